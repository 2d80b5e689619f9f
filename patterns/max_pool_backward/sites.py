"""Gradients of max pooling, read from the graph: what adds a gradient at indices that come from the places of elements in their windows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims  # noqa: F401  (registers the operators that keep places in windows)

from fusebackend import fx_utils as g
from fusebackend.native import arguments
from fusebackend.patterns.max_pool_backward.ops import DTYPES, MAX_AXES, MAX_DIMS
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten
prims = torch.ops.prims

#: Of a gradient and indices, by name.
BACKWARDS = (
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
)
#: What Inductor decomposes the first of them into from PyTorch 2.13 on.
SCATTER = aten.scatter_add.default
_TO_INDICES = prims._low_memory_max_pool_offsets_to_indices.default
_HALVES = (torch.float16, torch.bfloat16)
#: Windows of an element, of which Inductor generates the code.
_MOST_LOOKED_AT = 25
#: They keep the elements' order, row by row.
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.clone.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
    }
)


@dataclasses.dataclass(frozen=True)
class Site:
    """``output`` is the gradient of pooling along the last dims.

    Attributes:
        grad, offsets: of the operator, of one shape.
        sizes: of the result along the pooled dims: numbers, or nodes.
        kernel_size, stride, padding, dilation: numbers for each of these.
        is_scatter: whether Inductor adds to zeros; it looks at windows otherwise, or calls a library.
        interior: the nodes that the replacement makes unnecessary.
    """

    output: fx.Node
    grad: fx.Node
    offsets: fx.Node
    sizes: tuple[Any, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    is_scatter: bool
    interior: tuple[fx.Node, ...]

    @property
    def order(self) -> list[int]:
        """The dims of the result's memory: the gradient's order, which its producers and the result's readers mostly have in memory, if the
        graph has the result in it or contiguous."""
        out, grad = g.value(self.output), g.value(self.grad)
        kept, given = list(range(out.dim())), g.memory_order(out) or list(range(out.dim()))
        own = g.memory_order(grad) if arguments.covers_memory(grad) else None
        return own if own is not None and (own == given or _lies_in(out, kept)) else given

    @property
    def is_reordered(self) -> bool:
        """Whether the graph has the result in another order: it is contiguous there."""
        return not _lies_in(g.value(self.output), self.order)


def _lies_in(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    dense = arguments.dense_strides(tensor.shape, order)
    return all(arguments.are_same(n, 1) or arguments.are_same(a, b) for n, a, b in zip(tensor.shape, dense, tensor.stride()))


def read(node: fx.Node) -> Site | Reject | None:
    """The site at ``node``, one of ``BACKWARDS`` or ``SCATTER``; why no kernel covers it; None if it is none."""
    if node.target in BACKWARDS:
        args = g.arguments(node)
        indices = args["indices"]
        if indices.target is not _TO_INDICES:
            return Reject("the forward keeps indices of 64 bits, as of windows of more than 25 elements, not places in windows", node)
        return _site(node, args["grad_output"], indices, [indices], is_scatter=False)
    return _read_scatter(node) if node.target is SCATTER else None


def _read_scatter(node: fx.Node) -> Site | Reject | None:
    """``zeros.scatter_add(1, indices, grad)``, of tensors that are reshaped to [channels, pixels] and back."""
    args = g.arguments(node)
    indices, inside = _reshaped(args["index"])
    if indices.target is not _TO_INDICES or g.value(node).dim() != 2 or args["dim"] not in (1, -1):
        return None
    zeros = args["self"]
    if zeros.target is not aten.full.default or zeros.args[1] != 0:
        return Reject("the sum is onto what is not zero", node)
    shape = g.value(indices).shape
    grad, outside = args["src"], list[fx.Node]()
    while not g.same_sizes(g.value(grad).shape, shape):
        if grad.target not in _RESHAPES and not _is_widening(grad):
            return Reject("the gradient is not reshaped from the windows' sizes", node)
        outside.append(grad)
        grad = grad.args[0]
    if _is_widening(grad):
        outside.append(grad)
        grad = grad.args[0]
    output = g.only_user(node)
    if output is None or output.target not in _RESHAPES:
        return Reject("the sum is not reshaped to the pooled tensor's sizes", node)
    between = [node]
    axes = len(indices.args[1])  # type: ignore[arg-type]
    sizes = [*shape[:-axes], *(_number(n) for n in indices.args[2])]  # type: ignore[union-attr]
    narrow = g.value(grad).dtype
    while (user := g.only_user(output)) is not None and not _is_done(output, sizes, narrow):
        if user.target not in _RESHAPES and not _converts_to(user, narrow):
            break
        between.append(output)
        output = user
    if g.value(output).dtype != narrow and outside and _is_widening(outside[-1]):
        grad = outside.pop()  # the sum is wanted in fp32
    copy = g.only_user(output, aten.clone.default)
    if copy is not None and g.value(copy).dtype == g.value(output).dtype:
        between.append(output)
        output = copy
    return _site(output, grad, indices, [*inside, indices, zeros, *outside, *between], is_scatter=True)


def _reshaped(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node of which ``node`` is a reshaped form, and those between."""
    between: list[fx.Node] = []
    while node.target in _RESHAPES:
        between.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, between


def _converts_to(node: fx.Node, dtype: torch.dtype) -> bool:
    return node.target is prims.convert_element_type.default and g.value(node).dtype == dtype


def _is_widening(node: fx.Node) -> bool:
    return _converts_to(node, torch.float32) and g.value(node.args[0]).dtype in _HALVES


def _is_done(output: fx.Node, sizes: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether this is the result, of a shape and a dtype."""
    return g.same_sizes(g.value(output).shape, sizes) and g.value(output).dtype == dtype


def _number(size: Any) -> Any:
    return g.value(size) if isinstance(size, fx.Node) else size


def _site(output: fx.Node, grad: fx.Node, indices: fx.Node, inside: Iterable[fx.Node], is_scatter: bool) -> Site | Reject:
    offsets, kernel_size, sizes, stride, padding, dilation = indices.args
    out, found = g.value(output), g.value(grad)
    axes = len(kernel_size)  # type: ignore[arg-type]
    if not 1 <= axes <= MAX_AXES or out.dim() > MAX_DIMS:
        return Reject(f"{out.dim()} dimensions, {axes} of them pooled; up to {MAX_DIMS} and {MAX_AXES} are accepted", output)
    if found.dtype not in DTYPES or out.dtype != found.dtype:
        dtypes = " to ".join(str(t.dtype).removeprefix("torch.") for t in (found, out))
        return Reject(f"{dtypes} is not supported", output)
    if not all(isinstance(n, int) for numbers in (kernel_size, stride, padding, dilation) for n in numbers):  # type: ignore[union-attr]
        return Reject("the windows' sizes are symbolic", output)
    shape = [*g.value(offsets).shape[:-axes], *map(_number, sizes)]  # type: ignore[union-attr, arg-type]
    if not g.same_sizes(found.shape, g.value(offsets).shape) or not g.same_sizes(out.shape, shape):
        return Reject("the result has other sizes than the tensor whose elements the indices count", output)
    if len({found.device, out.device, g.value(offsets).device}) != 1:
        return Reject("the tensors are on several devices", output)
    if not arguments.covers_memory(out):
        return Reject("the result has gaps in memory", output)
    interior = _made_unnecessary(output, inside)
    return Site(output, grad, offsets, tuple(sizes), *map(tuple, (kernel_size, stride, padding, dilation)), is_scatter, interior)  # type: ignore[arg-type]


def _made_unnecessary(output: fx.Node, candidates: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """Those of some nodes that nothing but the output and each other uses."""
    gone = {output}
    for node in sorted(set(candidates) - gone, reverse=True):
        if all(user in gone for user in node.users):
            gone.add(node)
    return tuple(gone - {output})


def is_gather(site: Site) -> bool:
    """Whether Inductor generates a kernel that looks at windows for each element."""
    looked = math.prod(max(-(-k // s), 1) for k, s in zip(site.kernel_size, site.stride))
    pools = site.output.target is BACKWARDS[0] and set(site.dilation) == {1}
    return pools and looked <= _MOST_LOOKED_AT
