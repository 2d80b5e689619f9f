"""Kernels registered for classes of layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusebackend
from fusebackend import RegistrationError
from fusebackend.testing import assert_pattern

X = torch.randn(2, 3, 8)


@pytest.fixture
def registered():
    made = []
    yield lambda *args, **settings: made.append(fusebackend.replace_module(*args, **settings)) or made[-1]
    for pattern in made:
        fusebackend.unregister(pattern.name)


class GemmaNorm(nn.Module):
    """As in transformers: with a method of its own, and a weight around 0."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(size))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


def test_a_layer_of_any_size_and_setting(registered):
    def replacement(x, weight, eps):
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + weight.float(), eps).type_as(x)

    pattern = registered(GemmaNorm, replacement, example=(GemmaNorm(8), X.clone().requires_grad_()), dtypes=[torch.float32, torch.bfloat16])
    assert pattern.name == "GemmaNorm"
    x = torch.randn(5, 16).requires_grad_()
    report = assert_pattern(nn.Sequential(GemmaNorm(16, eps=1e-3), nn.SiLU()), x, pattern="GemmaNorm", training=True, count=1)
    assert report.substitutions[0].graph == "joint"
    assert_pattern(GemmaNorm(32).bfloat16(), torch.randn(4, 3, 2, 32, dtype=torch.bfloat16), pattern="GemmaNorm", count=1)


def test_layers_of_pytorch(registered):
    registered(nn.LayerNorm, layer_norm, example=(nn.LayerNorm(8), X.clone().requires_grad_()), dtypes=None)
    x = torch.randn(5, 4, 16).requires_grad_()
    assert_pattern(nn.LayerNorm(16, eps=1e-2), x, pattern="LayerNorm", count=1, training=True)


def layer_norm(input, weight, bias, eps):
    centred = input - input.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def test_a_module_with_children_is_a_search_function_as_it_stands(pattern):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gate = nn.Linear(8, 6), nn.Linear(8, 6)

        def forward(self, x):
            return F.silu(self.gate(x)) * self.up(x)

    def replacement(x, up_weight, up_bias, gate_weight, gate_bias):
        return F.linear(x, up_weight, up_bias) * F.silu(F.linear(x, gate_weight, gate_bias))

    name = pattern(Gated().requires_grad_(False), replacement, (torch.randn(5, 8),), verify=True)
    with torch.no_grad():
        assert_pattern(Gated(), torch.randn(7, 8), pattern=name, count=1)


@pytest.mark.parametrize(
    ("kind", "replacement", "example", "words"),
    [
        (torch.sin, layer_norm, (X,), "is no class of modules"),
        (nn.LayerNorm, layer_norm, (X,), "a LayerNorm and the arguments of its forward are needed"),
        (nn.LayerNorm, layer_norm, (nn.RMSNorm(8), X), "a LayerNorm and the arguments of its forward are needed"),
        (nn.RMSNorm, layer_norm, (nn.RMSNorm(8, eps=1e-6), X), "the replacement takes 'input'; RMSNorm has x, weight, eps"),
    ],
)
def test_a_wrong_registration_is_refused(kind, replacement, example, words):
    with pytest.raises(RegistrationError) as error:
        fusebackend.replace_module(kind, replacement, example=example)
    assert words in str(error.value)
