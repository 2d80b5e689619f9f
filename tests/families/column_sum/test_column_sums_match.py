"""Sums that one pass computes together, and sums made of another one's result: found where the graph allows it, and right elsewhere too."""

import contextlib

import pytest
import torch

import fusebackend
from fusebackend.testing import assert_pattern

pytestmark = pytest.mark.usefixtures("library")

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
OPTIONS = {"fuse.patterns": "column_sum", "fuse.strict": True}


def calls(report):
    """The operators of the replacements."""
    found = [name for made in report.substitutions for name in made.replacement]
    return sorted(n.split(".")[1] for n in found if n.startswith("fusebackend."))


def check(interpreted, fn, *inputs, wanted, **kwargs):
    """Results have eager's strides and dtypes and nearly its values."""
    expected = fn(*inputs)
    result = interpreted(fn, options=OPTIONS, **kwargs)(*inputs)
    for a, b in zip(result, expected):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=3e-2 if b.dtype.itemsize == 2 else 1e-4, atol=1e-3)
    report = fusebackend.last_report()
    assert calls(report) == wanted, report


TOGETHER = {
    "a factor": lambda x, y: (x.sum(0), (x * y).sum(0)),
    "the other factor": lambda x, y: (y.sum(0), (x * y).sum(0)),
    "squares": lambda x, y: (x.sum(0), (x * x).sum(0)),
    "pow": lambda x, y: (x.mean(0), x.pow(2).mean(0)),
    "products alone": lambda x, y: ((x * y).sum(0),),
    "squares alone": lambda x, y: (x.square().sum(0),),
    "a mean beside a sum": lambda x, y: (x.mean(0), (x * y).sum(0)),
    "keepdim": lambda x, y: (x.sum((0, 1), keepdim=True), (x * y).sum((0, 1))),
    "in the middle": lambda x, y: (x.sum(1), (x * y).sum(1)),
    "products that others read": lambda x, y: (x.sum(0), (x * y).sum(0), (x * y).relu()),
    "through casts": lambda x, y: (x.float().sum(0), (x.float() * y.float()).sum(0)),
    "a view of the first": lambda x, y: (x.sum(0, keepdim=True).view(-1), (x * y.cos()).sum(0)),
}


@pytest.mark.parametrize("dtype", [f32, bf16, f16], ids=str)
@pytest.mark.parametrize("name", TOGETHER)
def test_one_pass(interpreted, device, name, dtype):
    x, y = torch.randn(2, 40, 30, 24, device=device).to(dtype)
    check(interpreted, TOGETHER[name], x, y, wanted=["column_sums"])


def test_channels_last(interpreted, device):
    x, y = (t.permute(0, 3, 1, 2) for t in torch.randn(2, 6, 7, 5, 24, device=device))
    check(interpreted, lambda x, y: (x.sum((0, 2, 3)), (x * y).sum((0, 2, 3))), x, y, wanted=["column_sums"])


@pytest.mark.parametrize("name", ["a factor", "squares", "in the middle", "products alone", "keepdim"])
def test_symbolic_sizes_compile_once(interpreted, device, name):
    compiled = interpreted(TOGETHER[name], options=OPTIONS, dynamic=True)
    for more in (0, 2, 5):
        x, y = torch.randn(2, 40 + more, 30 + more, 24 + more, device=device)
        with torch.compiler.set_stance("fail_on_recompile") if more else contextlib.nullcontext():
            torch.testing.assert_close(compiled(x, y), TOGETHER[name](x, y), rtol=1e-4, atol=1e-3)
    assert calls(fusebackend.last_report()) == ["column_sums"]


APART = {
    "a factor that needs the other sum": (lambda x, y: ((s := x.sum(0)), (x * (y - s)).sum(0)), ["column_sum", "column_sums"]),
    "centred squares": (lambda x, y: ((m := x.mean(0)), (x - m).square().mean(0)), ["column_sum", "column_sums"]),
    "a broadcast factor": (lambda x, y: (x.sum(0), (x * y[0, 0]).sum(0)), ["column_sum", "column_sum"]),
    "other dims": (lambda x, y: (x.sum(1), (x * y).sum(0)), ["column_sum", "column_sums"]),
    "a factor of another dtype": (lambda x, y: (x.sum(0), (x * y.double()).sum(0)), ["column_sum", "column_sum"]),
    "a factor in another order": (lambda x, y: (x.sum(0), (x * y.mT.contiguous().mT).sum(0)), ["column_sum", "column_sum"]),
    "no product": (lambda x, y: (x.sum(0), (x + y).sum(0)), ["column_sum", "column_sum"]),
    "a factor of its own for each": (lambda x, y: (y.sum(0), x.sum(0)), ["column_sum", "column_sum"]),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_summed_apart(interpreted, device, name):
    fn, wanted = APART[name]
    check(interpreted, fn, *torch.randn(2, 40, 30, 24, device=device), wanted=wanted)


def test_a_product_in_16_bits_is_rounded(interpreted, device):
    """As eager rounds it: the sum of what is lost would be seen."""
    x = torch.full((512, 8), 1 + 2**-5, device=device).bfloat16()
    for fn, wanted in (
        (lambda x: ((x * x).float().sum(0), x.float().sum(0)), 512 * (1 + 2**-4)),
        (lambda x: ((x.float() * x.float()).sum(0), x.float().sum(0)), 512 * (1 + 2**-4 + 2**-10)),
    ):
        result = interpreted(fn, options=OPTIONS)(x)
        assert float(result[0][0]) == wanted
        assert calls(fusebackend.last_report()) == ["column_sums"]


NESTED = {
    "sums": lambda x: (x.sum(0), x.sum((0, 1))),
    "the outer first": lambda x: (x.sum((0, 1)), x.sum(0)),
    "the inner dim": lambda x: (x.sum(1), x.sum((0, 1))),
    "means": lambda x: (x.mean(0), x.mean((0, 1))),
    "keepdim": lambda x: (x.sum(1, keepdim=True), x.sum((0, 1), keepdim=True)),
    "through a cast": lambda x: (x.float().sum(1), x.sum((0, 1))),
}


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_a_sum_over_more_dims_in_fp64_is_made_of_one_in_fp64(interpreted, dtype):
    x = torch.randn(7, 50, 33).to(dtype) + 1
    few, all_of_them = interpreted(lambda x: (x.sum(1), x.sum((0, 1), dtype=torch.float64)), options=OPTIONS)(x)
    assert few.dtype == dtype and (all_of_them - x.double().sum((0, 1))).norm() <= 1e-14 * all_of_them.norm()


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("name", NESTED)
def test_a_sum_over_more_dims_is_made_of_the_other(interpreted, device, name, dtype):
    x = torch.randn(40, 30, 24, device=device).to(dtype)
    check(interpreted, NESTED[name], x, wanted=["column_sum", "column_sum"])
    (made,) = fusebackend.last_report().substitutions
    exact = [t.double() for t in NESTED[name](x.double())]
    for found, wanted in zip(interpreted(NESTED[name], options=OPTIONS)(x), exact):
        bound = torch.finfo(found.dtype).eps / 2 * wanted.abs() + 40 * torch.finfo(f32).eps * 1200
        assert bool(((found.double() - wanted).abs() <= bound).all()), "each is rounded once"


def test_a_sum_and_a_mean_are_not_made_of_one_another(interpreted, device):
    x = torch.randn(40, 30, 24, device=device)
    check(interpreted, lambda x: (x.sum(0), x.mean((0, 1))), x, wanted=["column_sum", "column_sum"])
    assert len(fusebackend.last_report().substitutions) == 2


@pytest.mark.parametrize("affine", [torch.nn.functional.layer_norm, torch.nn.functional.rms_norm])
def test_gradients_of_a_norm(device, affine):
    def layer(x, w, b):
        return affine(x, (24,), w, b) if affine is torch.nn.functional.layer_norm else affine(x, (24,), w) + b

    leaves = [torch.randn(*shape, device=device, requires_grad=True) for shape in ((6, 50, 24), (24,), (24,))]
    report = assert_pattern(layer, *leaves, pattern="column_sum", count=1, training=True)
    assert report is None or calls(report) == ["column_sums"]


@pytest.mark.codegen
@pytest.mark.parametrize("dynamic", [False, True])
def test_generated_code(device, dynamic):
    def fn(x, y):
        return x.sum(0), (x * y).sum(0), y.sum((0, 1)), y.sum(1).relu()

    x, y = torch.randn(2, 70, 30, 24, device=device)
    compiled = torch.compile(fn, backend="fuse", options={"fuse.patterns": "column_sum", "fuse.gate": "off"}, dynamic=dynamic)
    torch.testing.assert_close(compiled(x, y), fn(x, y), rtol=1e-4, atol=1e-3)
    assert calls(fusebackend.last_report()) == ["column_sum", "column_sum", "column_sums"]
