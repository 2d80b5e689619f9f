"""Sums that go by the same index share one sort of it; by a sorted index the kernels compute the same."""

import pytest
import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusebackend
from fusebackend.native import loader
from fusebackend.patterns.index_add import ops
from fusebackend.patterns.index_add.match import IndexAdd
from fusebackend.rewriting.pattern import Emitter, Match

kernels = torch.ops.fusebackend
NODES, EDGES, CHANNELS = 60, 700, 32


@pytest.fixture(autouse=True)
def library():
    reason = loader.load().why_not(torch.device("cpu"), ops.INDEX_PLAN)
    if reason:
        pytest.skip(reason)


class Layer(torch.nn.Module):
    """What PyG's SAGEConv does."""

    def __init__(self):
        super().__init__()
        self.neighbours, self.self = torch.nn.Linear(CHANNELS, CHANNELS), torch.nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, edges):
        src, dst = edges[0], edges[1]
        sums = x.new_zeros(x.shape).scatter_add_(0, dst.view(-1, 1).expand(-1, CHANNELS), x.index_select(0, src))
        counts = x.new_zeros(x.shape[0]).scatter_add_(0, dst, x.new_ones(dst.shape[0]))
        return self.self(x) + self.neighbours(sums / counts.clamp(min=1)[:, None])


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(x, edges).relu()
        return x


def graph(device="cpu", dtype=torch.float32):
    return torch.randn(NODES, CHANNELS, device=device).to(dtype), torch.randint(NODES, (2, EDGES), device=device)


def calls(report, graph_name, name):
    code = next(c.after for c in report.graphs if c.name == graph_name)
    return code.count(f"fusebackend.{name}.default(")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_an_inference_share_one_sort(interpreted, device, dtype):
    model, (x, edges) = Network().to(device, dtype), graph(device, dtype)
    with torch.no_grad():
        expected, found = model(x, edges), interpreted(model, options={"fuse.strict": True})(x, edges)
    torch.testing.assert_close(found, expected, **({} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}))
    report = fusebackend.last_report()
    assert calls(report, "forward", "index_plan") == 1
    assert calls(report, "forward", "index_add_zeros") == 3  # the counts are read off the sorted index
    sums = [s for s in report.substitutions if s.pattern == "index_add"]
    assert len(sums) == 6 and all("planned" in s.note for s in sums)


def test_a_training_step_sorts_once_for_each_direction(interpreted, device):
    model, (x, edges) = Network().to(device), graph(device)
    model(x, edges).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    interpreted(model, options={"fuse.strict": True})(x, edges).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    report = fusebackend.last_report()
    assert calls(report, "forward", "index_plan") == 1 and calls(report, "backward", "index_plan") == 1


def test_the_sort_stands_before_the_first_sum_that_needs_it(interpreted):
    """The wide sum, which has more nodes, is replaced first; the count before it finds the sorted index all the same."""

    def function(x, dst):
        counts = torch.zeros(NODES).index_add(0, dst[1], torch.ones(EDGES))
        sums = torch.zeros(NODES, CHANNELS).index_add(0, dst[1], x[dst[0]] * counts[dst[0]][:, None])
        return sums

    x, edges = graph()
    torch.testing.assert_close(interpreted(function, options={"fuse.strict": True})(x, edges), function(x, edges))
    assert calls(fusebackend.last_report(), "forward", "index_plan") == 1
    assert calls(fusebackend.last_report(), "forward", "index_add_zeros") == 1


def test_a_count_before_the_sums_sorts_for_them(interpreted, device):
    """As in PyG's mean; in training the sum's zeros and its gather are used elsewhere too, so that it has no more nodes than
    the count."""

    def function(x, edges):
        src, dst = edges[0], edges[1]
        messages = x[src]
        counts = torch.zeros(NODES, device=x.device).scatter_add_(0, dst, torch.ones(EDGES, device=x.device)).clamp(min=1)
        zeros = torch.zeros(NODES, CHANNELS, device=x.device)
        sums = zeros.scatter_add(0, dst[:, None].expand(-1, CHANNELS), messages) / counts[:, None]
        return zeros.scatter_add(0, dst[:, None].expand(-1, CHANNELS), sums[src]), messages, zeros

    x, edges = graph(device)
    for found, expected in zip(interpreted(function, options={"fuse.strict": True})(x, edges), function(x, edges)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    report = fusebackend.last_report()
    assert len(report.substitutions) == 3 and calls(report, "forward", "index_plan") <= 2
    # The counts are read off a sorted index.
    assert calls(report, "forward", "index_add_zeros") + calls(report, "forward", "index_add") == 2


@pytest.mark.parametrize("reason", ["one sum", "other rows", "other index"])
def test_nothing_is_sorted_for_one_sum(interpreted, reason):
    def function(x, edges):
        a = torch.zeros(NODES, CHANNELS).index_add(0, edges[1], x)
        if reason == "one sum":
            return a
        rows = NODES + 1 if reason == "other rows" else NODES
        return a, torch.zeros(rows, CHANNELS).index_add(0, edges[0 if reason == "other index" else 1], x * 2)

    x, edges = torch.randn(EDGES, CHANNELS), graph()[1]
    torch.testing.assert_close(interpreted(function)(x, edges), function(x, edges))
    assert calls(fusebackend.last_report(), "forward", "index_plan") == 0


def test_dynamic_sizes_share_a_sort(interpreted):
    model = Network()
    compiled = interpreted(model, dynamic=True, options={"fuse.strict": True})
    with torch.no_grad():
        for nodes, edge_count in ((60, 700), (45, 300)):
            x, edges = torch.randn(nodes, CHANNELS), torch.randint(nodes, (2, edge_count))
            torch.testing.assert_close(compiled(x, edges), model(x, edges))
    assert calls(fusebackend.last_report(), "forward", "index_plan") == 2  # of unknown sizes, counts are sums of ones, without a gather


def mean_of_neighbours(x, edges):
    """A count, then two sums by the same index, one of them onto what is given."""
    src, dst = edges[0], edges[1]
    counts = torch.full((NODES,), 0.0).index_add(0, dst, torch.full((EDGES,), 1.0))
    sums = torch.full((NODES, CHANNELS), 0.0).index_add(0, dst, x[src])
    means = sums / counts.clamp(min=1)[:, None]
    return x.index_add(0, dst, means[src])


@pytest.mark.parametrize("applied", [(), (0,), (1,), (2,), (2, 1)], ids=str)
def test_a_refused_match_leaves_the_graph_as_it_was(applied):
    """Whether it would make the sort, use one that is there, or put one before a sum that comes earlier."""
    traced = make_fx(mean_of_neighbours, tracing_mode="fake")(*graph())
    anchors = [n for n in traced.graph.nodes if n.target is torch.ops.aten.index_add.default]
    mode = detect_fake_mode([n.meta["val"] for n in traced.graph.nodes if "val" in n.meta])

    def built(anchor):
        match = IndexAdd().match(anchor)
        assert isinstance(match, Match) and "planned" in match.note
        emitter = Emitter(match.outputs, mode)
        return match.emit(emitter), emitter.nodes

    def code():
        traced.graph.lint()
        return [(n.name, n.op, str(n.target), str(n.args), str(n.kwargs)) for n in traced.graph.nodes]

    for i in applied:
        new, _ = built(anchors[i])
        anchors[i].replace_all_uses_with(new)
        traced.graph.erase_node(anchors[i])
    for i in set(range(3)) - set(applied):
        before = code()
        _, emitted = built(anchors[i])
        assert code() != before
        for node in sorted(emitted, reverse=True):
            traced.graph.erase_node(node)
        assert code() == before


def test_matching_leaves_the_graph_as_it_was():
    traced = make_fx(mean_of_neighbours, tracing_mode="fake")(*graph())
    before = str(traced.graph)
    matches = [IndexAdd().match(n) for n in traced.graph.nodes if n.target in IndexAdd.anchors]
    assert len(matches) == 3 and all(isinstance(m, Match) for m in matches)
    for match in matches:
        planned, alone = IndexAdd().estimate(match)
        assert planned.match is None and alone.match is not None
    assert str(traced.graph) == before


# ---- the operators ----


def index_of(kind, rows, n, device, dtype=torch.int64):
    index = torch.randint(-rows, 2 * rows, (n,), device=device, dtype=dtype)
    if kind == "one row":
        index.fill_(rows // 2)
    return index if kind == "dropped" else index % rows


@pytest.mark.parametrize("kind", ["random", "one row", "dropped"])
@pytest.mark.parametrize("rows, n", [(60, 700), (1, 300), (5000, 3), (3000, 20000), (70000, 9000), (100000, 300000), (7, 0)])
def test_sorted_index_equals_the_reference(device, kind, rows, n):
    index = index_of(kind, rows, n, device, torch.int32 if n % 2 else torch.int64)
    doubled = torch.stack([index, index], 1)[:, 0]
    source_index = torch.randint(-9, 9, (n,), device=device)
    for ignore, bounds in [(None, ops.DROP), (rows // 2, ops.DROP), *([(None, ops.WRAP), (3, ops.STRICT)] if kind != "dropped" else [])]:
        for given, source in ((index, None), (doubled, source_index)):
            options = rows, ignore, bounds, source, 9
            assert torch.equal(kernels.index_plan(given, *options), ops.reference_plan(given, *options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(60, 24), (40, 1), (3, 200), (60, 33), (20, 1030), (4, 2, 6)], ids=str)
@pytest.mark.parametrize("kind", ["random", "one row", "dropped"])
def test_sums_by_a_sorted_index_equal_the_reference(device, dtype, shape, kind):
    n, rows = 900, shape[0]
    index = index_of(kind, rows, n, device)

    def tensor(*shape):
        if dtype == torch.float64:  # eighths: the reference, a float64 sum itself, is then exact
            return torch.randint(-64, 65, shape, device=device).to(dtype) / 8
        return torch.randn(shape, device=device).to(dtype) if dtype.is_floating_point else torch.randint(5, shape, device=device).to(dtype)

    self, source, source_index = tensor(*shape), tensor(50, *shape[1:]), torch.randint(-50, 50, (n,), device=device)
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    plan = kernels.index_plan(index, rows, 1, ops.DROP, source_index, 50)
    for weight, alpha in ((None, 1.0), (tensor(n), 2.0)):
        options = (0, index, source, weight, source_index, alpha, 1, ops.DROP)
        exact = ops.reference(self.to(wide), *options[:2], source.to(wide), *options[3:])
        found = kernels.index_add(self, *options, False, False, plan)
        in_place = self.clone()
        kernels.index_add_(in_place, *options, False, False, plan)
        zeros = kernels.index_add_zeros(rows, *options, False, False, plan)
        for result, value in ((found, exact), (in_place, exact), (zeros, exact - self.to(wide))):
            if dtype.is_floating_point:
                bound = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
                if device.type == "cpu":  # adds in the order of the entries, uncompensated
                    bound *= n**0.5
                assert (result.double() - value).norm() <= bound * value.norm().clamp_min(1e-3)
            else:
                assert torch.equal(result, value.to(dtype))
        if device.type == "cuda":
            assert torch.equal(found, kernels.index_add(self, *options, False, False, plan))


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["random", "one row"])
def test_fp32_sums_by_a_sorted_index_are_rounded_once(kind):
    """They are compensated: the exact sum rounded to fp32, whatever the contention."""
    index = index_of(kind, 50, 20000, "cuda")
    source = torch.randn(20000, 64, device="cuda") * torch.logspace(-3, 3, 20000, device="cuda")[:, None]
    exact = torch.zeros(50, 64, device="cuda", dtype=torch.float64).index_add_(0, index, source.double())
    plan = kernels.index_plan(index, 50, None, ops.STRICT, None, 0)
    found = kernels.index_add_zeros(50, 0, index, source, None, None, 1.0, None, ops.STRICT, False, False, plan)
    assert ((found.double() - exact).abs() <= 1.01 * 2.0**-24 * exact.abs() + 1e-9).all()


def test_infinities_stay_infinite(device):
    source = torch.full((4, 8), float("inf"), device=device)
    index = torch.zeros(4, dtype=torch.int64, device=device)
    plan = kernels.index_plan(index, 2, None, ops.STRICT, None, 0)
    found = kernels.index_add_zeros(2, 0, index, source, None, None, 1.0, None, ops.STRICT, False, False, plan)
    assert found[0].isposinf().all() and (found[1] == 0).all()


def test_a_sorted_index_of_something_else_is_refused(device):
    index, source = torch.zeros(4, dtype=torch.int64, device=device), torch.ones(4, 8, device=device)
    plan = kernels.index_plan(index[:3], 2, None, ops.STRICT, None, 0)
    with pytest.raises(RuntimeError, match="plan is of another index"):
        kernels.index_add_zeros(2, 0, index, source, None, None, 1.0, None, ops.STRICT, False, False, plan)


def test_out_of_range_is_an_error_on_cpu():
    with pytest.raises(RuntimeError, match="index 5 is out of bounds for a dimension of size 5"):
        kernels.index_plan(torch.tensor([0, 5]), 5, None, ops.STRICT, None, 0)
    with pytest.raises(IndexError, match="index 7 is out of bounds for a dimension of size 7"):
        kernels.index_plan(torch.tensor([0, 4]), 5, None, ops.STRICT, torch.tensor([6, 7]), 7)


def test_fake_of_a_sorted_index_needs_no_library(monkeypatch):
    monkeypatch.setattr(loader, "_loaded", loader.Native(reason="there is none"))
    with FakeTensorMode():
        found = kernels.index_plan(torch.empty(700, dtype=torch.int64), NODES, None, ops.STRICT, None, 0)
    assert found.dtype == torch.int32 and found.dim() == 1


def test_opcheck_of_index_plan():
    index = torch.tensor([3, 0, 3])
    torch.library.opcheck(ops.INDEX_PLAN, (index, 5, None, ops.STRICT, index, 4))


def test_a_match_without_its_sort_computes_the_same():
    traced = make_fx(mean_of_neighbours, tracing_mode="fake")(*graph())
    mode = detect_fake_mode([n.meta["val"] for n in traced.graph.nodes if "val" in n.meta])
    anchors = [n for n in traced.graph.nodes if n.target is torch.ops.aten.index_add.default]
    workloads = [IndexAdd().estimate(IndexAdd().match(anchor)) for anchor in anchors]
    for anchor, (_, alone) in zip(anchors, workloads):
        assert alone.match is not None and anchor in alone.match.nodes
        anchor.replace_all_uses_with(alone.match.emit(Emitter(alone.match.outputs, mode)))
        traced.graph.erase_node(anchor)
    assert not traced.graph.find_nodes(op="call_function", target=ops.INDEX_PLAN)
    traced.recompile()
    torch.testing.assert_close(traced(*(inputs := graph())), mean_of_neighbours(*inputs))
