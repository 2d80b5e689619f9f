"""``bench losses``: whether training with ours stays as close to training in float64 as training without it.

A model is trained three times from the same parameters on the same data: in float32 without any pattern (the vendor's
kernels), in float32 with ours, and in float64, eagerly. Both float32 runs interpret their graphs (``fuse.interpret``), so
they differ in what the patterns replace and in nothing else. The distance of a run is the mean over the steps of
\\|loss - float64's loss\\|. One pair of distances says little: rounding errors are a random walk, and which of two walks ends
farther away is chance. So there are several seeds, each with parameters and data of its own, and the figure is the geometric
mean over the seeds of the ratio of the distances, ours over theirs, with its 95 % confidence interval (Student's t of the
logarithms). Beside it stands what is nearly free of chance: the relative distance of the first step's gradient (all
parameters, by norm) to float64's.

The optimizer is SGD with momentum and gradients clipped to norm 1. Adam divides a gradient by its own size; where the true
gradient is zero (the bias of an attention key is one such place) it makes a full step out of rounding noise, and the runs
would measure that.

The loss is the cross-entropy of what the model returns, along its last dim, with random labels: a batch is learnt by heart.
It is computed in float64 from what the model returned, or its own rounding would drown the model's.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fusebackend.bench.device_time import this_device
from fusebackend.bench.pool import FEWEST_CORES, Failure, Row
from fusebackend.native import loader

ARMS = ("float64", "without", "with")

#: Seeds whose first gradient is compared: these are kept on disk for that.
GRADIENTS = 2

MOMENTUM, LONGEST_GRADIENT = 0.9, 1.0

HEADING = f"{'distance of losses to float64':30}{'without':>10}{'with':>10}{'ratio':>8}   {'95 %':13}{'first gradient: ratio':>22}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model's experiment.

    Attributes:
        model: as for ``bench models``.
        patterns: what is replaced in the third arm.
        batch: the inputs' first dim is cut to this; 0 leaves it.
        rate: the learning rate.
    """

    model: str
    patterns: tuple[str, ...] = ("all",)
    seeds: int = 10
    steps: int = 50
    batch: int = 0
    rate: float = 0.02


def line(row: Row) -> str:
    without, ours = (statistics.fmean(d[arm] for d in row["distances"]) for arm in ("without", "with"))
    figures = f"{without:10.2e}{ours:10.2e}{row['ratio']:8.3f}   {row['low']:.3f} - {row['high']:.3f}{row['gradient']:22.3f}"
    losses = f"{row['seeds']} seeds, {row['steps']} steps, loss {row['losses'][0]:.3f} -> {row['losses'][1]:.3f}"
    counts = ", ".join(f"{name} {n}" for name, n in row["substitutions"].items()) or "NOTHING SUBSTITUTED"
    return f"{row['model']:30}{figures}   {losses}; {counts}" + ("   FARTHER AWAY" if row["low"] > 1 else "")


def run(settings: Sequence[Setting]) -> Iterator[tuple[dict[str, str], Row | Failure]]:
    """Yields the names and figures of a row a model.

    Figures: ``distances``, by seed and arm; ``ratio``, their ratio's geometric mean, between ``low`` and ``high``;
    ``gradient``, that of the first gradients' distances, and these in ``gradients``; ``losses``, the first and the last of
    the first seed; ``substitutions``.
    """
    cores = len(os.sched_getaffinity(0))
    side_by_side = cores // 2 if this_device().type == "cuda" and cores >= FEWEST_CORES else 1
    with tempfile.TemporaryDirectory(prefix="fusebackend-bench-") as folder, concurrent.futures.ThreadPoolExecutor(side_by_side) as pool:
        arms = [[pool.submit(_process, s, arm, f"{folder}/{i}") for arm in ARMS] for i, s in enumerate(settings)]
        for i, (setting, futures) in enumerate(zip(settings, arms)):
            names = {"model": setting.model}
            try:
                found = dict(zip(ARMS, (f.result() for f in futures)))
                yield names, figures(setting, found) | _compare_gradients(f"{folder}/{i}")
            except subprocess.CalledProcessError as error:
                lines = error.stderr.strip().splitlines()
                yield names, Failure("an arm failed", lines[-1] if lines else f"exit code {error.returncode}")


def figures(setting: Setting, found: dict[str, dict[str, Any]]) -> Row:
    """What the losses of the arms say; ``found[arm]["losses"][seed][step]``."""
    exact = found["float64"]["losses"]
    distances = [
        {arm: statistics.fmean(abs(a - b) for a, b in zip(found[arm]["losses"][seed], exact[seed])) for arm in ("without", "with")}
        for seed in range(setting.seeds)
    ]
    ratio, low, high = interval([d["with"] / d["without"] for d in distances])
    return {
        **{"seeds": setting.seeds, "steps": setting.steps, "batch": setting.batch, "rate": setting.rate},
        **{"distances": distances, "ratio": ratio, "low": low, "high": high},
        "losses": (exact[0][0], exact[0][-1]),
        "substitutions": found["with"]["substitutions"],
    }


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean, and the ends of its 95 % confidence interval by Student's t (to 1 % of its width from five ratios on)."""
    logs, n = [math.log(r) for r in ratios], len(ratios)
    # Student's quantile from the normal one, in powers of 1 / (degrees of freedom): Abramowitz & Stegun 26.7.5.
    z, f = statistics.NormalDist().inv_cdf(0.975), n - 1
    t = z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3)
    mean, spread = statistics.fmean(logs), t * statistics.stdev(logs) / math.sqrt(n)
    return math.exp(mean), math.exp(mean - spread), math.exp(mean + spread)


def _compare_gradients(folder: str) -> Row:
    device = this_device()
    found = []
    for seed in range(len(list(Path(folder).glob("float64-*")))):
        exact, *others = (torch.load(f"{folder}/{arm}-{seed}", map_location=device) for arm in ARMS)
        found.append({arm: ((g.double() - exact).norm() / exact.norm()).item() for arm, g in zip(ARMS[1:], others)})
    return {"gradients": found, "gradient": math.exp(statistics.fmean(math.log(g["with"] / g["without"]) for g in found))}


def _process(setting: Setting, arm: str, folder: str) -> dict[str, Any]:
    os.makedirs(folder, exist_ok=True)
    environment = dict(os.environ)
    if (library := loader.load().path) is not None:
        environment["FUSEBACKEND_LIBRARY"] = str(library.parent)
    command = [sys.executable, "-m", "fusebackend.bench.losses", json.dumps(dataclasses.asdict(setting)), arm, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# ---- in a process of its own ----


def train(setting: Setting, arm: str, folder: str | None = None) -> dict[str, Any]:
    """The losses of one arm, by seed and step, and what was substituted; first gradients are saved in ``folder``."""
    from fusebackend.bench.model_steps import Subject, _substitutions

    device = this_device()
    subject = Subject(setting.model, "training-fp32", device)
    model, start = subject.model, [p.detach().clone() for p in subject.model.parameters()]
    compiled: Any = model
    if arm == "float64":
        model.double()
    else:
        patterns = list(setting.patterns) if arm == "with" else []
        options: Any = {"fuse.interpret": True, "fuse.gate": "off", "fuse.patterns": patterns}
        compiled = torch.compile(model, backend="fuse", options=options)
    dtype = torch.float64 if arm == "float64" else torch.float32
    parameters = list(model.parameters())

    losses = []
    for seed in range(setting.seeds):
        generator = torch.Generator(device).manual_seed(seed)
        _draw(parameters, start, generator)
        leaves, structure = torch.utils._pytree.tree_flatten((subject.args, subject.kwargs))
        tensors = [_shuffled(t, setting.batch, generator, dtype) if isinstance(t, torch.Tensor) else t for t in leaves]
        args, kwargs = torch.utils._pytree.tree_unflatten(tensors, structure)
        optimizer = torch.optim.SGD(parameters, lr=setting.rate, momentum=MOMENTUM)
        labels, found = None, []
        for step in range(setting.steps):
            optimizer.zero_grad()
            out = next(t for t in torch.utils._pytree.tree_leaves(compiled(*args, **kwargs)) if torch.is_floating_point(t))
            out = out.reshape(-1, out.shape[-1])
            if labels is None:
                labels = torch.randint(out.shape[-1], (out.shape[0],), device=device, generator=generator)
            loss = F.cross_entropy(out.double(), labels)
            loss.backward()
            if step == 0 and seed < GRADIENTS and folder:
                torch.save(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), f"{folder}/{arm}-{seed}")
            torch.nn.utils.clip_grad_norm_(parameters, LONGEST_GRADIENT)
            optimizer.step()
            found.append(loss.detach())
        losses.append(torch.stack(found).tolist())
    return {"losses": losses, "substitutions": _substitutions()}


def _draw(parameters: Sequence[torch.Tensor], start: Sequence[torch.Tensor], generator: torch.Generator) -> None:
    """Matrices and the like anew, at the spread that the model gave them; vectors (biases, norms) as they were.

    In float32 always, so that all arms begin at the same numbers.
    """
    with torch.no_grad():
        for parameter, first in zip(parameters, start):
            drawn = first
            if first.dim() > 1 and first.is_floating_point():
                drawn = torch.randn(first.shape, device=first.device, generator=generator) * first.std()
            parameter.copy_(drawn)


def _shuffled(tensor: torch.Tensor, batch: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """The first ``batch`` entries, with their elements in another order: other data of the same distribution."""
    part = tensor[:batch] if batch and tensor.dim() else tensor
    order = torch.randperm(part.numel(), device=part.device, generator=generator)
    part = part.flatten()[order].view(part.shape)
    return part.to(dtype) if part.is_floating_point() else part


if __name__ == "__main__":
    text, arm, folder = sys.argv[1:]
    given = json.loads(text)
    print(json.dumps(train(Setting(**{**given, "patterns": tuple(given["patterns"])}), arm, folder)))
