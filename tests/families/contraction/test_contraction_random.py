"""Random contractions, forward and backward, are as exact as a sum in fp32 (fp64) of unrounded products.

``FUSEBACKEND_TEST_CONTRACTIONS=2000`` draws so many; the default is a sample.
"""

import math
import os

import pytest
import torch
from families.contraction.random_contractions import aten, calls, draw, rewritten

COUNT = int(os.environ.get("FUSEBACKEND_TEST_CONTRACTIONS", "160"))
SEEDS_A_TEST = 40


def assert_close(found, expected, absolute, terms, dtype):
    """As exact as adding ``terms`` products in fp32 (fp64) and rounding once: ``absolute`` is the sum of the products' absolute values."""
    unit = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    smallest = torch.finfo(dtype).smallest_normal
    bound = absolute * (terms + 2) * unit + expected.abs() * torch.finfo(dtype).eps + smallest
    assert ((found.double() - expected).abs() <= bound).all()


def with_gradients(drawn):
    def forward_and_backward(x, y, gradient):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        out = drawn(x, y)
        return (out, *torch.autograd.grad(out, (x, y), gradient))

    return forward_and_backward


def is_product(drawn):
    """Whether the dims of size above 1 make a matrix product."""
    kinds = {kind for kind, size in zip(drawn.kinds, drawn.sizes) if size > 1}
    return {"left", "right", "summed"} <= kinds


@pytest.mark.parametrize("start", range(0, COUNT, SEEDS_A_TEST))
def test_random_contractions(start):
    replaced = 0
    for seed in range(start, min(start + SEEDS_A_TEST, COUNT)):
        drawn = draw(seed)
        x, y = drawn.holders(seed)
        out = drawn(x, y)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
        both = with_gradients(drawn)
        module, outcome = rewritten(both, x, y, gradient)
        results, eager = module(x, y, gradient), both(x, y, gradient)
        exact = both(x.double(), y.double(), gradient.double())
        bounds = both(x.double().abs(), y.double().abs(), gradient.double().abs())
        terms = math.prod(drawn.sizes)
        refused = drawn.mean and out.dtype == torch.float16
        matched = len(calls(module.graph, aten.bmm.default, aten.mm.default))
        assert refused or matched == (3 if is_product(drawn) else 0), (seed, outcome.rejections)
        rounds_between = drawn.mean or drawn.out is not None or len(set(drawn.dtypes)) > 1  # the gradient, in eager mode too
        for found, plain, expected, absolute in zip(results, eager, exact, bounds):
            assert found.dtype == plain.dtype and found.stride() == plain.stride(), seed
            if not matched:
                assert torch.equal(found, plain), seed
            elif not rounds_between:
                assert_close(found, expected, absolute, terms, found.dtype)
            else:
                least = max(torch.finfo(t).eps for t in (*drawn.dtypes, gradient.dtype))
                assert ((found.double() - expected).abs() <= 4 * least * absolute + 1e-30).all(), seed
        replaced += matched
    assert replaced > SEEDS_A_TEST // 2
