"""What several replacements compute alike is computed once."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusebackend.rewriting.repeated import merge_repeated

aten = torch.ops.aten


def merged(function, *args):
    """The operators that are left where all nodes count as emitted, and what the graph computes."""
    traced = make_fx(function, tracing_mode="fake")(*args)
    merge_repeated([n for n in traced.graph.nodes if n.op == "call_function"])
    traced.graph.lint()
    traced.recompile()
    for got, expected in zip(traced(*args), function(*args), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    return [n.target for n in traced.graph.nodes if n.op == "call_function"]


def masked(seen, scores, fill=-1e4):
    return scores + torch.where(seen[None], torch.zeros((), dtype=scores.dtype), torch.full((), fill, dtype=scores.dtype))


SEEN, SCORES = torch.rand(3, 4) > 0.5, torch.randn(2, 3, 4)


def test_the_mask_of_each_layer_is_made_once():
    left = merged(lambda seen, x: (masked(seen, masked(seen, x).exp()),), SEEN, SCORES)
    assert left.count(aten.where.self) == 1 and left.count(aten.add.Tensor) == 2


def test_numbers_that_are_equal_to_python_alone_stay_apart():
    def function(seen, x):
        return (masked(seen, x, 0.0).reciprocal() + masked(seen, x, -0.0).reciprocal(),)

    assert merged(function, SEEN, torch.zeros(2, 3, 4) * -1.0).count(aten.where.self) == 2


def test_what_a_caller_may_write_to_stays_apart():
    def function(x):
        return x.exp(), x.exp(), x.sin().view(-1), x.sin().view(-1)

    assert [merged(function, SCORES).count(f) for f in (aten.exp.default, aten.sin.default)] == [2, 2]


@pytest.mark.parametrize(
    "view",
    [lambda t: t.view(torch.int32), lambda t: torch.view_as_complex(t.view(-1, 2)), lambda t: torch.view_as_complex(t.view(-1, 2)).conj()],
)
def test_what_a_caller_may_write_to_through_any_view_stays_apart(view):
    traced = make_fx(lambda x: (view(x.exp()), view(x.exp())), tracing_mode="fake")(SCORES)
    merge_repeated([n for n in traced.graph.nodes if n.op == "call_function"])
    assert len(traced.graph.find_nodes(op="call_function", target=aten.exp.default)) == 2


def test_what_the_graph_writes_to_stays_apart():
    def function(x):
        first, second = x.exp(), x.exp()
        first.add_(1)
        return (first + second,)

    assert merged(function, SCORES).count(aten.exp.default) == 2


def test_what_is_read_before_and_after_a_write_stays_apart():
    def function(x):
        y = x.clone()
        before = y.exp().sum()
        y.add_(1)
        return (before + y.exp().sum(),)

    assert merged(function, SCORES).count(aten.exp.default) == 2


def test_random_numbers_stay_apart():
    traced = make_fx(lambda x: (torch.rand_like(x).add(torch.rand_like(x)),), tracing_mode="fake")(SCORES)
    merge_repeated([n for n in traced.graph.nodes if n.op == "call_function"])
    assert len(traced.graph.find_nodes(op="call_function", target=aten.rand_like.default)) == 2


def test_sizes_of_any_batch_are_not_guarded_on():
    traced = make_fx(lambda x: (x.new_zeros(x.shape[0], 4) + x.new_zeros(x.shape[0], 4),), tracing_mode="symbolic")(torch.randn(5, 3))
    shapes = next(n for n in traced.graph.nodes if n.op == "placeholder").meta["val"].fake_mode.shape_env
    guards = len(shapes.guards)
    merge_repeated([n for n in traced.graph.nodes if n.op == "call_function"])
    assert len(shapes.guards) == guards
    assert len(traced.graph.find_nodes(op="call_function", target=aten.new_zeros.default)) == 1
