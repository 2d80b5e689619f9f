"""scatter_add along the last dim: found in every spelling that a kernel takes; the rest is refused with a reason."""

import contextlib

import pytest
import torch

import fusebackend
from fusebackend.testing import assert_pattern

pytestmark = pytest.mark.usefixtures("library")

f32, bf16 = torch.float32, torch.bfloat16


def check(interpreted, fn, *inputs, count=1, **kwargs):
    expected = fn(*inputs)
    result = interpreted(fn, options={"fuse.patterns": "row_scatter", "fuse.strict": True}, **kwargs)(*inputs)
    assert result.dtype == expected.dtype and result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    report = fusebackend.last_report()
    assert len(report.substitutions) == count, report
    return report


def inputs(device, shape=(3, 20, 50), index_shape=(1, 20, 50), bins=33, dtype=f32):
    return torch.randn(shape, device=device).to(dtype), torch.randint(bins, index_shape, device=device)


def own_index(i):
    """(1, 20, 50) -> (3, 20, 50)"""
    return (i + torch.arange(3, device=i.device)[:, None, None]) % 33


SPELLINGS = {
    "scatter_add": lambda x, i: x.new_zeros(3, 20, 33).scatter_add(-1, i.expand(x.shape), x),
    "scatter_add_": lambda x, i: x.new_zeros(3, 20, 33).scatter_add_(2, i.expand(x.shape), x),
    "scatter_reduce": lambda x, i: x.new_zeros(3, 20, 33).scatter_reduce(-1, i.expand(x.shape), x, "sum"),
    "onto a tensor": lambda x, i: (x[..., :33] * 2).scatter_add(-1, i.expand(x.shape), x),
    "an index for each element": lambda x, i: x.new_zeros(3, 20, 33).scatter_add(-1, own_index(i), x),
    "expanded from a smaller rank": lambda x, i: x.new_zeros(3, 20, 33).scatter_add(-1, i[0].expand(x.shape), x),
    "transposed": lambda x, i: x.new_zeros(3, 50, 33).scatter_add(-1, i.mT.expand(3, 50, 20), x.mT),
    "a slice": lambda x, i: x.new_zeros(3, 19, 33).scatter_add(-1, i[:, 1:, 1:].expand(3, 19, 49), x[:, 1:, 1:]),
    "computed": lambda x, i: x.new_zeros(3, 20, 33).scatter_add(-1, i.expand(x.shape), x.relu() / 3) + 1,
}


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(interpreted, device, name, dtype):
    x, i = inputs(device, dtype=dtype)
    if dtype is bf16:
        x = (8 * x).round() / 8  # sums that eager, which rounds each time, makes without an error
    check(interpreted, SPELLINGS[name], x, i)


def test_the_backward_of_a_gather(interpreted, device):
    x, index = inputs(device, (6, 20, 33), (1, 20, 50))
    x.requires_grad_()

    def fn(x, index):
        return torch.gather(x, -1, index.expand(6, 20, 50)).mT / 3

    (expected,) = torch.autograd.grad(fn(x, index).pow(2).sum(), x)
    (found,) = torch.autograd.grad(interpreted(fn, options={"fuse.patterns": "row_scatter"})(x, index).pow(2).sum(), x)
    torch.testing.assert_close(found, expected)
    assert fusebackend.last_report().counts() == {"row_scatter": 1}


def test_symbolic_sizes_compile_once(interpreted, device):
    def fn(x, i):
        onto_a_tensor = x[..., :33].cos().scatter_add(-1, i.expand(x.shape), x)
        return onto_a_tensor, x.new_zeros(x.shape[0], x.shape[1], 33).scatter_add(-1, i.expand(x.shape), x)

    compiled = interpreted(fn, options={"fuse.patterns": "row_scatter"})
    for more in (0, 2, 5):
        x, i = inputs(device, (3 + more, 20 + more, 50), (1, 20 + more, 50))
        torch._dynamo.mark_dynamic(x, (0, 1))
        torch._dynamo.mark_dynamic(i, 1)
        with torch.compiler.set_stance("fail_on_recompile") if more else contextlib.nullcontext():
            torch.testing.assert_close(compiled(x, i), fn(x, i))
    assert fusebackend.last_report().counts() == {"row_scatter": 2}


def test_rows_of_what_is_added_to_that_may_be_more_are_left(device):
    """``start`` may have rows that no index names."""

    def fn(x, i, start):
        return start.scatter_add(-1, i.expand(x.shape), x)

    x, i = inputs(device)
    start = torch.randn(4, 20, 33, device=device)
    assert_pattern(fn, x, i, start, pattern="row_scatter", rejected="does not cover all rows")


def bounded(x, i):
    """As many bins as sources."""
    torch._check(x.shape[-1] <= 4000)
    return x.cos().scatter_add(-1, i.expand(x.shape), x), torch.zeros_like(x).scatter_add(-1, i.expand(x.shape), x)


def test_rows_of_symbolic_length(interpreted, device):
    compiled = interpreted(bounded, options={"fuse.patterns": "row_scatter"}, dynamic=True)
    for more in (0, 2, 5):
        x, i = inputs(device, (3, 20, 50 + more), (1, 20, 50 + more))
        for found, expected in zip(compiled(x, i), bounded(x, i)):
            torch.testing.assert_close(found, expected)
    assert fusebackend.last_report().counts() == {"row_scatter": 2}


def test_rows_without_a_bound_are_left(device):
    def fn(x, i):
        return x.cos().scatter_add(-1, i.expand(x.shape), x)

    assert_pattern(fn, *inputs(device), pattern="row_scatter", rejected="rows may become longer", dynamic=True)


REFUSED = {
    "the indexed dim is not the last one": lambda x, i: x.new_zeros(3, 33, 50).scatter_add(1, i.expand(x.shape), x),
    "the index does not cover all of the source": lambda x, i: x.new_zeros(3, 20, 33).scatter_add(-1, i[..., 1:].expand(3, 20, 49), x),
    "the index does not cover all rows": lambda x, i: x.new_zeros(4, 20, 33).scatter_add(-1, i.expand(x.shape), x),
    "dtype float64 is not supported": lambda x, i: x.double().new_zeros(3, 20, 33).scatter_add(-1, i.expand(x.shape), x.double()),
    "dtype int64 is not supported": lambda x, i: i.new_zeros(3, 20, 33).scatter_add(-1, i.expand(x.shape), i.expand(x.shape)),
    "rows of 9000 elements": lambda x, i: x.new_zeros(3, 20, 9000).scatter_add(-1, i.expand(x.shape), x),
    "not contiguous": lambda x, i: torch.zeros(3, 33, 20, device=x.device).mT.cos().scatter_add(-1, i.expand(x.shape), x),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(device, reason):
    assert_pattern(REFUSED[reason], *inputs(device), pattern="row_scatter", rejected=reason)


OTHERS = {
    "one number a column": lambda x, i: x.new_zeros(3, 20, 33).scatter_add(-1, i[:, :1].expand(x.shape), x),  # index_add's
    "one number a row": lambda x, i: x.new_zeros(3, 33, 50).scatter_add(1, i[:, :, :1].expand(x.shape), x),
    "the largest": lambda x, i: x.new_zeros(3, 20, 33).scatter_reduce(-1, i.expand(x.shape), x, "amax"),
    "any one": lambda x, i: x.new_zeros(3, 20, 33).scatter(-1, i.expand(x.shape), x),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_belongs_to_others(device, name):
    fn = OTHERS[name]
    torch.compile(fn, backend="fuse", options={"fuse.patterns": "row_scatter", "fuse.interpret": True, "fuse.gate": "off"})(*inputs(device))
    report = fusebackend.last_report()
    assert not report.substitutions and not report.rejections, report


def test_deterministic_algorithms(interpreted, device):
    torch.use_deterministic_algorithms(True)
    try:
        check(interpreted, SPELLINGS["scatter_add"], *inputs(device))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.codegen
def test_generated_code(device):
    x, i = inputs(device, (6, 20, 50))

    def fn(x, i):
        y = x * 3
        first = x.new_zeros(6, 20, 33).scatter_add(-1, i.expand(x.shape), y)
        return first, x.new_zeros(6, 50, 33).scatter_add(-1, i.mT.expand(6, 50, 20), y.mT)

    compiled = torch.compile(fn, backend="fuse", options={"fuse.gate": "off", "fuse.patterns": "row_scatter"})
    for found, expected in zip(compiled(x, i), fn(x, i)):
        torch.testing.assert_close(found, expected)
    assert fusebackend.last_report().counts() == {"row_scatter": 2}
