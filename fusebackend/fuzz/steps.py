"""Lines that may stand anywhere in a program: views, copies, arithmetic, conversions, reductions, mutations, products."""

from __future__ import annotations

import torch

from fusebackend.fuzz.builder import Builder
from fusebackend.fuzz.programs import TYPES


def step(b: Builder) -> str | None:
    """Adds one random line, if eager accepts it; an input, if there is no value yet."""
    if not b.values:
        return b.input(b.shape(b.pick((2, 3, 1, 4, 0))))
    return b.pick(_STEPS)(b)


def _any(b: Builder) -> str:
    return b.value() or b.input(b.shape(2))


def view(b: Builder) -> str | None:
    """A view of a value. An empty or small one does not have most of these views; then nothing is added."""
    x = _any(b)
    shape, dims = tuple(b[x].shape), b[x].dim()
    if dims == 0:
        return b.emit(f"{x}.unsqueeze(0)", moves=True)
    d, e = b.integer(0, dims - 1), b.integer(0, dims - 1)
    n = shape[d]
    kinds = (
        lambda: f"{x}.transpose({d}, {e})",
        lambda: f"{x}.permute({b.permutation(dims)})",
        lambda: f"{x}.narrow({d}, {min(1, n)}, {max(n - b.integer(1, 3), 0)})",
        lambda: f"{x}[{':, ' * d}{b.integer(0, 2)}::{b.integer(1, 3)}]",
        lambda: f"{x}.select({d}, {b.integer(0, max(n - 1, 0))})",
        lambda: f"{x}.unsqueeze({d})",
        lambda: f"{x}.squeeze()",
        lambda: f"{x}.flatten({min(d, e)}, {max(d, e)})",
        lambda: f"{x}.reshape({_reshaped(b, shape)})",
        lambda: f"{x}.expand(2, {', '.join(['-1'] * dims)})",
        lambda: f"{x}.view(-1)",
        lambda: f"{x}.chunk(2, {d})[{b.integer(0, 1)}]",
        lambda: f"{x}.unfold({d}, {min(2, n)}, 1)",
        lambda: f"{x}.diagonal()",
        lambda: f"{x}.detach()",
        lambda: f"{x}.mT",
        lambda: f"{x}.movedim({d}, {e})",
        lambda: f"torch.as_strided({x}, ({min(n, 2)}, 2), (1, 2))",
    )
    return b.emit(b.pick(kinds)(), moves=True)


def _reshaped(b: Builder, shape: tuple[int, ...]) -> str:
    sizes = list(shape)
    d = b.integer(0, len(sizes) - 1)
    for factor in (2, 4, 5, 3):
        if sizes[d] and sizes[d] % factor == 0:
            return ", ".join(map(str, (*sizes[:d], factor, sizes[d] // factor, *sizes[d + 1 :])))
    return "-1"


def copy(b: Builder) -> str | None:
    """A copy: data is moved, nothing is computed."""
    x = _any(b)
    dims = b[x].dim()
    d = b.integer(0, max(dims - 1, 0))
    kinds = (
        lambda: f"{x}.contiguous()",
        lambda: f"{x}.clone()",
        lambda: f"{x}.clone(memory_format=torch.contiguous_format)",
        lambda: f"torch.cat([{x}, {b.operand(b[x].shape, b[x].dtype)}], {d})",
        lambda: f"torch.stack([{x}, {x}], {d})",
        lambda: f"{x}.flip({d})",
        lambda: f"F.pad({x}, ({b.integer(0, 2)}, {b.integer(-1, 2)}))",
        lambda: f"{x}.repeat({', '.join(['1'] * d + ['2'] + ['1'] * (dims - d - 1)) or '2'})",
        lambda: f"{x}.roll(1, {d})",
    )
    return b.emit(b.pick(kinds)(), moves=True)


def arithmetic(b: Builder) -> str | None:
    x = _any(b)
    y = b.operand(b[x].shape, b[x].dtype) if b.chance(60) else _any(b)
    kinds = (
        f"{x} * {b.number()}",
        f"{x} + {b.number()}",
        f"{x} + {y}",
        f"{x} * {y}",
        f"{x} - {y}",
        f"torch.relu({x})",
        f"-{x}",
        f"{x}.abs()",
        f"torch.sigmoid({x})",
        f"F.silu({x})",
        f"torch.tanh({x})",
        f"torch.maximum({x}, {y})",
        f"{x}.sin()",
        f"F.gelu({x})",
        f"torch.add({x}, {y}, alpha={b.number()})",
    )
    return b.emit(b.pick(kinds))


def convert(b: Builder) -> str | None:
    """A conversion. One that copies is written so, as the program in float64, where all these dtypes are one, must copy there too."""
    x = _any(b)
    if b[x].is_floating_point() or b.chance(30):
        to = b.pick(("f32", "bf16", "f16", "f64"))
        copies = ", copy=True" if TYPES[to] != b[x].dtype else ""
        return b.emit(f"{x}.to({to}{copies})") if not b[x].is_complex() else None
    return b.emit(f"{x}.to(torch.{b.pick(('int64', 'int32', 'uint8'))})") if not b[x].is_complex() else None


def reduction(b: Builder) -> str | None:
    x = _any(b)
    d = b.integer(0, max(b[x].dim() - 1, 0))
    kinds = (
        f"{x}.sum({d})",
        f"{x}.sum()",
        f"{x}.mean({d}, keepdim=True)",
        f"{x}.cumsum({d})",
        f"{x}.softmax({d})",
        f"F.layer_norm({x}, {x}.shape[-1:])",
        f"{x}.amax({d})",
        f"torch.linalg.vector_norm({x}, dim={d})",
    )
    return b.emit(b.pick(kinds))


def mutation(b: Builder) -> str | None:
    """Overwrites a value, often a view or an input, and returns its name."""
    x = _any(b)
    y = b.operand(b[x].shape, b[x].dtype)
    if b[x].numel() > 1 and 0 in b[x].stride() or _overlaps(b[x]):
        return None  # eager accepts some of these, and the order of its writes is undefined
    dims = b[x].dim()
    row = f"{x}[{b.integer(0, 1)}]" if dims else x
    kinds = (
        (f"{x}.add_({y})", False),
        (f"{x}.mul_({b.number()})", False),
        (f"{x}.copy_({y})", True),
        (f"{x}.zero_()", True),
        (f"{row}.fill_(1)", True),
        (f"{x}.neg_()", False),
        (f"{x}.t_()", True),
        (f"{x}.sub_({y}, alpha=2)", False),
    )
    statement, moves = b.pick(kinds)
    b.do(statement, moves=moves)
    return x


def _overlaps(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and tensor.dim() > 1 and torch._debug_has_internal_overlap(tensor) != 0


def creation(b: Builder) -> str | None:
    x = _any(b)
    kinds = (
        f"torch.zeros_like({x})",
        f"torch.ones_like({x})",
        f"{x}.new_zeros({b.size_of(b.pick(tuple(b[x].shape) or (3,)))})",
        f"torch.empty_like({x}).fill_({b.number()})",
    )
    return b.emit(b.pick(kinds), moves=True)


def product(b: Builder) -> str | None:
    x = b.value((2, 3), b.dtype) or b.input(b.shape(2))
    y = b.operand((b[x].shape[-1], b.size()) if b[x].dim() == 2 else (b[x].shape[0], b[x].shape[2], b.size()), b[x].dtype)
    return b.emit(f"{x} @ {y}")


_STEPS = (view, arithmetic, copy, view, arithmetic, mutation, reduction, mutation, convert, creation, product)
