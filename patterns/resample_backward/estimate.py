"""What the gradient of an interpolation makes a device do: in our kernels, and in Inductor's scatters."""

from __future__ import annotations

import math

from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.resample_backward.ops import accumulator, plan_facts
from fusebackend.patterns.resample_backward.sites import Site
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Work, Workload
from fusebackend.rewriting.workload import log2, stream, streamed


def estimate(site: Site) -> Estimate | Workload:
    grad, out = g.value(site.grad), g.value(site.output)
    sizes, strides, out_sizes = g.hints(grad.shape), g.hints(grad.stride()), g.hints(out.shape)
    if sizes is None or strides is None or out_sizes is None:
        return Estimate(None, "a size depends on data, so it is not known whether the sum pays", "unmeasured")
    if 0 in sizes or 0 in out_sizes:
        return Estimate(False, "an empty tensor: nothing to gain")
    elements, results, terms = math.prod(sizes), math.prod(out_sizes), [len(of) for of in site.terms]
    axis_sizes = [out_sizes[axis] for axis in site.axes]
    misaligned = (g.hint(grad.storage_offset()) or 0) * grad.itemsize % 16
    numbers = sizes, strides, site.dim, terms, axis_sizes, site.order
    facts = plan_facts(*numbers, grad.dtype, out.dtype, device_facts(out.device).multiprocessors, misaligned)
    summed = [n * sizes[axis] / max(out_sizes[axis], 1) for n, axis in zip(terms, site.axes)]  # elements of a sum along each axis
    vector = facts["vector_bytes"] / grad.itemsize
    lists = float(sum(n * sizes[axis] for n, axis in zip(terms, site.axes)))
    shape = {
        "lanes": facts["lanes"],
        "planes": facts["planes"],
        "elements": facts["elements"],
        "row": log2(min(sizes[site.axes[-1]], out_sizes[site.axes[-1]])),
        "vector": log2(facts["vector_bytes"]),
        "element": log2(grad.itemsize),
        "dynamic": float(not all(isinstance(n, int) for n in (*grad.shape, *out.shape))),
    }
    in_planes = math.prod(summed[:-1]) * results / axis_sizes[-1] * sizes[site.axes[-1]] / vector
    loads = in_planes if facts["planes"] else math.prod(summed) * results / vector
    ours = Work(
        "resample_backward",
        {
            "read": float(elements * grad.itemsize),
            "written": float(results * out.itemsize),
            "loads": loads,
            "results": float(results),
            "rows": results / axis_sizes[-1],
            "shared loads": summed[-1] * results if facts["planes"] else 0.0,
            "lists": lists,
            "launches": 2.0,
        },
        shape,
    )
    more = []
    producer = _fused_gradient(site)
    if producer is not None:
        more.append(stream(producer))
    if site.is_reordered:
        more.append(streamed(2.0 * results * out.itemsize, out))
    puts = float(math.prod(terms))
    sum_bytes = float(results * accumulator(out.dtype).itemsize)
    inductor = Work(
        "inductor resample_backward",
        {
            "read": puts * elements * grad.itemsize,
            "atomics": puts * elements,
            "filled": puts * sum_bytes,
            "summed": puts * sum_bytes + results * out.itemsize,
            "launches": 2.0 * puts + 1.0,
        },
        {"element": shape["element"], "lanes": shape["lanes"], "puts": log2(puts), "dynamic": shape["dynamic"]},
    )
    return Workload((ours, *more), (inductor,), producer)


def _fused_gradient(site: Site) -> fx.Node | None:
    """The node that Inductor computes inside its scatters, and that must become a tensor for the kernel, if there is one."""
    producer = g.through_views(site.grad)
    inside = {*site.interior, site.output}
    if not g.is_fusable(producer):
        return None
    return producer if all(user in inside for user in g.consumers(producer)) else None  # otherwise it is one anyway
