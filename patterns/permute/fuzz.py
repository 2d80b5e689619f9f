"""What the fuzzer draws for this family: the sequences that it looks for, in the spellings that users have, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def permute_copy(b: Builder) -> None:
    """permute(x) made a tensor of its own."""
    x = (b.value((2, 3, 4, 5)) if b.chance(40) else None) or b.input(b.shape(b.pick((3, 2, 4, 5))))
    turned = b.emit(f"{x}.permute({b.permutation(b[x].dim())})", moves=True) or x
    if b.chance(15):
        turned = b.emit(f"{turned}[{b.pick(('1:', '::2', '..., 1:', '..., ::2', ':, 1:'))}]", moves=True) or turned
    dims = b[turned].dim()
    d = b.integer(0, dims - 1)
    kinds = [
        f"{turned}.contiguous()",
        f"{turned}.reshape(-1)",
        f"{turned}.clone(memory_format=torch.contiguous_format)",
        f"{turned}.flatten({max(dims - 2, 0)})",
        f"{turned}.flatten(0, {min(1, dims - 1)})",
        f"{turned}.clone()",
        f"{turned}.contiguous().view(-1)",
        f"{turned}.unsqueeze(0).expand(2, {', '.join(['-1'] * dims)}).reshape(-1)",
        f"torch.cat([{turned}, {turned}], {d})",
        f"torch.empty_like({turned}, memory_format=torch.contiguous_format).copy_({turned})",
        f"F.pad({turned}, (1, 0))",
    ]
    if dims == 4:
        kinds += [f"{x}.contiguous(memory_format=torch.channels_last)", f"{turned}.contiguous(memory_format=torch.channels_last)"]
    if dims == 3:
        a, c = b[turned].shape[0], b[turned].shape[1]
        kinds.append(f"{turned}.reshape({b.size_of(a)} * {b.size_of(c)}, -1)")
    b.emit(b.pick(kinds), moves=True)


CORES = (permute_copy,)
