"""Whether the 2-D convolutions of a graph should run channels last where Inductor's rule is against it.

In training Inductor runs none of a graph's convolutions channels last if one of them is grouped, or gives at most half as many channels as
it takes: U-Nets, DenseNets, ResNeXts. cuDNN's kernels for tensor cores want channels last, and copy where they get planes. So the
convolutions are called in both orders, and the sums of their times compared.

What Inductor generates between them reads and writes as much in either order, but for sums over the pixels of a channel or of a group of
channels, as norms take them: these are charged with copies, which are timed beside the convolutions.
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
from fusebackend.profitability.budget import clock_standing
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.region_timing import MARGIN, refuse_where_nothing_can_run
from fusebackend.profitability.unfit import Unfit

aten = torch.ops.aten
prims = torch.ops.prims

_SUMS = (aten.var_mean.correction, aten.var.correction, aten.mean.dim, aten.sum.dim_IntList)
_CHANNELS, _PIXELS = 1, {2, 3}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the library: a convolution, or its gradients.

    Attributes:
        x, weight, result: shapes.
        has_bias: of a convolution.
        is_given: whether x enters the graph as planes.
        geometry: strides, padding, dilations, whether it is transposed, output padding, groups.
        gradients: of x and of the weight, which are wanted; empty for the convolution.
    """

    dtype: torch.dtype
    x: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    has_bias: bool
    is_given: bool
    geometry: tuple[Any, ...]
    gradients: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class Calls:
    """What is compared.

    Attributes:
        counts: how often each call is made.
        extra_bytes: what is read and written besides where the convolutions run channels last.
    """

    counts: Mapping[Call, int]
    extra_bytes: int

    def __str__(self) -> str:
        return f"{sorted(self.counts.items(), key=repr)!r} {self.extra_bytes}"


def calls_of(convolutions: Sequence[fx.Node]) -> Calls:
    """The calls that a forward's convolutions are, and those of their gradients, for which the graph returns what they need."""
    graph = convolutions[0].graph
    returned = set(graph.output_node().all_input_nodes)
    counts: collections.Counter[Call] = collections.Counter()
    for node in convolutions:
        args = g.arguments(node)
        x, weight = args["input"], args["weight"]
        geometry = [args[n] for n in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]
        call = Call(
            g.value(x).dtype,
            tuple(g.value(x).shape),
            tuple(g.value(weight).shape),
            tuple(g.value(node).shape),
            args["bias"] is not None,
            x.op == "placeholder",
            tuple(tuple(a) if isinstance(a, (list, tuple)) else a for a in geometry),
        )
        counts[call] += 1
        # A weight is kept for the gradient of x, which may be computed anew for that of the weight. Images get no gradient.
        keeps_weight = weight in returned or _before_casts(weight) in returned
        keeps_x = x in returned or _before_casts(x) in returned
        gradients = (keeps_weight and _before_casts(x).op != "placeholder", keeps_weight or keeps_x)
        if any(gradients):
            counts[dataclasses.replace(call, has_bias=False, gradients=gradients)] += 1
    return Calls(counts, _extra_bytes(graph, any(call.gradients for call in counts)))


def _before_casts(node: fx.Node) -> fx.Node:
    """What a tensor was converted from, to another dtype."""
    while node.target is prims.convert_element_type.default:
        node = node.all_input_nodes[0]
    return node


def _extra_bytes(graph: fx.Graph, with_gradients: bool) -> int:
    """What sums over pixels read and write more channels last, and where ``with_gradients`` those of their gradients."""
    found = 0.0
    for target in _SUMS:
        for node in graph.find_nodes(op="call_function", target=target):
            kind, value = _summed(node)
            if kind:
                passes = _extra_passes()[kind]
                found += (passes["forward"] + passes["backward"] * with_gradients) * value.numel() * value.dtype.itemsize
    return int(found)


def _summed(node: fx.Node) -> tuple[str, Any]:
    """Whether the sum is over the pixels of a ``"channel"``, or of a ``"group"`` of them (``""``: of neither), and the tensor before casts
    and views."""
    args = g.arguments(node)
    seen, dims = g.value(args["self"]), {d % max(1, g.value(args["self"]).dim()) for d in args["dim"] or ()}
    source = args["self"]
    while (before := g.through_views(_before_casts(source))) is not source:
        source = before
    value = g.value(source)
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.numel() != seen.numel():
        return "", value
    if seen.shape[2:] == value.shape[2:]:  # of instances too, which are seen as so many more channels
        return "channel" if dims >= _PIXELS and _CHANNELS not in dims else "", value
    return "group" if len(dims) > 1 or seen.dim() < 4 else "", value


@functools.cache
def _extra_passes() -> dict[str, dict[str, float]]:
    (path,) = (calibration.FOLDER / "channels_last").glob("*.json")  # of one device: passes, not times
    passes: dict[str, dict[str, float]] = json.loads(path.read_text())["passes"]
    return passes


def time_both_orders(calls: Calls, device: torch.device) -> Measurement:
    """Calls all of them in both orders, on random tensors, for tens of milliseconds.

    Raises:
        Unfit: they can't be called.
    """
    refuse_where_nothing_can_run(device)
    largest = max(sum(map(math.prod, (c.x, c.x, c.result, c.result))) * c.dtype.itemsize for c in calls.counts)
    if device.type == "cuda" and 2 * largest > torch.cuda.mem_get_info(device)[0]:
        raise Unfit("there is no memory to call the convolutions in")
    with timer.undisturbed(device):
        tensors = _Tensors(calls.counts, device)
        forms = [_form(calls, tensors, channels_last=order) for order in (True, False)]
        with clock_standing():  # one of them is what the program's first step would wait for
            for form in forms:
                form([])
        last_ms, planes_ms = timer.medians_ms(forms, _NoInputs(), device, seconds=0.03, draws=1)
    subject = f"{sum(calls.counts.values())} convolutions and gradients, channels last"
    return Measurement(last_ms * MARGIN <= planes_ms, last_ms, planes_ms, "calls", subject, cache_keys.machine(device))


class _NoInputs:
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
    """Calls each as often as the graph does, with the copies that Inductor would make: parameters lie as planes, and so does what enters
    the graph."""
    given = tensors.channels_last if channels_last else tensors.planes
    copies = round(calls.extra_bytes / (2 * tensors.largest.nbytes)) if channels_last else 0

    def run(inputs: list[Any]) -> None:
        for call, times in calls.counts.items():
            x = tensors.planes(call, "x") if call.is_given else given(call, "x")
            weight, result = tensors.planes(call, "weight"), given(call, "result")
            for _ in range(times):
                operands = [t.contiguous(memory_format=torch.channels_last) if channels_last else t for t in (x, weight)]
                if call.gradients:
                    aten.convolution_backward(result, *operands, None, *call.geometry, [*call.gradients, False])
                else:
                    bias = tensors.planes(call, "weight").flatten()[: call.result[1]] if call.has_bias else None
                    aten.convolution(*operands, bias, *call.geometry)
        for _ in range(copies):
            tensors.largest.clone()

    return run
