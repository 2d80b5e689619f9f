"""What products in place and products of copies are said to make a device do, and which of both is taken."""

import dataclasses

import pytest
import torch
from families.traced_graphs import traced

from fusebackend import fx_utils as g
from fusebackend.patterns.contraction.bench import CASES
from fusebackend.patterns.contraction.match import Contraction
from fusebackend.patterns.strided_bmm.match import StridedBmm
from fusebackend.profitability.calibration import Calibration
from fusebackend.profitability.estimating import Estimator
from fusebackend.profitability.time_model import TimeModel
from fusebackend.rewriting.pattern import Emitter, Match, Work

aten, op = torch.ops.aten, torch.ops.fusebackend.strided_bmm.default
pytestmark = pytest.mark.usefixtures("library", "kernels_for_every_device")

bf16, f32 = torch.bfloat16, torch.float32
SIZES = dict(zip("bclshpn", (2, 1, 64, 64, 24, 64, 64)))
SCORES, EQUATION = CASES["scores"]


def matches(graph, pattern):
    found = [pattern.match(n) for n in graph.nodes if n.target in pattern.anchors]
    return [match for match in found if isinstance(match, Match)]


def graph_of(fn, dtype=bf16, sizes=SIZES):
    """A function of the two factors of scores."""
    graph = traced(fn, *[(*[sizes[d] for d in dims], dtype) for dims in EQUATION.split("->")[0].split(",")])
    graph.eliminate_dead_code()
    return graph


def contracted(fn=SCORES, **options):
    """The one contraction in a graph of ``fn``, and its workloads."""
    (match,) = matches(graph_of(fn, **options), Contraction())
    return match, Contraction().estimate(match)


# ---- sums of products ----


def test_a_contraction_is_offered_in_place_and_by_a_library():
    match, (here, library) = contracted()
    assert (here.ours[0].kind, library.ours[0].kind) == ("strided_bmm", "contraction")
    assert here.inductor == library.inductor and library.is_alternative and not here.untimed
    assert here.ours[0].quantities["launches"] == 1
    assert library.ours[0].quantities["launches"] == 4, "two copies, and one of the result"
    assert library.match.outputs == match.outputs and library.match.nodes == match.nodes and library.match.note != match.note


def test_in_fp32_a_library_needs_chunks_and_the_kernels_none():
    match, (here, library) = contracted(dtype=f32)
    assert [work.kind for work in here.ours] == ["strided_bmm"] and "chunks" not in match.note
    assert [work.kind for work in library.ours] == ["contraction", "inductor column sum"] and "4 chunks" in library.match.note
    assert here.ours[0].quantities["flops in 32 bits"] == library.ours[0].quantities["flops in 32 bits"]


def test_in_fp32_what_lies_as_a_library_reads_it_is_offered_in_place_too():
    def rows(x, y):
        return (x[:, :, None] * y[:, None]).sum(-1)

    (match,) = matches(traced(rows, (4, 64, 64, f32), (4, 64, 64, f32)), Contraction())
    assert [w.ours[0].kind for w in Contraction().estimate(match)] == ["strided_bmm", "contraction"]


def test_each_form_is_what_it_says():
    for form, (present, absent) in enumerate(((op, aten.bmm.default), (aten.bmm.default, op))):
        match, workloads = contracted()
        chosen = workloads[form].match or match
        emitter = Emitter(match.outputs, g.value(match.outputs[0]).fake_mode)
        made = chosen.emit(emitter)
        assert g.difference(g.value(match.outputs[0]), g.value(made)) is None
        targets = {n.target for n in emitter.nodes}
        assert present in targets and absent not in targets


def test_small_tiles_read_large_operands_often_and_are_computed_whole():
    """What makes the kernels slower than a library, where they are."""

    def quantities(**sizes):
        return contracted(sizes=dict(SIZES, b=1, **sizes))[1][0].ours[0].quantities

    alike, large, small = quantities(), quantities(l=2048, s=2048), quantities(l=8, s=8)
    again = [q["staged bytes"] / (2 * 24 * 64 * 2 * n) for q, n in ((small, 8), (alike, 64), (large, 2048))]
    assert again == [4, 2, 64], "how often an operand is read, or what stands for it"
    flops = "flops in 16 bits"
    assert large[flops] == 32**2 * alike[flops] and small[flops] == alike[flops] / 4


def test_what_inductor_computes_is_written_in_any_order():
    _, (here, library) = contracted(lambda c, b: SCORES(c * 2, b))
    assert here.ours[0].quantities["launches"] == 2 and here.ours[0].quantities["computed bytes"] == 2 * 2 * 2 * 64 * 24 * 64
    assert "computed operands" in here.untimed and not library.untimed


def calibrated(**expected):
    """A calibration that knows how many microseconds these kinds of work take, of no quantities."""
    models = {kind.replace("_of_", " of "): TimeModel(us, {}, 1.0, noise=0.1) for kind, us in expected.items()}
    return Calibration("a device", "2.13", "2026-01-01", 9, models, {}, call=0.0)


def by_kind(works):
    return tuple(Work(w.kind, {}, otherwise=w.otherwise and Work(w.otherwise.kind, {})) for w in works)


def estimated(match, workloads, **expected):
    """By the kinds of our work and of library products; a loop of Inductor's takes 1000 us."""
    described = [
        dataclasses.replace(w, ours=by_kind(w.ours), inductor=(Work("loop", {}),) if isinstance(match.site, tuple) else by_kind(w.inductor))
        for w in workloads
    ]
    return Estimator(calibrated(loop=1000.0, **expected)).estimate(described, "post_grad", match.outputs, match.nodes)


def test_in_place_is_not_taken_before_it_is_known():
    """It is offered beside the library's product, against which the gate times it."""
    found = estimated(*contracted(), contraction=60.0)
    assert found.pays is None and found.instead is None and "'strided_bmm'" in found.reason
    assert found.rival.pays is True and found.rival.ours.expected == 60.0
    match, workloads = contracted(lambda c, b: SCORES(c * 2, b))
    found = estimated(match, workloads, contraction=60.0)  # timing would not tell
    assert found.pays is True and found.instead is workloads[1].match and found.rival is None


@pytest.mark.parametrize("us", [30.0, 90.0])
def test_of_both_the_faster_is_taken(us):
    match, workloads = contracted()
    found = estimated(match, workloads, contraction=60.0, strided_bmm=us)
    assert found.pays is True and found.ours.expected == min(us, 60.0) and (found.instead is None) is (us < 60)


# ---- products of copies ----


def einsum(c, b):
    return torch.einsum(EQUATION, c, b)


def test_copies_and_a_library_are_compared_with_a_product_in_place():
    (match,) = matches(graph_of(einsum), StridedBmm())
    workload = StridedBmm().estimate(match)
    ((ours,), (theirs,)) = workload.ours, workload.inductor
    assert (ours.kind, theirs.kind, theirs.otherwise.kind) == ("strided_bmm", "contraction of strided_bmm", "contraction")
    assert theirs.quantities["copied bytes"] == 2 * 2 * 2 * (2 * 64 * 24 * 64) and theirs.quantities["launches"] == 3
    assert ours.quantities["launches"] == 1 and ours.quantities["bytes"] == theirs.quantities["bytes"]
    assert [n.target for n in match.interior].count(aten.clone.default) == 2, "they are timed too"


def test_a_calibration_of_either_kind_tells():
    (match,) = matches(graph_of(einsum), StridedBmm())
    workloads = [StridedBmm().estimate(match)]
    for library in ("contraction", "contraction_of_strided_bmm"):
        found = estimated(match, workloads, strided_bmm=30.0, **{library: 60.0})
        assert found.pays is True and found.inductor.expected == 60.0
    found = estimated(match, workloads, contraction=60.0)
    assert found.pays is None and found.code == "unmeasured" and found.inductor.expected == 60.0, "both forms are called then"


def test_a_copy_that_inductor_writes_where_it_computes_is_not_saved():
    (match,) = matches(graph_of(lambda c, b: einsum(c * 2, b)), StridedBmm())
    assert StridedBmm().estimate(match).inductor[0].quantities["launches"] == 2
    assert [n.target for n in match.interior].count(aten.clone.default) == 1
    # A loop that sums writes its result in any order, too.
    (match,) = matches(graph_of(lambda c, b: einsum(c.expand(2, *c.shape).sum(0), b)), StridedBmm())
    assert [n.target for n in match.interior].count(aten.clone.default) == 1
    (match,) = matches(graph_of(lambda c, b: einsum(c * 2, b * 3)), StridedBmm())
    found = StridedBmm().estimate(match)
    assert found.pays is False and "no copy is saved" in found.reason and not match.interior


@pytest.mark.parametrize(("read_by_library", "copies"), [(False, 0), (True, 2)])
def test_what_inductor_computes_for_each_of_several_readers_is_not_saved(read_by_library, copies):
    """As where queries, keys and a gate are chunks of one activation (HSTU): three loops compute it, and two of them write the copies.
    Where a library reads it too it is a tensor, of which copies are made."""

    def fn(x, w):
        y = torch.nn.functional.silu(x)
        q, k, gate = y.chunk(3, -1)
        q, k = (z.view(4, 64, 8, 16).transpose(1, 2) for z in (q, k))
        scores = torch.bmm(q.reshape(32, 64, 16), k.transpose(-1, -2).reshape(32, 16, 64))
        return scores, gate + 1, *([y.view(-1, 384) @ w] if read_by_library else [])

    graph = traced(fn, (4, 64, 384, bf16), (384, 8, bf16))
    graph.eliminate_dead_code()
    (match,) = matches(graph, StridedBmm())
    assert [n.target for n in match.interior].count(aten.clone.default) == copies
    found = StridedBmm().estimate(match)
    if not copies:
        assert found.pays is False and "no copy is saved" in found.reason


def test_a_copy_that_others_read_is_not_saved():
    def fn(c, b):
        copied = c.permute(0, 1, 3, 2, 4).contiguous().view(-1, 64, 64)
        return torch.bmm(copied, b.permute(0, 1, 3, 4, 2).reshape(-1, 64, 64)), copied

    (match,) = matches(graph_of(fn), StridedBmm())
    assert [n.target for n in match.interior].count(aten.clone.default) == 1
    assert StridedBmm().estimate(match).inductor[0].quantities["launches"] == 2
