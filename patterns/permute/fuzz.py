"""What the fuzzer draws for this family: the sequences that its pattern matches, in the spellings that users write, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def permute_copy(b: Builder) -> None:
    """A copy of ``x.permute(...)``."""
    x = (b.value((2, 3, 4, 5)) if b.chance(40) else None) or b.input(b.long_shape() if b.chance(6) else b.shape(b.pick((3, 2, 4, 5))))
    permuted = b.emit(f"{x}.permute({b.permutation(b[x].dim())})", moves=True) or x
    if b.chance(15):
        permuted = b.emit(f"{permuted}[{b.pick(('1:', '::2', '..., 1:', '..., ::2', ':, 1:'))}]", moves=True) or permuted
    dims = b[permuted].dim()
    d = b.integer(0, dims - 1)
    kinds = [
        f"{permuted}.contiguous()",
        f"{permuted}.reshape(-1)",
        f"{permuted}.clone(memory_format=torch.contiguous_format)",
        f"{permuted}.flatten({max(dims - 2, 0)})",
        f"{permuted}.flatten(0, {min(1, dims - 1)})",
        f"{permuted}.clone()",
        f"{permuted}.contiguous().view(-1)",
        f"{permuted}.unsqueeze(0).expand(2, {', '.join(['-1'] * dims)}).reshape(-1)",
        f"torch.cat([{permuted}, {permuted}], {d})",
        f"torch.empty_like({permuted}, memory_format=torch.contiguous_format).copy_({permuted})",
        f"F.pad({permuted}, (1, 0))",
    ]
    if dims == 4:
        kinds += [f"{x}.contiguous(memory_format=torch.channels_last)", f"{permuted}.contiguous(memory_format=torch.channels_last)"]
    if dims == 3:
        a, c = b[permuted].shape[0], b[permuted].shape[1]
        kinds.append(f"{permuted}.reshape({b.size_of(a)} * {b.size_of(c)}, -1)")
    b.emit(b.pick(kinds), moves=True)


CORES = (permute_copy,)
