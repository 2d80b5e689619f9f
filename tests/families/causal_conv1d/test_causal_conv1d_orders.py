"""Which memory orders are chosen, and that no legal convolution is refused for profit.

The orders of CUDA kernels are decided on fake tensors, so no GPU is needed.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fusebackend
from fusebackend.patterns.causal_conv1d.orders import Orders, backward_orders, forward_orders
from fusebackend.patterns.causal_conv1d.read_backward import Backward
from fusebackend.patterns.causal_conv1d.read_convolution import Convolution
from fusebackend.patterns.causal_conv1d.read_forward import Forward

pytestmark = pytest.mark.usefixtures("library")

BTC, BCT = True, False
IN_BTC, IN_BCT, TRANSPOSED = Orders(BTC, BTC), Orders(BCT, BCT), Orders(None, BCT)
BF16, FP32 = torch.bfloat16, torch.float32


def rows(btc, dtype, channels=64, length=128, device="cuda"):
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = (2, length, channels) if btc else (2, channels, length)
        x = torch.empty(shape, dtype=dtype, device=device)
        return x.transpose(1, 2) if btc else x


def value(graph, tensor, op="placeholder"):
    name = f"v{len(graph.nodes)}"
    node = graph.placeholder(name) if op == "placeholder" else graph.call_function(torch.ops.aten.relu.default, (graph._root.prev,))
    node.meta["val"] = tensor
    return node


def convolution(graph, x, taps):
    weight = value(graph, rows(BCT, x.dtype).new_empty(x.shape[1], 1, taps))
    return Convolution(value(graph, x), weight, taps - 1, 0)


def forward(x, taps, *, output, returned=False, left=None):
    graph = fx.Graph()
    conv = convolution(graph, x, taps)
    node = value(graph, output, "call")
    seen = graph.call_function(torch.ops.aten.permute.default, (node, [0, 2, 1])) if returned == "as a view" else node
    graph.output(seen if returned else None)
    left = taps - 1 if left is None else left
    return forward_orders(Forward(conv, None, left, taps - 1 - left, 0.0, False, node, (node,), node))


def backward(x, taps, *, grad, dx, computed=False):
    graph = fx.Graph()
    conv = convolution(graph, x, taps)
    grad = value(graph, grad, "call" if computed else "placeholder")
    result = None if dx is None else value(graph, dx, "call")
    return backward_orders(Backward(conv, None, grad, False, taps - 1, 0.0, False, (result, None, None), ()))


@pytest.mark.parametrize("dtype, taps, orders", [(BF16, 8, IN_BTC), (BF16, 9, IN_BCT), (FP32, 32, IN_BTC), (FP32, 33, IN_BCT)])
def test_kernels_for_few_taps_stay_in_the_order_of_x(dtype, taps, orders):
    assert forward(rows(BTC, dtype), taps, output=rows(BTC, dtype)) == orders
    assert backward(rows(BTC, dtype), taps, grad=rows(BTC, dtype), dx=rows(BTC, dtype)) == orders
    assert forward(rows(BCT, dtype), taps, output=rows(BTC, dtype)) == IN_BCT


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_result_of_the_graph_is_written_in_its_order(dtype):
    x, output = rows(BTC, dtype), rows(BCT, dtype)
    assert forward(x, 4, output=output, returned=True) == TRANSPOSED
    assert forward(x, 4, output=output, returned="as a view") == TRANSPOSED
    assert forward(x, 4, output=output) == IN_BTC, "Inductor reads it in any order"
    assert forward(x, 5, output=output, returned=True) == IN_BTC, "only kernels for up to 4 taps transpose"
    assert forward(x, 4, output=output, returned=True, left=1) == IN_BTC, "only causal ones"
    odd = [rows(order, dtype, channels=63) for order in (BTC, BCT)]
    assert forward(odd[0], 4, output=odd[1], returned=True) == IN_BTC, "only pairs of channels"


def test_a_gradient_that_comes_into_the_graph_is_read_in_its_order():
    x, grad = rows(BTC, BF16), rows(BCT, BF16)
    assert backward(x, 4, grad=grad, dx=grad) == TRANSPOSED
    assert backward(x, 4, grad=grad, dx=None) == TRANSPOSED
    assert backward(x, 4, grad=grad, dx=x) == IN_BTC
    assert backward(x, 4, grad=grad, dx=grad, computed=True) == IN_BTC, "Inductor writes it in any order"
    assert backward(rows(BTC, FP32), 4, grad=rows(BCT, FP32), dx=rows(BCT, FP32)) == IN_BTC, "only 16-bit types"
    odd = [rows(order, BF16, length=127) for order in (BTC, BCT)]
    assert backward(odd[0], 4, grad=odd[1], dx=odd[1]) == IN_BTC, "only whole vectors of samples"


def test_cpu_kernels_take_any_order_and_write_the_one_that_is_read():
    for order in (BTC, BCT):
        assert forward(rows(BCT, FP32, device="cpu"), 4, output=rows(order, FP32, device="cpu")) == Orders(None, order)
        assert backward(rows(BCT, FP32, device="cpu"), 4, grad=rows(BCT, FP32, device="cpu"), dx=rows(order, FP32, device="cpu")) == Orders(
            None, order
        )


NEIGHBOURS = (lambda x: x, torch.sin, torch.relu, lambda x: 2 * x)


@pytest.mark.parametrize("seed", range(6))
def test_small_convolutions_beside_pointwise_neighbours_are_applied_with_the_gate_off(device, seed):
    """Legal convolutions that profit rules of other families would refuse: results of a few bytes, neighbours that Inductor would fuse."""
    draw = random.Random(seed)
    before, after, silu = draw.choice(NEIGHBOURS), draw.choice(NEIGHBOURS), draw.random() < 0.5
    batch, channels, length, taps = draw.randint(1, 3), draw.randint(2, 5), draw.randint(1, 9), draw.randint(1, 5)
    x = torch.randn(batch, channels, length, device=device, requires_grad=True)
    weight = torch.randn(channels, 1, taps, device=device, requires_grad=True)

    def fn(x, weight):
        y = F.conv1d(F.pad(before(x), (taps - 1, 0)), weight, groups=channels)
        return after(F.silu(y) if silu else y)

    expected = fn(x, weight)
    grad = torch.randn_like(expected)
    torch._dynamo.reset()
    options = {"fuse.interpret": True, "fuse.strict": True, "fuse.gate": "off"}
    found = torch.compile(fn, backend="fuse", options=options)(x, weight)
    torch.testing.assert_close(found, expected)
    for got, want in zip(torch.autograd.grad(found, (x, weight), grad), torch.autograd.grad(fn(x, weight), (x, weight), grad)):
        torch.testing.assert_close(got, want)
    report = fusebackend.last_report()
    assert sorted(s.pattern for s in report.substitutions) == ["causal_conv1d", "causal_conv1d_backward"], report
    assert not report.rejections
