"""One convolution with random operands, computed by the operators, and by torch in any dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusebackend.patterns.causal_conv1d.ops import reference

ops = torch.ops.fusebackend
# Relative errors in norm that one rounding of the result, and of a few hundred products, may make.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class Case:
    """Random inputs of one convolution, its result and gradients by the op, and by torch in any dtype."""

    def __init__(
        self,
        batch,
        channels,
        length,
        taps,
        dtype,
        device,
        *,
        channels_last=False,
        left=None,
        out=None,
        silu=False,
        bias=True,
        shift=0.25,
    ):
        def rows(n):
            if channels_last:
                return torch.randn(batch, n, channels, device=device, dtype=torch.float64).transpose(1, 2).to(dtype)
            return torch.randn(batch, channels, n, device=device, dtype=torch.float64).to(dtype)

        self.left = taps - 1 if left is None else left
        out = length if out is None else out
        self.right = out - length - self.left + taps - 1
        self.x, self.grad = rows(length), rows(out)
        self.weight = (torch.randn(channels, 1, taps, device=device, dtype=torch.float64) / taps**0.5).to(dtype)
        self.bias = torch.randn(channels, device=device, dtype=torch.float64).to(dtype) if bias else None
        self.shift, self.silu, self.channels_last = shift, silu, channels_last

    def forward(self):
        return ops.causal_conv1d(self.x, self.weight, self.bias, self.left, self.right, self.shift, self.silu, self.channels_last)

    def backward(self, *needed):
        return ops.causal_conv1d_backward(
            self.grad,
            self.x,
            self.weight,
            self.bias,
            self.left,
            self.shift,
            self.silu,
            self.channels_last,
            *(needed or (True,) * 3),
        )

    def ours(self):
        return self.forward(), *self.backward(True, True, self.bias is not None)[: 3 if self.bias is not None else 2]

    def torchs(self, dtype=torch.float64):
        leaves = [t.detach().to(dtype).contiguous().requires_grad_() for t in (self.x, self.weight, self.bias) if t is not None]
        padded_right = max(self.right, 0)
        bias = leaves[2] if self.bias is not None else None
        y = reference(leaves[0], leaves[1], bias, self.left, padded_right, self.shift, self.silu)[..., : self.grad.shape[2]]
        return y.detach(), *torch.autograd.grad(y, leaves, self.grad.to(dtype))

    def tap_by_tap(self):
        """What ``ours`` computes, in fp64 on the CPU, of exactly the products that eager mode makes.

        It pads x, so forwards taps meet zeros, and for the weight's gradient gradients do. x's gradient is summed over the outputs alone.
        """
        x, weight, grad = (t.detach().cpu().double() for t in (self.x, self.weight[:, 0], self.grad))
        taps, length, right = weight.shape[1], grad.shape[2], max(self.right, 0)
        padded = F.pad(x, (self.left, right))
        pre = torch.zeros_like(grad) if self.bias is None else self.bias.detach().cpu().double()[:, None].expand_as(grad).clone()
        for k in range(taps):
            pre += weight[:, k, None] * padded[..., k : k + length]
        pre += self.shift
        sigmoid = 1 / (1 + torch.exp(-pre))
        if self.silu:
            grad = grad * sigmoid * (1 + pre * (1 - sigmoid))
        dx, dw = torch.zeros_like(padded), torch.zeros_like(weight)
        for k in range(taps):
            dx[..., k : k + length] += weight[:, k, None] * grad
            dw[:, k] = (grad * padded[..., k : k + length]).sum((0, 2))
        out = pre / (1 + torch.exp(-pre)) if self.silu else pre
        return out, dx[..., self.left : self.left + x.shape[2]], dw[:, None], grad.sum((0, 2))

    def check_what_is_not_finite(self, place=""):
        for name, got, want in zip(("out", "dx", "dw", "db"), self.ours(), self.tap_by_tap()):
            got = got.cpu()
            same = torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isposinf(), want.isposinf())
            assert same and torch.equal(got.isneginf(), want.isneginf()), f"{name}, {place}"

    def check(self):
        for name, got, want in zip(("out", "dx", "dw", "db"), self.ours(), self.torchs()):
            assert got.shape == want.shape
            # A sum of random gradients may be near zero by chance: its error is relative to what was summed.
            scale = max(want.norm(), self.grad.double().norm()) if name in ("dw", "db") else want.norm().clamp_min(1e-6)
            error = (got.double() - want).norm() / scale
            assert error < TOLERANCE[self.x.dtype], f"{name}: {error:.1e}"
