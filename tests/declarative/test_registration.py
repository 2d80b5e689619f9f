"""Registering patterns given as PyTorch functions: errors, verification, decorators, fingerprints."""

import pytest
import torch
from example_pattern import other_silu_mul, pair, silu_mul
from torch.nn import functional as F

import fusebackend
from fusebackend import RegistrationError, VerificationError
from fusebackend.declarative.traced_pattern import TracedPattern
from fusebackend.rewriting import registry
from fusebackend.testing import assert_pattern

A, B = pair(4, 8)
TENSOR = torch.randn(8)


@pytest.mark.parametrize(
    ("search", "replace", "example", "kwargs", "words"),
    [
        (silu_mul, lambda x, y: other_silu_mul(x, y).sum(0), (A, B), {}, "output 0 differs: the search function gives float32 of shape"),
        (silu_mul, lambda x, y: other_silu_mul(x, y).double(), (A, B), {}, "float64"),
        (silu_mul, lambda x, y: other_silu_mul(x, y).t().contiguous().t(), (A, B), {}, "strides"),
        (silu_mul, lambda x, y: (x + 1, y + 1), (A, B), {}, "returns 1 tensors, the replacement 2"),
        (silu_mul, lambda x: x, (A, B), {}, "takes (x, y), the replacement (x)"),
        (silu_mul, lambda x, y: other_silu_mul(x, y) * torch.tensor(1.0), (A, B), {}, "torch.full makes one"),
        (silu_mul, other_silu_mul, (A,), {}, "do not fit the search function"),
        (silu_mul, other_silu_mul, (1.0, 2.0), {}, "must hold a tensor"),
        (silu_mul, other_silu_mul, (A, B), {"pin": ("z",)}, "pin names 'z'; the arguments are x, y"),
        (lambda x, y: x * TENSOR, lambda x, y: x * y, (A, B), {}, "uses a tensor that is not one of its arguments"),
        (lambda x, y: x.sin(), lambda x, y: x.sin(), (A, B), {}, "does not use its argument 'y'"),
        (lambda x, a: x * (a + 1), lambda x, a: x * (a + 1), (A, 2.0), {}, "pin it: pin=('a',)"),
        (lambda x, y: print(x) or x * y, other_silu_mul, (A, B), {}, "can't be traced"),
        (silu_mul, other_silu_mul, (A, B), {"name": "transpose_add"}, "'transpose_add' is taken"),
        (
            silu_mul,
            other_silu_mul,
            (A, B),
            {"extra_check": lambda c, held=TENSOR: True},
            "a Tensor: compiled graphs are cached by what a pattern does",
        ),
        (silu_mul, other_silu_mul, (A.clone().requires_grad_(), B), {"level": "post_grad"}, "need level='joint'"),
    ],
)
def test_registering_wrongly_says_what_to_do(search, replace, example, kwargs, words):
    with pytest.raises(RegistrationError) as error:
        fusebackend.register_replacement(search, replace, example, **{"name": "test_wrong", **kwargs})
    assert words in str(error.value)
    assert "test_wrong" not in registry.known_names()


@pytest.mark.parametrize(
    "replace",
    [
        lambda x, n: torch.tanh(x) * (1 / n),
        lambda x, n: torch.tanh(x) * (-1 / -n),
        lambda x, n: torch.tanh(x) / int(n),
        lambda x, n: torch.tanh(x) / n if n < 1 else torch.tanh(x).div(n).clone(),
    ],
)
def test_a_replacement_that_computes_with_a_number_is_refused(replace):
    """The trace would hold what was computed of one number, and be used for all."""
    with pytest.raises(RegistrationError, match="the replacement computes with 'n' .* pin it"):
        fusebackend.register_replacement(lambda x, n: torch.tanh(x) / n, replace, (A, 2.0), name="test_wrong")


def test_a_pinned_number_may_be_computed_with(pattern):
    name = pattern(lambda x, n: torch.tanh(x) / n, lambda x, n: torch.tanh(x) * (1 / n), (A, 4.0), pin=("n",), verify=True)
    assert_pattern(lambda x: torch.tanh(x) / 4.0, A, pattern=name, count=1)
    assert_pattern(lambda x: torch.tanh(x) / 2.0, A, pattern=name, count=0)


def test_a_replacement_is_compared_for_other_numbers_too():
    with pytest.raises(VerificationError, match="other numbers"):
        fusebackend.register_replacement(lambda x, n: torch.tanh(x) / n, lambda x, n: torch.tanh(x) / 2.0, (A, 2.0), name="test_wrong")


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        (lambda x, y: F.silu(x) * y * 1.0001, "largest error"),
        (lambda x, y: F.silu(x.clamp(max=100)) * y, "large values"),
        (lambda x, y: F.silu(x) * torch.nan_to_num(y), "inf or nan"),
    ],
)
def test_a_replacement_that_computes_something_else_is_not_registered(replace, words):
    with pytest.raises(VerificationError) as error:
        fusebackend.register_replacement(silu_mul, replace, (A, B), name="test_wrong")
    assert words in str(error.value) and "test_wrong" not in registry.known_names()


def test_the_decorators():
    @fusebackend.register_pattern("test_decorated", example_inputs=(A, B))
    def search(x, y):
        return F.silu(x) * y

    try:
        replacement = search.replace_with(other_silu_mul)
        assert torch.equal(search(A, B), silu_mul(A, B))
        assert fusebackend.verify("test_decorated").ok and replacement.name == "test_decorated"
        assert_pattern(silu_mul, A, B, pattern="test_decorated", count=1)
    finally:
        fusebackend.unregister("test_decorated")


def test_the_fingerprint_follows_what_the_pattern_does():
    def make(factor=1.0, limit=3, priority=0, dtype=torch.float32):
        return TracedPattern(
            "test_print",
            lambda x, y: F.silu(x) * y,
            lambda x, y: y * F.silu(x) * factor,
            pair(4, 8, dtype=dtype),
            when=lambda c: len(c.nodes) < limit,
            priority=priority,
        ).fingerprint()

    first = make()
    assert make() == first
    others = {make(factor=2.0), make(limit=4), make(priority=1), make(dtype=torch.float64)}
    assert len(others) == 4 and first not in others
