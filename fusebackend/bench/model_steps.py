"""``bench models``: a step of whole models with Inductor and with fuse, interleaved."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusebackend.bench.device_time import Effort, busy_ms, median_ms
from fusebackend.bench.interleaved import interleaved_ms
from fusebackend.bench.job import retry_out_of_memory
from fusebackend.bench.model_zoo import CPU_MODELS, MODELS
from fusebackend.bench.rows import Row, substitutions
from fusebackend.bench.stats import relative_uncertainty
from fusebackend.bench.workload import KINDS, Workload, floating_point, near_misses, substitution_counts
from fusebackend.tools.object_reference import UsageError

#: The kinds that are timed by default.
DEFAULT_KINDS = ("training-fp32", "inference-bf16", "training-bf16")

#: The smallest accepted ratio to Inductor on an H200, by model and kind.
GOALS = {
    ("rwkv_v3", "training-fp32"): 3.5,
    ("rwkv_v3", "inference-bf16"): 4.0,
    ("gpt2_small", "training-fp32"): 1.5,
    ("wav2vec2_bert", "training-fp32"): 1.7,
    ("wav2vec2_bert", "inference-bf16"): 1.1,
    ("graphsage", "training-fp32"): 1.4,
    ("graphsage", "inference-bf16"): 1.5,
    ("swin_b", "training-fp32"): 1.4,
}

#: The smallest accepted ratio of every other model: as fast as Inductor, within noise.
NO_SLOWER = 0.98

_SLOW_TO_COMPILE = ("swin_b", "wav2vec2_bert", "gpt2_small", "convnext_tiny")

# Steps of which the device's time is taken: by their kernels, or between two events where these can't be seen.
_PROFILED_STEPS = 4
_TIMED_STEPS = Effort(least=3, most=10, span_ms=200, cpu_most=0, cpu_seconds=0.0)

#: Each step of which losses are compared moves the parameters by this part of their norm, down the gradient.
STEP = 1e-3

#: The two backends, and the layers of one class, share Dynamo's cache of a code object: the default limit of 8 is too small.
RECOMPILE_LIMIT = 64


@dataclasses.dataclass(frozen=True)
class ModelJob:
    """One model in one kind.

    Attributes:
        model: as for :class:`fusebackend.bench.workload.Workload`.
        kind: one of ``KINDS``.
        options: torch.compile's options for fuse, as pairs.
        steps: the number of training steps over which losses are compared.
    """

    model: str
    kind: str
    options: tuple[tuple[str, Any], ...] = ()
    steps: int = 3

    @property
    def names(self) -> dict[str, str]:
        return {"model": self.model, "kind": self.kind}

    @property
    def weight(self) -> int:
        return 2 * KINDS[self.kind][0] + (self.model in _SLOW_TO_COMPILE or self.model not in MODELS)

    def prepare(self, device: torch.device) -> Callable[[], Row]:
        return Prepared(self, device).measure


def jobs(models: Sequence[str] = (), kinds: Sequence[str] = (), options: Sequence[tuple[str, Any]] = (), steps: int = 3) -> list[ModelJob]:
    """A job for each model in each kind; by default the models that suit the device, in ``DEFAULT_KINDS``.

    Raises:
        UsageError: an unknown model or kind, or fewer than one step.
    """
    for model in models:
        if model not in MODELS and ":" not in model:
            raise UsageError(f"--model takes package.module:factory or one of {', '.join(MODELS)}; got {model!r}")
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"--kind takes {', '.join(KINDS)}; got {kind!r}")
    if steps < 1:
        raise UsageError(f"--steps takes a number from 1 on, got {steps}")
    suited = [m for m in MODELS if m not in CPU_MODELS] if torch.cuda.is_available() else list(CPU_MODELS)
    return [ModelJob(m, k, tuple(options), steps) for m in models or suited for k in kinds or DEFAULT_KINDS]


HEADING = f"{'a step, ms':34}{'inductor':>10}{'fuse':>10}{'ratio':>8}{'+-':>8}{'goal':>8}{'difference':>12}   substitutions"


def line(row: Row) -> str:
    """A row as it is printed."""
    times = "".join(f"{row['ms'][way]:10.3f}" for way in ("inductor", "fuse"))
    figures = f"{times}{row['ratio']:8.3f}{row['uncertainty']:8.3f}{row['goal']:8.2f}{row['difference']:12.1e}"
    missed = "   goal MISSED" if row["ratio"] < row["goal"] else ""
    device = "".join(
        f"   {name} {row[key]['inductor']:.3g} -> {row[key]['fuse']:.3g} {unit}" for name, key, unit in _ON_THE_DEVICE if key in row
    )
    return f"{row['model'] + ' ' + row['kind']:34}{figures}   {substitutions(row)}{missed}{device}"


_ON_THE_DEVICE = (("device", "device_ms", "ms"), ("peak", "peak_gib", "GiB"))


class Prepared:
    """A model that is compiled with both backends and whose losses were compared. ``measure`` gives its row.

    A row has ``ms`` (the median step with ``inductor`` and with ``fuse``), ``ratio`` (of Inductor's time to fuse's, the median over
    rounds), ``uncertainty`` (of the ratio, as a part of it), ``goal`` (for the ratio), ``substitutions`` by pattern,
    ``near_misses`` (sentences), on CUDA ``device_ms`` (of a step's kernels) and ``peak_gib`` (of a step's memory,
    the model's included), and ``difference``: in training the largest relative difference of a loss to Inductor's, over some steps
    down the normalised gradient; in inference the largest of an output (norm of the difference over the norm).
    """

    def __init__(self, job: ModelJob, device: torch.device):
        self.device = device
        self.goal = GOALS.get((job.model, job.kind), NO_SLOWER) if device.type == "cuda" else NO_SLOWER
        self.workload = Workload(job.model, job.kind, device)
        self.steps = {"inductor": self.workload.step("inductor"), "fuse": self.workload.step("fuse", dict(job.options))}
        start = {k: v.clone() for k, v in self.workload.model.state_dict().items()}
        results = {}
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            for way, step in self.steps.items():
                torch.manual_seed(0)
                results[way] = retry_out_of_memory(_results, self.workload, step, start, job.steps)
        difference = max(map(_relative_difference, results["fuse"], results["inductor"]))
        self.row: Row = {"substitutions": substitution_counts(), "near_misses": near_misses(), "difference": difference}
        self.workload.model.zero_grad()

    def measure(self) -> Row:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            times = interleaved_ms(self.steps, self.device)
            device = self._on_the_device() if self.device.type == "cuda" else {}
        self.workload.model.zero_grad()
        inductor, fuse = times["inductor"], times["fuse"]
        return (
            self.row
            | device
            | {
                "goal": self.goal,
                "ms": {way: statistics.median(t) for way, t in times.items()},
                "ratio": statistics.median(a / b for a, b in zip(inductor, fuse)),
                "uncertainty": relative_uncertainty(inductor, fuse),
            }
        )

    def _on_the_device(self) -> dict[str, dict[str, float]]:
        peaks = {}
        for way, step in self.steps.items():
            self.workload.model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats(self.device)
            _seeded(step)
            peaks[way] = torch.cuda.max_memory_allocated(self.device) / 2**30
        calls = {way: functools.partial(_seeded, step) for way, step in self.steps.items()}
        times = [ms for call in calls.values() if (ms := busy_ms(call, _PROFILED_STEPS)) is not None]
        if len(times) < len(calls):
            times = [median_ms(call, self.device, _TIMED_STEPS) for call in calls.values()]
        return {"device_ms": dict(zip(calls, times)), "peak_gib": peaks}


def _seeded(step: Callable[[], Any]) -> None:
    torch.manual_seed(0)  # models that drop layers at random drop the same ones
    step()


def _results(workload: Workload, step: Callable[[], Any], start: dict[str, torch.Tensor], steps: int) -> list[torch.Tensor]:
    """The losses of some training steps, each after a small step down the gradient; or the outputs of inference."""
    if not workload.training:
        return [t.float() for t in floating_point(step())]
    workload.model.load_state_dict(start)  # an earlier attempt may have run out of memory after it moved the parameters
    losses = []
    for _ in range(steps):
        losses.append(step())
        with torch.no_grad():
            moved: list[torch.Tensor] = [p for p in workload.model.parameters() if p.grad is not None]
            gradients = [p.grad for p in moved if p.grad is not None]
            norm, gradient_norm = (torch.stack(torch._foreach_norm(tensors)).norm() for tensors in (moved, gradients))
            torch._foreach_add_(moved, gradients, alpha=(-STEP * norm / gradient_norm.clamp(min=1e-30)).item())
    workload.model.load_state_dict(start)
    return losses


def _relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()
