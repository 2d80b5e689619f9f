"""Attention under autocast, whose backward converts anew what its forward converted."""

import pytest
import torch
import torch.nn.functional as F
from attention_programs import check, compiled, randn

pytestmark = pytest.mark.usefixtures("library")

_WIDTH, _HEADS, _TOKENS = 32, 2, 16


def _split(x, weight):
    return F.linear(x, weight).view(2, _TOKENS, _HEADS, -1).transpose(1, 2)


def written_out(q, k, v, bias):
    weights = F.softmax((q @ k.transpose(2, 3) + bias).float(), dim=-1).type_as(q)
    return weights @ v


def scaled_dot_product(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)


def scaled(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def layers(attend, count):
    """An encoder as T5's: the bias of relative positions is looked up once, and added in all layers."""

    def fn(x, table, *weights):
        with torch.autocast("cpu", torch.bfloat16):
            positions = torch.arange(_TOKENS)
            distance = (positions[None] - positions[:, None]).clamp(-4, 4) + 4
            bias = F.embedding(distance, table).permute(2, 0, 1).unsqueeze(0)
            for layer in range(count):
                wq, wk, wv, wo = weights[4 * layer : 4 * layer + 4]
                y = F.layer_norm(x, (_WIDTH,))
                out = attend(_split(y, wq), _split(y, wk), _split(y, wv), bias.contiguous() if attend is not written_out else bias)
                x = x + F.linear(out.transpose(1, 2).reshape(2, _TOKENS, _WIDTH), wo)
        return x

    weights = [(torch.randn(_WIDTH, _WIDTH) * _WIDTH**-0.5).requires_grad_() for _ in range(4 * count)]
    return fn, (randn(2, _TOKENS, _WIDTH, dtype=torch.float32), randn(9, _HEADS, dtype=torch.float32), *weights)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attend", [written_out, scaled_dot_product, scaled], ids=lambda f: f.__name__)
def test_a_layer_whose_bias_is_looked_up(attend, training):
    torch.manual_seed(0)
    fn, args = layers(attend, 1)
    found = not training and attend is not written_out  # without gradients, PyTorch has a kernel for it
    report = check(fn, args, training=training, count=0 if found else 1, slack=1.05)
    assert all(("1 of them with a gradient" in s.note) == training for s in report.substitutions)


@pytest.mark.parametrize("attend", [written_out, scaled_dot_product], ids=lambda f: f.__name__)
def test_all_layers_of_a_model_are_found(attend):
    """They share the bias, whose gradient is the sum of theirs."""
    fn, args = layers(attend, 12)
    _, report = compiled(fn, args, True)
    assert len(report.substitutions) == 12


def test_nothing_is_converted_or_copied_around_scaled_dot_product_attention():
    """PyTorch computes it in float32, and its gradients in 16 bits: of all conversions none is left."""
    fn, args = layers(scaled_dot_product, 1)
    _, report = compiled(fn, args, True)
    (site,) = report.substitutions
    assert site.replacement.count("prims.convert_element_type.default") == 0, site.replacement
    assert site.replacement.count("aten.clone.default") == 1, site.replacement  # of which rows are hidden wholly


@pytest.mark.parametrize("rounded_to", [torch.float32, torch.float16])
def test_a_gradient_by_values_that_were_not_rounded_alike_is_refused(rounded_to):
    """The forward rounds to bf16, the backward not, or to fp16 first: a kernel that reads one tensor would round otherwise."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p, v):
            ctx.save_for_backward(p, v)
            return p @ v.to(p.dtype)

        @staticmethod
        def backward(ctx, grad):
            p, v = ctx.saved_tensors
            v = v if rounded_to == torch.float32 else v.to(rounded_to).to(p.dtype)
            return (grad.to(v.dtype) @ v.mT).to(p.dtype), (p.mT @ grad).float()

    def fn(q, k, v, b):
        return Rounded.apply((q @ k.mT * 0.25 + b).softmax(-1), v)

    args = (randn(2, 4, 9, 16), randn(2, 4, 9, 16), randn(2, 4, 9, 16, dtype=torch.float32), randn(4, 9, 9))
    _, report = compiled(fn, args, True)
    assert not report.substitutions
    assert any("adds to the gradient of the probabilities" in r.reason for r in report.rejections), report
