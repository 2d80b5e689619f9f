"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.attention.ops import (
    attention,
    attention_backward,
    attention_mask_bits,
    reference,
    reference_backward,
    reference_mask_bits,
)
from fusebackend.tools.sanitizer import KnownReport, close, tolerance

KNOWN_REPORTS = (
    KnownReport(
        "attention_pipelined_backward_keys",
        "row sums are read, then copied over by cp.async.bulk. All lanes read before __syncwarp and lane 0's arrival at an mbarrier; "
        "the thread that copies waits for it, and fences. In machine code nothing is left of that __syncwarp: the warp is converged",
    ),
)


def launch_every_kernel() -> None:
    """Windows and long sequences of each width of a head; biases that are aligned, copied, broadcast; gradients summed in each kernel."""
    if torch.cuda.get_device_capability() < (8, 0):
        return

    def check(dtype, q_shape, biases, keys=None, causal=False, masked=False, drops=False):
        *batch, heads, queries, dim = q_shape
        keys = keys or queries
        q, grad, k, v = (torch.randn(*batch, n, heads, dim).to(dtype).transpose(-3, -2) for n in (queries, queries, keys, keys))
        biases = [torch.randn(b).to(dtype) for b in biases]
        if masked:  # queries of 0, since fp32 tells scores apart beside float16's lowest number, and a marked row has none
            biases[0][..., 3, :] = torch.finfo(dtype).min
            q[..., 3, :] = 0
        mask = torch.rand(*batch, heads, queries, keys) > 0.2
        dropped, dropped_on_gpu = ((reference_mask_bits(mask), 1.25), (attention_mask_bits(mask.cuda()), 1.25)) if drops else ((), ())
        exact_out, _ = reference(q.double(), k.double(), v.double(), [b.double() for b in biases], 0.2, causal, *dropped)
        on_gpu = [x.cuda() for x in (q, k, v)]
        out, statistics = attention(*on_gpu, [b.cuda() for b in biases], 0.2, causal, *dropped_on_gpu)
        close(out, exact_out, tolerance(dtype))
        if masked:
            statistics[..., 3, 1].neg_()  # no gradients of its scores
        wanted = [True] * len(biases), [drops] * len(biases)
        arguments = grad.cuda(), *on_gpu, [b.cuda() for b in biases], out, statistics, 0.2, causal, *wanted, *dropped_on_gpu
        gradients = attention_backward(*arguments)
        wide = [x.double() for x in (grad, q, k, v)]
        wide_biases = [b.double() for b in biases]
        exact = reference_backward(*wide, wide_biases, exact_out, statistics.cpu().double(), 0.2, causal, *wanted, *dropped)
        for found, expected in zip(gradients, exact, strict=True):
            close(found, expected, tolerance(dtype))

    for dtype in (torch.bfloat16, torch.float16):
        for dim in (32, 64):
            for queries in (17, 49, 64):
                check(dtype, (3, 2, queries, dim), [(1, 2, queries, queries)])
        check(dtype, (2, 3, 2, 49, 32), [(1, 1, 2, 49, 49), (1, 3, 1, 49, 49)], masked=True)
        check(dtype, (2, 2, 50, 64), [])
        check(dtype, (2, 2, 50, 32), [])
        for dim in (32, 64, 128):
            check(dtype, (2, 2, 100, dim), [(1, 2, 100, 100)])
            check(dtype, (2, 2, 136, dim), [(1, 2, 136, 136), (2, 1, 1, 136)], masked=True)
            check(dtype, (1, 2, 264, dim), [(1, 2, 264, 96)], keys=96, causal=True)
            check(dtype, (2, 1, 128, dim), [])
            for heads_of_a_bias in (3, 5, 11):
                check(dtype, (heads_of_a_bias, 1, 72, dim), [(1, 1, 72, 72)])
            check(dtype, (2, 2, 17, dim), [(1, 2, 17, 136)], keys=136)
            for queries in (17, 136):  # with dropout
                check(dtype, (2, 2, queries, dim), [(1, 2, queries, queries)], drops=True)
                check(dtype, (2, 2, queries, dim), [(1, 2, queries, queries)], masked=True, drops=True)
                check(dtype, (2, 2, queries, dim), [], drops=True)
                check(dtype, (2, 2, queries, dim), [(1, 2, queries, queries), (2, 1, queries, queries)], drops=True)
            for queries in (136, 250):  # two biases of all scores: the kernels for any biases
                check(dtype, (2, 2, queries, dim), [(1, 2, queries, queries), (2, 1, queries, queries)])
