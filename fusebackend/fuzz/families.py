"""The sequences that the families look for, in the spellings that users have, and near misses of them."""

from __future__ import annotations

import torch

from fusebackend.fuzz.build import Builder


def transpose_add(b: Builder) -> None:
    """permute(x) + alpha * y, either operand permuted, y whole or broadcast."""
    x = (b.value((2, 3, 4), b.dtype) if b.chance(40) else None) or b.input(b.shape(b.pick((2, 3, 2, 4))))
    shape = tuple(b[x].shape)
    if b.chance(85):
        order = b.permutation(len(shape))
        turned = (b.emit(f"{x}.permute({order})", moves=True) if len(shape) > 2 or b.chance(20) else b.emit(f"{x}.mT", moves=True)) or x
    else:
        turned = x
    wanted = list(b[turned].shape)
    kind = b.integer(0, 7)
    if kind == 6:
        wanted[b.integer(0, len(wanted) - 1)] = 1
    if kind == 7:
        wanted = wanted[1:]
    dtype = b.dtype if b.chance(95) else torch.float32
    y = b.operand(wanted, dtype) if b.chance(20) else b.input(wanted, dtype)
    alpha = f", alpha={b.number()}" if b.chance(40) else ""
    first, second = (turned, y) if b.chance(60) else (y, turned)
    kinds = (
        f"torch.add({first}, {second}{alpha})",
        f"{first} + {second}",
        f"torch.sub({first}, {second}{alpha})",
        f"{first}.add({second}{alpha})",
        f"torch.rsub({first}, {second}{alpha})",
    )
    if b.chance(10) and b[y].dim() == b[turned].dim():
        b.do(f"{y}.add_({turned}{alpha})")
    else:
        b.emit(b.pick(kinds)) or b.emit(f"{first} + {second}")


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


def _entries(b: Builder, rows: int) -> int:
    return b.pick((5, 16, 33, 64, 1, 0, 100, 3, 200, rows))


def index_add(b: Builder) -> None:
    """index_add, index_put, scatter_add: functional or in place, onto values, inputs or zeros, with a scale or a gather."""
    target = (b.value((1, 2, 3), b.dtype) if b.chance(30) else None) or b.input(b.shape(b.pick((2, 1, 3))))
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
    source = _source(b, wanted, d)
    if source is None:
        return
    alpha = f", alpha={b.number()}" if b.chance(25) else ""
    colons = ":, " * d
    if kind in (0, 1):
        call = f"index_add{'_' if b.chance(35) else ''}({d}, {index}, {source}{alpha})"
    elif kind in (2, 3, 4, 5, 6):
        if b[index].dim() == 2:
            source = b.emit(f"{source}.reshape({', '.join(map(str, (*b[index].shape, *wanted[1:])))})", moves=True) or source
        call = f"index_put{'_' if b.chance(35) else ''}(({'None, ' * d}{index},), {source}, accumulate=True)"
    else:
        shape = ", ".join("-1" if i == d else "1" for i in range(dims))
        wide = index if dims == 1 else b.emit(f"{index}.view({shape}).expand({', '.join(map(str, wanted))})", moves=True)
        if wide is None:
            return
        method = b.pick(("scatter_add", "scatter_add", "scatter_reduce"))
        reduce = ", 'sum'" if method == "scatter_reduce" else ""
        call = f"{method}{'_' if b.chance(35) else ''}({d}, {wide}.to(torch.int64), {source}{reduce})"
    if call.split("(")[0].endswith("_") and b[target].numel() < 2 or not _overlapping(b[target]):
        b.emit(f"{target}.{call}") or b.emit(f"{target}.{call.replace('_(', '(', 1)}")
    elif b.chance(30):
        b.emit(f"{target}[{colons}{index}]")


def _overlapping(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and torch._debug_has_internal_overlap(tensor) != 0


def _source(b: Builder, shape: list[int], d: int) -> str | None:
    """What is added: a tensor, one that is gathered, scaled, weighted by row, converted, constant, or some of these."""
    kind = b.integer(0, 9)
    if kind in (4, 5):
        rows = b.pick((7, 3, 20, 1, 64))
        whole = b.operand([*shape[:d], rows, *shape[d + 1 :]])
        index = b.index([shape[d]], rows, signed=True)
        source = b.emit(b.pick((f"{whole}[{':, ' * d}{index}]", f"{whole}.index_select({d}, {index}.abs() % {rows})")))
    elif kind == 6:
        size = ", ".join(map(str, shape))
        source = b.emit(f"torch.ones({size}, dtype=x0.dtype, device=x0.device)")
    elif kind == 7:
        smaller = [1 if i == b.integer(0, len(shape) - 1) else n for i, n in enumerate(shape)]
        source = b.emit(f"{b.operand(smaller)}.expand({', '.join(map(str, shape))})", moves=True)
    elif kind == 8 and len(shape) > 1:
        source = b.emit(f"{b.operand([*shape[:-2], shape[-1], shape[-2]])}.mT", moves=True)
    else:
        source = b.operand(shape)
    if source and b.chance(20):
        weight = b.operand([shape[d]])
        source = b.emit(f"{source} * {weight}.view({', '.join('-1' if i == d else '1' for i in range(len(shape)))})") or source
    if source and b.chance(20):
        source = b.emit(f"{source} * {b.number()}") or source
    return source


def lookup(b: Builder) -> None:
    """Forms whose backward accumulates."""
    b.training |= b.dtype.is_floating_point and b.chance(80)
    rows, width = b.size(), b.pick((4, 8, 33, 64, 3, 16, 1))
    table = b.operand((rows, width))
    shape = b.pick(((7,), (3, 5), (1,), (0,), (64,), (2, 3, 4), (200,), ()))
    index = b.index(shape, rows)
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


def causal_conv1d(b: Builder) -> None:
    """Depthwise convolutions, left-padded or sliced, and others that look like them."""
    if not b.dtype.is_floating_point or b.special:
        return transpose_add(b)  # what padding times infinity is differs between PyTorch's own kernels
    batch, channels, length = b.pick((2, 1, 3, 2, 1, 3, 2, 0)), b.pick((4, 8, 1, 16, 3, 33)), b.pick((9, 16, 33, 64, 5, 1, 130, 17, 40))
    taps = b.pick((4, 3, 2, 4, 3, 1, 7, length, 31, length + 2))
    if b.chance(40):
        x = b.operand((batch, length, channels))
        x = b.emit(f"{x}.transpose(1, 2)", moves=True) or x
    else:
        x = b.operand((batch, channels, length))
    weight = b.operand((channels, 1, taps))
    bias = b.operand((channels,)) if b.chance(50) else "None"
    left = taps - 1 if b.chance(90) else b.integer(0, taps + 2)
    odd = b.pick(("",) * 12 + (", stride=2", ", dilation=2"))
    groups = f", groups={channels}"
    kind = b.integer(0, 7)
    if kind <= 2:
        plain = f"({left}, 0)"
        pad = b.pick((plain, f"({left}, 0, 0, 0)", plain, f"({left}, 1)", plain, f"({left}, -1)", plain, plain, f"({left}, 0, 1, 0)"))
        value = ", value=1.0" if b.chance(4) else ""
        padded = b.emit(f"F.pad({x}, {pad}{value})", moves=True) or x
        y = b.emit(f"F.conv1d({padded}, {weight}, {bias}{groups}{odd})")
    elif kind <= 5:
        y = b.emit(f"F.conv1d({x}, {weight}, {bias}, padding={left}{groups}{odd})")
        whole = f":{b.size_of(length)}"
        cut = b.pick((whole, f":-{max(taps - 1, 1)}", whole, f"1:{length}", ":-1", whole, f":{length}:2"))
        y = (b.emit(f"{y}[..., {cut}]", moves=True) if y and b.chance(85) else y) or y
    elif kind == 6:
        y = b.emit(f"F.conv1d({x}, {weight}, {bias}, padding='same'{groups})")
    else:
        y = b.emit(f"F.conv1d({x}[0], {weight}, {bias}, padding={left}{groups})")
    if y is None:
        return
    if b.chance(40):
        y = b.emit(f"{y} + {b.number()}") or y
    if b.chance(40):
        y = b.emit(f"F.silu({y})") or y
    if b.chance(25):
        b.emit(b.pick((f"{y}.transpose(-1, -2)", f"{y} * torch.sigmoid({y})", f"F.silu({y} + 1)")))


def matmul(b: Builder) -> None:
    """mm, addmm, bmm, baddbmm, linear, with operands in any layout."""
    if not b.dtype.is_floating_point:
        return permute_copy(b)
    m, k, n = b.size(), b.size(), b.size()
    alphas = f", beta={b.number()}, alpha={b.number()}" if b.chance(40) else ""
    if b.chance(40):
        batch = b.pick((2, 3, 1, 0))
        x, y = _matrix(b, (batch, m, k)), _matrix(b, (batch, k, n))
        d = b.operand(b.pick(((batch, m, n), (n,), (m, 1), (1, 1, 1))))
        kinds = (f"torch.bmm({x}, {y})", f"torch.baddbmm({d}, {x}, {y}{alphas})", f"{x} @ {y}")
    else:
        x, y = _matrix(b, (m, k)), _matrix(b, (k, n))
        d = b.operand(b.pick(((m, n), (n,), (m, 1), ())))
        kinds = (f"{x} @ {y}", f"torch.addmm({d}, {x}, {y}{alphas})", f"F.linear({x}, {y}.mT)", f"torch.mm({x}, {y})")
    b.emit(b.pick(kinds))


def _matrix(b: Builder, shape: tuple[int, ...]) -> str:
    if b.chance(40):
        x = b.operand((*shape[:-2], shape[-1], shape[-2]))
        return b.emit(f"{x}.mT", moves=True) or x
    return b.operand(shape)


CORES_CPU = (transpose_add, index_add, causal_conv1d, permute_copy, lookup) * 4 + (matmul,)
CORES = CORES_CPU + (matmul,) * 3
