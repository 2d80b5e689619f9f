"""Which sums of products become matrix products, what they become, and which are refused, in every spelling."""

import pytest
import torch
from families.contraction.random_contractions import aten, calls, rewritten
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusebackend
from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.contraction.match import Contraction
from fusebackend.rewriting.apply import rewrite

PRODUCTS = (aten.bmm.default, aten.mm.default)


def rows(x, y):
    return (x[:, :, None] * y[:, None]).sum(-1)


def scores(c, b):
    return (c[:, :, :, None] * b[:, :, None]).sum(-1)


def repeated_heads(c, b):
    c, b = (t.repeat_interleave(3, dim=3, output_size=3) for t in (c, b))
    return scores(c, b)


SPELLINGS = {
    "rows": (rows, (3, 5, 8), (3, 6, 8)),
    "no batch": (lambda x, y: (x[:, None] * y[None]).sum(-1), (5, 8), (6, 8)),
    "three batch dims, one of them innermost but one": (scores, (2, 3, 5, 4, 7), (2, 3, 6, 4, 7)),
    "both repeated along heads": (repeated_heads, (2, 3, 5, 1, 7), (2, 3, 6, 1, 7)),
    "a middle dim": (lambda x, y: (x[..., None] * y[:, None]).sum(2), (2, 5, 6), (2, 6, 7)),
    "two summed dims": (lambda x, y: (x[:, None] * y[None]).sum((1, 3)[1:] + (2,)), (5, 6, 7), (4, 6, 7)),
    "two free dims": (lambda x, y: (x[:, :, :, None] * y[:, None, None]).sum(-1), (2, 3, 5, 8), (2, 6, 8)),
    "negative dim, keepdim": (lambda x, y: (x[:, :, None] * y[:, None]).sum(dim=-1, keepdim=True), (3, 5, 8), (3, 6, 8)),
    "the mean": (lambda x, y: (x[:, :, None] * y[:, None]).mean(-1), (3, 5, 8), (3, 6, 8)),
    "expanded factors": (lambda x, y: (x[:, :, None].expand(3, 5, 6, 8) * y[:, None].expand(3, 5, 6, 8)).sum(-1), (3, 5, 8), (3, 6, 8)),
    "a permutation between": (lambda x, y: (x[:, :, None] * y[:, None]).permute(3, 0, 2, 1).sum(0), (3, 5, 8), (3, 6, 8)),
    "merged summed dims": (lambda x, y: (x[:, None] * y[None]).flatten(2).sum(-1), (5, 6, 7), (4, 6, 7)),
    "merged free dims": (lambda x, y: (x[:, None] * y[None]).flatten(0, 1).sum(-1), (5, 7), (4, 7)),
    "an elementwise mask on one factor": (lambda x, y: (x.tril()[:, :, None] * y[:, None]).sum(-1), (3, 8, 8), (3, 6, 8)),
    "factors of other orders in memory": (lambda x, y: rows(x.transpose(1, 2), y.transpose(0, 2)), (3, 8, 5), (8, 6, 3)),
    "a slice": (lambda x, y: rows(x[:, 1::2, 3:], y[..., 3:]), (3, 11, 8), (3, 6, 8)),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_spellings(interpreted, device, name, dynamic):
    fn, *shapes = SPELLINGS[name]
    left = dynamic and name in ("the mean", "merged summed dims", "merged free dims")  # these are not followed under symbolic sizes
    inputs = [torch.randn(s, device=device) for s in shapes]
    result = interpreted(fn, options={"fuse.patterns": "contraction", "fuse.strict": True}, dynamic=dynamic)(*inputs)
    expected = fn(*inputs)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    report = fusebackend.last_report()
    assert len(report.substitutions) == (0 if left else 1), report


def test_gradients_become_matrix_products_too(interpreted):
    c, b = torch.randn(2, 3, 5, 4, 7, requires_grad=True), torch.randn(2, 3, 6, 4, 7, requires_grad=True)
    result = interpreted(scores, options={"fuse.patterns": "contraction"})(c, b)
    expected = scores(c, b)
    gradient = torch.randn_like(expected)
    for found, wanted in zip(torch.autograd.grad(result, (c, b), gradient), torch.autograd.grad(expected, (c, b), gradient)):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert [s.graph for s in fusebackend.last_report().substitutions] == ["forward", "backward", "backward"]


def test_both_gradients_read_one_copy_of_what_they_share():
    def gradients(c, b, gradient):
        product = gradient[..., None]
        return (product * b[:, :, None]).sum(3), (product * c[:, :, :, None]).sum(2)

    shapes = (2, 3, 5, 4, 7), (2, 3, 6, 4, 7), (2, 3, 5, 6, 4)
    inputs = [torch.randn(s) for s in shapes]
    module, outcome = rewritten(gradients, *inputs)
    assert len(outcome.substitutions) == 2
    read_by = [len([*g.consumers(copy)]) for copy in calls(module.graph, aten.clone.default) if copy.meta["val"].shape == (2, 3, 4, 5, 6)]
    assert read_by == [2]
    for found, wanted in zip(module(*inputs), gradients(*inputs)):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_copy_from_before_a_mutation_is_not_read_again():
    def fn(c, b, gradient):
        product = gradient[..., None]
        first = (product * b[:, :, None]).sum(3)
        aten.copy_.default(gradient, gradient + 1)
        return first, (product * c[:, :, :, None]).sum(2)

    inputs = [torch.randn(s) for s in ((2, 3, 5, 4, 7), (2, 3, 6, 4, 7), (2, 3, 5, 6, 4))]
    module, outcome = rewritten(fn, *inputs)
    assert outcome.substitutions
    for found, wanted in zip(module(*[t.clone() for t in inputs]), fn(*inputs)):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


THREE_FACTORS = {
    "a mask of the summed dim": (lambda x, y, m: (x[:, :, None] * y[:, None] * m).sum(-1), (8,), 3),
    "a mask of rows": (lambda x, y, m: (x[:, :, None] * y[:, None] * m[:, :, None]).sum(-1), (3, 5, 1), 2),
    "a mask twice": (lambda x, y, m: (x[:, :, None] * y[:, None] * m * m).sum(-1), (8,), 3),
    "a mask and signs": (lambda x, y, m: (-(x[:, :, None] * y[:, None] * m) * -1).sum(-1), (8,), 3),
    "weights of the summed dim": (lambda x, y, w: (x[:, :, None] * y[:, None] * w).sum(-1), (8,), 3),
    "weights of rows": (lambda x, y, w: (x[:, :, None] * y[:, None] * w[:, :, None]).sum(-1), (3, 5, 1), 2),
    "weights twice": (lambda x, y, w: (x[:, :, None] * y[:, None] * w * w).sum(-1), (8,), 3),
    "weights and a number": (lambda x, y, w: (-(x[:, :, None] * y[:, None] * w) * 0.3 / 7).sum(-1), (8,), 3),
    "weights and a large number": (lambda x, y, w: (-(x[:, :, None] * y[:, None] * w) * 3 / 0.7).sum(-1), (8,), 3),
}


@pytest.mark.parametrize("name", THREE_FACTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_more_than_two_factors(name, dtype):
    """The small ones are multiplied first. How many of the forward and the gradients of the matrices are matrix products then?"""
    fn, shape, count = THREE_FACTORS[name]
    if dtype == torch.float16 and "weights" in name:
        pytest.skip("fp16 factors keep their order")

    def forward_and_backward(x, y, m, gradient):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        out = fn(x, y, m)
        return (out, *torch.autograd.grad(out, (x, y), gradient.to(out.dtype)))

    inputs = [torch.randn(s).to(dtype) for s in ((3, 5, 8), (3, 6, 8), shape, (3, 5, 6))]
    if "mask" in name:
        inputs[2] = inputs[2] > 0
    module, _ = rewritten(forward_and_backward, *inputs)
    assert len(calls(module.graph, *PRODUCTS)) >= count
    exact = forward_and_backward(*[t.double() if t.is_floating_point() else t for t in inputs])
    eager = forward_and_backward(*inputs)
    for found, plain, wanted in zip(module(*inputs), eager, exact):
        assert (found.double() - wanted).norm() <= 1.5 * (plain.double() - wanted).norm() + torch.finfo(dtype).eps * wanted.norm()


NUMBERS = {
    "a large one": (lambda x, y: (x[:, :, None] * y[:, None] * 1e30).sum(-1), 1e20, 1e-20),
    "one above one": (lambda x, y: (x[:, :, None] * y[:, None] * 4).sum(-1), 2e38, 1e-30),
    "one below one": (lambda x, y: (x[:, :, None] * y[:, None] / 8).sum(-1), 1e19, 3e19),
    "a small one": (lambda x, y: (x[:, :, None] * y[:, None] / 1e30).sum(-1), 1e-12, 1e35),
    "a large and a small one": (lambda x, y: (x[:, :, None] * y[:, None] * 1e20 / 1e30).sum(-1), 1e-12, 1e35),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_make_nothing_overflow_or_vanish_that_does_not_in_eager_mode(name, dtype):
    fn, size_x, size_y = NUMBERS[name]
    inputs = [(size_x * torch.ones(3, 5, 8)).to(dtype), (size_y * torch.ones(3, 6, 8)).to(dtype)]
    module, outcome = rewritten(fn, *inputs)
    torch.testing.assert_close(module(*inputs), fn(*inputs))
    assert bool(outcome.substitutions) == ("small" not in name)
    if "small" in name:
        assert "may overflow, or vanish" in outcome.rejections[0].reason


def test_a_quotient_by_an_operator_of_numbers_is_one():
    """As the gradient of a mean, differentiated again, has it."""

    def fn(x, y):
        return torch.ops.aten.div.Scalar(x[:, :, None] * y[:, None], 1e8).sum(-1)

    inputs = [6e18 * torch.rand(3, 5, 8), 6e18 * torch.rand(3, 6, 8)]
    module, _ = rewritten(fn, *inputs)
    torch.testing.assert_close(module(*inputs), fn(*inputs))


NARROW_FACTORS = {
    "uint8": (torch.float32, lambda: torch.randint(100, 200, (3, 1, 6, 8), dtype=torch.uint8)),
    "int16": (torch.float32, lambda: torch.randint(1000, 2000, (3, 1, 6, 8), dtype=torch.int16)),
    "bf16": (torch.float32, lambda: torch.randn(3, 1, 6, 8).bfloat16()),
    "fp16": (torch.float32, lambda: torch.full((3, 1, 6, 8), 300.0).half()),
    "fp32": (torch.float64, lambda: torch.randn(3, 1, 6, 8)),
    "bool": (torch.float32, lambda: torch.rand(3, 1, 6, 8) > 0.5),
}


@pytest.mark.parametrize("name", NARROW_FACTORS)
def test_what_is_multiplied_first_is_multiplied_in_the_products_dtype(name):
    dtype, draw = NARROW_FACTORS[name]

    def fn(x, y, z):
        return (x[:, :, None] * y * z).sum(-1)

    inputs = [torch.randn(3, 5, 8, dtype=dtype), draw(), draw()]
    module, outcome = rewritten(fn, *inputs)
    assert outcome.substitutions, outcome
    expected = fn(inputs[0].double(), inputs[1].double(), inputs[2].double())
    assert (module(*inputs) - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


def test_a_number_in_a_tensor_on_the_cpu_may_be_a_third_factor(monkeypatch):
    monkeypatch.setattr(loader.Native, "why_not", lambda *_: None)
    with FakeTensorMode():
        x, y, s = torch.empty(3, 5, 8, device="cuda"), torch.empty(3, 6, 8, device="cuda"), torch.empty(())
        graph = make_fx(lambda x, y, s: ((x[:, :, None] * y[:, None]) * s).sum(-1))(x, y, s).graph
    assert rewrite(graph, [Contraction()], "forward", strict=True).substitutions


def test_three_factors_in_fp16_keep_their_order():
    def fn(x, y, w):
        return (x[:, :, None] * y[:, None] * w).sum(-1)

    _, outcome = rewritten(fn, *(torch.randn(s).half() for s in ((3, 5, 8), (3, 6, 8), (8,))))
    assert not outcome.substitutions and "may overflow" in outcome.rejections[0].reason


def test_integers_that_are_multiplied_before_may_wrap_around():
    def fn(x, y, w):
        return (x[:, :, None] * y[:, None] * w).sum(-1)

    _, outcome = rewritten(fn, *(torch.full(s, 100, dtype=torch.int8) for s in ((3, 5, 8), (3, 6, 8))), torch.randn(8))
    assert not outcome.substitutions and "torch.int8" in outcome.rejections[0].reason


@pytest.mark.parametrize("shape", [(0, 5, 8), (3, 0, 8), (3, 5, 0)])
@pytest.mark.parametrize("expanded", [False, True])
def test_a_product_without_elements_is_left(shape, expanded):
    def fn(x, y):
        y = y[:, None].expand(-1, x.shape[1], -1, -1).clone() if expanded else y[:, None]
        return (x[:, :, None] * y).sum(-1)

    _, outcome = rewritten(fn, torch.randn(shape), torch.randn(shape[0], 6, shape[2]))
    assert not outcome.substitutions and "without elements" in outcome.rejections[0].reason


def test_what_repeats_itself_is_multiplied_once():
    """Along the heads both factors are one tensor, so one product serves them all."""
    module, _ = rewritten(repeated_heads, torch.randn(2, 3, 5, 1, 7), torch.randn(2, 3, 6, 1, 7))
    (product,) = calls(module.graph, aten.bmm.default)
    assert product.meta["val"].shape == (6, 5, 6) and not calls(module.graph, aten.mul.Tensor)


def test_operands_that_lie_as_matrices_are_not_copied():
    module, _ = rewritten(rows, torch.randn(3, 5, 8), torch.randn(3, 6, 8))
    assert not calls(module.graph, aten.clone.default)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_that_are_added_in_fp32_stay_exact(dtype):
    def upcast(x, y):
        return (x[:, :, None] * y[:, None]).sum(-1, dtype=torch.float32)

    x, y = torch.randn(3, 5, 64).to(dtype), torch.randn(3, 6, 64).to(dtype)
    module, _ = rewritten(upcast, x, y)
    (product,) = calls(module.graph, aten.bmm.default)
    assert product.meta["val"].dtype == torch.float32
    exact = rows(x.double(), y.double())
    assert (module(x, y) - exact).abs().max() < (upcast(x, y) - exact).abs().max()


def test_infinities_and_nans_meet_the_same_zeros():
    x, y = torch.randn(3, 8, 8), torch.randn(3, 6, 8)
    y[0, 1, 7], y[1, 2, 3], y[2, 0, 0] = float("inf"), float("nan"), float("-inf")

    def masked(x, y):
        return rows(x.tril(), y)

    module, _ = rewritten(masked, x, y)
    assert calls(module.graph, aten.bmm.default)
    torch.testing.assert_close(module(x, y), masked(x, y), equal_nan=True, atol=1e-5, rtol=1e-5)


def test_a_product_that_is_used_elsewhere_is_kept():
    def both(x, y):
        product = x[:, :, None] * y[:, None]
        return product.sum(-1), product.exp()

    x, y = torch.randn(3, 5, 8), torch.randn(3, 6, 8)
    module, _ = rewritten(both, x, y)
    assert calls(module.graph, aten.bmm.default) and calls(module.graph, aten.mul.Tensor)
    for found, wanted in zip(module(x, y), both(x, y)):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_two_sums_of_one_product():
    def both(x, y):
        product = x[:, :, :, None] * y[:, None]
        return product.sum(2), product.sum((0, 2))

    x, y = torch.randn(3, 5, 8), torch.randn(3, 8, 4)
    module, _ = rewritten(both, x, y)
    assert len(calls(module.graph, *PRODUCTS)) == 2 and not calls(module.graph, aten.mul.Tensor)
    for found, wanted in zip(module(x, y), both(x, y)):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


NO_CANDIDATES = {
    "a dot product of rows": lambda x, y: (x * x).sum(-1),
    "a weighted sum": lambda x, y: (x * y[:, :1, :1]).sum(-1),
    "a matrix times a vector": lambda x, y: (x * y[:, :1]).sum(-1),
    "an outer product": lambda x, y: x[:, :, None] * y[:, None],
}


@pytest.mark.parametrize("name", NO_CANDIDATES)
def test_what_is_no_matrix_product_is_no_candidate(name):
    module, outcome = rewritten(NO_CANDIDATES[name], torch.randn(3, 5, 8), torch.randn(3, 6, 8))
    assert not outcome.substitutions and not outcome.rejections


REFUSED = {
    "a summed dim of one factor": (lambda x, y: (x[:, :, None] * y[None, None, 0, :, :]).sum((0, 3)), "one factor alone"),
    "integers": (lambda x, y: rows(x.long(), y.long()), "torch.int64"),
    "the mean in fp16": (lambda x, y: (x.half()[:, :, None] * y.half()[:, None]).mean(-1), "out of fp16's range"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    fn, reason = REFUSED[name]
    _, outcome = rewritten(fn, torch.randn(3, 5, 8), torch.randn(3, 6, 8))
    assert not outcome.substitutions and reason in outcome.rejections[0].reason


@pytest.fixture
def restored_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_loop_in_fp32_is_not_rounded_to_tf32(precision, restored_precision):
    torch.set_float32_matmul_precision(precision)
    x, y = torch.randn(3, 5, 8), torch.randn(3, 6, 8)
    _, outcome = rewritten(rows, x, y)
    assert not outcome.substitutions and "this loop computes in fp32" in outcome.rejections[0].reason
    assert rewritten(rows, x.bfloat16(), y.bfloat16())[1].substitutions


def test_a_factor_that_is_overwritten_is_read_before():
    def fn(x, y):
        product = x[:, :, None] * y[:, None]
        aten.copy_.default(x, y[:, :5])
        return product.sum(-1)

    x, y = torch.randn(3, 5, 8), torch.randn(3, 6, 8)
    _, outcome = rewritten(fn, x, y)
    assert not outcome.substitutions and "mutates" in outcome.rejections[0].reason


def test_other_sizes_do_not_recompile(interpreted):
    compiled = interpreted(scores, options={"fuse.patterns": "contraction", "fuse.strict": True}, dynamic=True)
    for sizes in ((2, 3, 5, 4, 7), (3, 2, 9, 5, 11), (4, 5, 6, 7, 8)):
        c, b = torch.randn(sizes), torch.randn(*sizes[:2], sizes[2] + 3, *sizes[3:])
        with torch._dynamo.config.patch(error_on_recompile=sizes != (2, 3, 5, 4, 7)):
            torch.testing.assert_close(compiled(c, b), scores(c, b), atol=1e-5, rtol=1e-5)
    assert len(fusebackend.last_report().substitutions) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_with_generated_code(dynamic):
    options = {"fuse.gate": "off", "fuse.patterns": "contraction", "fuse.strict": True}
    compiled = torch.compile(scores, backend="fuse", dynamic=dynamic, options=options)
    c, b = torch.randn(2, 3, 5, 4, 7, requires_grad=True), torch.randn(2, 3, 6, 4, 7, requires_grad=True)
    found, expected = compiled(c, b), scores(c, b)
    gradient = torch.randn_like(expected)
    results = (found, *torch.autograd.grad(found, (c, b), gradient))
    for result, wanted in zip(results, (expected, *torch.autograd.grad(expected, (c, b), gradient))):
        torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)
    assert len(fusebackend.last_report().substitutions) == 3
