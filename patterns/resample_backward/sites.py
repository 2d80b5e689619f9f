"""Gradients of interpolations, read from the graph: ``index_put`` at grids of indices, of one gradient with weights along each axis."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import arguments
from fusebackend.patterns.resample_backward.ops import DTYPES, HALVES, INDEX_DTYPES, MAX_AXES, MAX_DIMS, MAX_TERMS, accumulator
from fusebackend.patterns.resample_backward.weights import ONE, Weight, Weighted, axis_of, of_two_alike, read_weighted
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten
prims = torch.ops.prims

#: What adds at a grid of indices. The second is of indices that need not be checked.
PUTS = (aten.index_put.default, aten._unsafe_index_put.default)


@dataclasses.dataclass(frozen=True)
class Put:
    """``zeros.index_put([..., i, j], value, accumulate=True)``: its axes are the dims from ``dim`` on, an index of each."""

    node: fx.Node
    zeros: fx.Node
    dim: int
    indices: tuple[fx.Node, ...]
    value: fx.Node


@dataclasses.dataclass(frozen=True)
class Site:
    """``output`` is the sum of ``grad``'s elements, weighted, at the products of the terms of all axes, and of ``others``.

    Attributes:
        grad: of the result's sizes but for the axes'; of 16 bits where a conversion to fp32 is absorbed.
        terms: of each axis, an index and a weight.
        zeros: what is added to; its arguments hold the result's sizes.
        others: further terms of the sum.
        output: the sum, or its conversion to 16 bits.
        interior: the nodes that the replacement makes unnecessary.
    """

    output: fx.Node
    grad: fx.Node
    dim: int
    terms: tuple[tuple[tuple[fx.Node, Weight], ...], ...]
    zeros: fx.Node
    others: tuple[fx.Node, ...]
    interior: tuple[fx.Node, ...]

    @property
    def axes(self) -> range:
        return range(self.dim, self.dim + len(self.terms))

    @property
    def order(self) -> list[int]:
        """The dims of the result's memory: the gradient's order, which its producers and the result's readers mostly have in memory, unless
        it is expanded, as that of a sum is."""
        kept, grad = list(range(g.value(self.output).dim())), g.value(self.grad)
        order = g.memory_order(grad) if arguments.covers_memory(grad) else None
        return kept if order is None or self.others else order

    @property
    def is_reordered(self) -> bool:
        """Whether the graph has the result in another order: it is contiguous there."""
        return self.order != list(range(len(self.order)))

    @property
    def sizes(self) -> list[Any]:
        """Of the result along its axes: numbers, or nodes."""
        return [self.zeros.args[0][axis] for axis in self.axes]  # type: ignore[index]


def read(node: fx.Node) -> Site | Reject | None:
    """The site whose first ``index_put`` is ``node``, one of ``PUTS``; why no kernel covers it; None if it is none, or not its first."""
    first = _read_put(node)
    if not isinstance(first, Put):
        return first
    total, leaves = _sum_of(node)
    puts = [put for leaf in leaves if isinstance(put := _read_put(leaf), Put) and _may_join(first, put)]
    values = [read_weighted(put.value, put.dim, len(put.indices)).unfactored() for put in puts]
    mine = values[[put.node for put in puts].index(node)]
    joined = [(put, value) for put, value in zip(puts, values) if value.base is mine.base]
    terms = _product_of_terms(joined)
    if terms is None or len(joined) == 1:
        total, leaves, joined = node, [node], [(first, mine)]
        terms = _product_of_terms(joined)
        assert terms is not None
    if joined[0][0].node is not node:
        return None
    if len(terms) == 1 and len(terms[0]) == 1:
        return None  # the family index_add's
    members = {put.node for put, _ in joined}
    if total is not node:
        total, leaves = _least_sum(total, members)
    others = tuple(leaf for leaf in leaves if leaf not in members)
    inside = [n for put, value in joined for n in (put.node, put.zeros, *value.nodes)]
    return _site(first, mine.base, terms, total, others, [*inside, *_additions(total, leaves)])


def _read_put(node: fx.Node) -> Put | Reject | None:
    if node.target not in PUTS:
        return None
    args = g.arguments(node)
    if not args["accumulate"]:
        return None
    indices, value = list(args["indices"]), args["values"]
    given = [d for d, index in enumerate(indices) if index is not None]
    dim, axes = given[0] if given else 0, len(given)
    if not 1 <= axes <= MAX_AXES or given != list(range(dim, dim + axes)):
        return None
    zeros = args["self"]
    if not isinstance(zeros, fx.Node) or zeros.target is not aten.full.default or zeros.args[1] != 0:
        return None if axes == 1 else Reject("the sum is onto what is not zero", node)
    found, tensor = g.value(node), g.value(value)
    if tensor.dim() != found.dim():
        return None
    for k, index in enumerate(indices[dim:]):
        if g.value(index).dtype not in INDEX_DTYPES:
            return None if axes == 1 else Reject("an index that is neither int32 nor int64", node)
        if axis_of(g.value(index), tensor.shape[dim : dim + axes]) != k:
            return None if axes == 1 else Reject("the indices are no grid: one vector along each axis", node)
    same = [g.same_size(n, m) for d, (n, m) in enumerate(zip(tensor.shape, found.shape)) if not dim <= d < dim + axes]
    if not all(same):
        return Reject("the values are broadcast", node)
    return Put(node, zeros, dim, tuple(indices[dim:]), value)


def _may_join(a: Put, b: Put) -> bool:
    same = a.dim == b.dim and len(a.indices) == len(b.indices)
    return same and g.value(a.node).dtype == g.value(b.node).dtype and g.same_sizes(g.value(a.value).shape, g.value(b.value).shape)


def _sum_of(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The largest sum of tensors of one shape and dtype, each used for nothing else, that ``node`` is a term of; and its terms."""
    total = node
    while (user := g.only_user(total, aten.add.Tensor)) is not None and of_two_alike(user):
        total = user
    return total, list(_leaves(total, total))


def _leaves(node: fx.Node, total: fx.Node) -> Iterator[fx.Node]:
    if node.target is aten.add.Tensor and of_two_alike(node) and (node is total or len(node.users) == 1):
        for operand in node.args[:2]:
            yield from _leaves(operand, total)  # type: ignore[arg-type]
    else:
        yield node


def _additions(total: fx.Node, leaves: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The nodes of a sum between its terms and itself."""
    if total not in leaves:
        yield total
        for operand in total.args[:2]:
            yield from _additions(operand, leaves)  # type: ignore[arg-type]


def _least_sum(total: fx.Node, members: set[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
    """The part of a sum that holds all of ``members``, and no more additions than it must."""
    while total.target is aten.add.Tensor:
        holders = [o for o in total.args[:2] if members <= set(_leaves(o, o))]  # type: ignore[arg-type]
        if not holders:
            break
        total = holders[0]  # type: ignore[assignment]
    return total, list(_leaves(total, total))


def _product_of_terms(joined: Sequence[tuple[Put, Weighted]]) -> tuple[tuple[tuple[fx.Node, Weight], ...], ...] | None:
    """The terms of each axis, if what is joined is every product of them, once."""
    keys = [tuple(zip(put.indices, value.weights)) for put, value in joined]
    axes = tuple(tuple(dict.fromkeys(key[axis] for key in keys)) for axis in range(len(keys[0])))
    if any(len(terms) > MAX_TERMS for terms in axes) or len(set(keys)) != len(keys):
        return None
    return axes if set(itertools.product(*axes)) == set(keys) else None


def _site(
    first: Put,
    base: fx.Node,
    terms: tuple[tuple[tuple[fx.Node, Weight], ...], ...],
    total: fx.Node,
    others: tuple[fx.Node, ...],
    inside: Sequence[fx.Node],
) -> Site | Reject:
    node, found = first.node, g.value(first.node)
    if found.dim() > MAX_DIMS:
        return Reject(f"{found.dim()} dimensions; up to {MAX_DIMS} are accepted", node)
    if found.dtype not in DTYPES:
        return Reject(f"dtype {str(found.dtype).removeprefix('torch.')} is not supported", node)
    weighted = any(weight != ONE for axis in terms for _, weight in axis)
    if weighted and found.dtype != accumulator(found.dtype):
        return Reject("weights of 16 bits", node)
    if len({g.value(index).dtype for axis in terms for index, _ in axis}) != 1:
        return Reject("indices of several dtypes", node)
    if {g.value(i).device for axis in terms for i, _ in axis} != {found.device}:
        return Reject("the tensors are on several devices", node)
    grad = base
    if base.target is prims.convert_element_type.default and found.dtype == torch.float32 and g.value(base.args[0]).dtype in HALVES:
        grad = base.args[0]  # type: ignore[assignment]
    if not arguments.is_contiguous(g.value(total)):
        return Reject("the result is not contiguous", node)
    output = total
    cast = g.only_user(total, prims.convert_element_type.default)
    if cast is not None and not others and found.dtype == torch.float32 and g.value(cast).dtype in HALVES:
        output = cast
    interior = _made_unnecessary(output, [*inside, *([] if grad is base else [base])])
    return Site(output, grad, first.dim, terms, first.zeros, others, interior)


def _made_unnecessary(output: fx.Node, candidates: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """Those of some nodes that nothing but the output and each other uses."""
    gone = {output}
    for node in sorted(set(candidates) - gone, reverse=True):
        if all(user in gone for user in node.users):
            gone.add(node)
    return tuple(gone - {output})
