"""Which products are matched, what they become, and which are refused as not right, without a GPU."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from traced_products import aten, calls, h200, ops, rewritten

from fusebackend.patterns.fp32_matmul import match
from fusebackend.rewriting import apply

__all__ = ["h200"]
pytestmark = pytest.mark.usefixtures("h200")


def test_every_spelling_becomes_one_op():
    def f(a, b, bias, x, y, z):
        return aten.mm(a, b), aten.addmm(bias, a, b, beta=0.5, alpha=2), aten.bmm(x, y), aten.baddbmm(z, x, y)

    graph, _ = rewritten(f, (2048, 1024), (1024, 2048), (2048,), (4, 1024, 1024), (4, 1024, 1024), (4, 1024, 1024))
    found = [(n.args[2] is not None, n.args[3], n.args[4]) for n in calls(graph, ops.matmul.default)]
    assert found == [(False, 1.0, 0.0), (True, 2.0, 0.5), (False, 1.0, 0.0), (True, 1.0, 1.0)]


def test_a_bias_that_is_scaled_by_zero_is_not_read():
    graph, _ = rewritten(lambda d, a, b: aten.addmm(d, a, b, beta=0), (2048,), (2048, 2048), (2048, 2048))
    (node,) = calls(graph, ops.matmul.default)
    assert node.args[2] is None


def test_the_gradient_of_a_linear_layer_is_split_once():
    def backward(grad, weight, x):
        return aten.mm(grad, weight), aten.mm(aten.permute(grad, [1, 0]), x)

    graph, _ = rewritten(backward, (8192, 2304), (2304, 768), (8192, 768))
    (planes,) = calls(graph, ops.matmul_planes.default)
    dx, dw = calls(graph, ops.matmul.default)
    assert planes.args[1] == -1
    assert dx.args[5:7] == (planes, -1) and dw.args[5:7] == (planes, -2)
    assert dx.args[7] is None and dw.args[7] is None


def test_an_operand_of_one_product_is_split_inside_it():
    graph, _ = rewritten(aten.mm, (2048, 1024), (1024, 2048))
    assert not calls(graph, ops.matmul_planes.default)


def test_a_lower_precision_setting_is_respected():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    graph, result = rewritten(aten.mm, (2048, 2048), (2048, 2048))
    assert not calls(graph, ops.matmul.default)
    assert "'tf32'" in result.rejections[0].reason


def test_a_missing_kernel_is_the_reason(monkeypatch):
    monkeypatch.setattr(match, "unavailable", lambda device: "no native library: no compiler")
    _, result = rewritten(aten.mm, (2048, 2048), (2048, 2048))
    assert result.rejections[0].reason == "no native library: no compiler"


def test_on_a_cpu_the_report_says_that_the_vendor_library_stays():
    graph, result = rewritten(aten.mm, (2048, 2048), (2048, 2048), device="cpu")
    assert not calls(graph, ops.matmul.default) and "vendor library" in result.rejections[0].reason
    assert not rewritten(aten.mm, (64, 64), (64, 64), device="cpu")[1].rejections


@pytest.mark.parametrize("device, dtype", [("cpu", torch.float64), ("cuda", torch.bfloat16), ("cuda", torch.float64)])
def test_what_is_no_fp32_product_on_a_gpu_is_no_candidate(device, dtype):
    graph, result = rewritten(aten.mm, (2048, 2048), (2048, 2048), device=device, dtype=dtype)
    assert not calls(graph, ops.matmul.default) and not result.rejections


def test_a_factor_is_absorbed():
    graph, _ = rewritten(lambda a, b: 0.125 * aten.mm(a, b), (2048, 2048), (2048, 2048))
    (node,) = calls(graph, ops.matmul.default)
    assert node.args[3:5] == (0.125, 0.0) and not calls(graph, aten.mul.Tensor)
    graph, _ = rewritten(lambda d, a, b: -0.5 * aten.addmm(d, a, b, alpha=0.25, beta=0), (2048,), (2048, 2048), (2048, 2048))
    (node,) = calls(graph, ops.matmul.default)
    assert node.args[2:5] == (None, -0.125, 0.0) and not calls(graph, aten.mul.Tensor)


@pytest.mark.parametrize("factor", [1e-30, 0.0, float("inf"), 1e-300, 3e38])
def test_a_factor_that_would_hide_or_cause_an_overflow_is_not_absorbed(factor):
    """(a @ b) * 1e30 is infinite where a @ b is 1e9, whatever it is multiplied by then."""
    graph, _ = rewritten(lambda d, a, b: aten.addmm(d, a, b, alpha=1e30, beta=0) * factor, (2048,), (2048, 2048), (2048, 2048))
    (node,) = calls(graph, ops.matmul.default)
    assert node.args[3:5] == (1e30, 0.0) and calls(graph, aten.mul.Tensor)


def test_a_factor_behind_an_addend_is_not_absorbed():
    """(a @ b + d) * 100 is 0 where a @ b is 1e37 and d is -1e37; 100 * a @ b is infinite."""
    graph, _ = rewritten(lambda d, a, b: aten.addmm(d, a, b) * 100.0, (2048,), (2048, 2048), (2048, 2048))
    (node,) = calls(graph, ops.matmul.default)
    assert node.args[3:5] == (1.0, 1.0) and calls(graph, aten.mul.Tensor)


def test_a_factor_beside_another_use_stays():
    def f(a, b):
        y = aten.mm(a, b)
        return y, y * 2.0

    graph, _ = rewritten(f, (2048, 2048), (2048, 2048))
    assert calls(graph, ops.matmul.default)[0].args[3] == 1.0 and calls(graph, aten.mul.Tensor)


def test_a_large_operand_is_not_split_for_good():
    def backward(grad, weight, x):
        return aten.mm(grad, weight), aten.mm(aten.permute(grad, [1, 0]), x)

    graph, result = rewritten(backward, (8192, 50257), (50257, 768), (8192, 768))
    assert not calls(graph, ops.matmul_planes.default) and len(calls(graph, ops.matmul.default)) == 2
    assert all("at most 1024 MiB of temporary planes" in s.note for s in result.substitutions)


def test_sizes_are_judged_without_guards():
    def f(a, b):
        return a @ b

    examples = [torch.empty(shape, device="meta") for shape in ((2048, 1024), (1024, 3072))]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        args = [torch.empty(mode.from_tensor(x, static_shapes=False).shape, device="cuda") for x in examples]
        assert isinstance(args[0].shape[0], torch.SymInt)
        graph = make_fx(f)(*args).graph
        guards = len(mode.shape_env.guards)
        apply.rewrite(graph, [match.Fp32Matmul()], "forward", strict=True)
    assert calls(graph, ops.matmul.default) and len(mode.shape_env.guards) == guards


@pytest.mark.parametrize(("rows", "depth"), [("unknown", 1024), (2048, "unknown")])
def test_strides_that_only_the_data_decide_are_refused(rows, depth):
    """Inductor of torch 2.11 can not bring such operands into an order of strides; rows are no part of any stride."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        unknown = mode.shape_env.create_unbacked_symint()
        torch._check(unknown >= 2)
        m, k = (unknown if n == "unknown" else n for n in (rows, depth))
        graph = torch.fx.Graph()
        a, b = graph.placeholder("a"), graph.placeholder("b")
        product = graph.call_function(aten.mm.default, (a, b))
        graph.output((product,))
        a.meta["val"], b.meta["val"] = torch.empty(m, k, device="cuda"), torch.empty(k, 3072, device="cuda")
        product.meta["val"] = torch.empty(m, 3072, device="cuda")
        torch.fx.GraphModule(torch.nn.Module(), graph)
        outcome = apply.rewrite(graph, [match.Fp32Matmul()], "forward", strict=True)
    if rows == "unknown":
        assert calls(graph, ops.matmul.default)
    else:
        assert "are not known before run time (unbacked symbols)" in outcome.rejections[0].reason


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_float32_matmul_precision(setting):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        graph, _ = rewritten(aten.mm, (2048, 2048), (2048, 2048))
    finally:
        torch.set_float32_matmul_precision(before)
    assert bool(calls(graph, ops.matmul.default)) == (setting == "highest")


def test_allow_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        graph, _ = rewritten(aten.mm, (2048, 2048), (2048, 2048))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert not calls(graph, ops.matmul.default)
