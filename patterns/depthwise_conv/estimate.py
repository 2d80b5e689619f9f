"""What a convolution makes a device do: our kernels, and the library's that Inductor calls.

Inductor adds the bias, and computes what follows, in a kernel of its own, unless the next one does, and sums the bias's gradient in one.
The library's kernels have times that depend on the form of the convolution more than on what it moves, so their shape names all of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.channel_epilogue import Epilogue
from fusebackend.patterns.depthwise_conv.layout import layout_of
from fusebackend.patterns.depthwise_conv.ops import is_channels_last
from fusebackend.patterns.depthwise_conv.sites import Backward, Convolution
from fusebackend.patterns.depthwise_conv.work import kernel_work
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Work, Workload
from fusebackend.rewriting.workload import alignment, log2, streamed

aten = torch.ops.aten

_UNKNOWN = Estimate(None, "a size depends on data, so it is not known whether the convolution pays", "unmeasured")
_CHANNELS_LAST = (0, 2, 3, 1)
_EMPTY = Estimate(False, "the convolution is empty")
_REORDERED = (
    "Inductor lays this graph's convolutions out anew (channels last), with copies: timing one by itself does not tell which is faster"
)


class _Sizes:
    """The sizes of a convolution as they were when the graph was traced, and where it runs."""

    def __init__(self, conv: Convolution, result: torch.Tensor):
        x, weight = _image(g.value(conv.x)), _image(g.value(conv.weight))
        result = _image(result)
        self.conv, self.device, self.dtype, self.item = conv, x.device, x.dtype, x.dtype.itemsize
        self.orders = (is_channels_last(x), is_channels_last(result))
        known = (g.hints(x.shape), g.hints(weight.shape), g.hints(result.shape))
        self.known = None not in known
        self.dynamic = any(isinstance(s, torch.SymInt) for s in x.shape)
        if known[0] is not None and known[1] is not None and known[2] is not None:
            (self.batch, self.channels, *self.sides), (self.outputs, _, *self.taps), (*_, height, width) = known
            self.result_sides = [height, width]
            self.inputs = self.batch * self.channels * math.prod(self.sides)
            self.results = self.batch * self.outputs * math.prod(self.result_sides)
            self.products = self.results * math.prod(self.taps)

    @property
    def multiprocessors(self) -> int:
        return device_facts(self.device).multiprocessors if self.device.type == "cuda" else torch.get_num_threads()

    def work(self, name: str, quantities: Mapping[str, float], shape: Mapping[str, float], orders: tuple[bool, bool] | None = None) -> Work:
        """A kernel's work. ``orders`` are those of x and of the result, if not the graph's."""
        kind = name if self.device.type == "cuda" else f"{name} {self.device.type}"
        return Work(kind, {n: float(q) for n, q in quantities.items()}, {**self._shape(orders or self.orders), **shape})

    def _shape(self, orders: tuple[bool, bool]) -> dict[str, float]:
        conv = self.conv
        return {
            "log2 batch": log2(self.batch),
            "log2 channels": log2(self.channels),
            "log2 rows": log2(self.result_sides[0]),
            "log2 columns": log2(self.result_sides[1]),
            "taps of a row": float(self.taps[1]),
            "log2 taps": log2(math.prod(self.taps)),
            "square": float(self.taps[0] == self.taps[1]),
            "stride": float(max(conv.stride)),
            "dilation": float(max(conv.dilation)),
            "multiplier": float(self.outputs // max(self.channels, 1)),
            "element": float(self.item),
            "half": float(self.dtype == torch.float16),
            "channels last": float(orders[0]),
            "result channels last": float(orders[1]),
            "row alignment": alignment(self.item * self.sides[1]),
            "channel alignment": alignment(self.item * self.channels),
            "dynamic": float(self.dynamic),
        }


def forward_workload(conv: Convolution, after: Epilogue) -> Estimate | Workload:
    """The work of a forward both ways."""
    sizes = _Sizes(conv, g.value(after.output))
    if not sizes.known:
        return _UNKNOWN
    if sizes.results == 0:
        return _EMPTY
    layout = layout_of(conv, after.output)
    if layout is None:
        return Estimate(False, "Inductor does not say in which memory order it runs this convolution", "unmeasured")
    x_bytes, result_bytes = sizes.item * sizes.inputs, sizes.item * sizes.results
    facts = _facts(sizes, "forward", layout.ours, layout.ours[1])
    ours = {"bytes": x_bytes + result_bytes, "launches": 1, **_quantities(sizes, facts)}
    # Both forms will read and write channels last, with no copy more than what is around them: so they can be timed.
    in_order = layout.differs and layout.ours == layout.inductors and not (layout.copies_x or layout.copies_result)
    theirs = {
        "bytes": x_bytes + result_bytes,
        "results": sizes.results,
        "products": sizes.products,
        "launches": 1 + layout.copies_x + layout.copies_result,
        "reordered bytes": 2 * (x_bytes * layout.copies_x + result_bytes * layout.copies_result),
    }
    our_kernels, their_kernels = _following(conv, after, result_bytes)
    return Workload(
        (sizes.work("depthwise_conv", ours, _route(sizes, facts), layout.ours), *our_kernels),
        (sizes.work("depthwise conv2d", theirs, {}, layout.inductors), *their_kernels),
        untimed=_REORDERED if layout.differs and not in_order else "",
        orders={conv.x: _CHANNELS_LAST} if in_order else {},
    )


def _following(conv: Convolution, after: Epilogue, result_bytes: int) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """The kernels behind both forms, in which the bias and the epilogue make them differ. Inductor computes these in a kernel of its own,
    unless those that read the result do."""
    if g.arguments(conv.node)["bias"] is None and not after.nodes:
        return (), ()
    result = g.value(after.output)
    if not g.is_read_by_loops(after.output):
        return (), (streamed(2.0 * result_bytes, result),)
    if _is_stored_by_a_pooling(after):
        return (streamed(float(result_bytes), result),), (streamed(2.0 * result_bytes, result),)
    return (), ()


def _is_stored_by_a_pooling(after: Epilogue) -> bool:
    """Whether Inductor computes the epilogue in the kernel that sums up its result, and stores it there for what else reads that, as in
    squeeze-and-excitation: it computes nothing anew that reads more than a few tensors (``StorageBox.should_realize_on_reuse``)."""
    from torch._inductor import config  # heavy

    vectors = (after.mean, after.variance, after.scale, after.shift)
    read = 1 + sum(v is not None for v in vectors)
    sums = [user for user in after.output.users if user.target in (aten.mean.dim, aten.sum.dim_IntList)]
    return bool(sums) and len(after.output.users) > len(sums) and read > config.realize_reads_threshold


def backward_workload(site: Backward) -> Estimate | Workload:
    """The work of a backward both ways."""
    sizes = _Sizes(site.conv, g.value(site.grad))
    if not sizes.known:
        return _UNKNOWN
    if sizes.results == 0:
        return _EMPTY
    of_x, of_weight, of_bias = (r is not None for r in site.results)
    grads, inputs = sizes.item * sizes.results, sizes.item * sizes.inputs
    ours = []
    order = is_channels_last(_image(g.value(site.results[0]))) if of_x else sizes.orders[0]
    together = _facts(sizes, "gradients", sizes.orders, order) if of_x and of_weight and sizes.device.type == "cuda" else {}
    if any(together.values()):
        ours.append(_of_weight(sizes, together, grads + 2 * inputs))
    else:
        if of_x:
            facts = _facts(sizes, "input", sizes.orders, order)
            quantities = {"bytes": grads + inputs, "launches": 1, **_quantities(sizes, facts)}
            ours.append(sizes.work("depthwise_conv of x", quantities, {**_route(sizes, facts), "dx channels last": float(order)}))
        if of_weight or of_bias:
            ours.append(_of_weight(sizes, _facts(sizes, "weight", sizes.orders, sizes.orders[0]), grads + inputs))
    theirs = {
        "bytes": (grads + inputs) * (of_x + of_weight),
        "results of x": sizes.inputs * of_x,
        "products of x": sizes.products * of_x,
        "products of weight": sizes.products * of_weight,
        "launches": of_x + of_weight + of_bias,
        "pointwise bytes": grads * of_bias,
    }
    shape = {"of x": float(of_x), "of weight": float(of_weight)}
    return Workload(tuple(ours), (sizes.work("depthwise conv2d backward", theirs, shape),))


def _of_weight(sizes: _Sizes, facts: Mapping[str, float], moved: float) -> Work:
    """The kernel of the weight's gradient, which may compute x's as well, and the one that adds up its partial sums."""
    quantities = {"bytes": moved, "launches": 2, **_quantities(sizes, facts), "partial bytes": facts.get("partial_bytes", 0.0)}
    shape = {**_route(sizes, facts), "outer": facts.get("outer", 0.0), "rows": facts.get("rows", 0.0)}
    return sizes.work("depthwise_conv of weight", quantities, shape)


def _image(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _facts(sizes: _Sizes, direction: str, orders: tuple[bool, bool], dx_order: bool) -> Mapping[str, float]:
    """What C++ says of the kernel; nothing of float64's, which runs on CPUs only."""
    if sizes.dtype == torch.float64:
        return {}
    conv = sizes.conv
    all_sizes = [sizes.batch, sizes.channels, sizes.outputs, *sizes.sides, *sizes.result_sides]
    numbers = (conv.stride, conv.padding[::2], conv.dilation)
    multiprocessors = sizes.multiprocessors if sizes.device.type == "cuda" else 0
    return kernel_work(direction, all_sizes, sizes.taps, *numbers, (*orders, dx_order), sizes.dtype, multiprocessors)


def _quantities(sizes: _Sizes, facts: Mapping[str, float]) -> dict[str, float]:
    """Dilated rows have the rate of ``rolling``: both are bound by memory and multiply in registers, and a calibration that is older than
    the kernels of these rows knows it."""
    if not facts:
        return {"products (loops)": sizes.products}
    if sizes.device.type != "cuda":
        route = next((name for name in ("channels", "planes") if facts[name]), "loops")
        threads = sizes.multiprocessors
        return {f"products ({route})": facts["products"] / threads, "loaded": facts["loaded"] / threads, "kernels": facts["kernels"]}
    routes = ("band", "channel", "rolling", "rows", "toeplitz", "outer", "window")
    route = "rolling" if facts["dilated"] else next((name for name in routes if facts[name]), "direct")
    idle = max(sizes.multiprocessors / max(facts["blocks"], 1.0), 1.0)
    quantities = {
        f"products ({route})": facts["products"] * idle,
        "loaded bytes": facts["loaded"] * sizes.item * idle,
        "blocks": facts["blocks"],
    }
    if facts["rows_of_taps"]:
        quantities["rows of taps"] = facts["rows_of_taps"] * idle
    return quantities


def _route(sizes: _Sizes, facts: Mapping[str, float]) -> dict[str, float]:
    if sizes.device.type != "cuda":
        return {name: facts.get(name, 0.0) for name in ("channels", "planes")}
    fill = log2(facts["blocks"] / sizes.multiprocessors)
    shape = {name: facts[name] for name in ("band", "channel", "dilated", "toeplitz", "window", "transposes", "elements")}
    shape["rolling"] = max(facts["rolling"], facts["dilated"])
    return {**shape, "log2 blocks per multiprocessor": fill, "log2 shared bytes": log2(max(facts["shared_bytes"], 1.0))}
