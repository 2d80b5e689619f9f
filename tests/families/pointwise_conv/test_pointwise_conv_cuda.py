"""On a GPU: what the products give beside cuDNN's convolutions, and what the default gate makes of them."""

import pytest
import torch
import torch.nn.functional as F
from families.compiled_results import alike

import fusebackend

pytestmark = pytest.mark.cuda
bf16 = torch.bfloat16
NAME = "pointwise_conv_backward"


def step(fn, x, w, grad):
    x, w = (t.detach().requires_grad_() for t in (x, w))
    y = fn(x, w)
    return torch.autograd.grad(y, (x, w), grad)


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [bf16, torch.float16])
@pytest.mark.parametrize(("sizes", "outputs"), [((64, 32, 56, 56), 96), ((16, 96, 14, 14), 40), ((16, 64, 1, 1), 6), ((3, 37, 11, 9), 19)])
def test_errors_are_no_larger_than_eagers(sizes, outputs, dtype):
    torch.manual_seed(0)
    x = torch.randn(sizes, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    w = torch.randn(outputs, sizes[1], 1, 1, device="cuda", dtype=dtype)
    grad = torch.randn_like(F.conv2d(x, w))
    torch._dynamo.reset()
    fused = torch.compile(
        lambda x, w: F.conv2d(x, w), backend="fuse", options={"fuse.gate": "off", "fuse.strict": True, "fuse.patterns": NAME}
    )
    ours, again, eager = step(fused, x, w, grad), step(fused, x, w, grad), step(F.conv2d, x, w, grad)
    assert fusebackend.last_report().counts() == {NAME: 1}
    exact = step(F.conv2d, x.double(), w.double(), grad.double())
    for found, repeated, expected, precise in zip(ours, again, eager, exact):
        assert alike(found, expected) and torch.equal(found, repeated)
        assert error(found, precise) <= 1.02 * error(expected, precise)


def test_the_default_gate_times_both_and_takes_no_slower_ones():
    x = torch.randn(64, 96, 28, 28, device="cuda", dtype=bf16).contiguous(memory_format=torch.channels_last)
    w = torch.randn(160, 96, 1, 1, device="cuda", dtype=bf16)
    torch._dynamo.reset()
    fn = torch.compile(lambda x, w: F.conv2d(x, w).relu(), backend="fuse", options={"fuse.patterns": NAME, "fuse.strict": True})
    dx, dw = step(fn, x, w, torch.randn_like(F.conv2d(x, w)))
    (verdict,) = fusebackend.last_report().verdicts
    assert verdict.applied is (verdict.replaced_ms <= verdict.inductor_ms)
    assert dx.shape == x.shape and dw.shape == w.shape
