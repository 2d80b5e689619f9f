"""A graph's code reads as PyTorch prints it."""

import math
import operator

import pytest
import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusebackend.rewriting.graph_code import graph_code


def step(x, y, index):
    values, _ = torch.sort(x)
    z = torch.cat([x, x], 1).sum((0, 2), keepdim=True)
    torch.full((3,), 1.0)
    return (
        x.transpose(1, 2) + y,
        values,
        z.to(torch.bfloat16),
        x.index_add(0, index, x),
        torch.empty(2, memory_format=torch.contiguous_format),
    )


def printed(module):
    """What PyTorch prints, without the comments."""
    return statements(module.print_readable(print_output=False, include_stride=True, include_device=True))


def statements(code):
    return [line for line in code.split("\n") if line.strip() and not line.strip().startswith("#")]


def test_statements_are_those_that_pytorch_prints():
    gm = make_fx(step, tracing_mode="fake")(torch.randn(4, 6, 8), torch.randn(4, 8, 6), torch.arange(4))
    found = statements(graph_code(gm.graph))
    assert found == printed(gm) and len(found) > 10
    assert any(line.endswith(";  full = None") for line in found), "what nothing reads is freed at once"


def test_symbolic_sizes_are_told():
    gm = make_fx(lambda x: x.new_zeros(x.shape[0] * 2), tracing_mode="symbolic")(torch.randn(5, 3))
    expected = [line.replace("sym_size_int * 2", "operator.mul(sym_size_int, 2)") for line in printed(gm)]
    assert statements(graph_code(gm.graph)) == expected and any('"Sym(' in line for line in expected)


def test_comments_tell_the_line_of_the_program_once():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.sin.default, (x,))
    second = graph.call_function(torch.ops.aten.cos.default, (first,))
    third = graph.call_function(operator.neg, (second,))
    graph.output((third,))
    stack = 'File "{}", line {}, in forward\n    return x.sin()\n'
    first.meta["stack_trace"] = second.meta["stack_trace"] = stack.format("net.py", 3)
    third.meta |= {"stack_trace": stack.format("net.py", 4), "autograd_backward": True}
    with FakeTensorMode():
        first.meta["val"] = torch.empty(2)
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert graph_code(gm.graph).split("\n") == [
        f"class {type(gm).__name__}(torch.nn.Module):",
        "    def forward(self, x):",
        "        # File: net.py:3 in forward, code: return x.sin()",
        '        sin_default: "f32[2][1]cpu" = torch.ops.aten.sin.default(x);  x = None',
        "        cos_default = torch.ops.aten.cos.default(sin_default);  sin_default = None",
        "",
        "        # Backward of forward node: File: net.py:4 in forward, code: return x.sin()",
        "        neg = operator.neg(cos_default);  cos_default = None",
        "        return (neg,)",
        "",
    ]


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (math.trunc, "math.trunc"),
        (triton_kernel_wrapper_mutation, "torch.ops.higher_order.triton_kernel_wrapper_mutation"),
        (torch.sym_max, "torch.sym_max"),
    ],
)
def test_what_is_no_operator_of_a_library_is_named(target, named):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.create_node("call_function", target, (x,), {"key": x}, "found"),))
    assert f"found = {named}(x, key = x);  x = None" in graph_code(fx.GraphModule(torch.nn.Module(), graph).graph)


def test_a_graph_within_a_graph_is_printed_too():
    inner = fx.symbolic_trace(lambda x: torch.ops.aten.sin.default(x))
    graph = fx.Graph()
    x = graph.placeholder("x")
    branch = graph.get_attr("branch")
    graph.output((graph.call_function(torch.utils.checkpoint.checkpoint, (branch, x)),))
    gm = fx.GraphModule({"branch": inner}, graph)
    assert "aten.sin.default" in graph_code(gm.graph)
