"""How unevenly an index names rows, where a graph computes it of nothing but sizes."""

import math

import pytest
import torch
from families.traced_graphs import traced

from fusebackend.patterns.index_add.amounts import Amounts
from fusebackend.profitability import region
from fusebackend.profitability.random_inputs import Samples
from fusebackend.rewriting import known_indices

f32, i64 = torch.float32, torch.int64
TOKENS = 96


def positions(tokens):
    """As in wav2vec2-BERT: clamped distances, most of which are one of the two ends."""
    places = torch.arange(tokens)
    return (places[None] - places[:, None]).clamp(-64, 8) + 64


def added(table, index, x):
    return table.index_put((index,), x, accumulate=True)


def share_in(function, *inputs, **options):
    """Of the index of the only scatter in a function."""
    graph = traced(function, *inputs, **options)
    (put,) = [n for n in graph.nodes if "index_put" in str(n.target)]
    return known_indices.largest_share(put.args[1][0])


def expected(index):
    return torch.unique(index, return_counts=True)[1].max().item() / index.numel()


@pytest.mark.parametrize("dynamic", [False, True])
def test_positions_are_known(dynamic):
    found = share_in(lambda t, x: added(t, positions(x.shape[0]), x), (73, 4, f32), (TOKENS, TOKENS, 4, f32), dynamic=dynamic)
    assert found == expected(positions(TOKENS)) > 0.3


def test_buckets_of_distances_are_known():
    """As in T5: logarithms, a tensor that is filled with a number, and a choice by size."""

    def buckets(tokens):
        places = torch.arange(tokens)
        far = (places[None] - places[:, None]).abs()
        large = 8 + (torch.log(far.float().clamp(min=1) / 8) / math.log(16) * 8).to(torch.long)
        return torch.where(far < 8, far, torch.minimum(large, torch.full_like(large, 15)))

    found = share_in(lambda t, x: added(t, buckets(TOKENS), x), (16, 4, f32), (TOKENS, TOKENS, 4, f32))
    assert found == expected(buckets(TOKENS))


def test_views_that_repeat_an_index_or_reshape_it_are_seen_through():
    index = positions(TOKENS)
    for view, shape in ((lambda i: i.flatten(), (TOKENS**2,)), (lambda i: i.expand(3, -1, -1), (3, TOKENS, TOKENS))):
        found = share_in(lambda t, x, view=view: added(t, view(positions(TOKENS)), x), (73, 4, f32), (*shape, 4, f32))
        assert found == expected(index)


def test_a_part_of_what_is_known_is_not_told():
    assert share_in(lambda t, x: added(t, positions(TOKENS)[0], x), (73, 4, f32), (TOKENS, 4, f32)) is None


def test_what_is_read_or_drawn_is_not_known():
    x = (TOKENS, 4, f32)
    assert share_in(lambda t, i, x: added(t, i, x), (73, 4, f32), (TOKENS, i64), x) is None
    assert share_in(lambda t, i, x: added(t, i + torch.arange(TOKENS), x), (73, 4, f32), (TOKENS, i64), x) is None
    assert share_in(lambda t, x: added(t, torch.randint(73, (TOKENS,)), x), (73, 4, f32), x) is None


@torch.library.custom_op("fusebackend_known_indices::drawn", mutates_args=())
def drawn(count: int, high: int) -> torch.Tensor:
    calls.append(count)
    return torch.arange(count) % high


drawn.register_fake(lambda count, high: torch.empty(count, dtype=i64))
calls = []


def test_operators_of_a_program_are_not_called():
    """They may have a state, as a sampler has: all results after one call more are others. Collectives would wait for the other ranks."""
    calls.clear()
    assert share_in(lambda t, x: added(t, drawn(TOKENS, 73), x), (73, 4, f32), (TOKENS, 4, f32)) is None
    assert share_in(lambda t, x: added(t, drawn(TOKENS, 73) // 2 + torch.arange(TOKENS) % 2, x), (73, 4, f32), (TOKENS, 4, f32)) is None
    assert not calls


def test_large_indices_are_not_computed():
    tokens = known_indices._MOST_ELEMENTS + 1
    assert share_in(lambda t, x: added(t, torch.arange(tokens) % 7, x), (7, 1, f32), (tokens, 1, f32)) is None


class Relative(torch.nn.Module):
    """Scores with embeddings of relative positions, whose gradient is a sum by index."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(73, 8)

    def forward(self, q):
        return torch.einsum("bld,lrd->blr", q, self.embedding(positions(q.shape[1]))).softmax(-1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backward_graph_knows_it_too(dynamic, interpreted, monkeypatch):
    """There the index is an input."""
    shares, of = [], Amounts.of.__func__

    def noted(cls, site):
        shares.append((site.index.op, known_indices.largest_share(site.index)))
        return of(cls, site)

    monkeypatch.setattr(Amounts, "of", classmethod(noted))
    fn = interpreted(Relative(), dynamic=dynamic, options={"fuse.gate": "auto"})
    fn(torch.randn(2, TOKENS, 8)).sum().backward()
    assert shares and set(shares) == {("placeholder", expected(positions(TOKENS)))}


def test_what_is_known_is_timed_as_it_is():
    """Instead of random numbers, to which threads would add in another order, and with other collisions."""
    graph = traced(lambda t, x: added(t, positions(TOKENS), x), (73, 4, f32), (TOKENS, TOKENS, 4, f32), device="cpu")
    known_indices.note(graph)
    (put,) = [n for n in graph.nodes if "index_put" in str(n.target)]
    found = region.cut_out([put])
    module, fakes, _ = region.alone([put])
    (position,) = found.known
    for _ in range(2):
        drawn = Samples(module.graph, fakes, known=found.known).draw()
        assert torch.equal(drawn[position], positions(TOKENS))
    other = traced(lambda t, x: added(t, positions(TOKENS) // 2, x), (73, 4, f32), (TOKENS, TOKENS, 4, f32), device="cpu")
    known_indices.note(other)
    (put,) = [n for n in other.nodes if "index_put" in str(n.target)]
    assert region.cut_out([put]).key("", "") != found.key("", "")
