"""Finds PyTorch's memory-efficient attention with a bias, forward and backward, which it takes on GPUs where the bias needs a gradient.

    bias_1   = aten.expand(bias, [B, H, T, S])
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, bias_1, True)         out, statistics = fusebackend.attention(...)
    dq, dk, dv, dbias = aten._scaled_dot_product_efficient_attention_backward(...)    ->   gradients = fusebackend.attention_backward(...)
    sum_1    = aten.sum(dbias, [0], True)

It writes the gradient of the bias for each head of the batch, which is summed afterwards; the family's operators sum inside.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.arrange import in_place_of, in_rows
from fusebackend.patterns.attention.biases import with_contiguous_rows
from fusebackend.patterns.attention.dims import is_cast, is_empty
from fusebackend.patterns.attention.emit import without_hidden_rows
from fusebackend.patterns.attention.memory_efficient_estimate import workload
from fusebackend.patterns.attention.ops import DTYPES, attention, attention_backward, limits, unavailable
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten

_FORWARD = aten._scaled_dot_product_efficient_attention.default
_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default


@dataclasses.dataclass(frozen=True)
class Site:
    """A call of memory-efficient attention, and that of its backward.

    Attributes:
        operands: queries, keys and values.
        bias: before it was expanded.
        out: the result.
        grad: that of the result; None without a backward.
        gradients: those of queries, keys and values that are used, by position.
        bias_gradient: that of ``bias``; None if it is not wanted.
        interior: the other nodes of both calls.
    """

    operands: tuple[fx.Node, fx.Node, fx.Node]
    bias: fx.Node
    scale: float
    causal: bool
    out: fx.Node
    grad: fx.Node | None = None
    gradients: dict[int, fx.Node] = dataclasses.field(default_factory=dict)
    bias_gradient: fx.Node | None = None
    interior: tuple[fx.Node, ...] = ()

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return (self.out, *self.gradients.values(), *([self.bias_gradient] if self.bias_gradient is not None else ()))


class MemoryEfficientAttention(Pattern):
    """PyTorch's memory-efficient attention with a bias, forward and backward together."""

    name = "memory_efficient_attention"
    anchors = (_FORWARD,)
    level = "joint"
    devices = ("cuda",)

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        if not isinstance(site, Site):
            return site
        no_kernel = unavailable(g.value(site.out).device)
        if no_kernel:
            return Reject(no_kernel, node, "no_kernel")
        learned = "with a bias that has a gradient" if site.bias_gradient is not None else "with a bias"
        # Both calls are tagged as such that draw random numbers: for dropout, of which there is none.
        return Match(site.outputs, lambda e: emit(e, site), site.interior, learned, site=site, draws_nothing=frozenset(site.interior))

    def estimate(self, match: Match) -> Estimate | Workload:
        site: Site = match.site
        return workload(site.operands, site.bias, site.out, site.causal, site.grad is not None, site.bias_gradient)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def biased(q, k, v, bias):
            return _FORWARD(q, k, v, bias.expand(2, 3, 9, 16), True)[0]

        # Values of one sign: where terms cancel, both round too much to be compared.
        operands = (torch.randn(2, 3, 9, 16), torch.randn(2, 3, 16, 16), torch.rand(2, 3, 16, 16) + 0.5, torch.randn(1, 3, 9, 16))
        return [(biased, tuple(x.to(dtype) for x in operands)) for dtype in (torch.bfloat16, torch.float16)]


def read(node: fx.Node) -> Site | Reject | None:
    """The attention whose forward is ``node``; why it is not replaced; or None if it has no bias."""
    call = g.arguments(node)
    operands = call["query"], call["key"], call["value"]
    if call["attn_bias"] is None:
        return None
    if call["dropout_p"] != 0:
        return Reject("dropout of the probabilities is not supported", node)
    refusal = _why_not_supported(node, operands)
    if refusal is not None:
        return refusal
    scale = call["scale"]
    scale = g.value(operands[0]).shape[-1] ** -0.5 if scale is None else scale
    if not isinstance(scale, (int, float)):
        return Reject("the scale is symbolic", node)
    bias, expanded = _before_expand(call["attn_bias"])
    results = _results(node)
    if results is None or 0 not in results:
        return Reject("its results are used in a way that is not followed", node)
    needed: dict[fx.Node, None] = dict.fromkeys([node, *(n for i, n in results.items() if i > 0)])
    readers = [u for i, n in results.items() if i > 0 for u in _readers(n, needed)]
    backward = next(iter(readers), None)
    found = Site(operands, bias, float(scale), call["is_causal"], results[0], interior=tuple(needed))
    if backward is None:
        return found
    if set(readers) != {backward} or backward.target != _BACKWARD:
        other = next(u for u in readers if u.target != _BACKWARD or u is not backward)
        return Reject(f"{g.describe(other)} also uses the logsumexp", other, "illegal")
    return _with_backward(found, call, backward, expanded, needed)


def _why_not_supported(node: fx.Node, operands: Sequence[fx.Node]) -> Reject | None:
    q, _, v = map(g.value, operands)
    if q.dtype not in DTYPES:
        return Reject(f"{q.dtype} queries: {' and '.join(sorted(str(d).removeprefix('torch.') for d in DTYPES))} are supported", node)
    if any(is_empty(g.value(x).shape) for x in operands):
        return Reject("a size is 0, or not known to be larger", node)
    _, most, multiple = limits()
    for size in (q.shape[-1], v.shape[-1]):
        if not isinstance(size, int) or size > most or size % multiple:
            return Reject(f"heads of {size} elements: multiples of {multiple} up to {most} are supported", node)
    return None


def _with_backward(
    site: Site, forward: dict[str, Any], backward: fx.Node, expanded: tuple[int, ...], needed: dict[fx.Node, None]
) -> Site | Reject:
    call, results = g.arguments(backward), _results(backward)
    same = all(_origin(call[n], needed) is _origin(forward[n], {}) for n in ("query", "key", "value", "attn_bias"))
    same &= _origin(call["out"], needed) is site.out
    same &= all(call[n] == forward[n] for n in ("dropout_p", "is_causal", "scale"))
    if not same or results is None:
        return Reject("the backward is not that of this forward", backward, "illegal")
    needed[backward] = None
    bias_gradient = results.pop(3, None)
    if bias_gradient is not None and expanded:
        needed[bias_gradient] = None
        summed = _sum_of(bias_gradient, expanded, needed)
        if summed is None:
            return Reject("the gradient of the bias is used otherwise than summed over what the bias was expanded along", bias_gradient)
        bias_gradient = summed
    return dataclasses.replace(site, grad=call["grad_out_"], gradients=results, bias_gradient=bias_gradient, interior=tuple(sorted(needed)))


def _results(node: fx.Node) -> dict[int, fx.Node] | None:
    """The results of a call that are used, by position; None where one is taken twice, or they are used together."""
    users = list(node.users)
    if not all(u.target is operator.getitem for u in users):
        return None
    found: dict[int, fx.Node] = {u.args[1]: u for u in users if u.users}  # type: ignore[misc]
    return dict(sorted(found.items())) if len(found) == sum(bool(u.users) for u in users) else None


def _readers(node: fx.Node, passed: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """The nodes that use ``node``, behind aliases, which are added to ``passed``."""
    for user in node.users:
        if _is_alias(user):
            passed[user] = None
            yield from _readers(user, passed)
        else:
            yield user


def _origin(node: Any, passed: dict[fx.Node, None]) -> Any:
    """What ``node`` is an alias of. Aliases that nothing else uses are added to ``passed``."""
    while isinstance(node, fx.Node) and _is_alias(node):
        if all(u in passed or u.target == _BACKWARD for u in node.users):
            passed[node] = None
        node = node.args[0]
    return node


def _is_alias(node: fx.Node) -> bool:
    return node.target in (aten.alias.default, aten.detach.default)


def _before_expand(bias: fx.Node) -> tuple[fx.Node, tuple[int, ...]]:
    """(the bias as it was before it was expanded, along which dims of the scores it was)."""
    source = _origin(bias, {})
    if source.target is not aten.expand.default:
        return bias, ()
    small, large = g.value(source.args[0]), g.value(source)
    missing = large.dim() - small.dim()
    sizes = [1] * missing + list(small.shape)
    along = tuple(i for i, (a, b) in enumerate(zip(sizes, large.shape)) if g.same_size(a, 1) and not g.same_size(b, 1))
    return (source.args[0], along) if along or missing else (bias, ())


def _sum_of(gradient: fx.Node, dims: tuple[int, ...], needed: dict[fx.Node, None]) -> fx.Node | None:
    """The only user of ``gradient``, if that sums it over ``dims``, in its dtype.

    Where a model is compiled under autocast, its backward is traced so, too: the sum is one of fp32, which is added to ``needed``, and its
    only user rounds it."""
    user = g.only_user(gradient, aten.sum.dim_IntList)
    if user is None:
        return None
    value = g.value(gradient)
    summed = sorted(d % value.dim() for d in g.arguments(user)["dim"] or ())
    wide = tuple(d for d in summed if d in dims or not g.same_size(value.shape[d], 1))
    if wide != dims:
        return None
    if g.value(user).dtype == torch.float32:
        needed[user] = None
        user = g.only_user(user)
        if not is_cast(user):
            return None
    return user if g.value(user).dtype == value.dtype else None


def emit(e: Emitter, site: Site) -> list[fx.Node]:
    """The values of ``site.outputs``."""
    q, k, v = (in_rows(e, x) for x in site.operands)
    bias = site.bias
    for _ in range(g.value(q).dim() - g.value(bias).dim()):
        bias = e.call(aten.unsqueeze.default, bias, 0)
    bias = with_contiguous_rows(e, bias)
    made = e.call(attention, q, k, v, [bias], site.scale, site.causal)
    # PyTorch's gives zeros in rows whose scores are all -inf.
    out, statistics = without_hidden_rows(e, e.call(operator.getitem, made, 0), e.call(operator.getitem, made, 1))
    found = [in_place_of(e, g.value(site.out), out)]
    if site.grad is None:
        return found
    wanted = [site.bias_gradient is not None]
    grad = in_rows(e, site.grad)
    gradients = e.call(attention_backward, grad, q, k, v, [bias], out, statistics, site.scale, site.causal, wanted)
    for i, replaced in site.gradients.items():
        found.append(in_place_of(e, g.value(replaced), e.call(operator.getitem, gradients, i)))
    if site.bias_gradient is not None:
        gradient = e.call(operator.getitem, gradients, 3)
        found.append(_as_laid_out(e, g.value(site.bias_gradient), gradient))
    return found


def _as_laid_out(e: Emitter, wanted: torch.Tensor, gradient: fx.Node) -> fx.Node:
    """The gradient of the bias with the sizes and strides of ``wanted``: without the dims that a sum has not kept, or with the gaps that
    PyTorch leaves between rows."""
    while g.value(gradient).dim() > wanted.dim():
        along = next(i for i, size in enumerate(g.value(gradient).shape) if g.same_size(size, 1))
        gradient = e.call(aten.squeeze.dim, gradient, along)
    columns = wanted.shape[-1]
    gap = wanted.stride(-2) - columns
    if isinstance(gap, int) and gap > 0:
        padded = e.call(aten.constant_pad_nd.default, gradient, [0, gap], 0.0)
        return e.call(aten.slice.Tensor, padded, wanted.dim() - 1, 0, columns)
    return in_place_of(e, wanted, gradient)
