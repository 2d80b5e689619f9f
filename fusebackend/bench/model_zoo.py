"""Public models with random weights, for ``python -m fusebackend bench models``. Nothing is downloaded.

Each factory takes a device and returns the module and its inputs. Dropout, stochastic depth and skipped layers are off
(wav2vec2-BERT has all of them by default): a random choice of the work to be done would make two runs incomparable.
Packages that a model needs are imported when it is made (``pip install 'fusebackend[models]'``).
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

    still = {"layerdrop": 0.0, "conformer_conv_dropout": 0.0, "final_dropout": 0.0}
    model = Wav2Vec2BertModel(Wav2Vec2BertConfig(num_hidden_layers=12, apply_spec_augment=False, **still))
    return _Output(model, "last_hidden_state").to(device), (torch.randn(16, 512, 160, device=device),)


def lfm2(device: torch.device) -> tuple[nn.Module, tuple]:
    """A short-convolution language model, 12 layers of which 3 are attention, 1024 channels; 8 x 2048 tokens."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    layers = ["full_attention" if i % 4 == 2 else "conv" for i in range(12)]
    config = Lfm2Config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4,
                        layer_types=layers, vocab_size=16384, use_cache=False)  # fmt: skip
    return _Output(Lfm2ForCausalLM(config), "logits").to(device), (torch.randint(16384, (8, 2048), device=device),)


def mamba2(device: torch.device) -> tuple[nn.Module, tuple]:
    """A state-space language model with short convolutions, 12 layers, 768 channels; 8 x 1024 tokens."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(hidden_size=768, num_hidden_layers=12, num_heads=24, head_dim=64, n_groups=1, state_size=64, chunk_size=128,
                          vocab_size=16384, use_cache=False)  # fmt: skip
    return _Output(Mamba2ForCausalLM(config), "logits").to(device), (torch.randint(16384, (8, 1024), device=device),)


def swin_b(device: torch.device) -> tuple[nn.Module, tuple]:
    import timm

    return timm.create_model("swin_base_patch4_window7_224", drop_path_rate=0.0).to(device), (torch.randn(64, 3, 224, 224, device=device),)


def convnext_tiny(device: torch.device) -> tuple[nn.Module, tuple]:
    """A control: its convolutions are depthwise but not causal, its transpositions are fused."""
    import timm

    return timm.create_model("convnext_tiny").to(device), (torch.randn(64, 3, 224, 224, device=device),)


def graphsage(device: torch.device) -> tuple[nn.Module, tuple]:
    """3 layers, 128 channels, 100,000 nodes, 1,600,000 edges."""
    from torch_geometric.nn import GraphSAGE

    edges = torch.randint(100_000, (2, 1_600_000), device=device)
    return GraphSAGE(128, 128, 3).to(device), (torch.randn(100_000, 128, device=device), edges)


def mixer_b16(device: torch.device) -> tuple[nn.Module, tuple]:
    import timm

    return timm.create_model("mixer_b16_224").to(device), (torch.randn(64, 3, 224, 224, device=device),)


def shufflenet(device: torch.device) -> tuple[nn.Module, tuple]:
    from torchvision.models import shufflenet_v2_x1_0

    return shufflenet_v2_x1_0().to(device), (torch.randn(128, 3, 224, 224, device=device),)


def jetmoe(device: torch.device) -> tuple[nn.Module, tuple]:
    """4 layers, 1024 channels, 8 experts, 4 x 1024 positions."""
    from transformers import JetMoeConfig, JetMoeForCausalLM

    config = JetMoeConfig(
        hidden_size=1024, num_hidden_layers=4, vocab_size=32000, intermediate_size=2816, kv_channels=64, num_key_value_heads=8
    )
    config.use_cache = False
    return _Output(JetMoeForCausalLM(config), "logits").to(device), (torch.randint(32000, (4, 1024), device=device),)


def _equivariant(nodes: int, edges: int, channels: int, device: torch.device) -> tuple[nn.Module, tuple]:
    """Two layers of e3nn's message passing (scalars and vectors): tensor products of neighbours with the spherical harmonics of
    the edges, weighted by their lengths, summed at the nodes; as in NequIP and MACE."""
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

    ends = torch.randint(nodes, (2, edges), device=device)
    ends[1] = (ends[0] + 1 + ends[1] % (nodes - 1)) % nodes  # no edge from a node to itself: it has no direction
    kinds, positions = torch.randint(10, (nodes,), device=device), 2 * torch.randn(nodes, 3, device=device)
    return Network().to(device), (kinds, positions, ends)


def e3nn_messages(device: torch.device) -> tuple[nn.Module, tuple]:
    """2 layers, 32 scalars and vectors, 10,000 nodes, 160,000 edges."""
    return _equivariant(10_000, 160_000, 32, device)


# ---- small enough for a CPU ----


def byte_lm(device: torch.device) -> tuple[nn.Module, tuple]:
    """The demo's model."""
    from fusebackend.tools.byte_lm import ByteLM

    return ByteLM(128, 128, 2).to(device), (torch.randint(256, (4, 128), device=device),)


def small_rwkv(device: torch.device) -> tuple[nn.Module, tuple]:
    """2 layers, 128 channels, 4 x 256 positions."""
    model = nn.Sequential(*(RwkvBlock(128, 256) for _ in range(2))).to(device)
    return model, (torch.randn(4, 256, 128, device=device),)


class ShortConvBlock(nn.Module):
    """LFM2's double-gated short convolution, with an MLP. Takes and returns (batch, time, channels)."""

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
    """Predicts the next token. Takes (batch, time) tokens as int64, returns logits."""

    def __init__(self, vocabulary: int, channels: int, blocks: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, channels)
        self.blocks = nn.Sequential(*(ShortConvBlock(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def small_short_conv(device: torch.device) -> tuple[nn.Module, tuple]:
    """2 layers, 128 channels, 4 x 512 tokens of 1,000."""
    return ShortConvLM(1000, 128, 2).to(device), (torch.randint(1000, (4, 512), device=device),)


class MessagePassing(nn.Module):
    """Each node takes a linear map of itself and of the weighted sum of its neighbours: (nodes, channels), (2, edges), (edges,)."""

    def __init__(self, channels: int):
        super().__init__()
        self.own, self.neighbours = nn.Linear(channels, channels), nn.Linear(channels, channels, bias=False)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        source, target = edges
        messages = x[source] * weight[:, None]
        total = messages.new_zeros(x.shape).index_add(0, target, messages)
        return F.relu(self.own(x) + self.neighbours(total))


class GraphNet(nn.Module):
    def __init__(self, channels: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(MessagePassing(channels) for _ in range(layers))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edges, weight)
        return x


def small_gnn(device: torch.device) -> tuple[nn.Module, tuple]:
    """3 layers, 64 channels, 5,000 nodes, 40,000 edges."""
    edges = torch.randint(5000, (2, 40_000), device=device)
    return GraphNet(64, 3).to(device), (torch.randn(5000, 64, device=device), edges, torch.rand(40_000, device=device) / 8)


#: What is timed where there is no GPU: the demo's model and three of other kinds.
CPU_MODELS = ("byte_lm", "small_rwkv", "small_short_conv", "small_gnn")

MODELS: dict[str, Callable[[torch.device], tuple[nn.Module, tuple]]] = {
    f.__name__: f
    for f in (
        rwkv_v3,
        gpt2_small,
        wav2vec2_bert,
        lfm2,
        mamba2,
        swin_b,
        graphsage,
        convnext_tiny,
        mixer_b16,
        shufflenet,
        jetmoe,
        e3nn_messages,
        byte_lm,
        small_rwkv,
        small_short_conv,
        small_gnn,
    )
}
