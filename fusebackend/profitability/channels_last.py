"""Whether the 2-D convolutions of a graph should run channels last where Inductor's rule is against it.

In training Inductor runs none of a graph's convolutions channels last if one of them is grouped, or larger than 1x1 and gives at most half
as many channels as it takes: U-Nets, DenseNets, ResNeXts; and none of dynamic sizes. cuDNN's kernels for tensor cores want channels last,
and copy where they get planes. So the convolutions are called in both orders, and the sums of their times compared.

What Inductor generates between them reads and writes as much in either order, but for sums over the pixels of a channel or of a group of
channels, for scatters, which are gradients of gathered pixels (interpolations), and for copies where tensors enter and leave the graph:
what these take longer channels last is charged as copies, which are timed beside the convolutions.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import cache_keys
from fusebackend import fx_utils as g
from fusebackend.profitability import calibration, timer
from fusebackend.profitability.distributed import first_calls
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.region_timing import MARGIN, refuse_where_nothing_can_run
from fusebackend.profitability.unfit import Unfit

aten = torch.ops.aten
prims = torch.ops.prims

_SUMS = (aten.var_mean.correction, aten.var.correction, aten.mean.dim, aten.sum.dim_IntList)
_GATHERS = (aten._unsafe_index.Tensor, aten.index.Tensor)
_CHANNELS, _PIXELS = 1, {2, 3}

# What has more channels is no image, and has a gradient.
_CHANNELS_OF_IMAGES = 4
# Where channels last took so many times as long in a first measurement, nothing more is called.
_CLEARLY = 1.5


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the library: a convolution, or its gradients.

    Attributes:
        x, weight, result: shapes, of dynamic sizes as they are at the compile.
        has_bias: of a convolution.
        geometry: strides, padding, dilations, whether it is transposed, output padding, groups.
        gradients: of x and of the weight, which are wanted; empty for the convolution.
    """

    dtype: torch.dtype
    x: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    has_bias: bool
    geometry: tuple[Any, ...]
    gradients: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class Calls:
    """What is compared.

    Attributes:
        counts: how often each call is made.
        extra_bytes: what is read and written besides where the convolutions run channels last: by sums, by scatters, and by copies where
            tensors enter and leave the graph.
    """

    counts: Mapping[Call, int]
    extra_bytes: int

    def __str__(self) -> str:
        return f"{sorted(self.counts.items(), key=repr)!r} {self.extra_bytes}"


def calls_of(convolutions: Sequence[fx.Node], *, scatters: bool = True) -> Calls:
    """The calls that a forward's convolutions are, and those of their gradients, where the graph returns what these need.

    Args:
        scatters: whether Inductor will generate those of the backward.
    """
    graph = convolutions[0].graph
    returned = set() if g.is_inference(graph) else set(graph.output_node().all_input_nodes)
    counts: collections.Counter[Call] = collections.Counter()
    extra, with_gradients = 0.0, False
    for node in convolutions:
        args = g.arguments(node)
        x, weight, has_bias = args["input"], args["weight"], args["bias"] is not None
        geometry = [args[n] for n in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]
        call = Call(
            g.value(x).dtype,
            _sizes(x),
            _sizes(weight),
            _sizes(node),
            has_bias,
            tuple(tuple(map(_number, a)) if isinstance(a, (list, tuple)) else _number(a) for a in geometry),
        )
        counts[call] += 1
        # The weight is kept for both gradients, unless it is computed anew for them, and then x may be kept.
        if not returned.isdisjoint({weight, _before_casts(weight), x, _before_casts(x)}):
            with_gradients = True
            counts[dataclasses.replace(call, has_bias=False, gradients=(call.x[1] > _CHANNELS_OF_IMAGES, True))] += 1
            extra += has_bias * _extra_passes()["channel"]["forward"] * _bytes(node)  # the bias's gradient is a sum over pixels
    if with_gradients and scatters:
        extra += _extra_passes()["scatter"]["backward"] * sum(map(_bytes, _gathered_pixels(graph)))
    return Calls(counts, int(extra + _bytes_of_sums(graph, with_gradients) + _bytes_at_the_ends(graph, with_gradients)))


def _bytes_at_the_ends(graph: fx.Graph, with_gradients: bool) -> int:
    """What copies read and write between the graph's convolutions and its user, whose tensors are planes, and so are their gradients."""
    returned: Any = graph.output_node().args[0]
    results = [returned[i] for i in graph.output_node().meta.get("user_visible_output_idxs", ())]
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    weights = {_before_casts(g.arguments(n)["weight"]) for n in convolutions}
    given = [n for n in graph.find_nodes(op="placeholder") if n not in weights]
    planes = [n for n in (*given, *results) if _has_planes(n)]
    return sum(2 * _bytes(n) * (1 + (with_gradients and _sizes(n)[1] > _CHANNELS_OF_IMAGES)) for n in planes)


def _has_planes(node: fx.Node) -> bool:
    """Whether it is a float tensor of images, as far as its shape says, and of sizes that are known."""
    value = g.value(node) if g.is_tensor(node) else None
    return value is not None and value.dim() == 4 and value.is_floating_point() and g.hints(value.shape) is not None


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """Of a tensor, where they are symbols as they are now."""
    sizes = g.hints(g.value(node).shape)
    if sizes is None:
        raise Unfit(f"a size of {g.describe(node)} depends on data")
    return tuple(sizes)


def _number(argument: Any) -> int:
    """An argument as it is now, where it is computed of sizes."""
    found = g.hint(g.value(argument)) if isinstance(argument, fx.Node) else g.hint(argument)
    if found is None:
        raise Unfit("a convolution's padding, stride or dilation depends on data")
    return found


def _bytes(node: fx.Node) -> int:
    return math.prod(_sizes(node)) * g.value(node).itemsize


def _before_casts(node: fx.Node) -> fx.Node:
    """What a tensor was converted from, to another dtype."""
    while node.target is prims.convert_element_type.default:
        node = node.all_input_nodes[0]
    return node


def _gathered_pixels(graph: fx.Graph) -> list[fx.Node]:
    """What is gathered by indices of pixels, from tensors of images that have gradients, as far as their channels say."""

    def is_one(node: fx.Node) -> bool:
        args = g.arguments(node)
        given = {d for d, index in enumerate(args["indices"]) if index is not None}
        return given <= _PIXELS and _has_planes(args["self"]) and _has_planes(node) and _sizes(node)[_CHANNELS] > _CHANNELS_OF_IMAGES

    return [n for target in _GATHERS for n in graph.find_nodes(op="call_function", target=target) if is_one(n)]


def _bytes_of_sums(graph: fx.Graph, with_gradients: bool) -> float:
    """What sums over pixels read and write more channels last, and where ``with_gradients`` those of their gradients."""
    found = 0.0
    for target in _SUMS:
        for node in graph.find_nodes(op="call_function", target=target):
            kind, source = _summed(node)
            if kind:
                passes = _extra_passes()[kind]
                found += (passes["forward"] + passes["backward"] * with_gradients) * _bytes(source)
    return found


def _summed(node: fx.Node) -> tuple[str, fx.Node]:
    """Whether the sum is over the pixels of a ``"channel"``, or of a ``"group"`` of them (``""``: of neither), and the tensor before casts
    and views."""
    args = g.arguments(node)
    dims = {d % max(1, g.value(args["self"]).dim()) for d in args["dim"] or ()}
    source = args["self"]
    while (before := g.through_views(_before_casts(source))) is not source:
        source = before
    if not _has_planes(source) or g.hints(g.value(args["self"]).shape) is None:
        return "", source
    seen, sizes = _sizes(args["self"]), _sizes(source)
    if math.prod(sizes) != math.prod(seen):
        return "", source
    if seen[2:] == sizes[2:]:  # of instances too, which are seen as so many more channels
        return "channel" if dims >= _PIXELS and _CHANNELS not in dims else "", source
    of_pixels_channels = [seen[d] for d in dims] == [sizes[_CHANNELS]]  # as a layer norm of tokens takes them
    return "" if of_pixels_channels else "group", source


@functools.cache
def _extra_passes() -> dict[str, dict[str, float]]:
    (path,) = (calibration.FOLDER / "channels_last").glob("*.json")  # of one device: passes, not times
    passes: dict[str, dict[str, float]] = json.loads(path.read_text())["passes"]
    return passes


def time_both_orders(calls: Calls, device: torch.device) -> Measurement:
    """Calls all of them in both orders on random tensors, for tens of milliseconds or a few times each; twice where planes are clearly
    faster.

    Raises:
        Unfit: they can't be called.
    """
    refuse_where_nothing_can_run(device)
    largest = max(2 * (math.prod(c.x) + math.prod(c.result)) * c.dtype.itemsize for c in calls.counts)
    if device.type == "cuda" and 2 * largest > _free_bytes(device):
        raise Unfit("there is no memory to call the convolutions in")
    with timer.undisturbed(device):
        tensors = _Tensors(calls.counts, device)
        last, planes = (_form(calls, tensors, channels_last=order) for order in (True, False))
        with first_calls():
            planes([])
        last([])
        roughly = [timer.once_ms(form, device) for form in (last, planes)]
        if roughly[0] > _CLEARLY * roughly[1]:
            last_ms, planes_ms = roughly
        else:
            last_ms, planes_ms = timer.times_ms([last, planes], _NoInputs(), device, seconds=0.03, draws=1)
    subject = f"{sum(calls.counts.values())} convolutions and gradients, channels last"
    return Measurement(last_ms * MARGIN <= planes_ms, last_ms, planes_ms, "calls", subject, cache_keys.machine(device))


def _free_bytes(device: torch.device) -> int:
    """What can be allocated, with what PyTorch holds for later."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class _NoInputs:
    """Of forms that have tensors of their own (:class:`fusebackend.profitability.timer.Inputs`)."""

    def __init__(self) -> None:
        self.mutated: list[int] = []

    def settle(self, form: Callable[[list[Any]], Any]) -> None:
        pass

    def draw(self) -> list[Any]:
        return []


class _Tensors:
    """Views of one buffer a role and dtype: of hundreds of convolutions not all operands fit into memory."""

    def __init__(self, calls: Collection[Call], device: torch.device):
        sizes: collections.Counter[tuple[str, torch.dtype]] = collections.Counter()
        for call in calls:
            for role in ("x", "weight", "result"):
                sizes[role, call.dtype] = max(sizes[role, call.dtype], math.prod(getattr(call, role)))
        self._buffers = {key: torch.randn(size, device=device).to(key[1]) for key, size in sizes.items()}
        self.largest = max(self._buffers.values(), key=lambda b: b.nbytes)

    def planes(self, call: Call, role: str) -> torch.Tensor:
        return self._flat(call, role).view(getattr(call, role))

    def channels_last(self, call: Call, role: str) -> torch.Tensor:
        n, c, h, w = getattr(call, role)
        return self._flat(call, role).view(n, h, w, c).permute(0, 3, 1, 2)

    def _flat(self, call: Call, role: str) -> torch.Tensor:
        return self._buffers[role, call.dtype][: math.prod(getattr(call, role))]


def _form(calls: Calls, tensors: _Tensors, *, channels_last: bool) -> Callable[[list[Any]], None]:
    """Calls each as often as the graph does, with the copies of weights, which lie as planes and so do their gradients."""
    given = tensors.channels_last if channels_last else tensors.planes
    copies = round(calls.extra_bytes / (2 * tensors.largest.nbytes)) if channels_last else 0

    def run(inputs: list[Any]) -> None:
        for call, times in calls.counts.items():
            x, result, parameter = given(call, "x"), given(call, "result"), tensors.planes(call, "weight")
            bias = parameter.flatten()[: call.result[1]] if call.has_bias else None
            for _ in range(times):
                weight = parameter.contiguous(memory_format=torch.channels_last) if channels_last else parameter
                if call.gradients:
                    wanted = [*call.gradients, False]
                    aten.convolution_backward(result, x, weight, None, *call.geometry, wanted)[1].contiguous()
                else:
                    aten.convolution(x, weight, bias, *call.geometry)
        for _ in range(copies):
            tensors.largest.clone()

    return run
