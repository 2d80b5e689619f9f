"""Trains a small language model in eager mode, with Inductor and with fusebackend, and compares losses and times."""

from __future__ import annotations

import copy
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from fusebackend import backend
from fusebackend.native import loader
from fusebackend.progress import progress_line
from fusebackend.tools.byte_lm import ByteLM

_MAX_LOSS_DIFFERENCE = 1e-3  # more than fp32 rounding can cause in this model's losses


class Trainer:
    """Trains a model with AdamW, one batch a step, and records the loss and the time of each step.

    Args:
        model: is trained in place.
        how: ``"eager"``, or the backend of ``torch.compile``.
    """

    def __init__(self, model: nn.Module, how: str):
        self.model = model if how == "eager" else torch.compile(model, backend=how)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokens: torch.Tensor) -> None:
        began = time.perf_counter()
        logits = self.model(tokens[:, :-1].contiguous())
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - began)

    @property
    def milliseconds(self) -> float:
        """The median time of the later half of the steps."""
        return 1e3 * statistics.median(self.seconds[len(self.seconds) // 2 :])


def batches(text: bytes, batch: int, time_steps: int, steps: int, device: torch.device) -> list[torch.Tensor]:
    """``steps`` batches of random excerpts of ``time_steps + 1`` bytes, as int64; the same at every call."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - time_steps - 1, (steps, batch, 1), generator=generator)
    return list(data[starts + torch.arange(time_steps + 1)].to(device))


def run(steps: int = 20) -> int:
    """Trains in the three ways and prints losses, substitutions and times. Returns 0 if the losses agree, else 1."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    batch, time_steps, channels, blocks = (8, 768, 768, 4) if cuda else (4, 128, 128, 2)
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"byte-level language model, {blocks} blocks, {channels} channels, batch {batch} x {time_steps}, fp32, {steps} steps")
    print(f"torch {torch.__version__}, {name}", flush=True)

    loader.load()  # built once for a machine, which is not part of the time to compile
    torch.manual_seed(0)
    model = ByteLM(channels, time_steps, blocks).to(device)
    data = batches((Path(__file__).parent / "demo.txt").read_bytes(), batch, time_steps, steps, device)
    trainers = {how: Trainer(copy.deepcopy(model), how) for how in ("eager", "inductor", "fuse")}
    for how, trainer in trainers.items():
        with progress_line("starting" if how == "eager" else f"compiling {how}", in_logs=True) as progress:
            progress("")
            trainer.step(data[0])
            progress(f"took {trainer.seconds[0]:.0f} s")
    for tokens in data[1:]:  # alternately, so that other load on the machine slows all three alike
        for trainer in trainers.values():
            trainer.step(tokens)
    return _print_comparison(*trainers.values())


def _print_comparison(eager: Trainer, inductor: Trainer, fuse: Trainer) -> int:
    print("\nstep    eager   inductor       fuse   |fuse - eager|")
    for i, (e, n, f) in enumerate(zip(eager.losses, inductor.losses, fuse.losses), 1):
        print(f"{i:4}  {e:8.5f}  {n:8.5f}  {f:9.5f}   {abs(f - e):.1e}")
    differences = [max(abs(o - e) for e, o in zip(eager.losses, other.losses)) for other in (fuse, inductor)]
    print(f"largest difference to eager: fuse {differences[0]:.1e}, inductor {differences[1]:.1e}\n")
    print(backend.last_report())
    times = [f"{name} {t.milliseconds:.2f} ms" for name, t in (("eager", eager), ("inductor", inductor), ("fuse", fuse))]
    print(f"\ntime a step (median of the later half): {', '.join(times)}")
    print(f"fuse is {inductor.milliseconds / fuse.milliseconds:.2f}x inductor, {eager.milliseconds / fuse.milliseconds:.2f}x eager")
    if differences[0] < _MAX_LOSS_DIFFERENCE:
        return 0
    print("FAILED: the losses differ by more than fp32 rounding explains")
    return 1
