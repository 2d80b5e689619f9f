"""Dims, powers and numbers of a pattern match those that mean the same, and no others."""

import pytest
import torch
from torch import fx

from fusebackend.declarative.precision import number_held_by
from fusebackend.testing import assert_pattern

X = torch.randn(4, 4)


def test_a_square_is_a_product_of_a_tensor_with_itself_alone(pattern):
    squared = pattern(lambda x: x.pow(2).sin(), lambda x: (x * x).sin(), (torch.randn(3, 4),))
    assert_pattern(lambda x: (x * x).sin(), X, pattern=squared, count=1)
    assert_pattern(lambda x: (x * 3).sin(), X, pattern=squared, count=0)
    doubled = pattern(lambda x: (x * 2).sin(), lambda x: (2 * x).sin(), (torch.randn(3, 4),))
    assert_pattern(lambda x: x.pow(2).sin(), X, pattern=doubled, count=0)


@pytest.mark.parametrize(("dim", "count"), [(0, 0), (1, 1), (-1, 1), (-2, 0)])
def test_unsqueeze_counts_the_dims_of_its_result(pattern, dim, count):
    name = pattern(lambda x: x.unsqueeze(1).cumsum(0), lambda x: x.view(-1, 1).cumsum(0), (torch.randn(5),))
    assert_pattern(lambda x: x.unsqueeze(dim).cumsum(0), torch.randn(6), pattern=name, count=count)


@pytest.mark.parametrize(
    "held",
    [
        lambda: torch.full((), 2.5),
        lambda: torch.full((), 2.7, dtype=torch.int64),
        lambda: torch.full((), 5, dtype=torch.bool),
        lambda: torch.full((), 1e6, dtype=torch.float16),
        lambda: torch.tensor(0.1).to(torch.bfloat16),
    ],
)
def test_a_tensor_without_dims_is_the_number_that_its_dtype_holds(pattern, held):
    name = pattern(lambda x, n: (x * n).atan(), lambda x, n: x.mul(n).atan(), (torch.randn(3, 4), 0.5))
    assert_pattern(lambda x: (x * held()).atan(), X, pattern=name, count=int(held().dtype != torch.bool))


def test_a_constant_that_the_graph_writes_is_no_number():
    """A buffer of an exported program, which the next call finds changed."""
    graph = fx.Graph()
    module = torch.nn.Module()
    module.register_buffer("step", torch.tensor(3.0))
    read = graph.get_attr("step")
    read.meta["val"] = torch.empty((), device="meta")
    graph.output(read)
    owner = fx.GraphModule(module, graph)
    (node,) = owner.graph.find_nodes(op="get_attr")
    assert number_held_by(node) == 3.0
    with owner.graph.inserting_before(owner.graph.output_node()):
        owner.graph.call_function(torch.ops.aten.copy_.default, (owner.graph.get_attr("step"), node))
    assert number_held_by(node) is None


def test_zeros_of_other_signs_are_other_numbers(pattern):
    name = pattern(lambda x: torch.copysign(x, 0.0) * 2, lambda x: x.abs() * 2, (torch.randn(3, 4),))
    assert_pattern(lambda x: torch.copysign(x, 0.0) * 2, X, pattern=name, count=1)
    assert_pattern(lambda x: torch.copysign(x, -0.0) * 2, X, pattern=name, rejected="is -0.0, the pattern has 0.0")


@pytest.mark.parametrize("fn", [lambda x, n: torch.clamp(x, max=n).sin(), lambda x, n: torch.add(x, x.sin(), alpha=n)])
def test_an_int_stands_for_any_int(pattern, fn):
    name = pattern(fn, fn, (torch.randn(3, 4), 3))
    assert_pattern(lambda x: fn(x, 2), X, pattern=name, count=1)


def test_a_slice_of_all_is_its_operand(pattern):
    name = pattern(lambda x: x[:, 1].sin(), lambda x: x.select(1, 1).sin(), (torch.randn(3, 4),))
    for fn in (lambda x: x[:, 1].sin(), lambda x: x.select(1, 1).sin(), lambda x: x[1:, 1].sin()):
        for dynamic in (False, True):
            assert_pattern(fn, X, pattern=name, count=1, dynamic=dynamic)
    assert_pattern(lambda x: x[:, 2].sin(), X, pattern=name, count=0)


def test_what_a_check_gives_is_named(pattern):
    def sum_of(when):
        return pattern(lambda x, y: (x + y).cos(), lambda x, y: torch.add(x, y).cos(), (X, X), when=when)

    def fn(x, y):
        return (x + y).cos()

    whole = sum_of(lambda c: c.kwargs["x"].shape[-1] % 4 == 0)
    assert_pattern(fn, X, X, pattern=whole, count=1)
    assert_pattern(fn, X, X, pattern=whole, rejected="returned a condition on symbolic sizes", dynamic=True)
    asked = sum_of(lambda c: bool(c.kwargs["x"].shape[-1] % 4 == 0))
    assert_pattern(fn, X, X, pattern=asked, count=1, dynamic=True)
    assert_pattern(fn, X, X, pattern=sum_of(lambda c: 1), rejected="returned 1; True, False, a reason or a Reject is accepted")


def test_arguments_by_keyword_are_compared_by_name(pattern):
    name = pattern(lambda a, x, y: torch.addmm(a, x, y, beta=2), lambda a, x, y: x @ y + 2 * a, (X, X, X))
    assert_pattern(lambda a, x, y: torch.addmm(a, x, y, beta=2), X, X, X, pattern=name, count=1)
    assert_pattern(lambda a, x, y: torch.addmm(a, x, y, alpha=2), X, X, X, pattern=name, count=0)


def test_a_tensor_added_to_itself_keeps_its_gradient(pattern):
    def norm(x, w):
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, 1e-6)

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    name = pattern(norm, lambda x, w: norm(x * 1, w), (x, w))
    assert_pattern(lambda x, w: norm(x + x, w), x, w, pattern=name, training=True)


def test_an_int_stands_for_no_float(pattern):
    """Its trace may hold the number where a float would be cut."""
    name = pattern(lambda x, n: x.clamp(max=n).sin(), lambda x, n: torch.minimum(x, torch.full((), n)).sin(), (X, 3))
    assert_pattern(lambda x: x.clamp(max=2).sin(), X, pattern=name, count=1)
    assert_pattern(lambda x: x.clamp(max=0.5).sin(), X, pattern=name, count=0)


def test_a_comparison_is_one_in_its_own_dtype(pattern):
    """Its result does not tell in which it was made: eager compares ints with a float in fp32."""
    large = torch.tensor([[16777216, 16777217]])
    name = pattern(lambda x: (x > 16777216).logical_not(), lambda x: x <= 16777216, (torch.arange(12).view(3, 4),))
    assert_pattern(lambda x: (x > 16777216).logical_not(), large, pattern=name, count=1)
    assert_pattern(lambda x: (x > 16777216.0).logical_not(), large, pattern=name, count=0)
    small = pattern(lambda x: (x.float() > 0.1).logical_not(), lambda x: (0.1 < x.float()).logical_not(), (X.bfloat16(),))
    assert_pattern(lambda x: (x.float() > 0.1).logical_not(), X.bfloat16(), pattern=small, count=1)
    assert_pattern(lambda x: (x > 0.1).logical_not(), X.bfloat16(), pattern=small, count=0)


def test_what_differs_by_the_sign_of_a_zero_is_not_computed_again(pattern):
    name = pattern(lambda x: x * x.sin(), lambda x: x.sin() * x, (X,))
    assert_pattern(lambda x: torch.copysign(x, 0.0) * torch.copysign(x, -0.0).sin(), X, pattern=name, count=0)


def test_a_replacement_that_was_traced_for_one_size_is_for_that_alone(pattern):
    def summed(x):
        out = x.new_zeros(x.shape[1])
        for row in x.unbind(0):
            out = out + row
        return out

    name = pattern(lambda x: x.sum(0) + 0.5, lambda x: summed(x) + 0.5, (torch.randn(3, 4),))
    assert_pattern(lambda x: x.sum(0) + 0.5, torch.randn(3, 5), pattern=name, count=1)
    assert_pattern(lambda x: x.sum(0) + 0.5, torch.randn(7, 4), pattern=name, rejected="its trace holds for 3; here it is 7")


def test_a_check_is_shown_what_the_replacement_is_given(pattern):
    def narrow(candidate):
        return candidate.kwargs["x"].shape[-1] <= 8

    name = pattern(lambda x: (x.sin() * 2).cos(), lambda x: (2 * x.sin()).cos(), (X,), when=narrow)
    assert_pattern(lambda x: (x.sin().view(8, 8) * 2).cos(), torch.randn(2, 32), pattern=name, count=1)
    assert_pattern(lambda x: (x.sin().view(2, 32) * 2).cos(), torch.randn(8, 8), pattern=name, count=0)


def test_a_view_of_one_of_several_results_is_left(pattern, interpreted):
    name = pattern(lambda x: x.topk(2)[0].sin(), lambda x: torch.sin(x.topk(2)[0]), (torch.randn(3, 4),))
    fn = interpreted(lambda x: x.topk(2)[0].view(2, 3).sin(), options={"fuse.strict": True, "fuse.patterns": [name]})
    x = torch.randn(3, 4)
    torch.testing.assert_close(fn(x), x.topk(2)[0].view(2, 3).sin())


def test_a_branch_on_a_size_holds_for_its_side_alone(pattern):
    def narrow(x):
        return x.sin() * 2 if x.shape[1] <= 8 else x.sin() * 3

    def narrow_again(x):
        return 2 * x.sin() if x.shape[1] <= 8 else 3 * x.sin()

    replaced = pattern(lambda x: (x.sin() * 2).cos(), lambda x: narrow_again(x).cos(), (torch.randn(3, 4),))
    searched = pattern(lambda x: narrow(x).atan(), lambda x: (2 * x.sin()).atan(), (torch.randn(3, 4),))
    for name, end, what in ((replaced, torch.cos, "replacement"), (searched, torch.atan, "search function")):
        assert_pattern(lambda x: end(x.sin() * 2), torch.randn(3, 5), pattern=name, count=1)
        why = f"the {what} decides by sizes, and its trace holds where x.size(1) <= 8, which is not known here"
        assert_pattern(lambda x: end(x.sin() * 2), torch.randn(3, 9), pattern=name, rejected=why)
