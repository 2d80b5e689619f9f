"""What is refused, and the reasons that users read."""

import pytest
import torch
from attention_programs import compiled, heads, randn, refused

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize(
    ("training", "reason"), [(False, "also uses the probabilities"), (True, "adds to the gradient of the probabilities")]
)
def test_probabilities_that_are_used_elsewhere_are_refused(training, reason):
    def fn(q, k, v, b):
        p = (q @ k.mT * 0.25 + b).softmax(-1)
        return torch.cat([p @ v, p], -1)

    refused(fn, (*heads(), randn(4, 9, 9)), reason, training=training)


@pytest.mark.parametrize(("training", "reason"), [(False, "also uses the scores"), (True, "used otherwise than as that of a bias")])
def test_scores_that_are_used_elsewhere_are_refused(training, reason):
    def fn(q, k, v, b):
        scores = q @ k.mT * 0.25
        return (scores + b).softmax(-1) @ v + scores.mean()

    refused(fn, (*heads(), randn(4, 9, 9)), reason, training=training)


def test_a_whole_bias_that_was_computed_is_found():
    def fn(q, k, v, b):
        return (q @ k.mT * 0.25 + b.sin().cumsum(-1) * b).softmax(-1) @ v

    q, k, v = heads()
    b = randn(2, 4, 9, 9)
    _, report = compiled(fn, (q, k, v, b), True)
    assert len(report.substitutions) == 1  # that of the whole bias, from which autograd goes on


@pytest.mark.parametrize(("dtype", "words"), [(torch.float32, "torch.float32 queries"), (torch.float64, "torch.float64 queries")])
def test_other_dtypes_are_refused(dtype, words):
    def fn(q, k, v, b):
        return (q @ k.mT * 0.25 + b).softmax(-1) @ v

    refused(fn, (*heads(dtype=dtype), randn(4, 9, 9, dtype=dtype)), words, training=False, code="unsupported")


def test_heads_that_the_kernels_do_not_take_are_refused():
    def fn(q, k, v, b):
        return (q @ k.mT * 0.25 + b).softmax(-1) @ v

    refused(fn, (*heads(depth=132), randn(4, 9, 9)), "D must be a multiple of 8 up to 128, not 132", training=False, code="unsupported")


def test_what_stands_between_is_named():
    def fn(q, k, v, b):
        return ((q @ k.mT * 0.02).tanh() * 50 + b).softmax(-1) @ v

    refused(fn, (*heads(), randn(4, 9, 9)), "aten.tanh.default between the product and the softmax", training=False)


def of_keys(q, k, v, s):
    return (q @ k.mT * s.mT).softmax(-1) @ v


def behind_a_bias(q, k, v, s):
    return ((q @ k.mT + 2 * s) * s).softmax(-1) @ v


def twice(q, k, v, s):
    return (q @ k.mT * s * s).softmax(-1) @ v


def of_wide_scores(q, k, v, s):
    return (q.float() @ k.float().mT * s).softmax(-1).to(v.dtype) @ v


def divided(q, k, v, s):
    return (q @ k.mT / s).softmax(-1) @ v


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "fn, reason",
    [
        (of_keys, "a tensor that differs between keys multiplies the scores"),
        (behind_a_bias, "a tensor multiplies scores to which something was added"),
        (twice, "a tensor multiplies scores to which something was added, or that were multiplied before"),
        (of_wide_scores, "a tensor multiplies scores that are not rounded"),
        (divided, "aten.div.Tensor between the product and the softmax"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_multiplies_scores_otherwise_is_refused(fn, reason, training):
    refused(fn, (*heads(), randn(4, 9, 1)), reason, training=training)


def test_multiplied_scores_that_are_used_elsewhere_are_refused():
    def fn(q, k, v, s):
        scores = q @ k.mT
        return (scores * s).softmax(-1) @ v + scores.mean(-1, keepdim=True)

    refused(fn, (*heads(), randn(4, 1, 1)), "also uses the scores", training=False)
    refused(fn, (*heads(), randn(4, 1, 1)), "is used otherwise than for queries and keys", training=True)


def test_a_softmax_of_a_layer_is_no_attention():
    def fn(x, w, v):
        return (x @ w).softmax(-1) @ v

    _, report = compiled(fn, (randn(2, 9, 16), randn(16, 7), randn(2, 7, 16)), False)
    assert not report.substitutions and not report.rejections


@pytest.mark.parametrize("place", ["scores", "probabilities"])
def test_a_rounding_to_8_bits_stays(place):
    def fn(q, k, v):
        scores = (q @ k.mT * 0.25).float()
        if place == "scores":
            scores = scores.to(torch.float8_e4m3fn).float()
        p = scores.softmax(-1)
        if place == "probabilities":
            p = p.to(torch.float8_e4m3fn)
        return p.to(v.dtype) @ v

    q, k, v = heads()
    ours, report = compiled(fn, (q, k, v), False)
    assert not report.substitutions
    torch.testing.assert_close(ours[0], fn(q, k, v), rtol=0.02, atol=0.02)


def test_probabilities_that_are_summed_over_the_queries_are_no_attention():
    """The backward's product with them is one of an attention, but what it would give is a result of the forward."""

    def fn(q, k, v):
        return (q @ k.mT * 0.25).softmax(-1).mT @ v

    refused(fn, tuple(heads()), "from gradients", training=True, code="illegal")
