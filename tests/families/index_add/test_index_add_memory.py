"""Sums that Inductor computes in the memory of an input, after operators that it computes there too."""

import pytest
import torch

import fusebackend

pytestmark = [pytest.mark.usefixtures("library"), pytest.mark.codegen]


def scattered(b, i, s):
    return b.scatter_add_(0, i[:, None].expand_as(s), s)


def twice(b, i, s):
    scattered(b, i, s)
    scattered(b, i, s)
    return b.clone()


def three_times(b, i, s):
    for _ in range(3):
        scattered(b, i, s)
    return b * 1


def after_another_sum(b, i, s):
    b.index_add_(0, i, s)
    scattered(b, i, s)
    return b.view(-1).clone()


def compiled(fn):
    torch._dynamo.reset()
    return torch.compile(fn, backend="fuse", options={"fuse.gate": "off"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [twice, three_times, after_another_sum])
def test_a_copy_of_what_was_summed_in_place_is_no_alias_of_it(fn, dtype):
    b, i, s = torch.randn(6, 8, dtype=dtype), torch.randint(0, 6, (7,)), torch.randn(7, 8, dtype=dtype)
    want = b.clone()
    expected = fn(want, i, s)
    got = compiled(fn)(b, i, s)
    torch.testing.assert_close(got, expected)
    assert len(fusebackend.last_report().substitutions) >= 2
    got.zero_()
    torch.testing.assert_close(b, want)


def overwritten(b, i, s):
    b[i] = 0
    return b.index_add(0, i, s)


def added(b, i, s):
    b[i] += s
    return b.index_add(0, i, s)


@pytest.mark.parametrize("fn", [overwritten, added])
def test_a_sum_onto_what_is_overwritten_in_an_input_with_gaps_is_left(fn):
    """The graph says that self is dense, and it would lie in the input in the end, which has gaps: the operator refuses that."""
    base, i, s = torch.randn(20, 64), torch.randperm(20), torch.randn(20, 32)
    want, b = base.clone()[:, :32], base.clone()[:, :32]
    expected = fn(want, i, s)
    torch.testing.assert_close(compiled(fn)(b, i, s), expected)
    torch.testing.assert_close(b, want)
    report = fusebackend.last_report()
    assert "self has gaps in memory" in " ".join(r.reason for r in report.rejections)
