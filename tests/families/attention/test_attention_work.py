"""What the kernels make a GPU do: quantities of a few attentions, and that whatever the benchmark draws is described. Without a GPU."""

import dataclasses
import itertools
import math
import random

import pytest
import torch
from families.traced_graphs import traced_joint

from fusebackend.fx_utils import is_view
from fusebackend.patterns.attention import bench, ops, work
from fusebackend.patterns.attention.match import Attention
from fusebackend.rewriting import device_facts, library_product
from fusebackend.rewriting.pattern import Generated, Match, Workload

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def h200(monkeypatch, library):
    monkeypatch.setattr(work, "device_facts", lambda device: device_facts.IMAGINED)


def attended(q, keys, biases, learned, causal=False):
    batch, group, heads, queries, dim = q
    facts = [work.BiasFacts(b, 2, b[-1] % 8 == 0, 2 * wanted) for b, wanted in zip(biases, learned)]
    return work.Attended((batch, group, heads, queries, keys, dim, dim), facts, causal, CUDA)


def test_the_quantities_of_windows():
    site = attended((1, 4096, 4, 49, 32), 49, [(1, 1, 4, 49, 49)], [True])
    forward, backward = work.work(site, False), work.work(site, True)
    tensor = 4096 * 4 * 49 * 32 * 2
    bias, statistics = 4 * 49 * 49 * 2, 4096 * 4 * 49 * 8
    assert forward.quantities["bytes"] == 4 * tensor + bias + statistics
    assert backward.quantities["bytes"] == 7 * tensor + 2 * bias + statistics
    assert forward.shape["window"] == backward.shape["window"] == 1
    assert forward.quantities["launches"] == 1 and backward.quantities["launches"] == 2  # the second adds the blocks' sums up
    # They stay in registers: each block reads them once.
    assert forward.quantities["biases"] < forward.quantities["scores"] / 8
    # At least what there is, on the multiprocessor that has most of it.
    assert forward.quantities["flops"] >= 4 * 4096 * 4 * 49 * 49 * 32 / 132


def test_biases_are_read_again_for_the_heads_that_do_not_share_them():
    """The windows of one head share the bias of heads; that of windows is shared by their 4 heads."""
    biases = [(1, 1, 4, 49, 49), (2048, 1, 1, 49, 49)]
    of_heads, of_windows = (work.work(attended((2048, 1, 4, 49, 32), 49, [b], [False]), False) for b in biases)
    assert of_heads.quantities["steps"] == of_windows.quantities["steps"] > 8
    assert of_heads.quantities["biases"] * 4 == of_windows.quantities["biases"] * 4 / 4 == of_windows.quantities["scores"] / 4


def test_the_quantities_of_long_sequences():
    site = attended((8, 1, 12, 1024, 64), 1024, [(1, 1, 12, 1024, 1024)], [True])
    forward, backward = work.work(site, False), work.work(site, True)
    blocks = 8 * 12 * 8  # of 128 queries
    assert forward.quantities["steps"] == -(-blocks // 132) * 16
    assert forward.quantities["scores"] == forward.quantities["steps"] * 128 * 64
    assert forward.quantities["flops"] == 4 * 64 * forward.quantities["scores"]
    assert forward.quantities["staged bytes"] == blocks * 16 * 2 * (128 * 64 + 128 * 64)  # keys, values, the bias
    assert forward.quantities["scratch bytes"] == 0
    assert backward.quantities["launches"] == 3  # sums of rows; dk and dv; dq and the bias
    assert backward.quantities["scratch bytes"] == 2 * 2 * 8 * 12 * 1024 * 1024  # gradients of scores
    without = work.work(dataclasses.replace(site, biases=[dataclasses.replace(site.biases[0], gradient_itemsize=0)]), True)
    assert without.quantities["launches"] == 3 and without.quantities["scratch bytes"] == 0
    assert without.quantities["scores"] == 2 * backward.quantities["scores"]  # for dq, they are computed once more


def test_biases_that_are_copied_are_counted():
    aligned, copied = (attended((4, 1, 2, 200, 64), 200, [(1, 1, 2, 200, 200)], [False]) for _ in range(2))
    copied = dataclasses.replace(copied, biases=[dataclasses.replace(copied.biases[0], aligned=False)])
    first, second = work.work(aligned, False), work.work(copied, False)
    assert second.quantities["launches"] == first.quantities["launches"] + 1
    assert second.quantities["scratch bytes"] == 2 * 2 * 2 * 200 * 200


def test_half_of_causal_attention_is_left_out():
    causal, all_keys = (work.work(attended((2, 1, 4, 2048, 64), 2048, [], [], c), False) for c in (True, False))
    assert causal.quantities["flops"] == all_keys.quantities["flops"] / 2


def test_whatever_the_benchmark_draws_is_described():
    for case in itertools.islice(bench.random_cases(random.Random(0), 1.0), 300):
        with torch.device("meta"):
            q, k, _, *others = case.inputs(torch.device("meta"))
        biases = [x for x in others if x.dim() == 4]  # without embeddings of positions, tables and indices
        head = int(case.name.split("x")[3].split(",")[0])
        heads = q.shape[-1] // head
        assert head % ops.limits()[2] == 0 and len(biases) <= ops.limits()[0]
        sizes = [(b.shape[0], 1, *b.shape[1:]) for b in biases]
        site = attended((q.shape[0], 1, heads, q.shape[1], head), k.shape[1], sizes, [3 + i in case.backward for i in range(len(biases))])
        for described in (work.work(site, False), work.work(site, True)):
            assert all(math.isfinite(x) and x >= 0 for x in described.quantities.values()), case.name
            assert all(math.isfinite(x) for x in described.shape.values()), case.name


def test_an_empty_attention_has_no_work():
    assert work.kernel_facts(attended((0, 1, 4, 9, 32), 9, [], []), True) == {}


def gathering(q, k, v, places, index):
    """As in DeBERTa: a term of the scores is gathered for each of them."""
    gathered = (q @ places.mT).gather(-1, index.expand(*q.shape[:-1], k.shape[-2]))
    return ((q @ k.mT + gathered / 3) * 0.125).softmax(-1) @ v


def looking_up(q, k, v, table, index):
    """As in T5: one bias for all of the batch."""
    return (q @ k.mT * 0.125 + table[index].permute(2, 0, 1)).softmax(-1) @ v


def estimated(fn, args, wanted, monkeypatch):
    """The workloads at the sites of ``fn``, as if on a GPU, and the graph; of the backward AOTAutograd notes that it is."""
    monkeypatch.setattr(library_product, "device_facts", lambda device: device_facts.IMAGINED)
    graph = traced_joint(fn, args, wanted)
    gradients = set()
    for node in graph.nodes:
        if node.name == f"arg{len(args)}_1" or gradients & {*node.all_input_nodes}:
            gradients.add(node)
        node.meta["partitioner_tag"] = "is_backward" if node in gradients else "is_forward"
    return estimates_where_found(graph)


def targets(generated):
    return [n.target for n in generated.nodes]


@pytest.mark.usefixtures("kernels_for_every_device")
@pytest.mark.parametrize(
    "fn, learned, read, family",
    [(gathering, (2, 4, 48, 32), aten.gather.default, "attention"), (looking_up, (32, 4), aten.index.Tensor, "")],
)
def test_computed_terms_are_read_inside_the_softmax_by_inductor_and_stored_here(fn, learned, read, family, monkeypatch):
    q, k, v, places = (torch.randn(s, dtype=torch.bfloat16) for s in (*[(2, 4, 64, 32)] * 3, learned))
    (found,) = estimated(fn, (q, k, v, places, torch.zeros(64, 64, dtype=torch.int64)), (0, 1, 2, 3), monkeypatch)
    (stored,) = (w for w in found.ours if isinstance(w, Generated))
    forward, backward = (w for w in found.inductor if isinstance(w, Generated))
    assert read in targets(stored) and aten.exp.default not in targets(stored)
    assert read in targets(forward) and aten.exp.default in targets(forward)
    assert read not in targets(backward) and aten.sum.dim_IntList in targets(backward)
    assert (stored.family, forward.family, backward.family) == (family, family, "")
    assert stored.is_unlike_others == forward.is_unlike_others == bool(family)


@pytest.mark.usefixtures("kernels_for_every_device")
def test_a_gathered_term_that_is_read_elsewhere_too_is_stored_in_both_forms(monkeypatch):
    def fn(q, k, v, places, index):
        gathered = (q @ places.mT).gather(-1, index.expand(*q.shape[:-1], k.shape[-2]))
        return ((q @ k.mT + gathered) * 0.125).softmax(-1) @ v + gathered.sum(-1, keepdim=True)

    q, k, v, places = (torch.randn(s, dtype=torch.bfloat16) for s in (*[(2, 4, 64, 32)] * 3, (2, 4, 48, 32)))
    (found,) = estimated(fn, (q, k, v, places, torch.zeros(64, 64, dtype=torch.int64)), (), monkeypatch)
    assert not any(isinstance(w, Generated) for w in found.ours)
    assert not any(aten.gather.default in targets(w) for w in found.inductor if isinstance(w, Generated))


@pytest.mark.usefixtures("kernels_for_every_device")
def test_what_is_read_inside_of_other_loops_is_not_stored(monkeypatch):
    """The gradient of the scores is divided inside the sum by places, and no view of a tensor is stored beside it."""
    q, k, v, places = (torch.randn(s, dtype=torch.bfloat16) for s in (*[(2, 4, 64, 32)] * 3, (2, 4, 48, 32)))
    (found,) = estimated(gathering, (q, k, v, places, torch.zeros(64, 64, dtype=torch.int64)), (0, 1, 2, 3), monkeypatch)
    for generated in (w for w in found.inductor if isinstance(w, Generated)):
        stored = [n for n in generated.nodes if not all(u in generated.nodes for u in n.users)]
        assert sum(n.meta["val"].numel() == 2 * 4 * 64 * 64 for n in stored) == 1
        assert not any(is_view(n) for n in stored)


def of_one_size(q, k, v, s):
    return ((q @ k.mT * 0.125 + s).softmax(-1)) @ v


def multiplied(q, k, v, s):
    return (((q * 0.125) @ k.mT * s).softmax(-1)) @ v


@pytest.mark.usefixtures("kernels_for_every_device")
@pytest.mark.parametrize("fn, depth, moved", [(of_one_size, 32, []), (of_one_size, 20, [24] * 8), (multiplied, 32, [32] * 3)])
def test_what_is_moved_around_the_kernels_is_counted(fn, depth, moved, monkeypatch):
    """Padding of q, k, v and the result, of which a kernel takes 24 for 20 elements a head, and of their gradients; products with a scale
    of the scores, and the sum in its gradient."""
    monkeypatch.setattr(library_product, "device_facts", lambda device: device_facts.IMAGINED)
    q, k, v = (torch.randn(2, 4, 64, depth, dtype=torch.bfloat16) for _ in range(3))
    graph = traced_joint(fn, (q, k, v, torch.randn(4, 1, 1, dtype=torch.bfloat16)), (0, 1, 2, 3) if fn is multiplied else (0, 1, 2))
    (found,) = estimates_where_found(graph)
    assert isinstance(found, Workload)
    assert [w.quantities["bytes"] for w in found.ours if w.kind == "stream"] == [2 * 2 * 2 * 4 * 64 * size for size in moved]


def estimates_where_found(graph):
    matches = (Attention().match(n) for n in graph.nodes if n.op == "call_function" and n.target in Attention.anchors)
    return [Attention().estimate(m) for m in matches if isinstance(m, Match)]
