"""Masks: which become biases, and what rows give that are hidden wholly."""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_programs import (
    LOWEST,
    LOWEST_IN_WIDE,
    OPTIONS,
    alibi_of_keys,
    check,
    compiled,
    error,
    heads,
    randn,
    refused,
    run,
    visible,
    wide,
)
from families.compiled_results import whole_report
from families.traced_graphs import traced_joint

from fusebackend import backend
from fusebackend.patterns.attention.facts import attended
from fusebackend.patterns.attention.match import Attention
from fusebackend.patterns.attention.ops import attention
from fusebackend.rewriting.apply import rewrite

pytestmark = pytest.mark.usefixtures("library")


def filled(fill):
    def fn(q, k, v, b, seen):
        return (q @ k.mT * 0.25 + b).masked_fill(~seen, fill).softmax(-1) @ v

    return fn


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (9, 9), (2, 1, 9, 9), (2, 4, 9, 9)])
def test_a_filled_mask_is_a_bias(shape, training):
    check(filled(-math.inf), (*heads(), randn(4, 9, 9), visible(*shape)), training=training)


@pytest.mark.parametrize("training", [False, True])
def test_a_mask_before_the_bias(training):
    def fn(q, k, v, b, seen):
        return (torch.where(seen, q @ k.mT * 0.25, -math.inf) + b).softmax(-1) @ v

    check(fn, (*heads(), randn(4, 9, 9), visible(2, 1, 1, 9)), training=training)


@pytest.mark.parametrize("training", [False, True])
def test_a_causal_mask(training):
    def fn(q, k, v):
        seen = torch.ones(9, 9, dtype=torch.bool).tril()
        return (q @ k.mT * 0.25).masked_fill(~seen, -math.inf).softmax(-1) @ v

    check(fn, tuple(heads()), training=training)


def additive(q, k, v, b, mask):
    return (q @ k.mT * 0.25 + b + mask).softmax(-1) @ v


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_the_lowest_number_are_uniform(dtype, training):
    """As in transformers, where a padded query sees no key."""
    mask = torch.zeros(2, 1, 9, 9)
    mask[0, 0, 3] = torch.finfo(dtype).min
    mask[:, :, :, -2:] = torch.finfo(dtype).min
    args = (*heads(dtype=dtype), randn(4, 9, 9, dtype=dtype), mask.to(dtype))
    if dtype == torch.bfloat16:
        check(additive, args, training=training)
        out = compiled(additive, args, training)[0][0]
        torch.testing.assert_close(out[0, :, 3].float(), args[2][0].float().mean(-2), rtol=0.02, atol=0.02)
    else:  # eager mode adds in fp16: the scores of such a row are 65504 less, and not one number
        out, theirs = compiled(additive, args, False)[0][0], run(additive, args, False)[0]
        torch.testing.assert_close(out[1], theirs[1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("fill", [-math.inf, LOWEST])
def test_rows_that_are_filled_wholly_give_what_eager_gives(fill):
    seen = visible(2, 1, 9, 9)
    seen[0, 0, 3] = False
    args = (*heads(), randn(4, 9, 9), seen)
    ours, report = compiled(filled(fill), args, False)
    assert len(report.substitutions) == 1
    theirs = run(filled(fill), args, False)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0.02, atol=0.02, equal_nan=True)
    assert bool(ours[0][0, :, 3].isnan().all()) == math.isinf(fill)


def test_rows_that_are_masked_wholly_in_scaled_dot_product_attention():
    def fn(q, k, v, b):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=b)

    b = randn(2, 1, 9, 9).detach()
    b[0, 0, 3] = -math.inf
    b[:, :, :, -2:] = -math.inf
    args = (*heads(), b.requires_grad_())
    ours, report = compiled(fn, args, True)
    assert len(report.substitutions) == 1
    assert not any(x.isnan().any() for x in ours) and (ours[0][0, :, 3] == 0).all()
    check(fn, args, training=True)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fill", [-1e4, -1e9, LOWEST])
@pytest.mark.parametrize("shape", [(2, 1, 9, 9), (2, 1, 1, 9), (4, 9, 9)])
def test_a_large_finite_number_hides(shape, fill, training):
    """A row that it hides wholly is uniform, and has gradients to the values alone."""

    def fn(q, k, v, seen):
        return torch.where(seen, q @ k.mT * 0.25, fill).softmax(-1) @ v

    seen = visible(*shape)
    seen[0, ..., min(3, shape[-2] - 1), :] = False
    check(fn, (*heads(), seen), training=training)


def test_a_finite_mask_over_a_learned_bias():
    """As in DeBERTa."""
    seen = visible(2, 1, 9, 9)
    seen[0, 0, 3] = False
    check(filled(LOWEST), (*heads(), randn(4, 9, 9), seen), training=True)
    check(filled(LOWEST), (*heads(), randn(2, 4, 9, 9), seen), training=True)


def test_a_finite_mask_over_a_learned_bias_of_symbolic_sizes():
    fn = filled(LOWEST)
    whole = torch.compile(fn, backend=backend.fuse, options=OPTIONS)
    for length in (9, 13, 17):
        seen = visible(2, 1, length, length)
        seen[0, 0, 3] = False
        args = (*heads(queries=length), randn(4, length, length), seen)
        for ours, theirs, exact in zip(run(whole, args, True), run(fn, args, True), run(fn, wide(args), True), strict=True):
            assert error(ours, exact) <= error(theirs, exact)
    assert len(whole_report().substitutions) == 2, "one graph for 9, one for all other lengths"


def test_a_finite_mask_over_a_bias_of_positions():
    """As in MPT: what is computed of positions alone hides nothing."""

    def alibi(q, k, v, seen):
        slopes = 1.0 / torch.pow(2, torch.arange(1, 5).to(torch.float32))
        bias = (torch.arange(1 - 9, 1).view(1, 1, 9) * slopes.view(4, 1, 1)).to(q.dtype)
        return (q @ k.mT * 0.25 + bias).masked_fill(~seen, LOWEST).softmax(-1) @ v

    def infinite(q, k, v, seen):
        bias = (-1.0 / torch.arange(9).to(torch.float32)).to(q.dtype)
        return (q @ k.mT * 0.25 + bias).masked_fill(~seen, LOWEST).softmax(-1) @ v

    seen = visible(2, 1, 9, 9)
    seen[0, 0, 3] = False
    check(alibi, (*heads(), seen), training=True)
    refused(infinite, (*heads(), seen), "beside what may hide too", training=True, code="illegal")


def test_finite_numbers_that_are_not_the_same_are_refused():
    args = (*heads(), randn(4, 9, 9), visible(2, 1, 1, 9))
    refused(filled(-100.0), args, "does not hide", training=False, code="illegal")
    refused(filled(-1e9), args, "beside another bias", training=False, code="illegal")
    fixed = (*heads(), randn(4, 9, 9, grad=False), visible(2, 1, 1, 9))
    refused(filled(LOWEST), fixed, "beside what may hide too", training=True, code="illegal")


@pytest.mark.parametrize("factor", [1, 100])
def test_a_number_that_is_added_below_a_finite_mask_counts(factor):
    """Visible scores are lower than hidden ones here."""

    def below(q, k, v, seen):
        return torch.where(seen, (q @ k.mT * 0.25 - 9990 / factor) * factor, -9500.0).softmax(-1) @ v

    def above(q, k, v, seen):
        return (torch.where(seen, q @ k.mT * 0.25, -9500.0) - 99).softmax(-1) @ v

    args = (*heads(), visible(9, 9))
    refused(below, args, "to which a number was added", training=False, code="illegal")
    check(above, args, training=True)


def test_infinity_without_a_gradient_of_the_values_is_refused():
    """Rows that are hidden wholly have no finite gradient of the values in eager mode; the others are zero."""

    def fn(q, k, v, seen):
        return torch.where(seen, q @ k.mT * 0.25, -math.inf).softmax(-1) @ v.detach()

    q, k, v = heads()
    refused(fn, (q, k, v.detach(), visible(9, 9)), "would be NaN", training=True, code="illegal")


class KeepsGradient(torch.autograd.Function):
    """Of what a mask hides, or of what it does not."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.where(ctx.saved_tensors[0], grad, 0.0), None


def test_gradients_of_the_other_side_of_a_mask_are_others():
    def fn(q, k, v, hidden):
        scores = KeepsGradient.apply(q @ k.mT * 0.25, hidden)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v

    args = (*heads(), ~visible(9, 9))
    (_, dq, dk, dv), _ = compiled(fn, args, True)
    assert not dq.any() and not dk.any() and dv.any()


def filled_in_wide(q, k, v, b, seen):
    scores = (q @ k.mT).float() * 0.25 + b
    return scores.masked_fill(~seen, torch.finfo(torch.float32).min).softmax(-1).to(q.dtype) @ v


def hidden_in_wide(q, k, v, seen):
    return ((q @ k.mT).float() * 0.25).masked_fill(~seen, LOWEST_IN_WIDE).softmax(-1).to(q.dtype) @ v


def added_in_wide(q, k, v, seen):
    """As in transformers under autocast, where masks have the parameters' dtype."""
    mask = torch.where(seen, torch.tensor(0.0), LOWEST_IN_WIDE).expand(2, 1, 9, 9)
    return ((q @ k.mT).float() * 0.25 + mask).softmax(-1).to(q.dtype) @ v


def added_beside_what_may_hide(q, k, v, b, seen):
    return ((q @ k.mT).float() * 0.25 + b + torch.where(seen, 0.0, LOWEST_IN_WIDE)).softmax(-1).to(q.dtype) @ v


def added_as_infinity(q, k, v, seen):
    """What a conversion rounds to it."""
    mask = torch.where(seen, 0.0, LOWEST_IN_WIDE).to(q.dtype)
    return ((q @ k.mT).float() * 0.25 + mask).softmax(-1).to(q.dtype) @ v


def added_to_hide_all(q, k, v, seen):
    """All weight is on the keys that are hidden by the larger number."""
    mask = torch.where(seen, -2e38, LOWEST_IN_WIDE)
    return ((q @ k.mT).float() * 0.25 + mask).softmax(-1).to(q.dtype) @ v


def added_beside_alibi(q, k, v, seen):
    """As in BLOOM."""
    bias = alibi_of_keys(torch.full((), 0.7))
    return ((q @ k.mT).float() * 0.25 + bias + torch.where(seen, 0.0, LOWEST_IN_WIDE)).softmax(-1).to(q.dtype) @ v


def filled_over_alibi(q, k, v, seen):
    """As in MPT. Together they were larger than either."""
    return ((q @ k.mT).float() * 0.25 + alibi_of_keys(torch.full((), 0.7))).masked_fill(~seen, LOWEST_IN_WIDE).softmax(-1).to(q.dtype) @ v


def filled_twice_over_alibi(q, k, v, seen):
    """A row may be hidden by two masks, each of which hides a part, and all of them override the bias."""
    scores = (q @ k.mT).float() * 0.25 + alibi_of_keys(torch.full((), 0.7))
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), LOWEST_IN_WIDE)
    return scores.masked_fill(~seen, LOWEST_IN_WIDE).softmax(-1).to(q.dtype) @ v


NARROW, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("fn", "held", "training"),
    [
        (filled(LOWEST), [NARROW], True),
        (filled_in_wide, [WIDE], False),
        *[(fn, [NARROW], training) for fn in (hidden_in_wide, added_in_wide, added_as_infinity) for training in (False, True)],
        *[(added_to_hide_all, [WIDE], training) for training in (False, True)],
        *[(added_beside_what_may_hide, [WIDE, WIDE], training) for training in (False, True)],
        *[(fn, [WIDE, NARROW], training) for fn in (added_beside_alibi, filled_over_alibi) for training in (False, True)],
        (filled_twice_over_alibi, [WIDE, WIDE], False),
    ],
)
def test_what_hides_has_the_dtype_of_queries_where_that_holds_a_number_that_hides(fn, held, training):
    """A bias in fp32 is twice as much memory, and on GPUs not for the fastest kernels."""
    with_bias = fn in (filled_in_wide, added_beside_what_may_hide) or held == [NARROW] and fn.__name__ == "fn"
    seen = visible(2, 1, 9, 9)
    seen[0, 0, 3] = fn is added_as_infinity  # or it is hidden wholly
    seen[1, 0, 2] = torch.arange(9) > 4
    seen[1, 0, 2, 0] |= fn is added_as_infinity
    biases = [randn(2, 4, 9, 9, dtype=WIDE if fn is added_beside_what_may_hide else NARROW)] if with_bias else []
    args = [*heads(), *biases, seen]
    graph = traced_joint(fn, args, range(len(args) - 1) if training else (), device="cpu")
    (match,) = (m for n in graph.nodes if n.op == "call_function" and n.target in Attention.anchors and (m := Attention().match(n)))
    assert [b.itemsize for b in attended(match.site).biases] == [dtype.itemsize for dtype in held]
    assert rewrite(graph, [Attention()], "joint", strict=True).substitutions
    (forward,) = graph.find_nodes(op="call_function", target=attention)
    assert [bias.meta["val"].dtype for bias in forward.args[3]] == held
    assert sum(bias.meta["val"].numel() for bias in forward.args[3]) < 4 * 81 or with_bias
    check(fn, tuple(args), training=training)


def test_a_mask_of_two_numbers_does_not_hold_the_gradient_of_a_bias():
    def fn(q, k, v, b, seen):
        return (q @ k.mT * 0.25 + torch.where(seen, torch.zeros(4, 9, 9), -math.inf) + b).softmax(-1).to(v.dtype) @ v

    check(fn, (*heads(), randn(4, 9, 9, dtype=torch.float32), visible(9, 9)), training=True)


def exponentials_over_their_sum(fill):
    def fn(q, k, v, seen):
        weights = ((q @ k.mT).float() * 0.25).masked_fill(~seen, fill).exp()
        return (weights / weights.sum(-1, keepdim=True)).to(q.dtype) @ v

    return fn


def test_rows_of_low_numbers_are_nan_where_no_maximum_is_subtracted():
    seen = visible(2, 1, 9, 9)
    seen[0, 0, 3] = False
    refused(exponentials_over_their_sum(-1e9), (*heads(), seen), "no maximum is subtracted", training=False, code="illegal")
    ours, report = compiled(exponentials_over_their_sum(-math.inf), (*heads(), seen), False)
    assert len(report.substitutions) == 1 and ours[0][0, :, 3].isnan().all() and ours[0][1].isfinite().all()

    def biased(q, k, v, mask):
        weights = ((q @ k.mT).float() * 0.25 + mask).exp()
        return (weights / weights.sum(-1, keepdim=True)).to(q.dtype) @ v

    refused(biased, (*heads(), seen.float() * 1e9 - 1e9), "no maximum is subtracted", training=False, code="illegal")


def test_a_number_that_overflows_once_it_is_scaled_is_minus_infinity():
    def fn(q, k, v, seen):
        return ((q @ k.mT).masked_fill(~seen, LOWEST) / 0.25).softmax(-1) @ v

    q, k, v = heads()
    refused(fn, (q, k, v.detach(), visible(2, 1, 9, 9)), "without that of the values", training=True, code="illegal")


def test_positions_may_give_numbers_that_hide():
    def fn(q, k, v, seen):
        bias = 2.0 ** (torch.arange(9) * 20)[None] * torch.ones(4, 1, 1)
        return ((q @ k.mT).float() * 0.25 - bias).masked_fill(~seen, -3e38).softmax(-1).to(q.dtype) @ v

    seen = visible(2, 1, 9, 9)
    seen[0, 0, 3] = False
    check(fn, (*heads(), seen), training=False)


@pytest.mark.cuda
def test_a_number_that_the_program_made_a_tensor_of_on_the_gpu_is_read():
    """As transformers' masks have it."""

    def fn(q, k, v, seen):
        mask = torch.where(seen, torch.tensor(0.0, device=q.device), LOWEST_IN_WIDE)
        return ((q @ k.mT).float() * 0.25 + mask).softmax(-1).to(q.dtype) @ v

    args = [a.detach().cuda() for a in (*heads(), visible(2, 1, 9, 9))]
    ours, report = compiled(fn, tuple(args), False)
    (made,) = report.substitutions
    assert "aten.where.self" in made.replacement, "made anew, in 16 bits"
    torch.testing.assert_close(ours[0], fn(*args), rtol=0.02, atol=0.02)
