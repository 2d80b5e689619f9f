"""One depthwise convolution with random operands, computed by the operators, and by torch in any dtype."""

from __future__ import annotations

import torch

from fusebackend.patterns.depthwise_conv.ops import reference

ops = torch.ops.fusebackend
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Relative errors in norm that one rounding of the result, and fp32 sums, may make.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


class Case:
    """Random inputs of one convolution, its result and gradients by the operators, and by torch.

    Args:
        shape: (batch, channels, height, width).
        taps, stride, dilation: of height and width, or one number for both.
        padding: top, bottom, left and right; None for half of the taps.
        orders: whether x, and the incoming gradient, are channels last.
        result: the operator's ``channels_last``.
        offset: elements before the first one of x and of the gradient in their memory.
    """

    def __init__(
        self, shape, taps, dtype, device, *,
        stride=1, dilation=1, padding=None, multiplier=1, orders=(False, False), result=None, offset=0,
    ):  # fmt: skip
        taps, self.stride, self.dilation = ((n, n) if isinstance(n, int) else tuple(n) for n in (taps, stride, dilation))
        half = [t // 2 * d for t, d in zip(taps, self.dilation)]
        self.padding = [half[0], half[0], half[1], half[1]] if padding is None else list(padding)
        self.result, outputs = result, shape[1] * multiplier

        def image(sizes, channels_last):
            n, c, h, w = sizes
            values = torch.randn(n, h, w, c, device=device, dtype=torch.float64).to(dtype)
            memory = torch.full((values.numel() + offset,), float("nan"), device=device, dtype=dtype)[offset:]
            if channels_last:
                return memory.view(n, h, w, c).copy_(values).permute(0, 3, 1, 2)
            return memory.view(n, c, h, w).copy_(values.permute(0, 3, 1, 2))

        self.x = image(shape, orders[0])
        self.weight = (torch.randn(outputs, 1, *taps, device=device, dtype=torch.float64) / (taps[0] * taps[1]) ** 0.5).to(dtype)
        self.bias = torch.randn(outputs, device=device, dtype=torch.float64).to(dtype)
        self.grad = image(self.torchs_forward(torch.float64).shape, orders[1])

    @property
    def numbers(self):
        return self.stride, self.padding, self.dilation

    def torchs_forward(self, dtype):
        with torch.backends.cudnn.flags(enabled=False):
            return reference(self.x.detach().to(dtype), self.weight.to(dtype), self.bias.to(dtype), *self.numbers)

    def forward(self):
        return ops.depthwise_conv(self.x, self.weight, self.bias, *self.numbers, self.result)

    def backward(self, *needed):
        return ops.depthwise_conv_backward(self.grad, self.x, self.weight, *self.numbers, self.result, False, *(needed or (True,) * 3))

    def ours(self):
        return self.forward(), *self.backward()

    def torchs(self, dtype=torch.float64):
        leaves = [t.detach().to(dtype).contiguous().requires_grad_() for t in (self.x, self.weight, self.bias)]
        with torch.backends.cudnn.flags(enabled=dtype != torch.float64):
            y = reference(*leaves, *self.numbers)
            return y.detach(), *torch.autograd.grad(y, leaves, self.grad.to(dtype))

    def check(self):
        for name, got, want in zip(("y", "dx", "dw", "db"), self.ours(), self.torchs()):
            assert got.shape == want.shape, name
            # A sum of random gradients may be near zero by chance: its error is relative to what was summed.
            scale = max(want.norm(), 0.3 * self.grad.double().norm()) if name in ("dw", "db") else want.norm().clamp_min(1e-6)
            error = (got.double() - want).norm() / scale
            assert error < TOLERANCE[self.x.dtype], f"{name}: {error:.1e}"

    def tap_by_tap(self):
        """What ``ours`` computes, in fp64 on the CPU, without any product with padding."""
        x, weight, grad = (t.detach().cpu().double() for t in (self.x, self.weight, self.grad))
        (sh, sw), (top, _, left, _), (dh, dw_) = self.numbers
        multiplier = weight.shape[0] // x.shape[1]
        source = x.repeat_interleave(multiplier, 1)
        y = self.bias.detach().cpu().double()[:, None, None].expand_as(grad).clone()
        of_source, of_weight = torch.zeros_like(source), torch.zeros_like(weight)
        for a in range(weight.shape[2]):
            for b in range(weight.shape[3]):
                rows = [i for i in range(grad.shape[2]) if 0 <= i * sh - top + a * dh < x.shape[2]]
                columns = [j for j in range(grad.shape[3]) if 0 <= j * sw - left + b * dw_ < x.shape[3]]
                if not rows or not columns:
                    continue
                here = (..., slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
                i, j = rows[0] * sh - top + a * dh, columns[0] * sw - left + b * dw_
                there = (..., slice(i, i + (len(rows) - 1) * sh + 1, sh), slice(j, j + (len(columns) - 1) * sw + 1, sw))
                tap = weight[:, :, a, b].view(1, -1, 1, 1)
                y[here] += tap * source[there]
                of_source[there] += tap * grad[here]
                of_weight[:, 0, a, b] = (grad[here] * source[there]).sum((0, 2, 3))
        return y, of_source.view(*x.shape[:2], multiplier, *x.shape[2:]).sum(2), of_weight, grad.sum((0, 2, 3))

    def plant_what_is_not_finite(self):
        """In x, weight, gradient and bias: inside, at edges and in corners. The shape is (40, 1000, 9, 6), or wider."""
        self.x[1, 3, 5, 4], self.x[0, 9, 8, 5], self.x[39, 999, 0, 0] = float("inf"), float("nan"), float("-inf")
        self.weight[4, 0, 0, 0], self.weight[12, 0, -1, 1] = float("-inf"), float("nan")
        self.grad[0, 7, 0, 0], self.grad[1, 1, -1, -1] = float("inf"), float("nan")
        self.bias[11] = float("inf")

    def check_what_is_not_finite(self):
        """It reaches what it is a factor of, and nothing else."""
        for name, got, want in zip(("y", "dx", "dw", "db"), self.ours(), self.tap_by_tap()):
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(got.cpu()), kind(want)), name
