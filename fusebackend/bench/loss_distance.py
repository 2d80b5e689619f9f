"""``bench losses``: whether training with substitutions stays as close to training in float64 as training without them.

A model is trained three times from the same parameters on the same data: in float32 without any pattern (the vendor's
kernels), in float32 with substitutions, and in float64 eagerly. Both float32 runs interpret their graphs (``fuse.interpret``), so
they differ in what the patterns replace and in nothing else. The distance of a run is the mean over the steps of
\\|loss - loss in float64\\|.

One pair of distances says little: rounding errors are a random walk, and chance decides which of two walks ends farther away.
So there are several seeds, each with its own parameters and data, and the figure is the geometric mean over the seeds of the
ratio of the distances, with over without substitutions, and its 95 % confidence interval (Student's t of the logarithms).
A second figure hardly depends on chance: the relative distance to float64 of the first step's gradient (of all parameters, by
norm).

The optimizer is SGD with momentum, with gradients clipped to norm 1. Adam divides a gradient by its own size; where the true
gradient is zero, as it is for the bias of an attention key, Adam takes a full step along rounding noise, and the runs would
measure that.

The loss is the cross-entropy of what the model returns, along its last dim, with random labels: a batch is learnt by heart.
It is computed in float64 from what the model returned; otherwise its own rounding would hide the model's.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
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

from fusebackend.bench.environment import default_device
from fusebackend.bench.job import Failure
from fusebackend.bench.process_pool import MIN_CORES, cancelling
from fusebackend.bench.rows import Row
from fusebackend.bench.stats import geometric_mean, geometric_mean_interval
from fusebackend.native import loader

#: The three trainings of a seed: in float64; in float32 without and with substitutions.
RUNS = ("float64", "without", "with")

#: The number of seeds whose first gradients are written to disk and compared.
GRADIENT_SEEDS = 2

MOMENTUM, MAX_GRADIENT_NORM = 0.9, 1.0

HEADING = f"{'distance of losses to float64':30}{'without':>10}{'with':>10}{'ratio':>8}   {'95 %':13}{'first gradient: ratio':>22}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model's experiment.

    Attributes:
        model: as for ``bench models``.
        patterns: what is replaced in the run with substitutions.
        seeds: how many parameters and data to start from.
        steps: training steps a seed.
        batch: the inputs' first dim is cut to this; 0 keeps it.
        rate: the learning rate.
    """

    model: str
    patterns: tuple[str, ...] = ("all",)
    seeds: int = 10
    steps: int = 50
    batch: int = 0
    rate: float = 0.02


def line(row: Row) -> str:
    """A row as it is printed."""
    without, with_ = (statistics.fmean(d[run] for d in row["distances"]) for run in ("without", "with"))
    figures = f"{without:10.2e}{with_:10.2e}{row['ratio']:8.3f}   {row['low']:.3f} - {row['high']:.3f}{row['gradient']:22.3f}"
    losses = f"{row['seeds']} seeds, {row['steps']} steps, loss {row['losses'][0]:.3f} -> {row['losses'][1]:.3f}"
    counts = ", ".join(f"{name} {n}" for name, n in row["substitutions"].items()) or "NOTHING SUBSTITUTED"
    return f"{row['model']:30}{figures}   {losses}; {counts}" + ("   FARTHER AWAY" if row["low"] > 1 else "")


def run(settings: Sequence[Setting]) -> Iterator[tuple[dict[str, str], Row | Failure]]:
    """Yields the names and the figures of a row a model.

    Figures: ``distances``, by seed and run; ``ratio``, the geometric mean of with over without, and the ends of its confidence
    interval, ``low`` and ``high``; ``gradients``, the first gradients' distances, and ``gradient``, the geometric mean of their
    ratios; ``losses``, the first seed's first and last; ``substitutions``.
    """
    cores = len(os.sched_getaffinity(0))
    in_parallel = cores // 2 if default_device().type == "cuda" and cores >= MIN_CORES else 1
    with (
        tempfile.TemporaryDirectory(prefix="fusebackend-bench-") as folder,
        concurrent.futures.ThreadPoolExecutor(in_parallel) as pool,
        cancelling(pool),
    ):
        started = [[pool.submit(_process, s, run, f"{folder}/{i}") for run in RUNS] for i, s in enumerate(settings)]
        for i, (setting, futures) in enumerate(zip(settings, started)):
            names = {"model": setting.model}
            try:
                found = dict(zip(RUNS, (f.result() for f in futures)))
                yield names, figures(setting, found) | _compare_gradients(f"{folder}/{i}")
            except subprocess.CalledProcessError as error:
                lines = error.stderr.strip().splitlines()
                yield names, Failure("a training process failed", lines[-1] if lines else f"exit code {error.returncode}")


def figures(setting: Setting, found: dict[str, dict[str, Any]]) -> Row:
    """The figures of ``found[run]["losses"][seed][step]``, but those of the gradients."""
    exact = found["float64"]["losses"]
    distances = [
        {run: statistics.fmean(abs(a - b) for a, b in zip(found[run]["losses"][seed], exact[seed])) for run in ("without", "with")}
        for seed in range(setting.seeds)
    ]
    ratio, low, high = geometric_mean_interval([d["with"] / d["without"] for d in distances])
    return {
        **{"seeds": setting.seeds, "steps": setting.steps, "batch": setting.batch, "rate": setting.rate},
        **{"distances": distances, "ratio": ratio, "low": low, "high": high},
        "losses": (exact[0][0], exact[0][-1]),
        "substitutions": found["with"]["substitutions"],
    }


def _compare_gradients(folder: str) -> Row:
    device = default_device()
    found = []
    for seed in range(len(list(Path(folder).glob("float64-*")))):
        exact, *others = (torch.load(f"{folder}/{run}-{seed}", map_location=device) for run in RUNS)
        found.append({run: ((g.double() - exact).norm() / exact.norm()).item() for run, g in zip(RUNS[1:], others)})
    return {"gradients": found, "gradient": geometric_mean(g["with"] / g["without"] for g in found)}


def _process(setting: Setting, run: str, folder: str) -> dict[str, Any]:
    os.makedirs(folder, exist_ok=True)
    variables = dict(os.environ)
    if (library := loader.load().path) is not None:
        variables["FUSEBACKEND_LIBRARY"] = str(library.parent)
    command = [sys.executable, "-m", "fusebackend.bench.loss_distance", json.dumps(dataclasses.asdict(setting)), run, folder]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# ---- in a process of its own ----


def train(setting: Setting, run: str, folder: str | None = None) -> dict[str, Any]:
    """The losses of one of ``RUNS``, by seed and step, and what was substituted. First gradients are written to ``folder``."""
    from fusebackend.bench.workload import Workload, substitution_counts

    device = default_device()
    workload = Workload(setting.model, "training-fp32", device)
    model, start = workload.model, [p.detach().clone() for p in workload.model.parameters()]
    compiled: Any = model
    if run == "float64":
        model.double()
    else:
        patterns = list(setting.patterns) if run == "with" else []
        options: Any = {"fuse.interpret": True, "fuse.gate": "off", "fuse.patterns": patterns}
        compiled = torch.compile(model, backend="fuse", options=options)
    dtype = torch.float64 if run == "float64" else torch.float32
    parameters = list(model.parameters())

    losses = []
    for seed in range(setting.seeds):
        generator = torch.Generator(device).manual_seed(seed)
        _draw(parameters, start, generator)
        leaves, structure = torch.utils._pytree.tree_flatten((workload.args, workload.kwargs))
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
            if step == 0 and seed < GRADIENT_SEEDS and folder:
                torch.save(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), f"{folder}/{run}-{seed}")
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
            optimizer.step()
            found.append(loss.detach())
        losses.append(torch.stack(found).tolist())
    return {"losses": losses, "substitutions": substitution_counts()}


def _draw(parameters: Sequence[torch.Tensor], start: Sequence[torch.Tensor], generator: torch.Generator) -> None:
    """Draws matrices and higher ranks anew, with the standard deviation that the model gave them, and resets vectors (biases, norms).

    Always in float32, so that all runs start from the same numbers.
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
    text, run_name, folder_name = sys.argv[1:]
    given = json.loads(text)
    print(json.dumps(train(Setting(**{**given, "patterns": tuple(given["patterns"])}), run_name, folder_name)))
