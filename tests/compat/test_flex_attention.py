"""FlexAttention beside this backend: it is left to Inductor, forward and backward, and what stands around it is replaced."""

import pytest
import torch
from families.compiled_results import whole_report
from torch._inductor.exc import InductorError
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fusebackend import backend

pytestmark = pytest.mark.codegen

LENGTH, HEADS, DEPTH = 128, 2, 32


def causal(b, h, query, key):
    return query >= key


def attended(q, k, v, bias, block_mask):
    return flex_attention(q, k, v, score_mod=lambda score, b, h, query, key: score + bias[h, query, key], block_mask=block_mask)


def written_out(q, k, v, bias, block_mask):
    scores = (q @ k.mT * DEPTH**-0.5 + bias).tril() + torch.full_like(bias, -torch.inf).triu(1)
    return scores.softmax(-1) @ v


def model(attention):
    def forward(x, weight, bias, block_mask):
        q = (x @ weight).unflatten(-1, (HEADS, DEPTH)).transpose(1, 2)
        return written_out(q, q, attention(q, q, q, bias, block_mask), bias, None)

    return forward


def run(fn, inputs, block_mask, gradients):
    leaves = [x.detach().clone().requires_grad_(gradients) for x in inputs]
    out = fn(*leaves, block_mask)
    if not gradients:
        return [out]
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_inductors_bit_by_bit(dynamic, masked, device):
    """PyTorch has no gradients of it on CPUs."""
    given = [torch.randn(2, HEADS, LENGTH, DEPTH, device=device) for _ in range(3)] + [torch.randn(HEADS, LENGTH, LENGTH, device=device)]
    block_mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device=device) if masked else None
    results = []
    for way in ("inductor", backend.fuse):
        torch._dynamo.reset()
        options = {"fuse.gate": "off", "fuse.strict": True} if way is backend.fuse else None
        compiled = torch.compile(attended, backend=way, options=options, dynamic=dynamic)
        results.append(run(compiled, given, block_mask, device.type == "cuda"))
    assert all(map(torch.equal, *results))


def test_what_stands_around_it_is_replaced(device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = HEADS * DEPTH
    given = [torch.randn(2, LENGTH, width), torch.randn(width, width) / width**0.5, torch.randn(HEADS, LENGTH, LENGTH)]
    given = [x.to(device, dtype) for x in given]
    block_mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device=device)
    gradients = device.type == "cuda"
    options = {"fuse.gate": "off", "fuse.strict": True, "fuse.patterns": ["attention", "permute"]}
    try:
        found = run(torch.compile(model(attended), backend=backend.fuse, options=options), given, block_mask, gradients)
    except InductorError:  # on CPUs torch 2.11 takes no queries, keys and values that lie in one buffer
        torch._dynamo.reset()
        with pytest.raises(InductorError) as error:
            run(torch.compile(model(attended), backend="inductor"), given, block_mask, gradients)
        pytest.skip(f"Inductor does not compile it either: {error.value}")
    assert whole_report().substitutions
    exact = run(model(written_out), [x.double() for x in given], None, gradients)
    eager = run(model(written_out), given, None, gradients)
    for ours, theirs, reference in zip(found, eager, exact, strict=True):
        assert (ours - reference).norm() <= 1.05 * (theirs - reference).norm() + 1e-6 * reference.norm()
