"""Times a region of a graph with a substitution and without, or a replacement by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor.virtualized import V

from fusebackend import cache_keys
from fusebackend.profitability import timer
from fusebackend.profitability.compile_apart import compile_apart
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.random_inputs import Samples
from fusebackend.profitability.region import Region
from fusebackend.profitability.unfit import Unfit

#: A replacement is kept if it is this many times as fast: a smaller difference may be noise.
MARGIN = 1.05


def time_region(region: Region, subject: str, *, calls: bool, brief: bool, patches: dict[str, Any]) -> Measurement:
    """Times both forms of a region on random inputs.

    Args:
        subject: what is timed, for people.
        calls: call the match and its replacement as they are, without neighbours, instead of compiling both forms.
        brief: take tens of milliseconds instead of a third of a second.
        patches: the Inductor configuration, without our passes, under which both forms are compiled.

    Raises:
        Unfit: it can't be timed.
    """
    _refuse_where_nothing_can_run(region.device)
    with timer.undisturbed(region.device):
        original, replaced, fakes = (region.without_neighbours() if calls else region).modules()
        samples = Samples(original.graph, fakes, replaced.graph)
        forms = [_called(m) if calls else compile_apart(m, fakes, patches) for m in (replaced, original)]
        seconds, draws = (0.03, 1) if brief else (0.3, 3)
        ours, theirs = timer.medians_ms(forms, samples, region.device, seconds=seconds, draws=draws)
    how = "calls" if calls else "region"
    return Measurement(ours * MARGIN <= theirs, ours, theirs, how, subject, cache_keys.machine(region.device))


def time_replacement(region: Region, subject: str, inductor_ms: float) -> Measurement:
    """Times a replacement by itself, called as it is, for tens of milliseconds. What Inductor would generate around it is not fused with
    it, so it takes no longer in the graph.

    Args:
        inductor_ms: the estimate of Inductor's form. Whether the replacement pays by both is for the caller to say.

    Raises:
        Unfit: it can't be timed.
    """
    _refuse_where_nothing_can_run(region.device)
    with timer.undisturbed(region.device):
        original, replaced, fakes = region.without_neighbours().modules()
        samples = Samples(original.graph, fakes, replaced.graph)
        (ours,) = timer.medians_ms([_called(replaced)], samples, region.device, seconds=0.03, draws=1)
    return Measurement(False, ours, inductor_ms, "replacement", subject, cache_keys.machine(region.device))


def _refuse_where_nothing_can_run(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unfit("a CUDA graph is being captured")
    if V.aot_compilation:
        raise Unfit("nothing can be compiled besides in an ahead-of-time compile")


def _called(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    return lambda inputs: module.forward(*inputs)
