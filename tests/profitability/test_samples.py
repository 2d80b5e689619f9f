"""Random inputs for what is timed: valid wherever they index, laid out as the real ones, finite."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusebackend.profitability import timer
from fusebackend.profitability.random_inputs import Samples
from fusebackend.profitability.unfit import Unfit


def samples(fn, *inputs):
    traced = make_fx(fn, tracing_mode="fake")(*inputs).graph
    return Samples(traced, [n.meta["val"] for n in traced.find_nodes(op="placeholder")])


TABLE, INDEX = torch.randn(7, 3), torch.tensor([0, 2, 1])


@pytest.mark.parametrize(
    "fn",
    [
        lambda t, i: t[i],
        lambda t, i: t[torch.where(i < 0, i + 7, i)],
        lambda t, i: t.index_select(0, i),
        lambda t, i: t.index_add(0, i.view(-1), t[:3]),
        lambda t, i: t.index_put((i, i), t[:3, 0], accumulate=True),
        lambda t, i: t.gather(1, i[:, None].expand(3, 2)),
        lambda t, i: t.scatter_add(0, i[:, None].expand(3, 3), t),
        lambda t, i: nn.functional.embedding(i, t),
        lambda t, i: t[torch.arange(7)] + t[i[:1]],
    ],
)
def test_indices_are_drawn_in_range(fn):
    found = samples(fn, TABLE, INDEX)
    for _ in range(20):
        fn(*found.draw())  # PyTorch checks


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda t, i: t[t.argmax(0)], "an index is computed from .*float32"),
        (lambda t, i: t[i + 100], "random values of .* would be out of range in aten.index"),
        (lambda t, i: t[t[:, 0] > 0], "indexes by a mask"),
        (lambda t, i: torch.bincount(i, minlength=3), "not known which integers aten.bincount"),
    ],
)
def test_what_might_be_out_of_range_is_not_timed(fn, said):
    with pytest.raises(Unfit, match=said):
        samples(fn, TABLE, INDEX).draw()


def test_strides_dtypes_and_expansion_are_kept():
    inputs = [
        torch.randn(4, 6).t(),
        torch.randn(5, 1, dtype=torch.bfloat16).expand(5, 3),
        torch.ones(3, dtype=torch.bool),
        torch.randn(2, dtype=torch.cfloat),
        torch.empty(0, 3),
    ]
    drawn = samples(lambda *ts: [t + 1 for t in ts[:2]], *inputs).draw()
    assert [(d.shape, d.stride(), d.dtype) for d in drawn] == [(t.shape, t.stride(), t.dtype) for t in inputs]


def test_inputs_that_are_mutated_are_restored_before_each_run():
    found = samples(lambda t, i: (t[i], i.copy_(i * 0 + 1)), TABLE, INDEX)
    seen = []

    def way(inputs):
        seen.append(inputs[1].clone())
        inputs[1].add_(1)

    assert found.mutated == [1]
    timer.times_ms([way, way], found, torch.device("cpu"), seconds=0.001, draws=1)
    assert all(torch.equal(i, seen[1]) for i in seen[1:]), "after the first, which settles how numbers are drawn"


def test_numbers_are_drawn_so_that_results_are_finite():
    found = samples(lambda t, i: (t, i), TABLE, INDEX)
    seen = []
    found.settle(lambda inputs: seen.append(inputs[0]) or torch.log(inputs[0]))
    assert len(seen) == 3 and (found.draw()[0] >= 0).all() and seen[1].abs().max() < seen[0].abs().max()
    with pytest.raises(Unfit, match="not finite on random inputs"):
        found.settle(lambda inputs: inputs[0] / 0)


def test_inputs_that_do_not_fit_into_memory_are_not_drawn():
    with torch._subclasses.FakeTensorMode():
        huge = torch.empty(1 << 45, dtype=torch.int8)
    graph_ = torch.fx.Graph()
    graph_.placeholder("x").meta["val"] = huge
    with pytest.raises(Unfit, match="may not fit"):
        Samples(graph_, [huge])
