"""What sums along rows by an index are said to make a device do, both ways."""

import random

import pytest
import torch
from families.traced_graphs import traced

from fusebackend.patterns.row_scatter import bench
from fusebackend.patterns.row_scatter.match import RowScatter
from fusebackend.profitability import calibration
from fusebackend.rewriting.device_facts import IMAGINED
from fusebackend.rewriting.pattern import Estimate, Match

pytestmark = pytest.mark.usefixtures("library", "kernels_for_every_device")

f32, bf16, i64 = torch.float32, torch.bfloat16, torch.int64
COPIES, ROWS, SOURCES, BINS = 24, 64, 512, 256
ELEMENTS = COPIES * ROWS * SOURCES


def described(function, *inputs, **options):
    """What is said of the last sum of a function."""
    graph = traced(function, *inputs, **options)
    found = [RowScatter().match(n) for n in graph.nodes if n.target in RowScatter.anchors][-1]
    assert isinstance(found, Match), found
    return RowScatter().estimate(found)


def scattered(x, i):
    return x.new_zeros(*x.shape[:-1], BINS).scatter_add(-1, i.expand(x.shape), x)


def given(dtype=bf16, index=(1, ROWS, SOURCES)):
    return (COPIES, ROWS, SOURCES, dtype), (*index, i64)


def test_a_source_that_is_there_is_read_once_by_both():
    found = described(scattered, *given())
    (ours,), (inductor,) = found.ours, found.inductor
    assert (ours.kind, inductor.kind, found.neighbour) == ("row_scatter", "inductor row scatter", None)
    for work in (ours, inductor):
        assert work.quantities["read"] == 2 * ELEMENTS and work.quantities["written"] == 2 * COPIES * ROWS * BINS
        assert work.quantities["index"] == 8 * ROWS * SOURCES
    assert ours.quantities["sorted"] == ROWS * SOURCES and ours.quantities["sort blocks"] == ROWS
    assert inductor.quantities["atomics"] == inductor.quantities["exchanges"] == ELEMENTS
    assert described(scattered, *given(f32)).inductor[0].quantities["exchanges"] == 0, "fp32 is added as it is"


def test_inductors_scatter_is_also_described_as_one_of_single_elements():
    """By which the calibrations of index_add know something of it."""
    (inductor,) = described(scattered, *given()).inductor
    assert inductor.otherwise.kind == "inductor scatter"
    amounts = inductor.otherwise.quantities
    assert amounts["sectors"] == amounts["atomics"] == ELEMENTS and amounts["swaps"] >= ELEMENTS and amounts["launches"] == 2


def test_by_the_calibration_of_the_h200_inductor_takes_milliseconds_where_deberta_does():
    """So it is worth the time to compile both forms, until this family was calibrated."""
    known = calibration.for_device("cuda", IMAGINED.name)
    found = described(lambda x, i: x.new_zeros(x.shape).scatter_add(-1, i.expand(x.shape), x), (192, 512, 512, bf16), (1, 512, 512, i64))
    time = known.time([found.inductor[0].otherwise])
    assert 400 < time.expected < 4000 and time.high > 1000


def test_an_index_of_its_own_is_sorted_for_each_row():
    (ours,) = described(scattered, *given(index=(COPIES, ROWS, SOURCES))).ours
    assert ours.quantities["sorted"] == ELEMENTS and ours.shape["copies"] == 0


def test_a_source_that_inductor_computes_inside_becomes_a_tensor_first():
    found = described(lambda x, i: scattered(x / 3, i), *given())
    assert [w.kind for w in found.ours] == ["row_scatter", "stream"] and found.neighbour is not None
    assert found.ours[1].quantities == {"bytes": 4 * ELEMENTS}
    several = described(lambda x, i: (scattered(x / 3, i), scattered(x / 3, i)), *given())
    assert [w.kind for w in several.ours] == ["row_scatter", "stream"], "two scatters read it, and no other node"
    there = described(lambda x, i, w: ((y := x / 3) @ w, scattered(y, i)), *given(), (COPIES, SOURCES, 8, bf16))
    assert [w.kind for w in there.ours] == ["row_scatter"] and there.neighbour is None, "the product reads it too"


def test_the_result_is_added_to():
    found = described(lambda x, i: x[..., :BINS].clone().scatter_add(-1, i.expand(x.shape), x), *given())
    assert found.ours[0].quantities["added to"] == found.inductor[0].quantities["copied"] == 2 * COPIES * ROWS * BINS


def test_sources_that_lie_apart_are_read_by_sectors():
    def fn(x, i):
        return scattered(x[..., ::2], i[..., ::2])

    (ours,) = described(fn, *given()).ours
    assert ours.quantities["read"] == 2 * ELEMENTS, "both halves of each pair"
    (ours,) = described(lambda x, i: scattered(x.mT, i), (COPIES, SOURCES, ROWS, bf16), (1, ROWS, SOURCES, i64)).ours
    assert ours.quantities["read"] == 2 * ELEMENTS and ours.shape["across"] == 1


def test_empty_tensors_gain_nothing():
    found = described(scattered, (COPIES, 0, SOURCES, bf16), (1, 0, SOURCES, i64))
    assert isinstance(found, Estimate) and found.pays is False


def test_on_a_cpu():
    found = described(scattered, *given(), device="cpu")
    assert [w.kind for w in (*found.ours, *found.inductor)] == ["row_scatter cpu", "inductor row scatter cpu"]


@pytest.mark.parametrize("seed", range(8))
def test_random_cases_are_described(seed):
    """What a calibration draws is of this family."""
    cases = bench.random_cases(random.Random(seed), 1e-3)
    for _ in range(4):
        case = next(cases)
        inputs = case.inputs(torch.device("cpu"))
        found = described(case.fn, *inputs)
        assert found.ours[0].kind == "row_scatter" and found.inductor[0].kind == "inductor row scatter", case.name
