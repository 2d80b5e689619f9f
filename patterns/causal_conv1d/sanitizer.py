"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.causal_conv1d.channel_reference import ACTIVATIONS, finished
from fusebackend.tools.sanitizer import close, random, tolerance


def launch_every_kernel() -> None:
    """Few taps in both memory orders and from one to the other, tens of taps, many on tensor cores, and thousands by FFT."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for btc in (False, True):
            for channels, length, taps in ((16, 129, 4), (5, 64, 4), (72, 200, 4), (8, 200, 3), (1, 40, 2)):
                _check(2, channels, length, taps, dtype, btc=btc, silu=taps == 4)
            _check(2, 4, 100, 31, dtype, btc=btc)
        _check(2, 3, 100, 8, dtype, left=3)
        for batch, length, taps in ((2, 129, 129), (4, 100, 100), (9, 300, 300), (17, 64, 33), (3, 700, 31), (9, 104, 31), (2, 700, 640)):
            _check(batch, 2, length, taps, dtype, silu=batch == 4)
        _check(9, 2, 103, 31, dtype)
        _check(2, 2, 4096, 4096, dtype)
        _check(2, 2, 8192, 8192, dtype)


def _check(batch, channels, length, taps, dtype, *, btc=False, left=None, silu=False):
    """Runs forward and backward on (batch, time, channels) tensors if ``btc``, and then also with results in the other order."""
    ops = torch.ops.fusebackend

    def rows():
        shape = (batch, length, channels) if btc else (batch, channels, length)
        made = random(shape, dtype).cuda()
        return made.transpose(1, 2) if btc else made

    x, grad = rows(), rows()
    weight, bias = random((channels, 1, taps), dtype).div_(taps**0.5).cuda(), random((channels,), dtype).cuda()
    left = taps - 1 if left is None else left
    right = taps - 1 - left
    out = ops.causal_conv1d(x, weight, bias, left, right, 0.25, silu, btc)
    gradients = list(ops.causal_conv1d_backward(grad, x, weight, bias, left, 0.25, silu, btc, True, True, True))
    if btc:
        close(ops.causal_conv1d(x, weight, bias, left, right, 0.25, silu, False), out.cpu().double(), tolerance(dtype))
        gradients += ops.causal_conv1d_backward(grad.contiguous(), x, weight, bias, left, 0.25, silu, False, True, True, True)
    leaves = [t.cpu().double().contiguous().requires_grad_() for t in (x, weight, bias)]
    exact = _reference(*leaves, left, silu)
    close(out, exact.detach(), tolerance(dtype))
    if not silu:
        _check_epilogue(x, weight, bias, left, right, btc, exact.detach())
    for got, want in zip(gradients, 2 * torch.autograd.grad(exact, leaves, grad.cpu().double())):
        close(got, want, 2 * tolerance(dtype))


def _check_epilogue(x, weight, bias, left, right, btc, exact):
    channels, dtype = x.shape[1], x.dtype
    vectors = [random((channels,), t) for t in (torch.float32, torch.float32, dtype, dtype)]
    vectors[1] = vectors[1].abs().add_(0.5)
    activation = list(ACTIVATIONS)[(weight.shape[2] + channels) % len(ACTIVATIONS)]
    after = [v.cuda() for v in vectors]
    out = torch.ops.fusebackend.causal_conv1d(x, weight, bias, left, right, 0.25, False, btc, *after, 1e-3, activation)
    close(out, finished(exact, *(v.double() for v in vectors), 1e-3, activation), 2 * tolerance(dtype))


def _reference(x, weight, bias, left, silu):
    """By FFT, which is fast for thousands of taps, too."""
    n = x.shape[2] + weight.shape[2]
    full = torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(weight[:, 0].flip(-1), n), n)
    out = full[..., weight.shape[2] - 1 - left :][..., : x.shape[2]] + bias[:, None] + 0.25
    return torch.nn.functional.silu(out) if silu else out
