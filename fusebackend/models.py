"""Public models with random weights, for ``python -m fusebackend bench models``. Nothing is downloaded.

Each factory takes a device and returns the module and its inputs; the loss of a training step is the mean square of what
the module returns. Packages that a model needs are imported when it is made (``pip install 'fusebackend[models]'``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class RwkvBlock(nn.Module):
    """RWKV-v3's time mixing, written with a causal depthwise convolution over all of time, and its channel mixing."""

    def __init__(self, channels: int, time_steps: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.key, self.value, self.receptance, self.output = (nn.Linear(channels, channels, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(channels, 4 * channels, bias=False), nn.Linear(4 * channels, channels, bias=False)
        self.gate = nn.Linear(channels, channels, bias=False)
        self.decay = nn.Parameter(torch.linspace(-5, 1, channels)[:, None])
        self.first = nn.Parameter(torch.zeros(channels, 1))
        self.mix = nn.Parameter(torch.full((1, 1, channels), 0.5))
        self.register_buffer("distance", torch.arange(-(time_steps - 2), 1.0)[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        h = h * self.mix + F.pad(h, (0, 0, 1, -1)) * (1 - self.mix)
        k = self.key(h).transpose(1, 2).clamp(max=60).exp()
        kv = k * self.value(h).transpose(1, 2)
        w = torch.cat([(self.decay.exp() * self.distance).exp(), self.first.exp()], dim=-1)[:, None]
        steps = w.shape[-1]
        wkv = F.conv1d(F.pad(kv, (steps - 1, 0)), w, groups=w.shape[0])
        wk = F.conv1d(F.pad(k, (steps - 1, 0)), w, groups=w.shape[0]) + 1e-9
        x = x + self.output(torch.sigmoid(self.receptance(h)) * (wkv / wk).transpose(1, 2))
        h = self.norm2(x)
        return x + torch.sigmoid(self.gate(h)) * self.down(F.relu(self.up(h)).square())


def rwkv_v3(device: torch.device) -> tuple[nn.Module, tuple]:
    """4 layers, 768 channels, 8 x 768 positions."""
    model = nn.Sequential(*(RwkvBlock(768, 768) for _ in range(4))).to(device)
    return model, (torch.randn(8, 768, 768, device=device),)


class _Output(nn.Module):
    """Picks a tensor out of what a transformers model returns."""

    def __init__(self, model: nn.Module, pick: str):
        super().__init__()
        self.model, self.pick = model, pick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self.model(x), self.pick)


def gpt2_small(device: torch.device) -> tuple[nn.Module, tuple]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return _Output(model, "logits").to(device), (torch.randint(50257, (8, 1024), device=device),)


def wav2vec2_bert(device: torch.device) -> tuple[nn.Module, tuple]:
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

    model = Wav2Vec2BertModel(Wav2Vec2BertConfig(num_hidden_layers=12, apply_spec_augment=False))
    return _Output(model, "last_hidden_state").to(device), (torch.randn(16, 512, 160, device=device),)


def swin_b(device: torch.device) -> tuple[nn.Module, tuple]:
    import timm

    return timm.create_model("swin_base_patch4_window7_224").to(device), (torch.randn(64, 3, 224, 224, device=device),)


def convnext_tiny(device: torch.device) -> tuple[nn.Module, tuple]:
    """A control: its convolutions are depthwise but not causal, its transpositions are fused."""
    import timm

    return timm.create_model("convnext_tiny").to(device), (torch.randn(64, 3, 224, 224, device=device),)


def graphsage(device: torch.device) -> tuple[nn.Module, tuple]:
    """3 layers, 128 channels, 100,000 nodes, 1,600,000 edges."""
    from torch_geometric.nn import GraphSAGE

    edges = torch.randint(100_000, (2, 1_600_000), device=device)
    return GraphSAGE(128, 128, 3).to(device), (torch.randn(100_000, 128, device=device), edges)


def byte_lm(device: torch.device) -> tuple[nn.Module, tuple]:
    """The demo's model, small enough for a CPU."""
    from .demo import ByteLM

    return ByteLM(128, 128, 2).to(device), (torch.randint(256, (4, 128), device=device),)


MODELS: dict[str, Callable[[torch.device], tuple[nn.Module, tuple]]] = {
    f.__name__: f for f in (rwkv_v3, gpt2_small, wav2vec2_bert, swin_b, graphsage, convnext_tiny, byte_lm)
}
