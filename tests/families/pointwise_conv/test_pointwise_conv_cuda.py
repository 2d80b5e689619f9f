"""On a GPU: what the products give beside cuDNN's convolutions, and what the default gate makes of them."""

import pytest
import torch
import torch.nn.functional as F

import fusebackend

pytestmark = pytest.mark.cuda
bf16 = torch.bfloat16
NAMES = ["pointwise_conv", "pointwise_conv_backward"]


def step(fn, x, w, grad):
    x, w = (t.detach().requires_grad_() for t in (x, w))
    y = fn(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), grad)


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [bf16, torch.float16])
@pytest.mark.parametrize(
    ("sizes", "outputs", "last"),
    [
        ((64, 32, 56, 56), 96, True),  # a long sum
        ((16, 96, 14, 14), 40, True),
        ((16, 64, 1, 1), 6, True),
        ((4, 256, 500), 512, False),
        ((3, 37, 101), 19, False),
        ((2, 24, 8, 9, 10), 48, True),
    ],
)
def test_errors_are_no_larger_than_eagers(sizes, outputs, last, dtype):
    torch.manual_seed(0)
    x = torch.randn(sizes, device="cuda", dtype=dtype)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    w = torch.randn(outputs, sizes[1], *[1] * (len(sizes) - 2), device="cuda", dtype=dtype)
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(sizes)]
    grad = torch.randn_like(conv(x, w))
    torch._dynamo.reset()
    fused = torch.compile(
        lambda x, w: conv(x, w), backend="fuse", options={"fuse.gate": "off", "fuse.strict": True, "fuse.patterns": NAMES}
    )
    ours, again, eager = step(fused, x, w, grad), step(fused, x, w, grad), step(conv, x, w, grad)
    assert fusebackend.last_report().counts()["pointwise_conv_backward"] == 1
    exact = step(conv, x.double(), w.double(), grad.double())
    for found, repeated, expected, precise in zip(ours, again, eager, exact):
        assert found.stride() == expected.stride() and torch.equal(found, repeated)
        assert error(found, precise) <= 1.02 * error(expected, precise)


def test_the_default_gate_times_both_and_takes_no_slower_ones():
    x = torch.randn(64, 96, 28, 28, device="cuda", dtype=bf16).contiguous(memory_format=torch.channels_last)
    w = torch.randn(160, 96, 1, 1, device="cuda", dtype=bf16)
    torch._dynamo.reset()
    fn = torch.compile(lambda x, w: F.conv2d(x, w).relu(), backend="fuse", options={"fuse.patterns": NAMES, "fuse.strict": True})
    y, dx, dw = step(fn, x, w, torch.randn_like(F.conv2d(x, w)))
    verdicts = [v for v in fusebackend.last_report().verdicts if v.pattern == "pointwise_conv_backward"]
    assert [v.applied for v in verdicts] == [v.replaced_ms <= v.inductor_ms for v in verdicts] and len(verdicts) == 1
    assert dx.shape == x.shape and dw.shape == w.shape
