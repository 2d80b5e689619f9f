"""What the fuzzer writes into random programs for this family: the sums it looks for, in the spellings that users have, and near misses."""

from __future__ import annotations

import torch

from fusebackend.fuzz.builder import Builder


def _entries(b: Builder, rows: int) -> int:
    return b.pick((5, 16, 33, 64, 1, 0, 100, 3, 200, rows))


def index_add(b: Builder) -> None:
    """``index_add``, ``index_put``, ``scatter_add``: functional or in place, onto values, inputs or zeros, with a scale or a gather."""
    target = (b.value((1, 2, 3), b.dtype) if b.chance(30) else None) or b.input(
        b.long_shape() if b.chance(4) else b.shape(b.pick((2, 1, 3)))
    )
    dims = b[target].dim()
    d = b.integer(0, dims - 1) if b.chance(45) else 0
    rows = b[target].shape[d]
    k = _entries(b, rows)
    if b[target].numel() // max(rows, 1) * k > 60_000:
        k = 5
    slices = [n for i, n in enumerate(b[target].shape) if i != d]
    zeros = b.chance(40)
    if zeros:
        target = b.emit(b.pick((f"torch.zeros_like({target})", f"{target}.new_zeros({target}.shape)", f"{target} * 0"))) or target
    wanted = [*slices[:d], k, *slices[d:]]
    kind = b.integer(0, 9)
    index = b.index([k] if kind not in (5, 6) or k % 2 or d else [k // 2, 2], rows, signed=kind in (2, 3, 4, 5, 6))
    source = _source(b, wanted, d, index)
    if source is None:
        return
    if b.chance(8) and b[index].dim() == 1:  # another number of indices than the source has rows
        b.note("another number of indices")
        k = b.pick((1, k + 1, max(k - 1, 0), 0))
        index = b.index([k] if b.chance(70) else [], rows, signed=kind in (2, 3, 4, 5, 6))
    alpha = f", alpha={b.number()}" if b.chance(25) else ""
    colons = ":, " * d
    if kind in (0, 1):
        call = f"index_add{'_' if b.chance(35) else ''}({d}, {index}, {source}{alpha})"
    elif kind in (2, 3, 4, 5, 6):
        if b[index].dim() == 2:
            source = b.emit(f"{source}.reshape({', '.join(map(str, (*b[index].shape, *wanted[1:])))})", moves=True) or source
        if b.chance(8):
            b.note("broadcast values")
            source = b.input(b.pick(((), (1,), wanted[1:], [1 if b.chance(50) else n for n in wanted])))
        call = f"index_put{'_' if b.chance(35) else ''}(({'None, ' * d}{index},), {source}, accumulate=True)"
    elif kind == 7 and d == 0 and b.chance(50):
        call = _masked(b, index, rows, source)
        if call is None:
            return
    else:
        if b.chance(30):
            wide = _other_index(b, rows, wanted, d)
        else:
            wide = _wide_index(b, index, wanted, d)
        if wide is None:
            return
        method = b.pick(("scatter_add", "scatter_add", "scatter_reduce"))
        reduce = ", 'sum'" if method == "scatter_reduce" else ""
        call = f"{method}{'_' if b.chance(35) else ''}({d}, {wide}.to(torch.int64), {source}{reduce})"
    if call.startswith("torch."):
        b.emit(call.replace("SELF", target))
    elif call.split("(")[0].endswith("_") and b[target].numel() < 2 or not _overlapping(b[target]):
        b.emit(f"{target}.{call}") or b.emit(f"{target}.{call.replace('_(', '(', 1)}")
    elif b.chance(30):
        b.emit(f"{target}[{colons}{index}]")


def _wide_index(b: Builder, index: str, shape: list[int], d: int) -> str | None:
    """An index that is expanded along the rows, as scatters and gathers take it."""
    if len(shape) == 1:
        return index
    ones = ", ".join("-1" if i == d else "1" for i in range(len(shape)))
    return b.emit(f"{index}.view({ones}).expand({', '.join(map(str, shape))})", moves=True)


def _other_index(b: Builder, rows: int, shape: list[int], d: int) -> str | None:
    """An index of a scatter or gather that is not one number a row: expanded along ``d``, along all dims or none, or smaller."""
    kind = b.integer(0, 4)
    if kind in (0, 1):
        b.note("index expanded along the indexed dim")
        own = [1 if i == d or kind else n for i, n in enumerate(shape)]
        return b.emit(f"{b.index(own, rows)}.expand({', '.join(map(str, shape))})", moves=True)
    if kind == 2:
        b.note("an index for each element")
        return b.index(shape, rows)
    b.note("index smaller than the source")
    smaller = [max(n - 1, 0) if i == d or kind == 3 else n for i, n in enumerate(shape)]
    return b.emit(
        f"{b.index([n if i == d else 1 for i, n in enumerate(smaller)], rows)}.expand({', '.join(map(str, smaller))})", moves=True
    )


def _masked(b: Builder, index: str, rows: int, source: str) -> str | None:
    """Indices out of range are left out by a mask, or by a part of one."""
    b.note("masked index_put")
    checks = [c for c in (f"({index} >= 0)", f"({index} < {b.size_of(rows)})", f"({index} != {b.integer(0, 3)})") if b.chance(75)]
    mask = b.emit(" & ".join(checks or [f"({index} >= 0)"]))
    if mask is None:
        return None
    wide = b.emit(f"{mask}.view(-1{', 1' * (b[source].dim() - 1)})", moves=True)
    shifted = f"{index} - 1" if b.chance(30) else index
    return f"torch.ops.aten._unsafe_masked_index_put_accumulate(SELF, {wide}, [{shifted}], {source})"


def _overlapping(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and torch._debug_has_internal_overlap(tensor) != 0


def _source(b: Builder, shape: list[int], d: int, target_index: str) -> str | None:
    """What is added: a tensor, perhaps gathered, constant, broadcast or transposed, weighted by row, scaled."""
    kind = b.integer(0, 10)
    sizes = ", ".join(map(str, shape))
    if kind in (4, 5):
        rows = b.pick((7, 3, 20, 1, 64))
        whole = b.operand([*shape[:d], rows, *shape[d + 1 :]])
        index = b.index([shape[d]], rows, signed=True)
        source = b.emit(b.pick((f"{whole}[{':, ' * d}{index}]", f"{whole}.index_select({d}, {index}.abs() % {rows})")))
    elif kind == 6:
        source = b.emit(f"torch.ones({sizes}, dtype=x0.dtype, device=x0.device)")
    elif kind == 7:
        smaller = [1 if i == b.integer(0, len(shape) - 1) else n for i, n in enumerate(shape)]
        source = b.emit(f"{b.operand(smaller)}.expand({sizes})", moves=True)
    elif kind == 8 and len(shape) > 1:
        source = b.emit(f"{b.operand([*shape[:-2], shape[-1], shape[-2]])}.mT", moves=True)
    elif kind == 9:
        rows = b.pick((7, 3, 20, 1, 64))
        whole = b.operand([*shape[:d], rows, *shape[d + 1 :]])
        wide = _wide_index(b, b.index([shape[d]], rows), shape, d) if b.chance(60) else _other_index(b, rows, shape, d)
        source = wide and b.emit(f"{whole}.gather({d}, {wide}.to(torch.int64))")
        if source and list(b[source].shape) != shape:
            return None
    else:
        source = b.operand(shape)
    row = ", ".join("-1" if i == d else "1" for i in range(len(shape)))
    factors = 0
    while source and b.chance(30):
        factors += 1
        factor = b.integer(0, 3)
        if factor in (0, 1):
            source = b.emit(f"{source} * {b.number()}") or source
        elif factor == 2:
            source = b.emit(f"{source} * {b.operand([shape[d]])}.view({row})") or source
        else:
            source = b.emit(f"{source} * {b.operand([])}") or source
    if factors > 1:
        b.note("several factors")
    if source and b[target_index].dim() == 1 and b.chance(12):
        b.note("padding")
        pad = b.pick((0, 1, -1, -100, 3, shape[d]))
        b.tries_bad_index = pad < 0 or pad > 1
        source = b.emit(f"torch.where(({target_index} == {pad}).view({row}), 0, {source})") or source
    return source


def lookup(b: Builder) -> None:
    """Look-ups, whose backward is a sum by index."""
    b.training |= b.dtype.is_floating_point and b.chance(80)
    rows, width = b.size(), b.pick((4, 8, 33, 64, 3, 16, 1))
    table = b.operand((rows, width))
    shape = b.pick(((7,), (3, 5), (1,), (0,), (64,), (2, 3, 4), (200,), ()))
    index = b.index(shape, rows)
    b.dynamic |= len(shape) > 1 and b.chance(15)  # the entries of such an index become one dim, whose size is a product then
    flat = f"{index}.flatten()"
    padding = b.pick(("", f", padding_idx={b.integer(0, max(rows - 1, 0))}", ", padding_idx=-1"))
    frequency = ", scale_grad_by_freq=True" if b.chance(10) else ""
    kinds = (
        f"F.embedding({index}, {table}{padding}{frequency})",
        f"{table}.index_select(0, {flat})",
        f"{table}[{index}]",
        f"{table}.mT[:, {index}]",
        f"{table}.gather(0, {flat}.long().unsqueeze(1).expand(-1, {width}))",
        f"torch.take_along_dim({table}, {flat}.long().unsqueeze(1), 0)",
        f"F.embedding({index}, {table}{padding}).sum(0)",
        f"{table}[{index}].permute({', '.join(map(str, b.permutation(len(shape) + 1)))})",
        f"{table}[{flat}, {flat} % {width}]",
        f"{table}.index_select(1, {flat} % {width})",
    )
    b.emit(b.pick(kinds))


CORES = (index_add, lookup)
