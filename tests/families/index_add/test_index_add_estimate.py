"""What sums by index are said to make a device do: our kernels, the sort that several share, and Inductor's scatter or PyTorch's kernel."""

from __future__ import annotations

import math
import random

import pytest
import torch
from families.traced_graphs import traced
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusebackend.patterns.index_add import bench, inductor_work, work
from fusebackend.patterns.index_add.match import IndexAdd
from fusebackend.profitability import calibration, estimating
from fusebackend.rewriting.device_facts import IMAGINED
from fusebackend.rewriting.pattern import Estimate, Match

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("library")

f16, bf16, f32, f64, i64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64


@pytest.fixture(autouse=True)
def h200(kernels_for_every_device, monkeypatch):
    for module in (work, inductor_work):
        monkeypatch.setattr(module, "device_facts", lambda device: IMAGINED)


def matches(function, *inputs, **options):
    graph = traced(function, *inputs, **options)
    found = [IndexAdd().match(n) for n in graph.nodes if n.target in IndexAdd.anchors]
    assert found and all(isinstance(m, Match) for m in found), found
    return found


def workload(function, *inputs, **options):
    """The only workload of the only sum."""
    (match,) = matches(function, *inputs, **options)
    (found,) = IndexAdd().estimate(match)
    return found


def quantities(work):
    return {name: n for name, n in work.quantities.items() if n}


def routes(work):
    names = ("tiled", "small", "wide", "fp32 copy", "few", "thread tables", "block tables", "buckets", "segments")
    return [name for name in names if work.shape[name]]


def onto(x, i, s):
    return x.index_add(0, i, s)


def onto_zeros(x, i, s):
    return torch.zeros_like(x).index_add(0, i, s)


def in_place(x, i, s):
    x.index_add_(0, i, s)
    return i


def put(x, i, s):
    return x.index_put((i,), s, accumulate=True)


def scatter(x, i, s):
    return x.scatter_add(0, i[:, None].expand_as(s), s)


# ---- exact quantities ----

N, ROWS, COLUMNS = 512, 4096, 256
ROW = COLUMNS * 4
TOUCHED = -ROWS * math.expm1(-N / ROWS) * ROW  # bytes of the rows that 512 even draws hit


def test_a_sum_in_place():
    found = workload(in_place, (ROWS, COLUMNS, f32), (N, i64), (N, COLUMNS, f32))
    (ours,), (theirs,) = found.ours, found.inductor
    assert ours.kind == "index_add" and routes(ours) == ["wide"]
    assert quantities(ours) == pytest.approx(
        {
            "read": N * ROW + N * 8 + TOUCHED,
            "written": TOUCHED,
            "launches": 1,
            "blocks": N,  # of one piece of one entry each
            "steps": 1,
            "atomics": N * ROW / 16,
            "queue": N / ROWS,
        }
    )
    assert theirs.kind == "inductor scatter"
    assert quantities(theirs) == pytest.approx(
        {
            "read": N * ROW + N * 8 + TOUCHED,
            "written": TOUCHED,
            "atomics": N * COLUMNS,
            "queue": 1,
            "sectors": N * ROW / 32,
            "launches": 1,
        }
    )


def test_a_copy_of_self_is_work_for_both():
    found = workload(onto, (ROWS, COLUMNS, f32), (N, i64), (N, COLUMNS, f32))
    (ours,), (theirs,) = found.ours, found.inductor
    whole = ROWS * ROW
    for side in (ours, theirs):
        assert side.quantities["read"] == pytest.approx(N * ROW + N * 8 + TOUCHED + whole)
        assert side.quantities["written"] == pytest.approx(TOUCHED + whole)
        assert side.quantities["launches"] == 2 and side.shape["copies"] == 1


def test_a_route_that_writes_each_row_once_does_not_fill_zeros_before():
    n, rows = 1_000_000, 100_000
    found = workload(onto_zeros, (rows, 64, bf16), (n, i64), (n, 64, bf16))
    (ours,), (theirs,) = found.ours, found.inductor
    assert routes(ours) == ["buckets"]
    assert ours.quantities["written"] == rows * 128 and ours.quantities["read"] == n * 128 + n * 8
    assert ours.quantities["sorted"] == 2 * n and ours.quantities["scratch"] == 8 * n and ours.quantities["launches"] == 3
    assert theirs.kind == "aten index_add"
    touched = -rows * math.expm1(-n / rows) * 128
    assert theirs.quantities["written"] == pytest.approx(touched + 2 * rows * 128)  # zeros, and PyTorch's copy of them
    assert theirs.quantities["launches"] == 3


def test_what_inductor_would_fuse_is_a_loop_of_its_own_for_ours():
    found = workload(lambda x, i, s: onto_zeros(x, i, s.relu()), (ROWS, COLUMNS, f32), (N, i64), (N, COLUMNS, f32))
    ours, loop = found.ours
    assert (loop.kind, loop.quantities) == ("stream", {"bytes": 2 * N * ROW}) and found.neighbour.target is aten.relu.default
    assert found.inductor[0].shape["fused source"] == 1
    # PyTorch's kernel needs a tensor as well.
    found = workload(lambda x, i, s: onto_zeros(x, i, s.relu()), (ROWS, COLUMNS, bf16), (N, i64), (N, COLUMNS, bf16))
    assert len(found.ours) == 1 and found.neighbour is None


def test_what_the_kernels_gather_is_made_a_tensor_for_a_library_call():
    def gathered(x, i, j):
        return onto_zeros(x, i, x[j])

    for dtype, kinds in ((f32, ["inductor scatter"]), (bf16, ["stream", "aten index_add"])):
        found = workload(gathered, (ROWS, COLUMNS, dtype), (N, i64), (N, i64))
        row = COLUMNS * dtype.itemsize
        assert [w.kind for w in found.inductor] == kinds
        assert found.ours[0].quantities["gathered"] == N * row
        distinct = -ROWS * math.expm1(-N / ROWS) * row
        if dtype is bf16:
            assert found.inductor[0].quantities["bytes"] == pytest.approx(distinct + 2 * 8 * N + N * row)


def test_adds_of_unaligned_pairs_are_compared_and_swapped_by_those_that_meet():
    n, rows = 98_304, 4
    swaps = [workload(put, (rows, c, f16), (n, i64), (n, c, f16)).inductor[0].quantities["swaps"] for c in (7, 8)]
    assert swaps == [pytest.approx(n * 7 * 132 * 2048 / (rows * 7)), 0]


def test_adds_of_a_source_that_is_read_along_its_entries_are_no_pairs():
    """The gradient of a table of biases, head by head as attention's backward writes it: 0.64 s by Inductor for 384 x 384 positions of 12
    heads and 32 rows on an H100, 0.015 ms ours."""
    tokens, heads, rows = 384, 12, 32
    places = (tokens, tokens, torch.int64)

    def gradient(table, i, g):
        return put(table, i, g.permute(1, 2, 0))

    (by_heads,) = workload(gradient, (rows, heads, f16), places, (heads, tokens, tokens, f16)).inductor
    (by_rows,) = workload(put, (rows, heads, f16), places, (tokens, tokens, heads, f16)).inductor
    assert by_heads.quantities["swaps"] == pytest.approx(tokens**2 * heads * 132 * 2048 / (rows * heads))
    assert by_rows.quantities["swaps"] == 0
    (of_one,) = workload(lambda x, i, g: put(x, i, g.expand(-1, -1, heads)), (rows, heads, f16), places, (tokens, tokens, 1, f16)).inductor
    assert of_one.quantities["swaps"] == 0, "neighbours get the same"


@pytest.mark.parametrize("device", ["NVIDIA-H200", "NVIDIA-H100-80GB-HBM3"])
def test_rows_that_are_known_to_get_most_entries_are_waited_for(device):
    """The gradient of wav2vec2-BERT's embedding of distances, most of which are one of the two ends of the table: Inductor takes 9058 us on
    an H100. For an even index it is expected to take as long as the kernels, and was left to Inductor."""

    def gradient(table, g):
        places = torch.arange(512)
        return put(table, (places[None] - places[:, None]).clamp(-64, 8) + 64, g)

    known = calibration._read(calibration.FOLDER / f"{device}-torch2.11.json")
    assert known is not None
    found = workload(gradient, (73, 64, f32), (512, 512, 64, f32))
    assert estimating.pays(
        *(
            total(known[1], [[w] for w in works])
            for total, works in ((estimating.replacement, found.ours), (estimating.total, found.inductor))
        )
    )
    even = workload(put, (73, 64, f32), (512, 512, i64), (512, 512, 64, f32))
    assert found.inductor[0].quantities["queue"] > 20 * even.inductor[0].quantities["queue"]


def test_a_sum_that_is_rounded_once_is_inductors_in_fp32():
    def embedding(x, i, g):
        return torch.zeros(ROWS, COLUMNS).index_add(0, i, g.float()).bfloat16()

    found = workload(embedding, (ROWS, COLUMNS, bf16), (N, i64), (N, COLUMNS, bf16))
    (ours,), (theirs,) = found.ours, found.inductor
    assert ours.shape["element"] == 1 and theirs.shape["element"] == 2
    assert theirs.quantities["launches"] == 3
    assert theirs.quantities["written"] == pytest.approx(TOUCHED + ROWS * ROW + ROWS * ROW / 2)


@pytest.mark.parametrize(
    "shape, n, dtype, route, facts",
    [
        ((9216, 3), 56, f16, "segments", {"launches": 5, "vector": 1, "sorted": 112}),  # a sort for 56 entries
        ((16, 256), 262_144, f32, "block tables", {"launches": 1, "vector": 4}),
        ((12, 1), 15_129, f32, "thread tables", {"launches": 2}),
        ((2, 640), 132, bf16, "few", {"launches": 1, "steps": 66}),  # one row's entries go one after the other
        ((1000, 10), 50_000, f32, "tiled", {"launches": 1, "atomics": 500_000}),
        ((100, 40), 300, f64, "small", {"launches": 1, "steps": 1}),
    ],
)
def test_the_route_is_what_the_kernels_choose(shape, n, dtype, route, facts):
    found = workload(put if route == "segments" else in_place, (*shape, dtype), (n, i64), (n, shape[1], dtype)).ours[0]
    assert routes(found) == [route]
    known = {**found.quantities, "vector": found.shape["vector"]}
    assert {name: known[name] for name in facts} == facts


# ---- what Inductor calls a library for ----


@pytest.mark.parametrize(
    "function, dtype, kind",
    [
        (onto, f32, "inductor scatter"),
        (onto, f16, "inductor scatter"),
        (onto, bf16, "aten index_add"),
        (onto, i64, "aten index_put"),
        (put, f64, "inductor scatter"),
        (put, i64, "aten index_put"),
        (scatter, f32, "inductor scatter"),
        (scatter, i64, "aten scatter_add"),
    ],
)
def test_which_kernel_inductor_has(function, dtype, kind):
    assert workload(function, (ROWS, 64, dtype), (N, i64), (N, 64, dtype)).inductor[-1].kind == kind


def test_deterministic_sums_are_pytorchs():
    torch.use_deterministic_algorithms(True)
    try:
        for function, kind in ((put, "aten index_put"), (onto, "aten index_put"), (scatter, "aten scatter_add")):
            found = workload(function, (ROWS, 64, f32), (N, i64), (N, 64, f32))
            assert found.inductor[-1].kind == kind and routes(found.ours[0]) == ["segments"]
    finally:
        torch.use_deterministic_algorithms(False)


# ---- a sort that several share ----

EDGES, NODES = 200_000, 20_000


def layers(count):
    def function(x, dst, src):
        for _ in range(count):
            x = torch.zeros_like(x).index_add(0, dst, x[src])
        return x

    return function


@pytest.mark.parametrize("count", [2, 3])
def test_sums_by_one_index_pay_a_part_of_the_sort_each(count):
    for match in matches(layers(count), (NODES, 64, f32), (EDGES, i64), (EDGES, i64)):
        planned, alone = IndexAdd().estimate(match)
        assert planned.match is None and "planned" in match.note and "planned" not in alone.match.note
        sort, ours = planned.ours
        assert (sort.kind, sort.share) == ("index_plan", 1 / count)
        assert sort.quantities["sorted"] == 2 * EDGES and sort.quantities["launches"] == 3
        assert sort.quantities["read"] == 16 * EDGES and sort.quantities["written"] == 4 * (2 * EDGES + NODES)
        assert routes(ours) == ["segments"] and ours.quantities["launches"] == 2 and ours.quantities["sorted"] == 0
        assert [w.share for w in alone.ours] == [1.0] and alone.inductor == planned.inductor


def test_a_sorted_index_that_is_there_costs_nothing():
    match, *_ = matches(layers(2), (NODES, 64, f32), (EDGES, i64), (EDGES, i64))
    graph, site = match.outputs[0].graph, match.site
    with graph.inserting_before(site.output):
        options = site.rows, site.ignore, site.all_bounds, site.source_index, site.rows
        graph.call_function(torch.ops.fusebackend.index_plan.default, (site.index, *options)).meta["val"] = site.index.meta["val"]
    planned, _ = IndexAdd().estimate(IndexAdd().match(site.anchor))
    assert [w.kind for w in planned.ours] == ["index_add"]


def test_a_count_is_read_off_a_sorted_index():
    def mean(x, dst, src):
        counts = torch.zeros(NODES).index_add(0, dst, torch.ones(EDGES))
        return torch.zeros_like(x).index_add(0, dst, x[src]) / counts[:, None]

    count, _ = matches(mean, (NODES, 64, f32), (EDGES, i64), (EDGES, i64))
    planned, alone = IndexAdd().estimate(count)
    assert [(w.kind, w.share) for w in planned.ours] == [("index_plan", 0.5), ("stream", 1.0)]
    assert planned.ours[0].shape["gathers"] == 1 and planned.ours[1].quantities == {"bytes": NODES * 12}
    assert alone.ours[0].quantities["read"] < EDGES * 9 + NODES * 4 + 1  # the ones are not read


@pytest.mark.parametrize("reason", ["one sum", "other rows", "other index", "counts alone", "other index of the source"])
def test_no_sort_is_shared(reason):
    def function(x, dst, src):
        if reason == "counts alone":
            return [torch.zeros(NODES).index_add(0, dst, torch.ones(EDGES)).add(k) for k in (0, 1)]
        if reason == "one sum":
            return onto_zeros(x, dst, x[src])
        rows, second = NODES + (reason == "other rows"), src if reason == "other index" else dst
        other = x[dst if reason == "other index of the source" else src]
        return onto_zeros(x, dst, x[src]), torch.zeros(rows, 64).index_add(0, second, other)

    for match in matches(function, (NODES, 64, f32), (EDGES, i64), (EDGES, i64)):
        assert not match.site.sharing and "planned" not in match.note and len(IndexAdd().estimate(match)) == 1


# ---- every size and form ----


def test_an_empty_sum_gains_nothing():
    (match,) = matches(onto, (ROWS, 64, f32), (0, i64), (0, 64, f32))
    assert IndexAdd().estimate(match) == Estimate(False, "an empty tensor: nothing to gain")


def test_an_index_of_no_dims_is_one_entry():
    found = workload(lambda v, s, i: v.index_put((i,), s, accumulate=True), (1, f32), ((), f32), ((), i64))
    assert found.ours[0].quantities["read"] >= 4 + 8 and found.ours[0].shape == workload(put, (1, f32), (1, i64), (1, f32)).ours[0].shape


def test_a_size_that_depends_on_data_is_not_known():
    def function(x, mask, s):
        i = mask.nonzero()[:, 0]
        return torch.zeros_like(x).index_add(0, i, s.expand(i.shape[0], 64))

    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    with mode:
        inputs = torch.empty(ROWS, 64), torch.empty(ROWS, dtype=torch.bool), torch.empty(1, 64)
        graph = make_fx(function)(*inputs).graph
    (node,) = (n for n in graph.nodes if n.target in IndexAdd.anchors)
    match = IndexAdd().match(node)
    assert isinstance(match, Match), match
    found = IndexAdd().estimate(match)
    assert (found.pays, found.code) == (None, "unmeasured")


def drawn(count):
    cases = bench.random_cases(random.Random(5), 1.0)
    return [next(cases) for _ in range(count)]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_case_of_the_bench_is_described(device, dynamic):
    with FakeTensorMode() as mode:
        cases = [(case, case.inputs(torch.device("cpu"))) for case in [*bench.cases(), *drawn(25)]]
    del mode
    for case, inputs in cases:
        for match in matches(case.fn, *inputs, dynamic=dynamic, device=device):
            found = IndexAdd().estimate(match)
            assert len(found) == 1 + bool(match.site.sharing)
            for piece in (w for load in found for w in (*load.ours, *load.inductor)):
                numbers = [*piece.quantities.values(), *piece.shape.values()]
                assert all(map(math.isfinite, numbers)) and min(piece.quantities.values()) >= 0, (case.name, piece)
                assert piece.kind.endswith(" cpu") == (device == "cpu")
                assert piece.shape.get("dynamic", dynamic) == dynamic
