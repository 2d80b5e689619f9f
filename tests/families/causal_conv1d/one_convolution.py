"""One convolution with random operands, computed by the operators, and by torch in any dtype."""

from __future__ import annotations

import torch

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

    def check(self):
        for name, got, want in zip(("out", "dx", "dw", "db"), self.ours(), self.torchs()):
            assert got.shape == want.shape
            # A sum of random gradients may be near zero by chance: its error is relative to what was summed.
            scale = max(want.norm(), self.grad.double().norm()) if name in ("dw", "db") else want.norm().clamp_min(1e-6)
            error = (got.double() - want).norm() / scale
            assert error < TOLERANCE[self.x.dtype], f"{name}: {error:.1e}"
