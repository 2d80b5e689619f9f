"""Sums over outer dims: found in every spelling and memory order that one pass over rows can serve; the rest is refused with a reason."""

import contextlib

import pytest
import torch

import fusebackend
from fusebackend.testing import assert_pattern

pytestmark = pytest.mark.usefixtures("library")

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def check(interpreted, fn, *inputs, count=1, **kwargs):
    """Results have eager's strides and dtypes and, in fp32 and fp64, nearly its values."""
    expected = fn(*inputs)
    result = interpreted(fn, options={"fuse.patterns": "column_sum", "fuse.strict": True}, **kwargs)(*inputs)
    assert result.dtype == expected.dtype and result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    report = fusebackend.last_report()
    assert len(report.substitutions) == count, report
    return report


SPELLINGS = {
    "sum(0)": (lambda x: x.sum(0), (50, 33)),
    "mean(0)": (lambda x: x.mean(0), (50, 33)),
    "keepdim": (lambda x: x.sum(0, keepdim=True), (50, 33)),
    "negative dim": (lambda x: x.sum(-2), (50, 33)),
    "several dims": (lambda x: x.sum((0, 1)), (5, 7, 33)),
    "several dims, keepdim": (lambda x: x.mean((1, 2), keepdim=True), (5, 7, 3, 33)),
    "a dim in the middle": (lambda x: x.sum(1), (5, 70, 33)),
    "dims of size 1": (lambda x: x.sum((0, 1, 3)), (5, 7, 4, 1, 33)),
    "a kept dim of size 1": (lambda x: x.sum(0), (40, 1, 33)),
    "reshaped": (lambda x: x.reshape(-1, 33).sum(0), (5, 8, 33)),
    "transposed dims outside": (lambda x: x.transpose(0, 1).sum((0, 1)), (5, 8, 33)),
    "channels last": (lambda x: x.permute(0, 3, 1, 2).sum((0, 2, 3)), (3, 5, 6, 8)),
    "channels last, keepdim": (lambda x: x.permute(0, 3, 1, 2).sum((0, 2, 3), keepdim=True), (3, 5, 6, 8)),
    "a slice of rows": (lambda x: x[3:].sum(0), (50, 33)),
    "a slice of columns": (lambda x: x[:, 1:30].sum(0), (50, 33)),
    "every second row": (lambda x: x[::2].sum(0), (50, 33)),
    "inner slices of a batch": (lambda x: x[:, 2:9].sum(1), (4, 12, 33)),
    "in fp64": (lambda x: x.sum(0, dtype=torch.float64), (50, 33)),
    "a product": (lambda x: (x * x.cos()).sum(0), (50, 33)),
    "gathered rows": (lambda x: x[torch.arange(90, device=x.device) % 50].sum(0), (50, 33)),
    "empty": (lambda x: x[:0].sum(0), (50, 33)),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_spellings(interpreted, device, name, dtype):
    fn, shape = SPELLINGS[name]
    check(interpreted, fn, torch.randn(shape, device=device, dtype=dtype))


@pytest.mark.parametrize("name", ["sum(0)", "several dims", "a dim in the middle", "channels last", "keepdim", "mean(0)"])
def test_symbolic_sizes_compile_once(interpreted, device, name):
    fn, shape = SPELLINGS[name]
    compiled = interpreted(fn, options={"fuse.patterns": "column_sum"}, dynamic=True)
    for more in (0, 2, 5):
        x = torch.randn([n + more for n in shape], device=device)
        with torch.compiler.set_stance("fail_on_recompile") if more else contextlib.nullcontext():
            torch.testing.assert_close(compiled(x), fn(x))
    assert fusebackend.last_report().counts() == {"column_sum": 1}


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_16_bits_are_read_through_a_cast(interpreted, device, dtype):
    x = torch.randn(500, 40, device=device).to(dtype)
    report = check(interpreted, lambda x: x.float().sum(0), x)
    (found,) = report.substitutions
    assert "f16[500, 40] -> f32[40]" in str(report) and found.pattern == "column_sum"
    report = check(interpreted, lambda x: x.sum(0, dtype=torch.float32), x)
    assert "f16[500, 40] -> f32[40]" in str(report)


def test_16_bit_results_are_rounded_once(interpreted, device):
    x = torch.randn(3000, 40, device=device).bfloat16()
    found = interpreted(lambda x: x.sum(0), options={"fuse.patterns": "column_sum"})(x)
    exact = x.double().sum(0)
    assert bool(((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all())


REFUSED = {
    "a sum over all dims": (lambda x: x.sum(), None),
    "the innermost dim": (lambda x: x.sum(-1), None),
    "innermost in memory": (lambda x: x.transpose(2, 3).sum(2), None),
    "integers": (lambda x: x.long().sum(0), None),
    "dims on both sides": (lambda x: x.sum((0, 2)), "on both sides"),
    "kept dims in another order": (lambda x: x.permute(0, 2, 1, 3).sum(0), "another order"),
    "every second column": (lambda x: x[..., ::2].sum(0), "gaps"),
    "gaps between summed dims": (lambda x: x[:, :5].sum((0, 1)), "gaps between"),
    "a narrower result": (lambda x: x.sum(0, dtype=torch.float16), "not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, interpreted, device):
    fn, reason = REFUSED[name]
    x = torch.randn(4, 6, 8, 10, device=device)
    interpreted(fn, options={"fuse.patterns": "column_sum", "fuse.strict": True})(x)
    report = fusebackend.last_report()
    assert not report.substitutions
    reasons = [r.reason for r in report.rejections]
    assert not reasons if reason is None else reason in reasons[0]


@pytest.mark.codegen
def test_generated_code_of_gathered_products(device):
    def fn(x, i, w):
        return (torch.relu(x[i]) * w).sum(0)

    x, w = torch.randn(50, 4, 8, device=device), torch.randn(4, 8, device=device)
    assert_pattern(fn, x, torch.randint(50, (700,), device=device), w, pattern="column_sum", count=1)


def test_a_sum_of_products_is_a_matrix_product_first(interpreted, device):
    x, y = torch.randn(40, 30, 1, device=device), torch.randn(40, 1, 20, device=device)
    compiled = interpreted(lambda x, y: (x * y).sum(0), options={"fuse.patterns": ["contraction", "column_sum"]})
    torch.testing.assert_close(compiled(x, y), (x * y).sum(0))
    assert fusebackend.last_report().counts() == {"contraction": 1}
