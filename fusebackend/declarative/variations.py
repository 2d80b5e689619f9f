"""The inputs that a replacement is compared on: other sizes, memory orders and values than those of an example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusebackend.declarative.examples import is_number
from fusebackend.declarative.replica import like as _like

#: What tells most: enough for another dtype or rank of what was compared on all.
_BRIEF = ("as given", "odd sizes", "storage in reverse order", "inf and nan")


def variations(variant: Any, example: dict[str, Any], brief: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments for both functions of a variant, each with what is special about them. The first are ``example`` itself.

    A function may not accept all of them. ``brief`` gives few.
    """
    return ((how, arguments) for how, arguments in _all(variant, example) if not brief or how in _BRIEF)


def _all(variant: Any, example: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "as given", example
    placeholders = dict(zip(variant.tensors, variant.search.inputs))
    symbols = list(dict.fromkeys(s.node.expr for p in placeholders.values() for s in p.meta["val"].shape if isinstance(s, torch.SymInt)))

    def resized(size_of: Callable[[int], int]) -> dict[str, Any]:
        sizes = {s: size_of(i) for i, s in enumerate(symbols)}
        new = dict(example)
        for name, p in placeholders.items():
            shape = [int(s.node.expr.subs(sizes)) if isinstance(s, torch.SymInt) else s for s in p.meta["val"].shape]
            new[name] = random_like(example[name], shape)
        return new

    odd = (7, 13, 5, 11, 3, 17)
    yield "odd sizes", resized(lambda i: odd[i % 6])
    yield "larger odd sizes", resized(lambda i: (33, 65, 129, 3, 5, 7)[i % 6])
    for k in range(len(symbols)):
        for size in (1, 0):
            yield f"a size of {size}", resized([size if i == k else odd[i % 6] for i in range(len(symbols))].__getitem__)
    base = resized(lambda i: odd[i % 6])
    seen = []
    for how, change in _LAYOUTS.items():
        changed = {n: _like(v, change(v.detach())) if isinstance(v, torch.Tensor) else v for n, v in base.items()}
        layout = [(v.stride(), v.storage_offset()) for v in changed.values() if isinstance(v, torch.Tensor)]
        if layout not in seen:  # of matrices, the reverse order is the transposed
            seen.append(layout)
            yield how, changed
    matrices = [n for n in placeholders if base[n].dim() > 1]
    for name in matrices if len(placeholders) > 1 else []:  # a kernel may take one input's strides for all
        yield f"transposed storage of {name} alone", {**base, name: _like(base[name], _transposed(base[name].detach()))}
    numbers = {n: v for n, v in base.items() if is_number(v) and n in variant.scalars.values()}
    if numbers:  # the pattern is found with any
        yield "other numbers", {**base, **{n: v + 1 if isinstance(v, int) else 1.5 * v + 0.25 for n, v in numbers.items()}}
    for how, change in _VALUES.items():
        floats = {n for n, v in base.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        yield how, {n: _like(v, change(v.detach())) if n in floats else v for n, v in base.items()}


def random_like(like: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if like.is_floating_point() or like.is_complex():
        new = torch.randn(shape, dtype=torch.float64 if like.is_floating_point() else like.dtype).to(like.dtype)
    elif like.dtype == torch.bool:
        new = torch.rand(shape) > 0.5
    else:  # integers may be indices: keep to the example's range
        low, high = (int(like.min()), int(like.max()) + 1) if like.numel() else (0, 1)
        new = torch.randint(low, high, shape).to(like.dtype)
    return _like(like, new.to(like.device))


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t


def _reversed(t: torch.Tensor) -> torch.Tensor:
    dims = tuple(reversed(range(t.dim())))
    return t.permute(dims).contiguous().permute(dims)


def _sliced(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t


def _misaligned(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)


def _with_specials(t: torch.Tensor) -> torch.Tensor:
    special = torch.tensor([float("inf"), -float("inf"), float("nan")], dtype=t.dtype, device=t.device)
    drawn = torch.randint(12, t.shape, device=t.device)  # at different positions in each argument
    return torch.where(drawn < 3, special[drawn.clamp(max=2)], t)


_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed storage": _transposed,
    "storage in reverse order": _reversed,
    "sliced storage": _sliced,
    "misaligned storage": _misaligned,
    "expanded storage": lambda t: t[:1].expand(t.shape) if t.dim() > 1 and t.shape[0] else t,
}
_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "large values": lambda t: t * 1e4,
    "tiny values": lambda t: t * 1e-4,
    "zeros": torch.zeros_like,
    "inf and nan": _with_specials,
}
