"""What is added to the scores, as the operator takes it: biases and masks become tensors that are broadcast by dims of size 1."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.arrange import arrange, contiguous, converted, has_rows
from fusebackend.patterns.attention.conditions import chosen_everywhere
from fusebackend.patterns.attention.dims import Axis, Dim, Dims, all_leaves, before, broadcast, is_cast, is_expansion, is_view
from fusebackend.patterns.attention.known_values import Computer
from fusebackend.patterns.attention.numbers import is_of_positions, rounded, uniform
from fusebackend.patterns.attention.scores import Bias, Mask
from fusebackend.rewriting.pattern import Emitter, Reject

aten, prims = torch.ops.aten, torch.ops.prims

#: Added to a score, a number below this is what is left, in fp32. Beyond, scores are out of what models compute.
ABSORBS = -1e30
#: A mask that fills in more than this does not hide: a visible score may be as low.
HIDES = -9_000.0
#: What takes the place of a number between the two: the lowest of bfloat16.
_LOWEST = torch.finfo(torch.bfloat16).min
_MAGNITUDE_NOTE = "fusebackend_magnitude"
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


@dataclasses.dataclass(frozen=True)
class Addend:
    """One of the operator's biases: a term of the scores, or a mask with terms before it, which it overrides.

    Attributes:
        expanded: whether it is taken as it is added, since the gradient of that is used; not as it was before it was expanded.
        exchanged: whether one number that hides may stand for another.
        learned: whether its gradient is computed, for which it keeps its dims.
    """

    terms: tuple[Bias | Mask, ...]
    expanded: bool = False
    exchanged: bool = False
    learned: bool = False

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(a for term in self.terms for a in all_leaves(self.source_of(term)[1]))

    def source_of(self, term: Bias | Mask) -> tuple[fx.Node, Dims]:
        """What is read for ``term``."""
        return (term.node, term.dims) if self.expanded and isinstance(term, Bias) else source_of(term)

    def held(self, number: float, dtype: torch.dtype) -> float | None:
        """What stands for a number in a tensor of that dtype; None where nothing does."""
        if self.exchanged and -math.inf < number < ABSORBS and not _holds(dtype, number):
            number = _LOWEST
        return number if _holds(dtype, number) else None

    def choice(self, term: Bias, dtype: torch.dtype) -> Choice | None:
        """The bias as a choice between two numbers that ``dtype``, of 16 bits, holds, in whatever dtype the program adds it; None where
        it is none."""
        found = _choice(term, *self.source_of(term))
        if found is None or self.learned or dtype not in (torch.bfloat16, torch.float16):
            return None
        numbers = [self.held(number, dtype) for number in found.numbers]
        return None if None in numbers else dataclasses.replace(found, numbers=tuple(numbers))


@dataclasses.dataclass(frozen=True)
class Choice:
    """The first of the ``numbers`` where ``condition``, which has these dims, is true, and the second where it is not."""

    condition: fx.Node
    dims: Dims
    numbers: tuple[float, float]


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
            apart = [a for a in found if _stays_apart(a, term)]
            found = [*apart, Addend((*(t for a in found if a not in apart for t in a.terms), term))]
    exchanged = _is_exchangeable(terms)
    return [dataclasses.replace(addend, exchanged=exchanged) for addend in found]


def _stays_apart(addend: Addend, mask: Mask) -> bool:
    """Whether what a mask overrides is added to it instead: it hides nothing itself, and together they would be larger than either, as
    ALiBi's bias of keys is beside a causal mask. The number that is filled in absorbs it."""
    both = addend.axes | Addend((mask,)).axes
    return both not in (addend.axes, Addend((mask,)).axes) and not any(map(may_hide, addend.terms))


def may_hide(term: Bias | Mask) -> bool:
    """Whether it may make a score as low as what hides does."""
    return isinstance(term, Mask) or not hides_nothing(term.node)


def hides_nothing(node: fx.Node) -> bool:
    """Whether a bias is of positions alone, as ALiBi is, and, where its sizes are known, no number of it absorbs a score."""
    if not is_of_positions(node):
        return False
    if _MAGNITUDE_NOTE not in node.meta:  # a bias is most often that of all layers
        with _disable_current_modes():  # a graph may be rewritten under a fake tensor mode
            value = Computer().value(node)
            node.meta[_MAGNITUDE_NOTE] = 0.0 if value is None or not value.numel() else float(value.abs().max())
    return node.meta[_MAGNITUDE_NOTE] < -ABSORBS


def _is_exchangeable(terms: tuple[Bias | Mask, ...]) -> bool:
    """Whether another number that absorbs a score may stand for the one that hides: nothing else does, and in rows that are hidden wholly
    weights are equal either way."""
    hiding = list(filter(may_hide, terms))
    return len(hiding) == 1 and (isinstance(hiding[0], Mask) or _choice(hiding[0], *source_of(hiding[0])) is not None)


def _choice(term: Bias, source: fx.Node, dims: Dims) -> Choice | None:
    node = term.node
    while node is not source and is_view(node):  # a cast may round
        node = node.args[0]  # type: ignore[assignment]
    if node is not source or source.target is not aten.where.self or term.factor != 1.0:
        return None
    condition, *numbers = source.args
    first, second = map(uniform, numbers)
    if first is None or second is None or not isinstance(condition, fx.Node):
        return None
    if max(first, second) < ABSORBS:  # it hides all keys, some of them less than others
        return None
    of_condition = broadcast(dims, condition)
    return None if of_condition is None else Choice(condition, of_condition, (first, second))


@dataclasses.dataclass(frozen=True)
class Hiding:
    """What an addend does that hides keys, and nothing else: where ``condition``, which has these dims, is ``hides``, by this number."""

    condition: fx.Node
    dims: Dims
    hides: bool
    number: float


def hiding_of(addend: Addend) -> Hiding | None:
    """None where an addend does anything else."""
    if len(addend.terms) != 1:
        return None
    (term,) = addend.terms
    if isinstance(term, Mask):
        return Hiding(*source_of(term), term.hides, fill_of(term))
    choice = _choice(term, *addend.source_of(term))
    for shown, hides in ((0, False), (1, True)):
        if choice is not None and choice.numbers[shown] == 0.0 and choice.numbers[1 - shown] < ABSORBS:
            return Hiding(choice.condition, choice.dims, hides, choice.numbers[1 - shown])
    return None


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
            fits = held in (None, dtype) and addend.held(fill_of(term), dtype) is not None  # it overrides, which rounds nothing
        elif addend.choice(term, dtype) is not None:
            fits = held is None
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
            total = _emit_mask(e, addend, term, total, layout, dtype)
            continue
        node = _emit_bias(e, addend, term, layout, dtype)
        if total is not None:
            total = e.call(aten.add.Tensor, converted(e, total, torch.float32), converted(e, node, torch.float32))
        else:
            total = node
    assert total is not None
    return total


def with_contiguous_rows(e: Emitter, bias: fx.Node) -> fx.Node:
    """The bias as kernels for long sequences read it: others they would copy, in each layer of a model anew."""
    return bias if has_rows(g.value(bias)) else contiguous(e, bias)


def _emit_bias(e: Emitter, addend: Addend, term: Bias, layout: tuple[Dim, ...], dtype: torch.dtype) -> fx.Node:
    choice = addend.choice(term, dtype)
    if choice is not None:
        condition = arrange(e, choice.condition, choice.dims, layout, repeat=False)
        return e.call(aten.where.self, condition, *(number(e, condition, n, dtype) for n in choice.numbers))
    source, dims = addend.source_of(term)
    node = converted(e, arrange(e, source, dims, layout, repeat=False), _bias_dtype(term, source, dtype))
    if term.factor != 1.0:
        node = e.call(aten.mul.Tensor, node if _is_exact(term.factor) else converted(e, node, torch.float32), term.factor)
    return node


def _emit_mask(e: Emitter, addend: Addend, term: Mask, below: fx.Node | None, layout: tuple[Dim, ...], dtype: torch.dtype) -> fx.Node:
    condition = arrange(e, *addend.source_of(term), layout, repeat=False)
    fill = addend.held(fill_of(term), dtype)
    held = dtype if fill is not None and (below is None or g.value(below).dtype == dtype) else torch.float32
    shown = number(e, condition, 0.0, held) if below is None else converted(e, below, held)
    hidden = number(e, condition, fill if fill is not None else fill_of(term), held)
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
