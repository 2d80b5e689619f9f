"""Masks that are known while compiling to be causal, which the kernels take as none; and what stands beside them."""

import math

import pytest
import torch
from attention_programs import LOWEST, LOWEST_IN_WIDE, OPTIONS, alibi_of_keys, check, heads, randn, refused, run, visible
from families.compiled_results import whole_report

from fusebackend import backend

pytestmark = pytest.mark.usefixtures("library")


def seen_before(count, offset=0, batch=None):
    """As transformers computes it: of positions, in every batch."""
    positions = torch.arange(count)
    seen = (positions[None] <= positions[:, None] + offset) & torch.ones((), dtype=torch.bool)
    return seen if batch is None else seen[None, None].expand(batch, -1, -1, -1)


def causal_by_where(q, k, v):
    return torch.where(seen_before(9), q @ k.mT * 0.25, -math.inf).softmax(-1) @ v


def causal_by_a_finite_number(q, k, v):
    return (q @ k.mT * 0.25).masked_fill(~seen_before(9), LOWEST).softmax(-1) @ v


def causal_by_addition(q, k, v):
    mask = torch.where(seen_before(9, batch=2), torch.tensor(0.0), LOWEST_IN_WIDE)
    return ((q @ k.mT).float() * 0.25 + mask).softmax(-1).to(q.dtype) @ v


def causal_by_infinity_elsewhere(q, k, v):
    mask = torch.where(~seen_before(9, batch=2), -math.inf, 0.0)
    return ((q @ k.mT).float() * 0.25 + mask).softmax(-1).to(q.dtype) @ v


def causal_over_alibi(q, k, v):
    scores = (q @ k.mT).float() * 0.25 + alibi_of_keys(torch.full((), 0.7))
    return scores.masked_fill(~seen_before(9, batch=2), LOWEST_IN_WIDE).softmax(-1).to(q.dtype) @ v


def causal_beside_another_mask(q, k, v, seen):
    return (torch.where(seen_before(9), q @ k.mT * 0.25, -math.inf) + torch.where(seen, 0.0, -math.inf).to(q.dtype)).softmax(-1) @ v


def causal_beside_a_learned_bias(q, k, v, b):
    return (q @ k.mT * 0.25 + b).masked_fill(~seen_before(9), -math.inf).softmax(-1) @ v


def but_for_one_more(q, k, v):
    return torch.where(seen_before(9, 1), q @ k.mT * 0.25, -math.inf).softmax(-1) @ v


def but_for_what_is_shown(q, k, v):
    return (q @ k.mT * 0.25 + torch.where(seen_before(9), 1.0, -math.inf).to(q.dtype)).softmax(-1) @ v


def by_data(q, k, v, seen):
    return torch.where(seen, q @ k.mT * 0.25, -math.inf).softmax(-1) @ v


def beside_padding(q, k, v, seen):
    """Padding on the left: the first rows see nothing, and have equal weights for all keys that one of the two hides."""
    mask = torch.where(seen_before(9), 0.0, LOWEST_IN_WIDE)
    return ((q @ k.mT).float() * 0.25 + mask + torch.where(seen, 0.0, LOWEST_IN_WIDE)).softmax(-1).to(q.dtype) @ v


def beside_a_bias_with_padding(fill, chosen):
    """The same padding, within a bias that has a gradient."""

    def fn(q, k, v, b, seen):
        padded = b.masked_fill(~seen, fill) if chosen else b + torch.where(seen, 0.0, fill)
        mask = torch.where(seen_before(9), 0.0, LOWEST_IN_WIDE)
        return ((q @ k.mT).float() * 0.25 + padded + mask).softmax(-1).to(q.dtype) @ v

    return fn


PADDED_ON_THE_LEFT = (torch.arange(9) >= torch.tensor([2, 0])[:, None])[:, None, None]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -math.inf])
def test_a_bias_with_a_gradient_may_hide(fill, chosen, training):
    fn = beside_a_bias_with_padding(fill, chosen)
    report = check(fn, (*heads(), randn(4, 9, 9, dtype=torch.float32), PADDED_ON_THE_LEFT), training=training)
    assert "causal" not in report.substitutions[0].note


def test_a_filled_mask_over_a_bias_that_may_hide_has_other_gradients():
    def fn(q, k, v, b, seen):
        scores = (q @ k.mT).float() * 0.25 + b.masked_fill(~seen, LOWEST_IN_WIDE)
        return scores.masked_fill(~seen_before(9), LOWEST_IN_WIDE).softmax(-1).to(q.dtype) @ v

    args = (*heads(), randn(4, 9, 9, dtype=torch.float32), PADDED_ON_THE_LEFT)
    refused(fn, args, "beside what may hide too", training=True, code="illegal")


def looked_up(q, k, v, b):
    return b[:, torch.arange(81) % 5].view(4, 9, 9)


def of_products(q, k, v, b):
    """As a bias of pairs is, and SAM's two, of heights and widths."""
    return (b @ b.mT)[:, :1, :1].expand(4, 9, 9) + (b * 0.5).sigmoid() @ torch.ones(5, 9, dtype=b.dtype).expand(4, 5, 9)


@pytest.mark.parametrize(("bias", "size"), [(lambda q, k, v, b: b, 9), (looked_up, 5), (of_products, 5)])
def test_a_causal_mask_beside_what_is_learned_is_none(bias, size):
    def fn(q, k, v, b):
        mask = torch.where(seen_before(9), 0.0, LOWEST_IN_WIDE)
        return ((q @ k.mT).float() * 0.25 + mask + bias(q, k, v, b)).softmax(-1).to(q.dtype) @ v

    shape = (4, 9, 9) if size == 9 else (4, 5) if bias is looked_up else (4, 9, 5)
    (made,) = check(fn, (*heads(), randn(*shape, dtype=torch.float32)), training=True).substitutions
    assert made.note == "causal, with 1 bias, 1 of them with a gradient"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("fn", "causal", "others"),
    [
        (causal_by_where, True, "without a bias"),
        (causal_by_a_finite_number, True, "without a bias"),
        (causal_by_addition, True, "without a bias"),
        (causal_by_infinity_elsewhere, True, "without a bias"),
        (causal_over_alibi, True, "with 1 bias"),
        (causal_beside_another_mask, True, "with 1 bias"),
        (causal_beside_a_learned_bias, True, "with 1 bias"),
        (beside_padding, False, "with 2 biases"),
        (but_for_one_more, False, "with 1 bias"),
        (but_for_what_is_shown, False, "with 1 bias"),
        (by_data, False, "with 1 bias"),
    ],
)
def test_a_mask_that_is_known_to_be_causal_is_none(fn, causal, others, training):
    """The kernels leave out what it hides, and read none."""
    given = {
        causal_beside_another_mask: visible(2, 1, 9, 9) | torch.eye(9, dtype=torch.bool),
        beside_padding: (torch.arange(9) >= torch.tensor([2, 0])[:, None])[:, None, None],
        by_data: torch.ones(9, 9).tril() > 0,
        causal_beside_a_learned_bias: randn(4, 9, 9),
    }
    further = [given[fn]] if fn in given else []
    (made,) = check(fn, (*heads(), *further), training=training).substitutions
    assert made.note.startswith("causal, " * causal + others)


def test_a_causal_mask_of_fewer_keys_or_of_sizes_that_are_not_known_is_a_bias():
    def rectangular(q, k, v):
        return torch.where(seen_before(9)[:5], q @ k.mT * 0.25, -math.inf).softmax(-1) @ v

    def dynamic(q, k, v):
        return torch.where(seen_before(q.shape[-2]), q @ k.mT * 0.25, -math.inf).softmax(-1) @ v

    (made,) = check(rectangular, tuple(heads(queries=5, keys=9)), training=True).substitutions
    assert made.note == "with 1 bias"
    whole = torch.compile(dynamic, backend=backend.fuse, options=OPTIONS, dynamic=True)
    args = tuple(heads())
    torch.testing.assert_close(run(whole, args, False)[0], run(dynamic, args, False)[0], rtol=0.02, atol=0.02)
    assert [s.note for s in whole_report().substitutions] == ["with 1 bias"]
