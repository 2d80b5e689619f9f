"""Public models with random weights, for ``bench models``. Nothing is downloaded.

Each factory takes a device and returns the module and its inputs. Dropout, stochastic depth and layer skipping are off: with a
random choice of the work, two runs could not be compared. Packages that a model needs are imported when it is made
(``pip install 'fusebackend[models]'``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusebackend.bench.zoo_modules import GraphNet, RwkvBlock, ShortConvLM, equivariant_network


def rwkv_v3(device: torch.device) -> tuple[nn.Module, tuple]:
    """4 layers, 768 channels, 8 x 768 positions."""
    model = nn.Sequential(*(RwkvBlock(768, 768) for _ in range(4))).to(device)
    return model, (torch.randn(8, 768, 768, device=device),)


class _Output(nn.Module):
    """Returns one tensor of a transformers model's output."""

    def __init__(self, model: nn.Module, field: str):
        super().__init__()
        self.model, self.field = model, field

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self.model(x), self.field)


def gpt2_small(device: torch.device) -> tuple[nn.Module, tuple]:
    """12 layers, 768 channels, 8 x 1024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return _Output(model, "logits").to(device), (torch.randint(50257, (8, 1024), device=device),)


def wav2vec2_bert(device: torch.device) -> tuple[nn.Module, tuple]:
    """12 layers, 1024 channels, 16 x 512 frames."""
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

    no_dropout: dict[str, Any] = {"layerdrop": 0.0, "conformer_conv_dropout": 0.0, "final_dropout": 0.0}
    model = Wav2Vec2BertModel(Wav2Vec2BertConfig(num_hidden_layers=12, apply_spec_augment=False, **no_dropout))
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
    """A control: its convolutions are depthwise but not causal, and Inductor fuses its transpositions."""
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


def e3nn_messages(device: torch.device) -> tuple[nn.Module, tuple]:
    """2 layers of equivariant message passing, 32 scalars and vectors, 10,000 nodes, 160,000 edges."""
    nodes = 10_000
    edges = torch.randint(nodes, (2, 160_000), device=device)
    edges[1] = (edges[0] + 1 + edges[1] % (nodes - 1)) % nodes  # no edge from a node to itself, which would have no direction
    kinds, positions = torch.randint(10, (nodes,), device=device), 2 * torch.randn(nodes, 3, device=device)
    return equivariant_network(32).to(device), (kinds, positions, edges)


# ---- small enough for a CPU ----


def byte_lm(device: torch.device) -> tuple[nn.Module, tuple]:
    """The demo's model."""
    from fusebackend.tools.byte_lm import ByteLM

    return ByteLM(128, 128, 2).to(device), (torch.randint(256, (4, 128), device=device),)


def small_rwkv(device: torch.device) -> tuple[nn.Module, tuple]:
    """2 layers, 128 channels, 4 x 256 positions."""
    model = nn.Sequential(*(RwkvBlock(128, 256) for _ in range(2))).to(device)
    return model, (torch.randn(4, 256, 128, device=device),)


def small_short_conv(device: torch.device) -> tuple[nn.Module, tuple]:
    """2 layers, 128 channels, 4 x 512 tokens of 1,000."""
    return ShortConvLM(1000, 128, 2).to(device), (torch.randint(1000, (4, 512), device=device),)


def small_gnn(device: torch.device) -> tuple[nn.Module, tuple]:
    """3 layers, 64 channels, 5,000 nodes, 40,000 edges."""
    edges = torch.randint(5000, (2, 40_000), device=device)
    return GraphNet(64, 3).to(device), (torch.randn(5000, 64, device=device), edges, torch.rand(40_000, device=device) / 8)


#: The models that are timed by default where there is no GPU.
CPU_MODELS = ("byte_lm", "small_rwkv", "small_short_conv", "small_gnn")

#: Every model, by name.
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
