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
@pytest.mark.parametrize("terms", [17, 19, 23, 31, 32, 37, 38, 64, 128, 192, 256, 512, 1021, 1024, 1072, 2053, 4096])
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


PADDED = {
    "a prime number": (rows, (3, 5, 19), (3, 6, 19)),
    "twice a prime number": (rows, (3, 5, 38), (3, 6, 38)),
    "the largest of two dims": (lambda x, y: (x[:, :, None] * y[:, None]).sum((0, -1)), (23, 5, 37), (23, 6, 37)),
    "the outer of two dims": (lambda x, y: (x[:, :, None] * y[:, None]).sum((0, -1)), (19, 5, 2), (19, 6, 2)),
    "the inner of two dims": (lambda x, y: (x[:, :, None] * y[:, None]).sum((0, -1)), (2, 5, 19), (2, 6, 19)),
    "the outermost dim": (lambda x, y: (x[:, :, None] * y[:, None]).sum(0), (37, 5), (37, 6)),
    "a mean": (lambda x, y: (x[:, :, None] * y[:, None]).mean(-1, keepdim=True), (3, 5, 37), (3, 6, 37)),
    "three factors": (lambda x, y, w: (x[:, :, None] * y[:, None] * w).sum(-1), (3, 5, 37), (3, 6, 37), (37,)),
    "a factor that lacks the dim": (lambda x, y, w: (x[:, :, None] * y[:, None] * w).sum(-1), (3, 5, 37), (3, 6, 37), (3, 5, 1, 1)),
    "a mask": (lambda x, y: ((x > 0)[:, :, None] * y[:, None]).sum(-1), (3, 5, 37), (3, 6, 37)),
    "a number": (lambda x, y: (-(x[:, :, None] * y[:, None]) / 8).sum(-1), (3, 5, 37), (3, 6, 37)),
    "other orders in memory": (lambda x, y: rows(x.transpose(1, 2), y.transpose(0, 2)), (3, 37, 5), (37, 6, 3)),
    "a cast of an expanded factor": (lambda x, y: rows(x.expand(3, 5, 37).clone().to(y.dtype), y), (1, 5, 37), (3, 6, 37)),
    "an expanded factor that was scaled": (lambda x, y: rows(x.expand(3, 5, 37).clone() / 3, y), (1, 5, 37), (3, 6, 37)),
}


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_has_no_divisor_is_padded(name, dtype):
    """The sum is of fp32 products; a factor may be of 16 bits."""
    fn, *shapes = PADDED[name]
    inputs = [torch.randn(s) for s in shapes]
    inputs[0] = inputs[0].to(dtype)
    module, outcome = rewritten(fn, *inputs)
    assert len(outcome.substitutions) == 1 and "padded" in outcome.substitutions[0].note, outcome
    found, eager, exact = module(*inputs), fn(*inputs), fn(*[x.double() for x in inputs])
    assert found.stride() == eager.stride() and found.dtype == eager.dtype
    assert norm_of_error(found, exact) < 1.3 * norm_of_error(eager, exact) + 2e-8


@pytest.mark.parametrize(("terms", "chunks", "padded"), [(19, 2, 20), (37, 3, 39), (94, 6, 96)])
def test_padded_chunks_are_few_and_short(terms, chunks, padded):
    _, outcome = rewritten(rows, torch.randn(3, 5, terms), torch.randn(3, 6, terms))
    assert f"summed over {chunks} chunks, padded to {padded} terms" in outcome.substitutions[0].note


def test_long_sums_in_fp64_are_padded():
    x, y = torch.randn(3, 5, 1031, dtype=torch.float64), torch.randn(3, 6, 1031, dtype=torch.float64)
    module, outcome = rewritten(rows, x, y)
    assert "33 chunks, padded to 1056" in outcome.substitutions[0].note
    torch.testing.assert_close(module(x, y), rows(x, y))


@pytest.mark.parametrize("fn", [rows, by_middle_dims])
@pytest.mark.parametrize("interpret", [True, False])
@pytest.mark.parametrize("traced_with", [5, 19, 1500])
def test_one_graph_pads_every_symbolic_number_of_terms(fn, interpret, traced_with):
    """To a whole number of chunks, and never to one: that would be compiled again."""
    options = {"fuse.patterns": "contraction", "fuse.strict": True, "fuse.gate": "off", "fuse.interpret": interpret}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(fn, backend="fuse", dynamic=True, options=options)
    for batch, m, n, terms in ((4, 18, 20, traced_with), (3, 5, 7, 23), (2, 9, 4, 64), (5, 3, 2, 2), (2, 3, 4, 10), (2, 16, 12, 5000)):
        inputs = [torch.randn(batch, rows, terms) for rows in (m, n)]
        if fn is by_middle_dims:
            inputs = [x.mT.contiguous() for x in inputs]
        inputs = [x.requires_grad_() for x in inputs]
        gradient = torch.randn(batch, m, n)
        results = []
        for f, wanted in ((compiled, torch.float32), (fn, torch.float32), (fn, torch.float64)):
            out = f(*[x.to(wanted) for x in inputs])
            results.append((out, *torch.autograd.grad(out, inputs, gradient.to(wanted))))
        for found, eager, exact in zip(*results):
            assert norm_of_error(found, exact) < 1.5 * norm_of_error(eager, exact) + 3e-8
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    notes = [s.note for s in fusebackend.last_report().substitutions]
    assert len(notes) == 3 and all("padded" in note for note in notes), notes


def test_two_symbolic_dims_of_which_the_larger_is_padded(interpreted):
    def fn(x, y):
        return (x[:, :, None] * y[:, None]).sum((0, -1))

    compiled = interpreted(fn, options={"fuse.patterns": "contraction", "fuse.strict": True}, dynamic=True)
    for i, (first, last) in enumerate(((3, 19), (2, 40), (50, 2))):
        x, y = torch.randn(first, 5, last), torch.randn(first, 6, last)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            torch.testing.assert_close(compiled(x, y), fn(x, y), rtol=1e-5, atol=1e-5)
    assert "summed over 9 chunks, padded to 90 terms" in fusebackend.last_report().substitutions[0].note


def test_zeros_of_the_padding_meet_no_infinities():
    """They would be NaN. Of a factor that lacks the summed dim an infinity meets every term."""

    def fn(x, y, w):
        return (x[:, :, None] * y[:, None] * w).sum(-1)

    x, y, w = torch.rand(3, 5, 37) + 1, torch.rand(3, 6, 37) + 1, torch.ones(3, 5, 1, 1)
    w[1, 2], x[0, 3, 36], y[2, 4, 0] = torch.inf, torch.inf, torch.nan
    module, outcome = rewritten(fn, x, y, w)
    assert "padded" in outcome.substitutions[0].note
    torch.testing.assert_close(module(x, y, w), fn(x, y, w), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("terms", [37, 2048])
def test_infinities_and_nans_stay_in_their_rows(terms):
    x, y = torch.randn(2, 5, terms), torch.randn(2, 6, terms)
    x[0, 1, 7], x[1, 2, terms - 1], y[0, 3, terms // 2] = torch.inf, torch.nan, -torch.inf
    module, outcome = rewritten(rows, x, y)
    assert len(outcome.substitutions) == 1
    torch.testing.assert_close(module(x, y), rows(x, y), rtol=1e-5, atol=1e-3, equal_nan=True)


def test_16_bit_products_are_not_divided():
    x, y = torch.randn(3, 5, 4096).bfloat16(), torch.randn(3, 6, 4096).bfloat16()
    _, outcome = rewritten(rows, x, y)
    assert "chunks" not in outcome.substitutions[0].note
