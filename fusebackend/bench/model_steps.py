"""``bench models``: a step of whole models, with Inductor and with ours, in turn.

A training step is forward, loss (the model's own, or the mean square of what it returns) and backward; bf16 training runs under
autocast, as it is done. Public models have random weights and no dropout or layerdrop: a random choice of what is computed
would make two runs different work.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusebackend import backend
from fusebackend.bench.device_time import in_turn, uncertainty
from fusebackend.bench.model_zoo import CPU_MODELS, MODELS
from fusebackend.bench.pool import Row, patiently
from fusebackend.tools.object_reference import UsageError, call_factory

#: What a model is timed at: name -> (training, dtype).
KINDS: dict[str, tuple[bool, torch.dtype]] = {
    "training-fp32": (True, torch.float32),
    "inference-bf16": (False, torch.bfloat16),
    "training-bf16": (True, torch.bfloat16),
    "inference-fp32": (False, torch.float32),
}

#: What is timed if nothing is asked for.
DEFAULT_KINDS = ("training-fp32", "inference-bf16", "training-bf16")

#: The ratio to Inductor that we aim at on an H200, by model and kind.
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

#: What any other model must not fall below: no slower, but for noise.
NO_SLOWER = 0.98

_SLOW_TO_COMPILE = ("swin_b", "wav2vec2_bert", "gpt2_small", "convnext_tiny")

#: A step changes the parameters by this part of their norm when losses are compared.
STEP = 1e-3


@dataclasses.dataclass(frozen=True)
class ModelJob:
    """One model in one kind.

    Attributes:
        model: a name of :data:`fusebackend.bench.model_zoo.MODELS`, or ``package.module:factory``, which returns (model, args[, kwargs]).
        kind: one of ``KINDS``.
        options: torch.compile's options for ours, as pairs.
        steps: how many training steps the losses are compared over.
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
    """The jobs of models x kinds; by default the models that suit the device, and ``DEFAULT_KINDS``.

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
    from fusebackend.bench.results import substitutions

    times = "".join(f"{row['ms'][way]:10.3f}" for way in ("inductor", "fuse"))
    figures = f"{times}{row['ratio']:8.3f}{row['uncertainty']:8.3f}{row['goal']:8.2f}{row['difference']:12.1e}"
    missed = "   goal MISSED" if row["ratio"] < row["goal"] else ""
    return f"{row['model'] + ' ' + row['kind']:34}{figures}   {substitutions(row)}{missed}"


class Subject:
    """A model with its inputs on a device, in one kind."""

    def __init__(self, name: str, kind: str, device: torch.device):
        self.device = device
        self.training, self.dtype = KINDS[kind]
        torch.manual_seed(0)
        kwargs: dict[str, Any] = {}
        model: Any
        if name in MODELS:
            with device:  # random weights are drawn where they are needed
                model, args = MODELS[name](device)
        else:
            model, args, kwargs = call_factory(name, "--model")
        if not isinstance(model, nn.Module):
            raise UsageError(f"{name} must give a torch.nn.Module, got {type(model).__name__}")
        self.model = model.to(device).train(self.training)
        if not self.training:
            self.model.to(self.dtype)
        self.args, self.kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, self._placed, (args, kwargs))

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        narrow = not self.training and tensor.is_floating_point()
        return tensor.detach().to(self.device, self.dtype if narrow else None)

    def step(self, way: str, options: Mapping[str, Any] | None = None) -> Callable[[], Any]:
        """A step of the model compiled with the backend ``way``: gives the loss of training, the output of inference."""
        compiled = torch.compile(self.model, backend=way, options=dict(options) if options else None)
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.training and self.dtype != torch.float32)

        def step() -> Any:
            if not self.training:
                with torch.no_grad():
                    return compiled(*self.args, **self.kwargs)
            self.model.zero_grad()
            with autocast:
                out = compiled(*self.args, **self.kwargs)
            loss = _loss(out)
            loss.backward()
            return loss.detach()

        return step


class Prepared:
    """A model that is compiled both ways, with losses compared; ``measure`` gives its row.

    A row has ``ms`` (a step with ``inductor`` and with ``fuse``), ``ratio`` (the median over rounds), ``uncertainty`` (of
    the ratio), ``goal`` (for the ratio), ``substitutions`` by pattern, and ``difference``: the largest relative difference
    between Inductor's and our losses, over some steps of normalised gradient descent; of outputs (by norm) for inference.
    """

    def __init__(self, job: ModelJob, device: torch.device):
        self.device = device
        self.goal = GOALS.get((job.model, job.kind), NO_SLOWER) if device.type == "cuda" else NO_SLOWER
        self.subject = Subject(job.model, job.kind, device)
        self.steps = {"inductor": self.subject.step("inductor"), "fuse": self.subject.step("fuse", dict(job.options))}
        start = {k: v.clone() for k, v in self.subject.model.state_dict().items()}
        results = {}
        # Both ways, and layers of one class, share Dynamo's cache of a code object.
        with torch._dynamo.config.patch(recompile_limit=64):
            for way, step in self.steps.items():
                torch.manual_seed(0)
                results[way] = patiently(_results, self.subject, step, start, job.steps)
        self.row: Row = {"substitutions": _substitutions(), "difference": max(map(_difference, results["fuse"], results["inductor"]))}
        self.subject.model.zero_grad()

    def measure(self) -> Row:
        with torch._dynamo.config.patch(recompile_limit=64):
            times = in_turn(self.steps, self.device)
        self.subject.model.zero_grad()
        inductor, fuse = times["inductor"], times["fuse"]
        return self.row | {
            "goal": self.goal,
            "ms": {way: statistics.median(t) for way, t in times.items()},
            "ratio": statistics.median(a / b for a, b in zip(inductor, fuse)),
            "uncertainty": uncertainty(inductor, fuse),
        }


def _results(subject: Subject, step: Callable[[], Any], start: dict[str, torch.Tensor], steps: int) -> list[torch.Tensor]:
    """The losses of some training steps, each after a small step down the gradient; or the output of inference."""
    if not subject.training:
        return [t.float() for t in _floats(step())]
    subject.model.load_state_dict(start)  # an attempt before this one may have run out of memory on its way
    losses = []
    for _ in range(steps):
        losses.append(step())
        with torch.no_grad():
            moved: list[torch.Tensor] = [p for p in subject.model.parameters() if p.grad is not None]
            slopes = [p.grad for p in moved if p.grad is not None]
            length, slope = (torch.stack(torch._foreach_norm(tensors)).norm() for tensors in (moved, slopes))
            torch._foreach_add_(moved, slopes, alpha=(-STEP * length / slope.clamp(min=1e-30)).item())
    subject.model.load_state_dict(start)
    return losses


def _floats(out: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(out)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _loss(out: Any) -> torch.Tensor:
    """The model's own loss where it returns one, else the mean square of what it returns."""
    own = getattr(out, "loss", None)
    if own is not None:
        return own
    return torch.stack([t.float() if t.dim() == 0 else t.float().square().mean() for t in _floats(out)]).sum()


def _substitutions() -> dict[str, int]:
    counts: dict[str, int] = {}
    for report in backend.reports():
        for pattern, n in report.counts().items():
            counts[pattern] = counts.get(pattern, 0) + n
    return counts


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()
