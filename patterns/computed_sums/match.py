"""What is computed element by element of tensors and of vectors along their innermost dim, as in batch norm, and sums of that over the
outer dims: in one pass over these tensors.

    sub   = aten.sub(x, mean)
    mul   = aten.mul(g, sub)
    sum_1 = aten.sum(g, [0, 2, 3])
    sum_2 = aten.sum(mul, [0, 2, 3])  ->  sums = fusebackend.computed_sums([g, x, mean], "t0=sub(i1,i2);t1=mul(i0,t0);out(i0);out(t1)", ...)

    sub   = aten.sub(x, mean)
    mul   = aten.mul(sub, scale)      ->  mul = fusebackend.computed_rows([x, mean, scale], "t0=sub(i0,i1);t1=mul(t0,i2);out(t1)", ...)[0]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.column_sum.groups import views_behind
from fusebackend.patterns.column_sum.match import viewed
from fusebackend.patterns.computed_sums import estimate, expression, row_sites
from fusebackend.patterns.computed_sums.expression import Expression, Leaf
from fusebackend.patterns.computed_sums.ops import computed_rows, computed_sums, letters
from fusebackend.patterns.computed_sums.reading import Reading
from fusebackend.patterns.computed_sums.row_sites import ENDS, Rows
from fusebackend.patterns.computed_sums.sites import SUMS, Site, read
from fusebackend.rewriting.emitted_sizes import merged, size_of
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Refusal, Reject, Workload

aten = torch.ops.aten


class ComputedSums(Pattern):
    """``aten.sum`` or ``aten.mean`` over dims outside of the innermost one, of what is computed element by element -> ``computed_sums``."""

    name = "computed_sums"
    anchors = SUMS
    priority = -1  # a sum of products is tried as a matrix product first

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        if not isinstance(site, Site):
            return site
        unavailable = _why_not(node, computed_sums)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")
        ends = [(s.node, *views_behind(s.node)) for s in site.sums]
        note = f"{len(site.sums)} {'means' if site.is_mean else 'sums'} of {_described(site.expression)}"
        interior = _interior([n for end in ends for n in end], site.nodes) + tuple(n for end in ends for n in end[:-1])
        return Match(tuple(end[-1] for end in ends), lambda emitter: _emit_sums(emitter, site), interior, note, site=site)

    def estimate(self, match: Match) -> Estimate | Workload:
        return estimate.of_sums(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def batch_norm(dy, x, mean, scale):
            centred = x - mean
            dz = dy * torch.sigmoid(centred * scale)
            return dz.sum((0, 1)), (dz * centred).sum((0, 1))

        def masked(dy, x, mean, scale):
            return torch.where(x > mean, dy * scale, 0.0).sum((0, 1))

        def squeezed(dy, x, mean, scale):
            return torch.nn.functional.silu((x - mean) * scale).mean(1)

        found: list[tuple[Callable, tuple]] = []
        for dtype in (torch.float32, torch.bfloat16):
            inputs = (*(torch.randn(3, 70, 33, dtype=dtype) for _ in range(2)), *(torch.randn(33) for _ in range(2)))
            found += [(fn, inputs) for fn in (batch_norm, masked, squeezed)]
        return found


def _why_not(node: fx.Node, operator: torch._ops.OpOverload) -> str | None:
    """Why an operator can't be called for ``node``."""
    if inductor_config.cpp_wrapper and torch.__version__ < "2.14":
        return "before torch 2.14, code with a wrapper in C++ crashes where it hands over lists of views"
    return loader.load().why_not(g.value(node).device, operator)


def _interior(ends: Sequence[fx.Node], nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """Those of ``nodes`` that only ``ends`` need."""
    inside = {*ends}
    for node in sorted({*nodes} - inside, reverse=True):
        if node.users and {*node.users} <= inside:
            inside.add(node)
    return tuple(sorted(inside - {*ends}))


class ComputedRows(Pattern):
    """What is computed element by element, of two or more vectors along the innermost dim among others, and read as a tensor ->
    ``computed_rows``."""

    name = "computed_rows"
    anchors = ENDS
    priority = -2  # a gradient is looked at when the sums of it are known

    def match(self, node: fx.Node) -> Match | Reject | None:
        rows = row_sites.read(node)
        if rows is None:
            return None
        unavailable = _why_not(node, computed_rows)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")
        interior = _interior([node], rows.expression.nodes)
        return Match((node,), lambda emitter: _emit_rows(emitter, rows), interior, _described(rows.expression), site=rows)

    def estimate(self, match: Match) -> Estimate | Workload:
        return estimate.of_rows(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def normalised(x, mean, scale, w):
            return torch.mm((torch.nn.functional.silu((x - mean) * scale)).to(w.dtype), w)

        found: list[tuple[Callable, tuple]] = []
        for dtype in (torch.float32, torch.bfloat16):
            found.append((normalised, (torch.randn(70, 33).to(dtype), torch.randn(33), torch.randn(33), torch.randn(33, 4).to(dtype))))
        return found


def _described(found: Expression) -> str:
    return f"{found.statements} functions of {len(found.leaves)} tensors"


def _emit_rows(emitter: Emitter, rows: Rows) -> fx.Node:
    dtypes = [g.value(rows.node).dtype]
    _compile(rows.reading, rows.expression.program, 1, dtypes)
    inputs = [_input(emitter, rows.order, leaf) for leaf in rows.expression.leaves]
    relaid = {"keeps_order": True} if rows.is_relaid else {}
    made = emitter.call(computed_rows, inputs, rows.expression.program, letters(dtypes), **relaid, **_in_order(rows.order))
    return emitter.call(operator.getitem, made, 0)


def _in_order(order: Sequence[int]) -> dict[str, Any]:
    return {} if list(order) == sorted(order) else {"order": list(order)}


def _compile(reading: Reading, program: str, outs: int, stored: Sequence[torch.dtype] = ()) -> None:
    """Compiles the kernel now, so that no call has to wait for it, nor finds out that it can't be done."""
    reason = reading.why_not_compiled(program, outs, stored)
    if reason is not None:
        raise Refusal(reason)


def _emit_sums(emitter: Emitter, site: Site) -> list[fx.Node]:
    _compile(site.reading, site.expression.program, len(site.sums))
    leaves, columns = site.expression.leaves, len(site.order) - site.end
    dtypes = [g.value(s.node).dtype for s in site.sums]
    named: dict[str, Any] = {"batch_dims": site.begin} if site.begin else {}
    named |= {"means": True} if site.is_mean else {}
    if columns > 1:  # which are one dim to the kernels
        walked = [_permuted(emitter, site.order, leaf) for leaf in leaves]
        inputs = [merged(emitter, x, [*[1] * site.end, columns]) for x in walked]
        full = next(x for x in walked if g.hints(g.value(x).shape) == site.sizes)
        kept = [*range(site.begin), *range(site.end, len(site.order))]
        shape = [size_of(emitter, full, axis) for axis in kept]
    else:
        inputs = [_input(emitter, site.order, leaf) for leaf in leaves]
        named |= _in_order(site.order)
    made = emitter.call(computed_sums, inputs, site.expression.program, letters(dtypes), **named)
    results = []
    for i, one in enumerate(site.sums):
        out = emitter.call(operator.getitem, made, i)
        results.append(viewed(emitter, one, emitter.call(aten.reshape.default, out, shape) if columns > 1 else out))
    return results


def _input(emitter: Emitter, order: Sequence[int], leaf: Leaf) -> fx.Node:
    """What is read of a leaf, with all dims, or the last of `order` alone. Each view would take the host some microseconds."""
    return leaf.node if expression.is_of_columns(leaf, order) else _with_all_dims(emitter, order, leaf)


def _with_all_dims(emitter: Emitter, order: Sequence[int], leaf: Leaf) -> fx.Node:
    x = leaf.node
    for view in leaf.views:
        x = emitter.call(expression.as_view(view), x, *view.args[1:], **view.kwargs)
    for _ in range(len(order) - g.value(x).dim()):
        x = emitter.call(aten.unsqueeze.default, x, 0)
    return x


def _permuted(emitter: Emitter, order: Sequence[int], leaf: Leaf) -> fx.Node:
    """What is read of a leaf, with the dims in the order of memory."""
    x = _with_all_dims(emitter, order, leaf)
    return x if list(order) == sorted(order) else emitter.call(aten.permute.default, x, list(order))
