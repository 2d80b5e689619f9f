"""Tensors that multiply the scores, as Swin v2's learned scale of each head does: queries are multiplied instead."""

import math

import pytest
import torch
from attention_programs import check, compiled, error, heads, randn, run, wide

#: The gradient of a scale is a sum that cancels: its error, and eager mode's, are those of a few numbers.
SLACK = 2.0
pytestmark = pytest.mark.usefixtures("library")


def learned(q, k, v, b, s):
    return (q @ k.mT * s.clamp(max=4.6).exp() + b).softmax(-1) @ v


def scaled_too(q, k, v, b, s):
    return ((s * ((q * 0.3) @ k.mT / 1.7) + b) * 0.7).softmax(-1) @ v


def keys_first(q, k, v, b, s):
    return ((k @ q.mT) * 0.25 * s.mT + b.mT).softmax(-2).mT @ v


def masked(q, k, v, b, s):
    return (q @ k.mT * s + b).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(4, 1, 1), (1,), (4, 9, 1), (2, 1, 1, 1), (2, 4, 9, 1)])
@pytest.mark.parametrize("fn", [learned, scaled_too, keys_first, masked], ids=lambda f: f.__name__)
def test_a_tensor_that_multiplies_the_scores(fn, shape, training):
    torch.manual_seed(0)
    check(fn, (*heads(), randn(4, 9, 9), randn(*([1] * (fn is keys_first and len(shape) == 1)), *shape)), training=training, slack=SLACK)


def test_errors_of_many_draws_are_smaller_than_eager_modes():
    """Of q, k, v, the bias and the scale; geometric means."""
    logarithms = []
    for seed in range(8):
        torch.manual_seed(seed)
        args = (*heads(), randn(4, 9, 9), randn(4, 1, 1))
        exact, eager, (ours, _) = run(learned, wide(args), True), run(learned, args, True), compiled(learned, args, True)
        logarithms.append([math.log(error(o, x) / error(e, x)) for o, e, x in zip(ours, eager, exact, strict=True)])
    assert (torch.tensor(logarithms).mean(0) < math.log(0.8)).all()


@pytest.mark.parametrize("wanted", [(0, 1, 2), (4,), (1, 4), (0,)])
def test_gradients_that_are_not_needed(wanted):
    torch.manual_seed(0)
    args = [*heads(), randn(4, 9, 9), randn(4, 1, 1)]
    for i, x in enumerate(args):
        x.requires_grad_(i in wanted)
    check(learned, tuple(args), training=True, slack=SLACK)


@pytest.mark.parametrize("training", [False, True])
def test_under_autocast(training):
    """The scale stays float32, and its gradient; the scores were rounded before it."""

    def fn(q, k, v, s):
        with torch.autocast("cpu", torch.bfloat16, enabled=q.dtype != torch.float64):
            return (q @ k.mT * s).softmax(-1) @ v

    torch.manual_seed(0)
    check(fn, (*heads(), randn(4, 1, 1, dtype=torch.float32)), training=training, slack=SLACK)


@pytest.mark.parametrize("training", [False, True])
def test_windows_of_padded_heads(training):
    def fn(q, k, v, b, s, mask):
        scores = ((q @ k.mT * s + b).view(2, 3, 4, 9, 9) + mask[None, :, None]).view(6, 4, 9, 9)
        return scores.softmax(-1) @ v

    torch.manual_seed(0)
    mask = torch.where(torch.rand(3, 9, 9) < 0.3, -100.0, 0.0).to(torch.bfloat16)
    check(fn, (*heads(6, depth=12), randn(4, 9, 9), randn(4, 1, 1), mask), training=training, slack=SLACK)


@pytest.mark.codegen
def test_with_generated_code():
    torch.manual_seed(0)
    check(learned, (*heads(), randn(4, 9, 9), randn(4, 1, 1)), training=True, interpret=False, slack=SLACK)
