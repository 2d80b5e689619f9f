"""The work of our operators' calls, by sizes and memory orders alone: of convolutions however a graph spells them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fusebackend.patterns.causal_conv1d.channel_epilogue import Epilogue
from fusebackend.patterns.causal_conv1d.work import kernel_work
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import alignment, log2


class Sizes:
    """The sizes of a convolution as they were when the graph was traced, and where it runs.

    Args:
        known: batch, channels, samples of x, samples of the result, taps, and the padding before; None if one is not known.
        dynamic: whether one of x's is symbolic.
    """

    def __init__(self, known: Sequence[int] | None, dtype: torch.dtype, device: torch.device, dynamic: bool):
        self.known, self.dtype, self.device, self.item, self.dynamic = known, dtype, device, dtype.itemsize, dynamic
        if known is not None:
            self.batch, self.channels, self.samples, self.length, self.taps, self.left = known
            self.x_bytes = self.item * self.batch * self.channels * self.samples
            self.bytes = self.item * self.batch * self.channels * self.length
            self.products = self.batch * self.channels * self.length * min(self.taps, self.samples)

    def kind(self, name: str) -> str:
        return name if self.device.type == "cuda" else f"{name} {self.device.type}"

    def work(self, name: str, quantities: Mapping[str, float], shape: Mapping[str, float]) -> Work:
        return Work(self.kind(name), {n: float(q) for n, q in quantities.items()}, {**self._common_shape(), **shape})

    def _common_shape(self) -> dict[str, float]:
        return {
            "log2 batch": log2(self.batch),
            "log2 channels": log2(self.channels),
            "log2 samples": log2(self.samples),
            "log2 taps": log2(self.taps),
            "log2 taps per sample": log2(self.taps / max(self.samples, 1)),
            "element": float(self.item),
            "row alignment": alignment(self.item * self.samples),
            "channel alignment": alignment(self.item * self.channels),
            "dynamic": float(self.dynamic),
        }


def forward_work(
    sizes: Sizes,
    x_btc: bool,
    result_btc: bool,
    *,
    silu: bool = False,
    after: Epilogue | None = None,
    copies: Sequence[int] = (),
    pointwise: Sequence[int] = (),
) -> Work:
    """The work of a convolution.

    Args:
        x_btc, result_btc: whether x, and the result, lie in memory as (batch, time, channels).
        after: what is computed with it, other than SiLU alone.
        copies, pointwise: the bytes that each copy into another memory order moves, and each kernel that computes something else.
    """
    quantities = {"bytes": sizes.x_bytes + sizes.bytes, "copied bytes": sum(copies), "pointwise bytes": sum(pointwise)}
    quantities["launches"] = 1 + len(copies) + len(pointwise)
    active = silu or (after is not None and bool(after.activation))
    shape = {"x in btc": float(x_btc), "result in btc": float(result_btc), "silu": float(active)}
    if sizes.device.type == "cuda":
        facts = kernel_facts(sizes, (x_btc, result_btc, False), silu, epilogue=after is not None)
        quantities |= _products(sizes, facts, sizes.products, x_btc) | {"blocks": facts["blocks"]}
        shape |= _route(facts) | _fill(sizes, facts)
    else:
        quantities["products"] = sizes.products
    quantities["activations"] = sizes.bytes / sizes.item if active else 0
    return sizes.work("causal_conv1d", quantities, shape)


def backward_work(
    sizes: Sizes,
    orders: tuple[bool, bool, bool],
    needed: Sequence[bool],
    *,
    silu: bool = False,
    copies: Sequence[int] = (),
    pointwise: Sequence[int] = (),
) -> Work:
    """The work of a convolution's gradients.

    Args:
        orders: of x, of the incoming gradient, and of x's gradient: whether (batch, time, channels).
        needed: which gradients, of x, weight and bias.
        copies, pointwise: as for :func:`forward_work`.
    """
    x_btc, grad_btc, result_btc = orders
    of_weight = needed[1] or needed[2]
    quantities: dict[str, float] = {"bytes": sizes.x_bytes * (1 + needed[0]) + sizes.bytes, "copied bytes": sum(copies)}
    quantities |= {"pointwise bytes": sum(pointwise), "launches": len(copies) + len(pointwise)}
    shape = {"x in btc": float(x_btc), "gradient in btc": float(grad_btc), "result in btc": float(result_btc), "silu": float(silu)}
    shape |= {"of x": float(needed[0]), "of weight": float(of_weight)}
    sums = silu + needed[0] + of_weight  # of products
    if sizes.device.type == "cuda":
        facts = kernel_facts(sizes, orders, silu, needed)
        apart = of_weight and not facts["one_pass"]
        quantities |= _products(sizes, facts, sizes.products * (sums - apart), x_btc)
        if apart:
            route = "grad_window" if facts["grad_window"] else "grad_tensor_cores" if facts["grad_tensor_cores"] else "grad_tile"
            quantities[route] = sizes.products
        quantities |= {"blocks": facts["blocks"], "bytes between kernels": facts["wide_bytes"]}
        quantities["launches"] += facts["launches"]
        shape |= _route(facts) | _fill(sizes, facts) | {"one pass": facts["one_pass"], "grad window": facts["grad_window"]}
    else:
        quantities["products"] = sizes.products * sums
    quantities["activations"] = sizes.bytes / sizes.item if silu else 0
    return sizes.work("causal_conv1d backward", quantities, shape)


def kernel_facts(
    sizes: Sizes, orders: Sequence[bool] = (False,) * 3, silu: bool = False, needed: Sequence[bool] = (), epilogue: bool = False
) -> Mapping[str, float]:
    """What csrc/causal_conv1d/work.h says of the CUDA kernels that run."""
    assert sizes.known is not None
    return kernel_work(sizes.known[:5], orders, sizes.dtype, sizes.left, silu, multiprocessors(sizes), needed, epilogue)


def _products(sizes: Sizes, facts: Mapping[str, float], products: float, btc: bool) -> dict[str, float]:
    """Products by what computes them, as if all multiprocessors and lanes had some, and the points of Fourier transforms."""
    names = ("doubles", "tensor_cores", "fft", "short", "window")
    route = next((name for name in names if facts[name]), "tile")
    if route == "fft":
        points = 2 ** math.ceil(math.log2(max(sizes.samples + sizes.taps, 2)))
        return {"fft points": sizes.channels * (math.ceil(sizes.batch / 2) + 0.5) * points}
    if route == "tensor_cores":  # whole groups of eight batch entries
        products *= math.ceil(sizes.batch / 8) * 8 / sizes.batch
    idle = max(multiprocessors(sizes) / facts["blocks"], 1.0)
    order = " btc" if btc and route in ("short", "window") else ""  # other kernels for other orders
    return {f"products ({route}{order})": products * idle * facts["lanes"]}


_ROUTES = ("short", "window", "tensor_cores", "fft", "doubles")


def _route(facts: Mapping[str, float]) -> dict[str, float]:
    return {name: facts[name] for name in _ROUTES}


def route(work: Work) -> tuple[float, ...]:
    """Which kind of kernel computes a convolution's ``work``: the same for equal tuples."""
    return tuple(work.shape.get(name, 0.0) for name in _ROUTES)


def multiprocessors(sizes: Sizes) -> int:
    return device_facts(sizes.device).multiprocessors if sizes.device.type == "cuda" else torch.get_num_threads()


def _fill(sizes: Sizes, facts: Mapping[str, float]) -> dict[str, float]:
    return {"log2 blocks per multiprocessor": log2(facts["blocks"] / multiprocessors(sizes)), "log2 lanes": log2(facts["lanes"])}
