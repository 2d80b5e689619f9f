"""What is added to the scores, as the operator takes it: biases and masks become tensors that are broadcast by dims of size 1."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.arrange import arrange, contiguous, converted, has_rows
from fusebackend.patterns.attention.conditions import chosen_everywhere
from fusebackend.patterns.attention.dims import Axis, Dim, Dims, all_leaves, before, broadcast, is_cast, is_expansion, is_view
from fusebackend.patterns.attention.numbers import rounded
from fusebackend.patterns.attention.scores import Bias, Mask
from fusebackend.rewriting.pattern import Emitter, Reject

aten, prims = torch.ops.aten, torch.ops.prims

#: Added to a score, a number below this is what is left, in fp32. Beyond, scores are out of what models compute.
ABSORBS = -1e30
#: A mask that fills in more than this does not hide: a visible score may be as low.
HIDES = -9_000.0
#: What takes the place of a number between the two: the lowest of bfloat16.
_LOWEST = torch.finfo(torch.bfloat16).min
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


@dataclasses.dataclass(frozen=True)
class Addend:
    """One of the operator's biases: a term of the scores, or a mask with the terms before it, which it overrides.

    Attributes:
        expanded: whether it is taken as it is added, since the gradient of that is used; not as it was before it was expanded.
    """

    terms: tuple[Bias | Mask, ...]
    expanded: bool = False

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(a for term in self.terms for a in all_leaves(self.source_of(term)[1]))

    def source_of(self, term: Bias | Mask) -> tuple[fx.Node, Dims]:
        """What is read for ``term``."""
        return (term.node, term.dims) if self.expanded and isinstance(term, Bias) else source_of(term)


def addends(terms: tuple[Bias | Mask, ...]) -> list[Addend] | Reject:
    """The operator's biases for the terms of the scores, in this order."""
    found: list[Addend] = []
    for term in terms:
        if isinstance(term, Bias):
            held = g.value(term.node).dtype
            if held.is_complex or held == torch.float64:
                return Reject(f"a {held} bias: 16 bits and float32 are supported", term.node)
            found.append(Addend((term,)))
        elif math.isinf(term.fill) and term.fill < 0:
            found.append(Addend((term,)))
        elif not term.fill < HIDES:
            return Reject(f"a mask that fills in {term.fill}: it does not hide, and is no bias", term.node, "illegal")
        elif term.fill > ABSORBS and len(terms) > 1:
            reason = f"a mask that fills in {term.fill} beside another bias or mask: a row that both hide would differ"
            return Reject(reason, term.node, "illegal")
        elif term.fill > ABSORBS and term.shifted:
            reason = f"a mask that fills in {term.fill}, beside scores to which a number was added: they may be as low"
            return Reject(reason, term.node, "illegal")
        else:
            found = [Addend((*(t for a in found for t in a.terms), term))]
    return found


def source_of(term: Bias | Mask) -> tuple[fx.Node, Dims]:
    """Of what the bias or the condition is a view: before it was expanded, if it was; where it was last copied, if not."""
    node, dims = (term.node, term.dims) if isinstance(term, Bias) else (term.condition, term.dims)
    found, smallest = (node, dims), (node, dims)
    copied = False
    for _ in range(16):
        chosen = chosen_everywhere(node)
        if chosen is None and not (is_view(node) or is_cast(node) and not isinstance(term, Mask)):
            break
        earlier = before(node, dims) if chosen is None else broadcast(dims, chosen)
        source = node.args[0] if chosen is None else chosen
        if earlier is None or not isinstance(source, fx.Node) or g.value(source).dtype not in (*_DTYPES, torch.bool):
            break
        copied |= node.target is aten.clone.default or is_cast(node)
        expanded = is_expansion(node) or (chosen is not None and not g.same_size(g.value(node).numel(), g.value(chosen).numel()))
        node, dims = source, earlier
        if expanded:
            smallest, copied = (node, dims), False
        if not copied:
            found = (node, dims)
    return found if found[0] < smallest[0] else smallest


def dtype_of(addend: Addend, dtype: torch.dtype) -> torch.dtype:
    """That of the tensor that :func:`emit_addend` makes."""
    held: torch.dtype | None = None
    for term in addend.terms:
        if isinstance(term, Mask):
            fits = held in (None, dtype) and _holds(dtype, fill_of(term))  # it overrides, which rounds nothing
        else:
            fits = held is None and _bias_dtype(term, addend.source_of(term)[0], dtype) == dtype and _is_exact(term.factor)
        held = dtype if fits else torch.float32
    return torch.float32 if held is None else held


def _bias_dtype(term: Bias, source: fx.Node, dtype: torch.dtype) -> torch.dtype:
    """Of what is read for a bias: 16 bits where they are what the program adds, though it may be computed in fp32."""
    return dtype if dtype in (g.value(source).dtype, g.value(term.node).dtype) else torch.float32


def fill_of(mask: Mask) -> float:
    """What is added where the mask hides."""
    return mask.fill if mask.fill < ABSORBS else _LOWEST


def _holds(dtype: torch.dtype, number: float) -> bool:
    return rounded(number, dtype) == rounded(number, torch.float32)


def _is_exact(factor: float) -> bool:
    """Whether no binary type rounds a product by it."""
    return abs(math.frexp(factor)[0]) == 0.5


def emit_addend(e: Emitter, addend: Addend, layout: tuple[Dim, ...], dtype: torch.dtype) -> fx.Node:
    """The bias with the operator's dims.

    Args:
        layout: the axes of the scores' dims, as the operator has them.
        dtype: of the queries.
    """
    total: fx.Node | None = None
    for term in addend.terms:
        if isinstance(term, Mask):
            total = _emit_mask(e, term, addend.source_of(term), total, layout, dtype)
            continue
        node = _emit_bias(e, term, addend.source_of(term), layout, dtype)
        if total is not None:
            total = e.call(aten.add.Tensor, converted(e, total, torch.float32), converted(e, node, torch.float32))
        else:
            total = node
    assert total is not None
    return total


def with_contiguous_rows(e: Emitter, bias: fx.Node) -> fx.Node:
    """The bias as kernels for long sequences read it: others they would copy, in each layer of a model anew."""
    return bias if has_rows(g.value(bias)) else contiguous(e, bias)


def _emit_bias(e: Emitter, term: Bias, source: tuple[fx.Node, Dims], layout: tuple[Dim, ...], dtype: torch.dtype) -> fx.Node:
    node = arrange(e, *source, layout, repeat=False)
    node = converted(e, node, _bias_dtype(term, source[0], dtype))
    if term.factor != 1.0:
        node = e.call(aten.mul.Tensor, node if _is_exact(term.factor) else converted(e, node, torch.float32), term.factor)
    return node


def _emit_mask(
    e: Emitter, term: Mask, source: tuple[fx.Node, Dims], below: fx.Node | None, layout: tuple[Dim, ...], dtype: torch.dtype
) -> fx.Node:
    condition = arrange(e, *source, layout, repeat=False)
    fill = fill_of(term)
    held = dtype if (below is None or g.value(below).dtype == dtype) and _holds(dtype, fill) else torch.float32
    shown = number(e, condition, 0.0, held) if below is None else converted(e, below, held)
    hidden = number(e, condition, fill, held)
    return e.call(aten.where.self, condition, *((hidden, shown) if term.hides else (shown, hidden)))


def emit_hidden_rows(e: Emitter, addend: Addend, layout: tuple[Dim, ...]) -> fx.Node:
    """Which rows the last term, a mask, hides wholly; of size 1 along the keys."""
    mask = addend.terms[-1]
    assert isinstance(mask, Mask)
    condition = arrange(e, *source_of(mask), layout, repeat=False)
    visible = e.call(aten.logical_not.default, condition) if mask.hides else condition
    return e.call(aten.logical_not.default, e.call(aten.any.dim, visible, -1, True))


def number(e: Emitter, beside: fx.Node, value: float, dtype: torch.dtype) -> fx.Node:
    return e.call(aten.full.default, [], value, dtype=dtype, layout=torch.strided, device=g.value(beside).device, pin_memory=False)
