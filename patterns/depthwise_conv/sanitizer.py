"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.causal_conv1d.channel_reference import ACTIVATIONS
from fusebackend.patterns.depthwise_conv.ops import reference
from fusebackend.tools.sanitizer import close, random, tolerance

#: What they store initcheck does not see, and would report when results are copied to the CPU. All of a result is compared there.
STORES_BY_BULK_COPIES = True


def launch_every_kernel() -> None:
    """Tensor cores with each band and step, windows that roll and that tiles hold, and loops for what is left; in both memory orders, and
    from one to the other; dilated rows of whole vectors, and of others; x's gradient and the weight's by one kernel and by two."""
    for dtype in (torch.bfloat16, torch.float16):
        for channels_last in (False, True):
            rolling = ((3, 16, 9, 28), 3), ((2, 9, 8, 14), 5), ((2, 8, 7, 7), 7), ((5, 6, 12, 10), 7)
            for shape, taps in (*rolling, ((3, 24, 9, 30), 7), ((2, 8, 9, 140), 5)):
                _check(shape, (taps, taps), 1, dtype, channels_last)
            for shape, taps, stride in (((3, 16, 9, 28), (4, 4), 1), ((2, 8, 7, 7), (9, 7), 1), ((1, 16, 20, 40), (12, 12), 1)):
                _check(shape, taps, stride, dtype, channels_last)
            for shape, taps, stride in (((1, 8, 35, 40), (31, 31), 1), ((2, 24, 12, 34), (3, 3), 2), ((2, 16, 16, 14), (9, 20), 2)):
                _check(shape, taps, stride, dtype, channels_last)
            for shape, taps, stride in (((3, 6, 15, 21), (5, 5), 2), ((2, 3, 14, 12), (7, 7), 2)):
                _check(shape, taps, stride, dtype, channels_last)
        # Planes wait in shared memory: several stages a block, and more stages than multiprocessors have blocks.
        for taps in (3, 5, 7):
            _check((304, 132, 2, 2), (taps, taps), 1, dtype)
        # So do strided planes, of whole words and of others, padded by an odd and by an even number.
        for width in (6, 7):
            for taps in (3, 5):
                _check((24, 136, 9, width), (taps, taps), 2, dtype)
        # Tensor copies bring and take pixels where multiprocessors have a block each: of several segments, and of one block of columns.
        for shape, taps in (((3, 1040, 5, 26), 7), ((17, 1064, 3, 7), 7), ((5, 1056, 4, 13), 5)):
            _check(shape, (taps, taps), 1, dtype, channels_last=True)
        _check((3, 6, 9, 29), (3, 3), 1, dtype)
        _check((2, 5, 9, 13), (5, 5), 1, dtype)
        _check((2, 3, 9, 20), (3, 13), 2, dtype)
        _check((2, 4, 12, 12), (3, 3), 3, dtype, multiplier=2)
    for taps in (3, 5, 7):
        for columns, channels_last in ((22, False), (20, False), (13, True)):
            _check((3, 4, 18, columns), (taps, taps), 1, torch.float32, channels_last)
    # Threads have eight columns each where there are enough for all multiprocessors.
    _check((16, 3 * 132, 4, 60), (7, 7), 1, torch.float32)
    _check((2, 8, 9, 12), (3, 3), 2, torch.float32, channels_last=True)
    # Rows wait in shared memory where a GPU's multiprocessors have more to read than they hold at once.
    images = 1 + 132 * (228 << 10) // (40 * 57 * 29)
    _check((images // 2, 40, 57, 29), (3, 3), 1, torch.bfloat16, channels_last=True)
    _check((images // 4, 40, 57, 29), (3, 3), 1, torch.float32, channels_last=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for taps, width, dilation in ((3, 160, 8), (3, 77, 5), (4, 160, 8), (4, 77, 5), (7, 160, 8), (7, 77, 5)):
            _check((3, 4, 1, width), (1, taps), 1, dtype, dilation=dilation)


def _check(shape, taps, stride, dtype, channels_last=False, multiplier=1, dilation=1):
    ops = torch.ops.fusebackend
    outputs = shape[1] * multiplier
    numbers = ([stride] * 2, [taps[0] // 2] * 2 + [taps[1] // 2 * dilation] * 2, [dilation] * 2)
    x, weight, bias = random(shape, dtype), random((outputs, 1, *taps), dtype).div_(taps[0] * taps[1]), random((outputs,), dtype)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    exact = reference(*leaves, *numbers)
    grad = random(tuple(exact.shape), dtype)
    vectors = [random((outputs,), t) for t in (torch.float32, torch.float32, dtype, dtype)]
    vectors[1] = vectors[1].abs().add_(0.5)
    activation = list(ACTIVATIONS)[(taps[0] + shape[3]) % len(ACTIVATIONS)]
    with torch.no_grad():
        finished = reference(*leaves, *numbers, *(v.double() for v in vectors), 1e-3, activation)
    gradients = torch.autograd.grad(exact, leaves, grad.double())
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x, grad = (t.cuda().to(memory_format=memory_format) for t in (x, grad))
    weight, bias = weight.cuda(), bias.cuda()
    for order in (None, not channels_last):
        close(ops.depthwise_conv(x, weight, bias, *numbers, order), exact.detach(), tolerance(dtype))
        close(
            ops.depthwise_conv(x, weight, bias, *numbers, order, *(v.cuda() for v in vectors), 1e-3, activation),
            finished,
            2 * tolerance(dtype),
        )
        close(
            ops.depthwise_conv(x, weight, bias, *numbers, order, None, None, None, None, 0.0, activation),
            ACTIVATIONS[activation](exact.detach()),
            2 * tolerance(dtype),
        )
        found = ops.depthwise_conv_backward(grad, x, weight, *numbers, order, False, True, True, True)
        found += ops.depthwise_conv_backward(grad, x, weight, *numbers, order, False, False, True, True)[1:]
        for got, want in zip(found, (*gradients, *gradients[1:])):
            close(got, want, 2 * tolerance(dtype))
