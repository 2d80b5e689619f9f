"""What Inductor is asked: which kernels it generates. That it is asked with less work than it takes itself changes none of them."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.sizevars import SizeVarAllocator
from torch.fx.experimental.proxy_tensor import make_fx

from fusebackend.profitability import inductor_kernels
from fusebackend.profitability.region import alone


def elementwise(x, y):
    return (x + 1) * y.transpose(0, 1).sigmoid()


def copy_of_heads(x, y):
    return x.reshape(x.shape[0], x.shape[1], 4, -1).permute(0, 2, 1, 3).reshape(x.shape[0] * 4, -1) + 1


def rows_that_wrap_around(x, y):
    return x.flatten().unfold(0, 12, 5).sum(1), y.roll((1, 3), (0, 1)), x.repeat(1, 2, 1)


def concatenated(x, y):
    return torch.cat([x, y.transpose(0, 1), x[:, ::2]], 1).relu()


def softmax_and_moments(x, y):
    return x.softmax(-1), F.layer_norm(y, y.shape[-1:]), x.var((0, 1))


def sums_that_share_a_pass(x, y):
    return (x * y.transpose(0, 1)).sum((0, 1)), x.sum((0, 1)), (x * x).sum(2)


def by_index(x, y):
    return y[torch.arange(y.shape[0], device=y.device) // 2 % 3], F.pad(x, (1, 2, 0, 3), value=2.0).sum(1)


GRAPHS = [elementwise, copy_of_heads, rows_that_wrap_around, concatenated, softmax_and_moments, sums_that_share_a_pass, by_index]


@pytest.mark.parametrize("sizes", ["fake", "symbolic"], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", GRAPHS)
def test_arithmetic_of_sizes_that_is_left_out_changes_no_kernel(function, sizes, device):
    inputs = torch.randn(24, 20, 48, device=device), torch.randn(20, 24, 48, device=device)
    graph = make_fx(function, tracing_mode=sizes, decomposition_table=select_decomp_table())(*inputs).graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]

    def generated():
        return inductor_kernels._generated_code(*alone(nodes)[:2])

    with mock.patch.object(inductor_kernels, "_SizeVarAllocator", SizeVarAllocator):
        by_inductor = generated()
    assert "empty" in by_inductor
    assert generated() == by_inductor
