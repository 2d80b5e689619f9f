"""What the gate times of a graph: a match with its pointwise neighbours on both sides, in both forms."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusebackend import fx_utils as graph
from fusebackend.profitability import region
from fusebackend.profitability.random_inputs import Samples

aten = torch.ops.aten
mm, matmul = aten.mm.default, aten.matmul.default


def two(n):
    return torch.randn(n, n), torch.randn(n, n)


def regions(fn, *inputs, dynamic=False):
    """The region of every matrix product in the graph of ``fn``, with another form of it in its place."""
    found = []
    while True:
        traced = make_fx(fn, tracing_mode="symbolic" if dynamic else "fake")(*inputs).graph
        products = [n for n in traced.nodes if n.target is mm]
        if len(found) == len(products):
            return found
        node = products[len(found)]
        with traced.inserting_before(node):
            new = traced.call_function(matmul, node.args)
        new.meta["val"] = node.meta["val"]
        found.append(region.extract((node,), (new,), {node: new}))


def targets(nodes):
    return [graph.describe(n) for n in nodes]


def test_a_region_has_its_neighbours_on_both_sides():
    def fn(x, y, w):
        before = torch.relu(x.t() + 1)
        after = ((before @ y).t() * 2).sum(0)
        return after @ w

    (found, _) = regions(fn, torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 3))
    assert targets(found.original) == [
        "aten.add.Tensor",
        "aten.relu.default",
        "aten.mm.default",
        "aten.t.default",
        "aten.mul.Tensor",
        "aten.sum.dim_IntList",
    ]
    assert "aten.matmul.default" in targets(found.replaced) and "aten.mm.default" not in targets(found.replaced)
    assert targets(found.outputs) == ["aten.sum.dim_IntList"], "what only the region reads stays inside"


def test_a_region_is_not_left_and_entered_again():
    def fn(x, y):
        a = x @ y
        return a + torch.relu(a @ y)

    first, second = regions(fn, *two(8))
    assert targets(first.original) == ["aten.mm.default"], "the sum needs the other product"
    assert targets(second.original) == ["aten.mm.default", "aten.relu.default", "aten.add.Tensor"]


def test_equal_regions_have_equal_keys_and_others_do_not():
    def fn(x, y):
        return x @ y, y @ x

    x, y = two(8)
    first, second = regions(fn, x, y)
    assert first.key("", "") == second.key("", "") != first.key("", "other versions")
    (other, _), (strided, _), (dynamic, _) = regions(fn, *two(16)), regions(fn, x.t(), y), regions(fn, x, y, dynamic=True)
    assert len({found.key("", "") for found in (first, other, strided, dynamic)}) == 4


def test_both_forms_of_a_region_run():
    def fn(x, y):
        return torch.relu(x @ y).sum(-1) * x.shape[0]

    x, y = torch.randn(8, 6), torch.randn(6, 4)
    for dynamic in (False, True):
        (found,) = regions(fn, x, y, dynamic=dynamic)
        original, replaced, fakes = found.modules()
        inputs = Samples(original.graph, fakes).draw()
        # Three sizes, and the one that the graph multiplies by.
        assert [i for i in inputs if isinstance(i, int)] == ([8, 6, 4, 8] if dynamic else [])
        for form in (original, replaced):
            torch.testing.assert_close(form(*inputs), (fn(*(i for i in inputs if isinstance(i, torch.Tensor))),))
        assert matmul in [n.target for n in replaced.graph.nodes]
