"""What the gradient of max pooling makes a device do: in our kernels, in Inductor's, and in PyTorch's."""

from __future__ import annotations

import math

from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.max_pool_backward.ops import plan_facts
from fusebackend.patterns.max_pool_backward.sites import Site, is_gather
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Work, Workload
from fusebackend.rewriting.workload import log2, stream, streamed


def estimate(site: Site) -> Estimate | Workload:
    grad, offsets, out = g.value(site.grad), g.value(site.offsets), g.value(site.output)
    numbers = g.hints(grad.shape), g.hints(grad.stride()), g.hints(offsets.stride()), g.hints(out.shape)
    if None in numbers:
        return Estimate(None, "a size depends on data, so it is not known whether the kernel pays", "unmeasured")
    sizes, strides, offset_strides, out_sizes = (n or [] for n in numbers)
    if 0 in sizes or 0 in out_sizes:
        return Estimate(False, "an empty tensor: nothing to gain")
    axes = len(site.kernel_size)
    misaligned = (g.hint(grad.storage_offset()) or 0) * grad.itemsize % 16
    multiprocessors = device_facts(out.device).multiprocessors
    windows = site.kernel_size, site.stride, site.padding, site.dilation
    facts = plan_facts(sizes, strides, offset_strides, out_sizes[-axes:], *windows, site.order, grad.dtype, multiprocessors, misaligned)
    elements, results = math.prod(sizes), math.prod(out_sizes)
    looked = [k / s for k, s in zip(site.kernel_size, site.stride)]  # at windows, for each element along an axis
    lanes, vector = facts["lanes"], facts["vector"]
    # Of the last axis neighbours look at the same windows, unless they are of different channels.
    loads = math.prod(looked) / vector if lanes else math.prod(looked[:-1]) * (vector / site.stride[-1] + looked[-1]) / vector
    moved = float(elements * (grad.itemsize + 1))
    shape = {
        "lanes": lanes,
        "vector": log2(vector),
        "row": log2(out_sizes[-1]),
        "element": log2(grad.itemsize),
        "looked": log2(math.prod(looked)),
        "dynamic": float(not all(isinstance(n, int) for n in (*grad.shape, *out.shape))),
    }
    written = float(results * out.itemsize)
    compared = math.prod(looked) * results
    ours = Work(
        "max_pool_backward",
        {
            "read": moved,
            "written": written,
            "loads": loads * results,
            "compared": compared,
            "threads": results / vector,
            "stores": results if not lanes and out_sizes[-1] % vector != 0 else results / vector,
            "launches": 1.0,
        },
        shape,
    )
    neighbours = _fused_neighbours(site)
    more = [stream(n) for n in neighbours]
    if site.is_reordered:
        more.append(streamed(2.0 * results * out.itemsize, out))
    seen = {k: shape[k] for k in ("lanes", "row", "element", "dynamic")}
    if site.is_scatter:
        wide = results * max(out.itemsize, 4)
        inductor = Work(  # as of other sums at indices
            "inductor resample_backward",
            {
                "read": moved,
                "atomics": float(elements),
                "filled": float(wide),
                "summed": float(wide) + results * out.itemsize,
                "launches": 3.0,
            },
            {"element": shape["element"], "lanes": lanes, "puts": 0.0, "dynamic": shape["dynamic"]},
        )
    elif is_gather(site):
        most = math.prod(max(-(-k // s), 1) for k, s in zip(site.kernel_size, site.stride))  # it looks at as many for each element
        inductor = Work(
            "inductor max_pool_backward", {"read": moved, "written": written, "looked": float(most * results), "launches": 1.0}, seen
        )
    else:
        inductor = Work(
            "aten max_pool_backward",
            {"read": elements * (grad.itemsize + 8.0), "written": written, "atomics": float(elements), "launches": 2.0},
            {**seen, "axes": float(axes)},
        )
    return Workload((ours, *more), (inductor,), next(iter(neighbours), None))


def _fused_neighbours(site: Site) -> list[fx.Node]:
    """The nodes that Inductor computes inside of its kernel: what computes the gradient, for it alone, and what reads the result."""
    inside = {*site.interior, site.output}
    found = [n for n in g.fused_neighbours(site.output) if n > site.output][:1] if is_gather(site) else []
    producer = g.through_views(site.grad)
    if g.is_fusable(producer) and all(user in inside for user in g.consumers(producer)):
        found.append(producer)
    return found
