"""The demo's model: a small byte-level language model that mixes over time by causal convolutions."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class TimeMix(nn.Module):
    """A causal weighted sum over all earlier positions with one decaying weight a channel.

    This is RWKV's time mixing, written as a left-padded depthwise convolution. Takes and returns (batch, channels, time).
    """

    def __init__(self, channels: int, time_steps: int):
        super().__init__()
        distance = torch.arange(time_steps - 1, -1, -1.0)
        decay = torch.linspace(0.3, 3.0, channels)
        self.weight = nn.Parameter(torch.exp(-decay[:, None] * distance / 8)[:, None] * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.weight.shape[-1]
        return F.conv1d(F.pad(x, (steps - 1, 0)), self.weight, groups=x.shape[1])


class Block(nn.Module):
    """Time mixing and an MLP, each with a residual connection. Takes and returns (batch, time, channels)."""

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
