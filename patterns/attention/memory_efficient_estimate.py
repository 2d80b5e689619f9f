"""What PyTorch's memory-efficient attention makes a GPU do, and ours in its place."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.arrange import has_rows
from fusebackend.patterns.attention.dims import is_cast
from fusebackend.patterns.attention.work import Attended, BiasFacts, work
from fusebackend.rewriting.pattern import Estimate, Generated, Work, Workload
from fusebackend.rewriting.workload import log2, streamed


def workload(
    operands: Sequence[fx.Node], bias: fx.Node, out: fx.Node, causal: bool, backward: bool, bias_gradient: fx.Node | None
) -> Estimate | Workload:
    """The work of both forms.

    Args:
        operands: queries, keys and values.
        bias: before it was expanded.
        out: the result.
        backward: whether gradients are computed.
        bias_gradient: that of ``bias``; None if it is not wanted. Where the bias was expanded it is a sum of what the library writes, or
            that sum rounded.
    """
    q, k, v = map(g.value, operands)
    small = g.value(bias)
    known = g.hints((*q.shape, k.shape[2], v.shape[3]))
    of_bias = g.hints((1,) * (4 - small.dim()) + tuple(small.shape))
    if known is None or of_bias is None:
        return Estimate(None, "a size depends on data, so it is not known whether the kernels pay", "unmeasured")
    batch, heads, queries, depth, keys, width = known
    gradient = small.itemsize if bias_gradient is not None else 0
    facts = BiasFacts((of_bias[0], 1, *of_bias[1:]), small.itemsize, keys * small.itemsize % 16 == 0, gradient)  # type: ignore[arg-type]
    dynamic = not all(isinstance(n, int) for n in (*q.shape, *k.shape, *v.shape))
    site = Attended((batch, 1, heads, queries, keys, depth, width), [facts], causal, q.device, q.itemsize, dynamic)
    # Zeros in the rows whose scores are all -inf, and the bias in contiguous rows.
    passed = [site.heads * queries * width * site.itemsize] + ([] if has_rows(small) else [math.prod(of_bias) * small.itemsize])
    ours = [work(site, False), *([work(site, True)] if backward else []), *(streamed(2.0 * size, g.value(out)) for size in passed)]
    theirs: list[Work | Generated] = [_library(site, False), *([_library(site, True)] if backward else [])]
    if bias_gradient is not None and bias_gradient.target is not operator.getitem:
        rounded = bias_gradient.all_input_nodes if is_cast(bias_gradient) else []
        theirs.append(Generated((*rounded, bias_gradient)))
    return Workload(tuple(ours), tuple(theirs))


def _library(site: Attended, backward: bool) -> Work:
    """That of PyTorch's forward or backward, which reads the bias, and writes its gradient, for each head of the batch."""
    _, _, _, queries, keys, dim, value_dim = site.sizes
    (bias,) = site.biases
    tensors = site.heads * site.itemsize * (queries + keys) * (dim + value_dim)
    gradients = site.scores * bias.gradient_itemsize if backward else 0
    quantities = {
        "flops": (5.0 if backward else 2.0) * site.scores * (dim + value_dim),
        "bytes": float((2 if backward else 1) * tensors + gradients),
        "biases": float(site.scores),
    }
    shape = {
        "log2 queries": log2(queries),
        "log2 keys": log2(keys),
        "log2 dim": log2(max(dim, value_dim)),
        "log2 heads": log2(site.heads),
        "bias gradients": float(gradients > 0),
        "causal": float(site.causal),
        "dynamic": float(site.dynamic),
    }
    return Work(f"memory-efficient attention{' backward' if backward else ''}", quantities, shape)
