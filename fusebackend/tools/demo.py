"""The main job on real input: a small byte-level language model, trained eagerly, with Inductor and with ``fuse``."""

from __future__ import annotations

import copy
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from fusebackend import backend
from fusebackend.progress import progress_line


class TimeMix(nn.Module):
    """A causal weighted sum over all earlier positions, one decaying weight a channel: RWKV's time mixing written as a
    left-padded depthwise convolution. Takes and returns (batch, channels, time)."""

    def __init__(self, channels: int, time_steps: int):
        super().__init__()
        distance = torch.arange(time_steps - 1, -1, -1.0)
        decay = torch.linspace(0.3, 3.0, channels)
        self.weight = nn.Parameter(torch.exp(-decay[:, None] * distance / 8)[:, None] * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.weight.shape[-1]
        return F.conv1d(F.pad(x, (steps - 1, 0)), self.weight, groups=x.shape[1])


class Block(nn.Module):
    def __init__(self, channels: int, time_steps: int):
        super().__init__()
        self.mix = TimeMix(channels, time_steps)
        self.up, self.down = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.relu(self.up(x)).square())


class ByteLM(nn.Module):
    """Predicts the next byte. Takes (batch, time) bytes as int64, returns (batch, time, 256) logits in fp32."""

    def __init__(self, channels: int, time_steps: int, blocks: int):
        super().__init__()
        self.embedding = nn.Embedding(256, channels)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block(channels, time_steps) for _ in range(blocks)))
        self.head = nn.Linear(channels, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def batches(text: bytes, batch: int, time_steps: int, steps: int, device: torch.device) -> list[torch.Tensor]:
    """``steps`` random excerpts of ``time_steps + 1`` bytes, the same at every call."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - time_steps - 1, (steps, batch, 1), generator=generator)
    return list(data[starts + torch.arange(time_steps + 1)].to(device))


class Trainer:
    """Trains a model with AdamW, a batch a step, and keeps each step's loss and time."""

    def __init__(self, model: nn.Module, way: str):
        self.model = model if way == "eager" else torch.compile(model, backend=way)
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
        """The median of the later half of the steps."""
        return 1e3 * statistics.median(self.seconds[len(self.seconds) // 2 :])


def run(steps: int = 20) -> int:
    """Trains the three ways and prints losses, substitutions and times. Returns 0 if the losses agree."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    batch, time_steps, channels, blocks = (8, 768, 768, 4) if cuda else (4, 128, 128, 2)
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"byte-level language model, {blocks} blocks, {channels} channels, batch {batch} x {time_steps}, fp32, {steps} steps")
    print(f"torch {torch.__version__}, {name}")

    torch.manual_seed(0)
    origin = ByteLM(channels, time_steps, blocks).to(device)
    data = batches((Path(__file__).parent / "demo.txt").read_bytes(), batch, time_steps, steps, device)
    trainers = {way: Trainer(copy.deepcopy(origin), way) for way in ("eager", "inductor", "fuse")}
    for way, trainer in trainers.items():
        with progress_line(f"compiling {way}" if way != "eager" else "starting") as progress:
            progress("")
            trainer.step(data[0])
            progress(f"took {trainer.seconds[0]:.0f} s")
    for tokens in data[1:]:  # step by step in turn, so that what else the machine does slows all three alike
        for trainer in trainers.values():
            trainer.step(tokens)

    eager, inductor, fuse = trainers.values()
    print("\nstep    eager   inductor       fuse   |fuse - eager|")
    for i, (e, n, f) in enumerate(zip(eager.losses, inductor.losses, fuse.losses), 1):
        print(f"{i:4}  {e:8.5f}  {n:8.5f}  {f:9.5f}   {abs(f - e):.1e}")
    difference, peer = (max(abs(o - e) for e, o in zip(eager.losses, other.losses)) for other in (fuse, inductor))
    print(f"largest difference to eager: fuse {difference:.1e}, inductor {peer:.1e}\n")
    print(backend.last_report())
    times = ", ".join(f"{way} {trainer.milliseconds:.2f} ms" for way, trainer in trainers.items())
    print(f"\ntime a step (median of the later half): {times}")
    ratios = [t.milliseconds / fuse.milliseconds for t in (inductor, eager)]
    print(f"fuse is {ratios[0]:.2f}x inductor, {ratios[1]:.2f}x eager")
    agree = difference < 1e-3
    if not agree:
        print("FAILED: the losses differ by more than fp32 rounding explains")
    return 0 if agree else 1
