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
from fusebackend.profitability.distributed import first_calls
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.random_inputs import Samples
from fusebackend.profitability.region import Region, alone, cut_out, library_calls
from fusebackend.profitability.unfit import Unfit

#: A replacement is kept if it is this many times as fast: a smaller difference may be noise.
MARGIN = 1.05


def time_region(
    region: Region, subject: str, *, calls: bool, brief: bool, patches: dict[str, Any], is_lighter: bool = False
) -> Measurement:
    """Times both forms of a region on random inputs.

    Args:
        subject: what is timed, for people.
        calls: call the match and its replacement as they are, without neighbours, instead of compiling both forms.
        brief: take tens of milliseconds instead of a third of a second.
        patches: the Inductor configuration, without our passes, under which both forms are compiled.
        is_lighter: whether a replacement that is called is kept where it takes no longer: it takes less of the host.

    Raises:
        Unfit: it can't be timed.
    """
    refuse_where_nothing_can_run(region.device)
    with timer.undisturbed(region.device):
        timed = region.without_neighbours() if calls else region
        original, replaced, fakes = timed.modules()
        samples = Samples(original.graph, fakes, replaced.graph, known=timed.known)
        forms = [_called(m) if calls else compile_apart(m, fakes, patches) for m in (replaced, original)]
        if calls:
            _call_first(samples, forms[-1])
        seconds, draws = (0.03, 1) if brief else (0.3, 3)
        ours, theirs = timer.times_ms(forms, samples, region.device, seconds=seconds, draws=draws)
    how, margin = ("calls", 1.0 if is_lighter else MARGIN) if calls else ("region", MARGIN)
    return Measurement(ours * margin <= theirs, ours, theirs, how, subject, cache_keys.machine(region.device))


def time_replacement(region: Region, subject: str) -> Measurement:
    """Times a replacement by itself, called as it is, for tens of milliseconds, and the library calls that it takes the place of. Around
    both Inductor would generate code, which can be timed only once it is compiled: without it the original takes longer, and the
    replacement no less, than what is measured here.

    Raises:
        Unfit: it can't be timed.
    """
    refuse_where_nothing_can_run(region.device)
    with timer.undisturbed(region.device):
        apart = region.without_neighbours()
        original, replaced, fakes = apart.modules()
        ours = _one_ms(replaced, Samples(original.graph, fakes, replaced.graph, known=apart.known), region.device)
        theirs = 0.0
        calls = library_calls(region.core)
        if calls:
            module, fakes, _ = alone(calls)
            samples = Samples(module.graph, fakes, known=cut_out(calls).known)
            _call_first(samples, _called(module))
            theirs = _one_ms(module, samples, region.device)
    return Measurement(ours * MARGIN <= theirs, ours, theirs, "replacement", subject, cache_keys.machine(region.device))


def _call_first(samples: Samples, form: Callable[[list[Any]], Any]) -> None:
    """Calls the original's library calls once, before they are timed. A library's first call loads its code, the first with other sizes
    chooses a kernel: of cuDNN's convolutions that takes 1.7 s and half a second, for which the program's first step would wait else."""
    with first_calls():
        samples.settle(form)


def _one_ms(module: fx.GraphModule, samples: Samples, device: torch.device) -> float:
    return timer.times_ms([_called(module)], samples, device, seconds=0.03, draws=1)[0]


def refuse_where_nothing_can_run(device: torch.device) -> None:
    """Raises :class:`Unfit` where nothing can be called or compiled for timing."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unfit("a CUDA graph is being captured")
    if V.aot_compilation:
        raise Unfit("nothing can be compiled besides in an ahead-of-time compile")


def _called(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    return lambda inputs: module.forward(*inputs)
