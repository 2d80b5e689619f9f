"""The fp32 matmul family without a GPU: the ops' references and fakes, what is matched, what is refused and why."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusebackend.native import loader
from fusebackend.patterns.fp32_matmul import match as family
from fusebackend.rewriting import apply

aten = torch.ops.aten
ops = torch.ops.fusebackend


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    monkeypatch.setattr(family, "unavailable", lambda device: None)
    monkeypatch.setattr(family, "capability", lambda device: (9, 0))
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def rewritten(fn, *shapes, device="cuda", dtype=torch.float32):
    """Traces ``fn`` on fake tensors of these shapes and rewrites the graph; returns the graph and the outcome."""
    with FakeTensorMode():
        args = [torch.empty(s, device=device, dtype=dtype) for s in shapes]
        graph = make_fx(fn, decomposition_table=select_decomp_table())(*args).graph
    return graph, apply.rewrite(graph, [family.Fp32Matmul()], "forward", strict=True)


def calls(graph, target):
    return [n for n in graph.nodes if n.target is target]


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


@pytest.mark.parametrize("shape", [(512, 512, 512), (256, 256, 50176), (200704, 128, 128), (8192, 8192, 16), (1, 8192, 8192)])
def test_small_thin_and_shallow_products_stay_with_cublas(shape):
    m, n, k = shape
    graph, result = rewritten(aten.mm, (m, k), (k, n))
    assert not calls(graph, ops.matmul.default)
    assert "cuBLAS is as fast or faster" in result.rejections[0].reason


@pytest.mark.parametrize("shape", [(1024, 1024, 1024), (8192, 768, 768), (768, 768, 8192), (8192, 50257, 768), (12544, 1536, 512)])
def test_model_sized_products_are_taken(shape):
    m, n, k = shape
    assert family.pays(m, k, n)


def test_where_the_error_would_be_larger_than_cublass_it_stays():
    for k, taken in ((256, False), (512, True)):
        graph, result = rewritten(aten.mm, (8192, k), (k, 8192))
        assert bool(calls(graph, ops.matmul.default)) == taken
        assert taken or "the error may be" in result.rejections[0].reason


def test_a_lower_precision_setting_is_respected():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    graph, result = rewritten(aten.mm, (2048, 2048), (2048, 2048))
    assert not calls(graph, ops.matmul.default)
    assert "'tf32'" in result.rejections[0].reason


def test_a_missing_kernel_is_the_reason(monkeypatch):
    monkeypatch.setattr(family, "unavailable", lambda device: "no native library: no compiler")
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
    graph, _ = rewritten(lambda d, a, b: 0.125 * aten.addmm(d, a, b, alpha=2), (2048,), (2048, 2048), (2048, 2048))
    (node,) = calls(graph, ops.matmul.default)
    assert node.args[3:5] == (0.25, 0.125) and not calls(graph, aten.mul.Tensor)


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
        apply.rewrite(graph, [family.Fp32Matmul()], "forward", strict=True)
    assert calls(graph, ops.matmul.default) and len(mode.shape_env.guards) == guards


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_where_nothing_was_measured_cublas_stays(monkeypatch, capability):
    monkeypatch.undo()
    monkeypatch.setattr(family, "capability", lambda device: capability)
    monkeypatch.setattr(loader.Native, "why_not", lambda *args: None)
    graph, result = rewritten(aten.mm, (4096, 4096), (4096, 4096))
    assert bool(calls(graph, ops.matmul.default)) == (capability == (9, 0))
    if capability != (9, 0):
        (reason,) = (r.reason for r in result.rejections)
        assert f"compute capability {capability[0]}.{capability[1]}" in reason and "measured" in reason


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


@pytest.mark.parametrize("alpha, beta", [(1.0, 0.0), (-0.5, 2.0)])
def test_op_on_cpu(alpha, beta):
    a, b, d = torch.randn(3, 5, 7), torch.randn(3, 9, 7).mT, torch.randn(9)
    torch.library.opcheck(ops.matmul.default, (a, b, d, alpha, beta))
    torch.testing.assert_close(ops.matmul(a, b, d, alpha, beta), alpha * (a @ b) + beta * d)


@pytest.mark.parametrize("inner", [-1, -2])
@pytest.mark.parametrize("shape", [(5, 70), (3, 5, 70)])
def test_planes_sum_to_the_operand(shape, inner):
    x = torch.randn(shape) * torch.exp(8 * torch.randn(shape))
    x[..., 0, 0], x[..., 1, 1] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
    torch.library.opcheck(ops.matmul_planes.default, (x, inner))
    planes = ops.matmul_planes(x, inner)
    inner_size = x.shape[inner]
    assert planes.shape[-1] % 64 == 0 and planes.isfinite().all()
    total = planes[..., :inner_size].double().sum(1)
    total = total if x.dim() == 3 else total[0]
    raised = (total if inner == -1 else total.mT) / x.double() - 1
    assert ((raised >= 0) & (raised < 2.0**-24)).all()


def test_planes_of_integers_are_exact():
    x = torch.randint(-(2**16), 2**16, (40, 70)).float()
    assert torch.equal(ops.matmul_planes(x, -1)[0, :, :, :70].double().sum(0).float(), x)
