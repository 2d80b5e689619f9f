"""What the gate times of a graph: a match with its pointwise neighbours on both sides, in both forms."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusebackend import fx_utils as graph
from fusebackend.native import ops
from fusebackend.profitability import region
from fusebackend.profitability.random_inputs import Samples
from fusebackend.profitability.unfit import Unfit

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
        found.append(region.extract((node,), (new,), {node: new}, {}))


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


def _order(index, rows):
    return torch.argsort(index, stable=True).int()


def _sum_in_order(self, index, source, order):
    assert torch.equal(order, _order(index, 0)), "a kernel would read elsewhere"
    return self.index_add(0, index[order.long()], source[order.long()])


#: Two operators, the second of which reads what the first computed, and would fault by anything else.
ORDER = ops.define(
    "test_order(Tensor index, SymInt rows) -> Tensor",
    fake=lambda index, rows: index.new_empty(index.shape, dtype=torch.int32),
    python_kernels={"CPU": _order},
    indices={"index": "rows"},
)
SUM_IN_ORDER = ops.define(
    "test_sum_in_order(Tensor self, Tensor index, Tensor source, Tensor order) -> Tensor",
    fake=lambda self, index, source, order: torch.empty_like(self),
    python_kernels={"CPU": _sum_in_order},
)


def replaced_sum(view):
    """The region of a sum by an index, replaced by a call that reads the order of the index, which stands in the graph already."""

    def fn(x, source, index):
        order = ORDER(index.view(-1), 5)
        return x.index_add(0, view(index), torch.sin(source)) + 1, order + 1

    traced = make_fx(fn, tracing_mode="fake")(torch.randn(5, 3), torch.randn(7, 3), torch.randint(5, (7, 1))).graph
    (order,), (total,) = (traced.find_nodes(op="call_function", target=t) for t in (ORDER, aten.index_add.default))
    x, _, index, source = total.args
    with traced.inserting_before(total):
        new = traced.call_function(SUM_IN_ORDER, (x, order.args[0], source, order))
    new.meta["val"] = total.meta["val"]
    return region.extract((total,), (new,), {total: new}, {}), order


def test_a_number_that_is_a_tensor_of_the_program_is_an_input_and_a_table_of_indices_is_not():
    def fn(x, y):
        return (x @ y) * torch.tensor(2.0), (x @ y)[torch.tensor([1, 0])]

    x, y = two(8)
    traced = make_fx(fn, tracing_mode="fake")(x, y).graph
    numbers = [n for n in traced.nodes if n.op == "get_attr"]
    scaled, indexed = (n for n in traced.nodes if n.target in (aten.mul.Tensor, aten.index.Tensor))
    found = region.cut_out([scaled, *scaled.all_input_nodes[1:]])
    assert numbers[0] in found.inputs
    with pytest.raises(Unfit, match="can't be cut off"):
        region.cut_out([indexed, *(n for n in traced.nodes if numbers[1] in n.all_input_nodes)])


def test_what_an_operator_of_ours_computed_is_computed_again_and_never_random():
    """Nor do the two forms see different numbers where one reads a view of what the other reads."""
    found, order = replaced_sum(lambda index: index.select(1, 0))
    assert order not in found.inputs and order in found.original and order in found.replaced
    assert order in found.outputs, "used in both forms, so that both are timed with it"
    for part in (found, found.without_neighbours()):
        assert not [n for n in part.inputs if graph.is_view(n)]
        original, replaced, fakes = part.modules()
        samples = Samples(original.graph, fakes, replaced.graph)
        for _ in range(5):
            inputs = samples.draw()
            for expected, got in zip(original(*inputs), replaced(*inputs), strict=True):
                torch.testing.assert_close(got, expected)


def test_what_is_structured_can_be_said():
    integers, floats = torch.ones(2, dtype=torch.int32), torch.ones(2)
    assert ops.is_structured(ORDER, integers) and not ops.is_structured(ORDER, floats) and not ops.is_structured(ORDER, integers > 0)
    assert not ops.is_structured(aten.argsort.stable, integers), "PyTorch checks"
    copied = ops.define("test_copy(Tensor x) -> Tensor", fake=torch.empty_like, structured=False)
    packed = ops.define("test_pack(Tensor x) -> Tensor", fake=torch.empty_like, structured=True)
    assert not ops.is_structured(copied, integers) and ops.is_structured(packed, floats)


def test_integers_that_only_the_replacement_reads_as_an_index_are_not_drawn():
    """As a one-hot product that becomes a table look-up: nothing says how large they may be."""

    def form(fn):
        traced = make_fx(fn, tracing_mode="fake")(torch.randn(5, 3), torch.randint(5, (7,))).graph
        return traced, [n.meta["val"] for n in traced.find_nodes(op="placeholder")]

    original, fakes = form(lambda table, i: (i[:, None] == 3).float() @ table[:1])
    replaced, _ = form(lambda table, i: SUM_IN_ORDER(table, i, table[:1], i))
    with pytest.raises(Unfit, match="indexes nothing in the original: it is not known which integers fusebackend.test_sum_in_order"):
        Samples(original, fakes, replaced)
    indexed, _ = form(lambda table, i: table[i] * 1)
    assert all((Samples(original, fakes, indexed).draw()[1] < 5).all() for _ in range(20)), "PyTorch's own operators say it"


def test_an_input_is_laid_out_as_inductor_will_lay_it_out():
    """And a timing in one order is none in another."""

    def fn(x):
        return x.cos()

    graph = make_fx(fn, tracing_mode="fake")(torch.randn(2, 8, 4, 4)).graph
    (x,), (cos,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="call_function", target=aten.cos.default)
    with graph.inserting_after(cos):
        new = graph.call_function(aten.cos.default, (x,))
    new.meta["val"] = cos.meta["val"]
    plain, reordered = (region.extract((cos,), (new,), {cos: new}, orders) for orders in ({}, {x: (0, 2, 3, 1)}))
    for found in (reordered, reordered.without_neighbours()):
        original, _, (fake,) = found.modules()
        assert fake.is_contiguous(memory_format=torch.channels_last) and fake.shape == (2, 8, 4, 4)
        (again,) = original.graph.find_nodes(op="call_function", target=aten.cos.default)
        assert again.meta["val"].is_contiguous(memory_format=torch.channels_last)
    assert plain.modules()[2][0].is_contiguous()
    assert plain.key("site", "with") != reordered.key("site", "with")
