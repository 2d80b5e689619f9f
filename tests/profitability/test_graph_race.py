"""Races of whole graphs: they see what regions do not, leave no trace, and are not believed where they contradict their regions."""

import pytest
import torch
from slow_product import compiled, slow_mm, square
from torch import nn

import fusebackend
from fusebackend.profitability import graph_race, raced_graphs, region_timing, timer
from fusebackend.profitability.unfit import Unfit

pytestmark = pytest.mark.usefixtures("own_cache", "the_long_way")
aten = torch.ops.aten


def test_a_race_sees_what_the_regions_did_not(slow, monkeypatch):
    monkeypatch.setattr(region_timing, "MARGIN", 0.0)  # every region seems to pay
    x, y = square()
    torch.testing.assert_close(compiled(torch.mm, "race", ["test_slow"])(x, y), x @ y)
    found = fusebackend.last_report()
    assert not found.substitutions and "the graph was gated out: " in str(found)
    assert all(c.before == c.after for c in found.graphs)


class Trained(nn.Module):
    """The norm's statistics are mutated, the embedding has indices, the backward is compiled late."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear, self.norm = nn.Embedding(50, 32), nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32)

    def forward(self, tokens):
        return self.norm(self.linear(self.embedding(tokens))).square().mean()


@pytest.mark.codegen
def test_a_race_in_training_leaves_no_trace(slow, monkeypatch):
    monkeypatch.setattr(region_timing, "MARGIN", 0.0)
    model, tokens = Trained(), torch.randint(50, (64,))
    start = {k: v.clone() for k, v in model.state_dict().items()}

    def step(fn):
        model.load_state_dict(start)
        model.zero_grad()
        torch.manual_seed(1)
        loss = fn(tokens)
        loss.backward()
        return [loss.detach(), torch.rand(2), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]

    raced = step(compiled(model, "race", ["test_slow"]))
    found = fusebackend.last_report()
    assert {v.graph for v in found.verdicts if not v.pattern} == {"forward", "backward"}
    assert not found.substitutions and all(v.replaced_ms is not None for v in found.verdicts)
    torch.testing.assert_close(raced, step(model))


def test_a_race_that_contradicts_its_regions_is_not_believed(fast, monkeypatch):
    real = timer.times_ms

    def times_ms(*a, launches=None, **k):  # only a race says whether launches count
        times = real(*a, launches=bool(launches), **k)
        return times if launches is None else [100.0, times[1] / 100]

    monkeypatch.setattr(timer, "times_ms", times_ms)
    x, y = square()
    torch.testing.assert_close(compiled(slow_mm, "race", ["test_fast"])(x, y), x @ y)
    found = fusebackend.last_report()
    assert found.counts() == {"test_fast": 1} and "but its regions gained" in str(found)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_graphs_with_collectives_are_not_raced():
    graph_ = torch.fx.Graph()
    x = graph_.placeholder("x")
    graph_.output((graph_.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,)),))
    module = torch.fx.GraphModule(nn.Module(), graph_)
    own = fusebackend.rewriting.inductor_pass.FusePass("post_grad", (), None)
    with pytest.raises(Unfit, match="needs the other ranks"):
        graph_race._Race(None, own, {}, module, [], {}).key()


@torch.library.custom_op("fusebackend_graph_race::tick", mutates_args=())
def tick(x: torch.Tensor) -> torch.Tensor:
    ticks.append(1)
    return x + len(ticks)


tick.register_fake(torch.empty_like)
ticks = []


@pytest.mark.codegen
def test_operators_of_a_program_are_not_run_to_race(fast):
    """They may have a state: a race would leave another one behind than the program expects."""
    ticks.clear()
    x, y = square()
    fn = compiled(lambda x, y: tick(slow_mm(x, y)), "race", ["test_fast"])
    for count in (1, 2, 3):
        torch.testing.assert_close(fn(x, y), x @ y + count)
    found = fusebackend.last_report()
    assert found.counts() == {"test_fast": 1} and "fusebackend_graph_race.tick.default is the program's own" in str(found)


def test_operators_of_a_program_are_found_in_the_branches_of_a_graph():
    inner, outer = torch.fx.Graph(), torch.fx.Graph()
    inner.output(inner.call_function(torch.ops.fusebackend_graph_race.tick.default, (inner.placeholder("x"),)))
    module = nn.Module()
    module.branch = torch.fx.GraphModule(nn.Module(), inner)
    outer.get_attr("branch")
    outer.output(outer.placeholder("x"))
    with pytest.raises(Unfit, match="the program's own"):
        raced_graphs.check_raceable(torch.fx.GraphModule(module, outer).graph, ())


@pytest.mark.cuda
@pytest.mark.codegen
def test_a_race_under_cuda_graphs(slow, fast, monkeypatch):
    monkeypatch.setattr(region_timing, "MARGIN", 0.0)
    weights = [torch.randn(256, 256, device="cuda", requires_grad=True) for _ in range(2)]  # mm's backward has mm's
    for pattern in ("test_slow", "test_fast"):
        torch._dynamo.reset()
        product = torch.mm if pattern == "test_slow" else slow_mm
        fn = compiled(lambda x, a, b, product=product: torch.relu(product(x, a)) @ b, "race", [pattern], mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(256, 256, device="cuda")
            for w in weights:
                w.grad = None
            out = fn(x, *weights)
            out.sum().backward()
            torch.testing.assert_close(out, torch.relu(x @ weights[0]) @ weights[1], rtol=1e-4, atol=1e-2)
        assert bool(fusebackend.last_report().substitutions) == (pattern == "test_fast")
        assert [v for v in fusebackend.last_report().verdicts if not v.pattern]
