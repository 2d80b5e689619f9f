"""Programs whose sums look like ours and mean something else: sizes that are expanded, factors that overflow, indices out of range."""

import math

import pytest
import torch

import fusebackend
from fusebackend.patterns.index_add.sites import may_multiply

pytestmark = pytest.mark.usefixtures("library")


def check(interpreted, fn, *inputs, count=1, reason="", **kwargs):
    """The result is eager's, and so many sums were replaced."""
    expected, found = fn(*inputs), interpreted(fn, **kwargs)(*inputs)
    torch.testing.assert_close(found, expected, equal_nan=True)
    report = fusebackend.last_report()
    assert len(report.substitutions) == count, report
    assert reason in " ".join(r.reason for r in report.rejections)
    return report


# ---- sizes ----


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_index_that_is_expanded_along_the_indexed_dimension_is_left_alone(interpreted, dynamic):
    index, source = torch.tensor([[2]]), torch.randn(30, 8)

    def fn(i, s):
        return torch.zeros(4, 8).scatter_add(0, i.expand(30, 8), s)

    check(interpreted, fn, index, source, count=0, reason="" if dynamic else "not one number a row", dynamic=dynamic)


def test_the_same_in_the_backward_of_a_gather(interpreted):
    def fn(x, i):
        return x.gather(0, i.expand(30, 8)).sin().sum()

    x, index = torch.randn(4, 8), torch.tensor([[1]])
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    fn(leaves[0], index).backward()
    interpreted(fn)(leaves[1], index).backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


def test_a_gather_by_such_an_index_is_not_absorbed(interpreted):
    def fn(x, d, g, i):
        return x.index_put((d,), g.gather(0, i.expand(5, 4)), accumulate=True)

    report = check(interpreted, fn, torch.randn(3, 4), torch.tensor([0, 1, 1, 0, 2]), torch.randn(3, 4), torch.tensor([[1]]))
    assert "gather" not in report.substitutions[0].note


@pytest.mark.parametrize("width", [1, 5])
def test_an_index_that_is_shorter_than_the_source_is_left_alone(interpreted, width):
    index, source = torch.randint(0, 4, (6, 1)), torch.randn(9, width)
    check(interpreted, lambda i, s: torch.zeros(4, width).scatter_add(0, i.expand(6, width), s), index, source, count=0, reason="cover all")


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (3, 4)])
@pytest.mark.parametrize("index", [(8, 2), (0, 2), ()])
def test_an_index_of_any_rank_onto_empty_rows(interpreted, shape, index):
    x, i, s = torch.randn(shape), torch.zeros(index, dtype=torch.int64), torch.randn(*index, shape[1])
    if not shape[0] and i.numel():
        return  # every index is out of range
    check(interpreted, lambda x, i, s: x.index_put((i,), s, accumulate=True), x, i, s)


# ---- factors ----

SMALL, HUGE = 1e-38, 1e38


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, d, s, w: x.index_add(0, d, s * w[:, None], alpha=1000.0),
        lambda x, d, s, w: x.index_add(0, d, s * w[:, None] * 1000.0),
        lambda x, d, s, w: x.index_add(0, d, (s * 1e-12) * w[:, None]),
        lambda x, d, s, w: x.index_add(0, d, (s * 1e-30) * 1e30),
        lambda x, d, s, w: x.index_add(0, d, (w[:, None] * 1e12 * torch.ones_like(s)) * 1e-12),
        lambda x, d, s, w: x.index_add(0, d, w[:, None].expand(3, 4) * 1e12, alpha=1e-12),
        lambda x, d, s, w: x.index_put((d,), (w[:, None] * 1e-10 * s) * 1e10, accumulate=True),
        lambda x, d, s, w: x.index_add(0, d, (s * 0.0) * 1e12, alpha=1e12),
    ],
)
def test_factors_are_applied_one_after_the_other_where_their_product_overflows(interpreted, fn):
    check(interpreted, fn, torch.zeros(3, 4), torch.tensor([0, 1, 1]), torch.full((3, 4), SMALL), torch.full((3,), HUGE))


@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e-320, 1e300])
def test_a_factor_that_no_kernel_takes_stays_outside(interpreted, factor):
    report = check(interpreted, lambda x, d, s: x.index_add(0, d, s * factor), torch.zeros(3, 4), torch.tensor([0, 1, 1]), torch.ones(3, 4))
    assert "scale" not in report.substitutions[0].note


def test_factors_on_one_side_of_1_and_signs_are_absorbed(interpreted):
    x, d, s, w = torch.randn(3, 4), torch.tensor([0, 1, 1]), torch.randn(3, 4), torch.randn(3)
    report = check(interpreted, lambda x, d, s: x.index_add(0, d, s * 0.5 * -0.25, alpha=0.125), x, d, s)
    assert report.substitutions[0].note in ("a scale, a scale", "a scale, a scale, a scale")  # alpha may be a multiplication too
    report = check(interpreted, lambda x, d, s, w: x.index_add(0, d, -1.0 * s * w[:, None], alpha=-1), x, d, s, w)
    assert "a weight a row, a scale" in report.substitutions[0].note


def test_which_numbers_may_be_multiplied():
    assert may_multiply(1, 1e12) and may_multiply(2.0, 3.0) and may_multiply(-0.5, 0.25) and may_multiply(0.5, 0)
    for a, b in [(1e12, 1e-12), (0.0, 1e12), (1e-20, 1e-20), (1e10, 1e10), (1, math.inf), (1, math.nan), (1, 1e-40)]:
        assert not may_multiply(a, b) and not may_multiply(b, a)


# ---- indices that are left out ----


@pytest.mark.parametrize("padding, absorbed", [(-100, False), (3, False), (-4, False), (2, True), (-3, True), (0, True)])
def test_a_padding_index_is_absorbed_only_if_eager_accepts_it(interpreted, padding, absorbed):
    def fn(x, i, s):
        return x.index_put((i,), torch.where((i == padding)[:, None], 0.0, s), accumulate=True)

    x, s = torch.randn(3, 4), torch.randn(5, 4)
    right = torch.tensor([0, 1, 1, -2, 0])
    report = check(interpreted, fn, x, right, s)
    assert ("ignored" in report.substitutions[0].note) == absorbed
    padded = right.clone()
    padded[2] = padding
    if absorbed:
        check(interpreted, fn, x, padded, s)
    else:
        for call in (fn, interpreted(fn)):
            with pytest.raises(IndexError):
                call(x, padded, s)


@pytest.mark.parametrize("bounds", ["both", "lower", "upper", "none"])
def test_a_mask_that_lets_indices_out_of_range_pass_is_left_alone(interpreted, bounds):
    """PyTorch's operator wraps and clamps what the mask lets pass; the kernel would leave it out."""

    def fn(x, i, s):
        mask = i != 1
        if bounds in ("both", "lower"):
            mask = mask & (i >= 0)
        if bounds in ("both", "upper"):
            mask = mask & (i < 3)
        return torch.ops.aten._unsafe_masked_index_put_accumulate(x, mask.unsqueeze(1), [i], s)

    x, i, s = torch.zeros(3, 4), torch.tensor([0, 1, 2, -1, 0, 7, -9]), torch.randn(7, 4)
    count, reason = (1, "") if bounds == "both" else (0, "does not leave out every index")
    check(interpreted, fn, x, i, s, count=count, reason=reason)
