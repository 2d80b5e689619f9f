"""The models of the zoo that no package provides."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class RwkvBlock(nn.Module):
    """RWKV-v3's time mixing, written with a causal depthwise convolution as long as the sequence, and its channel mixing.

    Takes and returns (batch, time_steps, channels).
    """

    distance: torch.Tensor

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


class ShortConvBlock(nn.Module):
    """LFM2's double-gated short convolution, and an MLP. Takes and returns (batch, time, channels)."""

    def __init__(self, channels: int, taps: int = 3):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(channels), nn.RMSNorm(channels)
        self.enter, self.leave = nn.Linear(channels, 3 * channels, bias=False), nn.Linear(channels, channels, bias=False)
        self.conv = nn.Conv1d(channels, channels, taps, groups=channels, padding=taps - 1, bias=False)
        self.up, self.down = nn.Linear(channels, 4 * channels, bias=False), nn.Linear(4 * channels, channels, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, after, h = self.enter(self.norm1(x)).transpose(1, 2).chunk(3, dim=1)
        h = self.conv(before * h)[..., : x.shape[1]]
        x = x + self.leave((after * h).transpose(1, 2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class ShortConvLM(nn.Module):
    """Predicts the next token. Takes (batch, time) int64 tokens, returns (batch, time, vocabulary) logits."""

    def __init__(self, vocabulary: int, channels: int, blocks: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, channels)
        self.blocks = nn.Sequential(*(ShortConvBlock(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class MessagePassing(nn.Module):
    """Each node takes a linear map of itself plus one of the weighted sum of its neighbours.

    Takes (nodes, channels) features, (2, edges) sources and targets, and (edges,) weights; returns (nodes, channels).
    """

    def __init__(self, channels: int):
        super().__init__()
        self.node, self.neighbours = nn.Linear(channels, channels), nn.Linear(channels, channels, bias=False)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        source, target = edges
        messages = x[source] * weight[:, None]
        total = messages.new_zeros(x.shape).index_add(0, target, messages)
        return F.relu(self.node(x) + self.neighbours(total))


class GraphNet(nn.Module):
    """Layers of message passing over one graph. Takes and returns what they do."""

    def __init__(self, channels: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(MessagePassing(channels) for _ in range(layers))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edges, weight)
        return x


def equivariant_network(channels: int) -> nn.Module:
    """Two layers of e3nn's message passing on scalars and vectors, as in NequIP and MACE: tensor products of neighbours with the
    spherical harmonics of the edges, weighted by the edges' lengths and summed at the nodes.

    The network takes (nodes,) kinds below 10, (nodes, 3) positions and (2, edges) sources and targets; it returns (nodes, 1) energies.
    """
    from e3nn import o3, set_optimization_defaults

    set_optimization_defaults(jit_mode="eager")  # leaves compiling to torch.compile
    scalars, hidden = o3.Irreps(f"{channels}x0e"), o3.Irreps(f"{channels}x0e + {channels}x1o")
    harmonics = o3.Irreps("0e + 1o + 2e")

    class Convolution(nn.Module):
        def __init__(self, irreps):
            super().__init__()
            pairs = [(i, j, mul, ir) for i, (mul, a) in enumerate(irreps) for j, (_, b) in enumerate(harmonics) for ir in a * b]
            paths = [(i, j, mul, ir) for i, j, mul, ir in pairs if ir in hidden]
            out = o3.Irreps([(mul, ir) for _, _, mul, ir in paths])
            instructions = [(i, j, k, "uvu", True) for k, (i, j, _, _) in enumerate(paths)]
            self.product = o3.TensorProduct(irreps, harmonics, out, instructions, shared_weights=False, internal_weights=False)
            self.radial = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, self.product.weight_numel))
            self.linear = o3.Linear(out, hidden)

        def forward(self, x, source, target, directions, lengths):
            messages = self.product(x[source], directions, self.radial(lengths))
            return self.linear(messages.new_zeros(x.shape[0], messages.shape[1]).index_add(0, target, messages)) / 4

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.directions = nn.Embedding(10, channels), o3.SphericalHarmonics(harmonics, True, normalization="component")
            self.first, self.second, self.energy = Convolution(scalars), Convolution(hidden), o3.Linear(hidden, "0e")
            self.register_buffer("grid", torch.linspace(0, 4, 8))

        def forward(self, kinds, positions, edges):
            source, target = edges[0], edges[1]
            vectors = positions[target] - positions[source]
            lengths = torch.exp(-((vectors.norm(dim=1, keepdim=True) - self.grid) ** 2))
            directions = self.directions(vectors)
            x = self.first(self.embed(kinds), source, target, directions, lengths)
            return self.energy(self.second(x, source, target, directions, lengths))

    return Network()
