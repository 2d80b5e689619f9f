"""Products of small matrices: found in forward and backward, with symbolic batches; the rest is refused with a reason."""

import contextlib

import pytest
import torch
from families.traced_graphs import traced
from torch._inductor import config as inductor_config

import fusebackend
from fusebackend.patterns.small_bmm.match import SmallBmm
from fusebackend.rewriting.pattern import Match
from fusebackend.testing import assert_pattern

pytestmark = pytest.mark.usefixtures("library")

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16


@inductor_config.patch(shape_padding=False)  # which makes results slices of larger ones on GPUs
def check(interpreted, fn, *inputs, count=1, **kwargs):
    expected = fn(*inputs)
    result = interpreted(fn, options={"fuse.patterns": "small_bmm", "fuse.strict": True}, **kwargs)(*inputs)
    assert result.dtype == expected.dtype and result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    assert len(fusebackend.last_report().substitutions) == count, fusebackend.last_report()


SPELLINGS = {
    "bmm": (torch.bmm, (70, 5, 6), (70, 6, 7)),
    "matmul of more dims": (torch.matmul, (7, 10, 5, 6), (7, 10, 6, 7)),
    "the first transposed": (lambda a, b: a.mT @ b, (70, 6, 5), (70, 6, 7)),
    "the second transposed": (lambda a, b: a @ b.mT, (70, 5, 6), (70, 7, 6)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (70, 5, 6), (70, 6, 7)),
    "one row": (torch.bmm, (70, 1, 6), (70, 6, 7)),
    "a slice of the batch": (lambda a, b: a[5:] @ b[5:], (70, 5, 6), (70, 6, 7)),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_spellings(interpreted, device, name, dtype):
    fn, a, b = SPELLINGS[name]
    check(interpreted, fn, torch.randn(a, device=device).to(dtype), torch.randn(b, device=device).to(dtype))


def test_a_symbolic_batch_compiles_once(interpreted, device):
    def fn(a, b):
        return a @ b

    compiled = interpreted(fn, options={"fuse.patterns": "small_bmm"})
    for batch in (70, 33, 1000):
        a, b = torch.randn(batch, 5, 6, device=device), torch.randn(batch, 6, 7, device=device)
        for t in (a, b):
            torch._dynamo.mark_dynamic(t, 0)
        with torch.compiler.set_stance("fail_on_recompile") if batch != 70 else contextlib.nullcontext():
            torch.testing.assert_close(compiled(a, b), fn(a, b))
    assert fusebackend.last_report().counts() == {"small_bmm": 1}


def test_gradients(device):
    a, b = (torch.randn(60, 8, 8, device=device, requires_grad=True) for _ in range(2))
    assert_pattern(lambda a, b: (a @ b).tanh(), a, b, pattern="small_bmm", count=3, training=True)


@pytest.mark.codegen
def test_generated_code(device):
    a, b = torch.randn(60, 8, 8, device=device), torch.randn(60, 8, 8, device=device)
    assert_pattern(lambda a, b: (a.cos() @ b.mT).sin(), a, b, pattern="small_bmm", count=1)


def test_symbolic_matrices_may_outgrow_the_kernel(interpreted, device):
    def fn(a, b):
        return a @ b.mT

    compiled = interpreted(fn, options={"fuse.patterns": "small_bmm"}, dynamic=True)
    for size in (5, 12, 32, 33, 70):
        a, b = torch.randn(9, size + 1, size, device=device), torch.randn(9, size + 2, size, device=device)
        with torch.compiler.set_stance("fail_on_recompile") if size != 5 else contextlib.nullcontext():
            torch.testing.assert_close(compiled(a, b), fn(a, b))
    assert fusebackend.last_report().counts() == {"small_bmm": 1}


REFUSED = {
    "large matrices": (lambda a: a @ a, (4, 33, 33), None),
    "a plain product": (lambda a: a @ a, (8, 8), None),
    "rows with gaps": (lambda a: a[:, :, :8] @ a[:, :, :8].mT, (6, 8, 9), "without a gap"),
    "an operand of all products": (lambda a: a @ a[:1].expand(6, 8, 8), (6, 8, 8), "without a gap"),
    "fp64": (lambda a: a.double() @ a.double(), (6, 8, 8), "not computed here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, interpreted, device):
    fn, shape, reason = REFUSED[name]
    interpreted(fn, options={"fuse.patterns": "small_bmm", "fuse.strict": True})(torch.randn(shape, device=device))
    report = fusebackend.last_report()
    assert not report.substitutions
    reasons = [r.reason for r in report.rejections]
    assert not reasons if reason is None else reason in reasons[0]


def test_fp32_products_are_left_where_less_will_do(kernels_for_every_device, monkeypatch):
    graph = traced(torch.bmm, (70, 8, 8, f32), (70, 8, 8, f32))
    (node,) = (n for n in graph.nodes if n.target in SmallBmm.anchors)
    assert isinstance(SmallBmm().match(node), Match)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert "less than fp32" in SmallBmm().match(node).reason
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_what_both_forms_do(kernels_for_every_device):
    def described(*inputs, function=torch.bmm, **options):
        graph = traced(function, *inputs, **options)
        (match,) = (SmallBmm().match(n) for n in graph.nodes if n.target in SmallBmm.anchors)
        return SmallBmm().estimate(match)

    found = described((1000, 4, 8, f32), (1000, 8, 12, f32))
    (ours,), (library,) = found.ours, found.inductor
    assert (ours.kind, library.kind) == ("small_bmm", "library bmm")
    for work in (ours, library):
        assert work.quantities["bytes"] == 1000 * (32 + 96 + 48) * 4 and work.quantities["products"] == 1000 * 4 * 8 * 12
        assert work.shape["a transposed"] == work.shape["b transposed"] == work.shape["dynamic"] == 0
    assert ours.quantities["blocks"] > 1
    back = described((1000, 8, 4, f32), (1000, 12, 8, f32), function=lambda a, b: a.mT @ b.mT)
    assert back.ours[0].shape["a transposed"] == back.ours[0].shape["b transposed"] == 1
    on_cpu = described((1000, 4, 8, f32), (1000, 8, 12, f32), device="cpu")
    assert on_cpu.ours[0].kind == "small_bmm cpu" and on_cpu.inductor[0].kind == "library bmm cpu"
    assert described((0, 4, 8, f32), (0, 8, 12, f32)).pays is False
