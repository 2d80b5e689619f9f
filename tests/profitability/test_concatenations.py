"""What a replacement costs where a concatenation reads what it reads."""

import pytest
import torch
from slow_product import Replace, compiled
from torch.fx.experimental.proxy_tensor import make_fx

import fusebackend
from fusebackend import fx_utils as g
from fusebackend.profitability import calibration, concatenations, region
from fusebackend.profitability.calibration import Calibration
from fusebackend.profitability.time_model import TimeModel
from fusebackend.rewriting.pattern import Workload
from fusebackend.rewriting.workload import streamed

aten = torch.ops.aten
N, M = 64, 16
BYTES = N * M * 4


def scatter(part, index):
    return torch.zeros(8, M).index_put((index,), part, accumulate=True)


def made(x, y, index, w):
    part = x.relu()
    return scatter(part, index), torch.cat([part, y], 1) @ w


def of_an_input(x, y, index, w):
    return scatter(x, index), torch.cat([x, y], 1) @ w


def read_by_a_product(x, y, index, w):
    part = x.relu()
    return scatter(part, index), torch.cat([part, y], 1) @ w, part @ w[:M]


def through_a_view(x, y, index, w):
    part = x.relu()
    return scatter(part, index), torch.cat([part.view(M, N).t(), y], 1) @ w


def read_by_pointwise_loops(x, y, index, w):
    part = x.relu()
    return scatter(part, index), torch.cat([part, y], 1).sin()


def matched_in(fn):
    x, y, w = torch.randn(N, M), torch.randn(N, M), torch.randn(2 * M, 4)
    graph = make_fx(fn, tracing_mode="fake")(x, y, torch.zeros(N, dtype=torch.int64), w).graph
    return [n for n in graph.nodes if n.target is aten.index_put.default]


@pytest.mark.parametrize(
    ("fn", "copied"),
    [(made, [2.0 * BYTES]), (of_an_input, []), (read_by_a_product, []), (through_a_view, []), (read_by_pointwise_loops, [2.0 * BYTES])],
)
def test_what_inductor_computes_inside_of_a_concatenation_is_copied(fn, copied):
    works = concatenations.copies_of_parts(matched_in(fn))
    assert [w.quantities["bytes"] for w in works] == copied and all(w.around for w in works)


@pytest.mark.parametrize(("fn", "copies"), [(made, 1), (read_by_pointwise_loops, 0)])
def test_on_a_gpu_pointwise_loops_compute_a_concatenation_as_they_read_it(fn, copies):
    matched = matched_in(fn)
    for node in matched[0].graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["val"].fake_device = torch.device("cuda")
    assert len(concatenations.copies_of_parts(matched)) == copies


def test_a_concatenation_that_is_replaced_too_is_none():
    (matched,) = matched_in(made)
    concatenation = next(n for n in matched.graph.nodes if n.target is aten.cat.default)
    assert not concatenations.copies_of_parts([matched, concatenation])


def test_a_region_has_the_concatenation():
    (matched,) = matched_in(made)
    with matched.graph.inserting_before(matched):
        new = matched.graph.call_function(aten.index_put.default, matched.args)
    new.meta["val"] = matched.meta["val"]
    found = region.extract((matched,), (new,), {matched: new}, {})
    assert [n for n in found.original if n.target is aten.cat.default] == [n for n in found.replaced if n.target is aten.cat.default] != []


class SumByIndex(Replace):
    """Said to take 8,000 bytes instead of 10,000."""

    def __init__(self):
        super().__init__("test_sum", aten.index_put.default, aten.index_put.default)

    def estimate(self, match):
        x = g.value(match.outputs[0])
        return Workload((streamed(8e3, x),), (streamed(10e3, x),))


@pytest.mark.parametrize(("fn", "pays"), [(made, False), (of_an_input, True)])
def test_the_gate_counts_the_copy(fn, pays, temporary_pattern, own_cache, monkeypatch):
    known = Calibration("a device", "2.13", "2026-01-01", 9, {"stream cpu": TimeModel(0.0, {"bytes": 1.0}, 1.0, noise=0.05)}, {}, call=0.0)
    monkeypatch.setattr(calibration, "of_device", lambda device: known)
    temporary_pattern(SumByIndex())
    torch._dynamo.reset()
    inputs = torch.randn(N, M), torch.randn(N, M), torch.randint(8, (N,)), torch.randn(2 * M, 4)
    torch.testing.assert_close(compiled(fn, "auto", ["test_sum"])(*inputs), fn(*inputs))
    found = fusebackend.last_report()
    assert bool(found.substitutions) == pays
    assert pays or "1.62e+04 us" in found.rejections[0].reason, "two copies of 4 kB each more"
