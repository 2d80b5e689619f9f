"""Sums in fp32, and long ones in fp64: in chunks, as exact as a sum in a tree."""

import pytest
import torch
from families.contraction.random_contractions import aten, calls, rewritten

import fusebackend


def rows(x, y):
    return (x[:, :, None] * y[:, None]).sum(-1)


def both_gradients(c, b):
    """Of Mamba-2's recurrence over chunks: the second sum is over heads' channels and states."""
    c, b = c.detach().requires_grad_(), b.detach().requires_grad_()
    out = (c[..., None, None] * b[:, None]).sum(2)
    return (out, *torch.autograd.grad(out, (c, b), torch.ones_like(out) + out.detach()))


LONG = {
    "one dim": (rows, (3, 5, 4096), (3, 6, 4096)),
    "no power of two": (rows, (3, 5, 1155), (3, 6, 1155)),
    "a dim that is split and one that is not": (lambda x, y: (x[:, :, None] * y[:, None]).sum((0, -1)), (40, 5, 64), (40, 6, 64)),
    "dims that are not split": (lambda x, y: (x[:, :, None] * y[:, None]).sum((0, -1)), (67, 5, 17), (67, 6, 17)),
    "the outermost dim": (lambda x, y: (x[:, :, None] * y[:, None]).sum(0), (2048, 5), (2048, 6)),
    "a mean": (lambda x, y: (x[:, :, None] * y[:, None]).mean(-1, keepdim=True), (3, 5, 2048), (3, 6, 2048)),
    "three factors": (lambda x, y, w: (x[:, :, None] * y[:, None] * w).sum(-1), (3, 5, 2048), (3, 6, 2048), (2048,)),
    "other orders in memory": (lambda x, y: rows(x.transpose(1, 2), y.transpose(0, 2)), (3, 2048, 5), (2048, 6, 3)),
    "an expanded factor that was written out": (lambda x, y: rows(x.expand(3, 5, 2048).clone(), y), (1, 5, 2048), (3, 6, 2048)),
}


def norm_of_error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_long_sum_is_as_exact_as_one_in_a_tree(name, dtype):
    fn, *shapes = LONG[name]
    inputs = [torch.randn(s, dtype=dtype) for s in shapes]
    module, outcome = rewritten(fn, *inputs)
    assert len(outcome.substitutions) == 1 and "chunks" in outcome.substitutions[0].note, outcome
    (product,) = calls(module.graph, aten.bmm.default)
    assert product.args[0].meta["val"].shape[-1] <= 32 or product.args[1].meta["val"].shape[-2] <= 32
    found, eager = module(*inputs), fn(*inputs)
    assert found.stride() == eager.stride()
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-4)
    if dtype == torch.float32:
        exact = fn(*[x.double() for x in inputs])
        # 1.3 times: one chunk is added in sequence. As one matrix product the error is 2 to 4 times eager's.
        assert norm_of_error(found, exact) < 1.3 * norm_of_error(eager, exact) + 2e-8


def by_middle_dims(x, y):
    return (x[:, :, :, None] * y[:, :, None]).sum(1)


@pytest.mark.parametrize("fn", [rows, by_middle_dims])
@pytest.mark.parametrize("terms", [17, 32, 64, 128, 192, 256, 512, 1024, 1072, 4096])
def test_compiled_sums_err_no_more_than_eager(fn, terms):
    """Normwise and in the worst element, of numbers that cancel and of such that do not."""
    compiled = torch.compile(fn, backend="fuse", dynamic=False, options={"fuse.patterns": "contraction", "fuse.gate": "off"})
    for draw in (torch.randn, torch.rand):
        x, y = draw(4, 48, terms), draw(4, 40, terms)
        if fn is by_middle_dims:
            x, y = x.mT.contiguous(), y.mT.contiguous()
        exact, scale = fn(x.double(), y.double()), fn(x.double().abs(), y.double().abs())
        found, eager = (result.double() - exact for result in (compiled(x, y), fn(x, y)))
        # 17 terms are one chunk: of 16, eager mode adds two and two on a CPU. One matrix product of 1,024 errs 2.2 times as much as eager.
        assert found.norm() <= 1.25 * eager.norm()
        assert (found.abs() / scale).max() <= 1.7 * (eager.abs() / scale).max()
    assert len(fusebackend.last_report().substitutions) == 1


def test_forward_and_backward_of_a_recurrence():
    inputs = torch.randn(2, 17, 17), torch.randn(2, 17, 32, 64)
    module, outcome = rewritten(both_gradients, *inputs)
    notes = [s.note for s in outcome.substitutions]
    assert len(notes) == 3 and sum("chunks" in note for note in notes) == 1, outcome
    exact = both_gradients(*[x.double() for x in inputs])
    for found, eager, wanted in zip(module(*inputs), both_gradients(*inputs), exact):
        assert norm_of_error(found, wanted) < 1.5 * norm_of_error(eager, wanted)


def test_symbolic_sizes_beside_those_that_are_summed(interpreted):
    def fn(x, y):
        return (x[:, :, None] * y[:, None]).sum((0, -1))  # over (batch, 2048), of which the batch is symbolic

    compiled = interpreted(fn, options={"fuse.patterns": "contraction", "fuse.strict": True}, dynamic=True)
    for batch, m, n in ((3, 5, 6), (4, 7, 9)):
        x, y = torch.randn(batch, m, 2048), torch.randn(batch, n, 2048)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch._dynamo.mark_static(x, 2)
        torch._dynamo.mark_static(y, 2)
        torch.testing.assert_close(compiled(x, y), fn(x, y), rtol=1e-5, atol=1e-3)
    assert "chunks" in fusebackend.last_report().substitutions[0].note


def test_infinities_and_nans_stay_in_their_rows():
    x, y = torch.randn(2, 5, 2048), torch.randn(2, 6, 2048)
    x[0, 1, 7], x[1, 2, 2000], y[0, 3, 1024] = torch.inf, torch.nan, -torch.inf
    module, outcome = rewritten(rows, x, y)
    assert len(outcome.substitutions) == 1
    torch.testing.assert_close(module(x, y), rows(x, y), rtol=1e-5, atol=1e-3, equal_nan=True)


def test_16_bit_products_are_not_divided():
    x, y = torch.randn(3, 5, 4096).bfloat16(), torch.randn(3, 6, 4096).bfloat16()
    _, outcome = rewritten(rows, x, y)
    assert "chunks" not in outcome.substitutions[0].note
