"""The work of both forms, and what follows from what a calibration makes of it."""

import itertools
import math
import random

import pytest
import stand_in_calibrations
import torch
from families.traced_graphs import traced
from sdpa_programs import heads

import fusebackend
from fusebackend.patterns.sdpa import bench
from fusebackend.patterns.sdpa.match import Sdpa
from fusebackend.rewriting.pattern import Estimate, Match, Workload

aten = torch.ops.aten
PATTERN = Sdpa()


def scaled_queries(q, k, v):
    return ((q * 0.25) @ k.mT).softmax(-1) @ v


def causal(q, k, v):
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return ((q * 0.25) @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v


def workload(graph) -> Workload | Estimate:
    matches = [m for target in PATTERN.anchors for n in graph.find_nodes(op="call_function", target=target) if (m := PATTERN.match(n))]
    assert len(matches) == 1 and isinstance(matches[0], Match), matches
    return PATTERN.estimate(matches[0])


def test_the_quantities_of_a_forward():
    found = workload(traced(scaled_queries, *heads(2, 4, 256, 64, dtype=torch.float32), device="cpu"))
    ours, theirs = found.ours[0], found.inductor[0]
    scores, tensor = 8 * 256 * 256, 8 * 256 * 64 * 4
    assert (ours.kind, theirs.kind) == ("sdpa cpu", "softmax attention cpu")
    assert theirs.quantities["flops in 32 bits"] == 4 * scores * 64
    assert ours.quantities["flops in 32 bits"] >= 4 * scores * 64  # of the thread that has most of it
    assert ours.quantities["bytes"] == theirs.quantities["bytes"] == 4 * tensor
    assert theirs.quantities["score bytes"] == 4 * scores


def test_keys_behind_all_queries_of_a_block_are_left_out_of_causal_attention():
    operands = heads(1, 2, 2048, 16)
    whole, half = (workload(traced(fn, *operands, device="cpu")).ours[0] for fn in (scaled_queries, causal))
    assert half.shape["causal"] == 1
    assert whole.quantities["scores"] / 2 < half.quantities["scores"] < whole.quantities["scores"]


def test_whatever_the_benchmark_draws_is_described():
    for case in itertools.islice(bench.random_cases(random.Random(0), 1 / 64), 40):
        found = workload(traced(case.fn, *case.inputs(torch.device("meta")), device="cpu"))
        for work in (*found.ours, *found.inductor):
            assert all(math.isfinite(x) and x >= 0 for x in (*work.quantities.values(), *work.shape.values()) if x > -30), case.name


def test_attention_on_a_gpu_is_not_looked_at():
    graph = traced(scaled_queries, *heads(2, 4, 256, 64), device="cuda")
    found = [PATTERN.match(n) for target in PATTERN.anchors for n in graph.find_nodes(op="call_function", target=target)]
    assert found == [None]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("ours_us", "reason"),
    [
        (stand_in_calibrations.FASTER_US, None),
        (stand_in_calibrations.SLOWER_US, "Inductor is as fast or faster"),
        (None, "nothing is known of this device"),
    ],
)
def test_a_calibration_decides(calibrated, ours_us, reason):
    calibrated(ours_us)
    torch.compile(scaled_queries, backend="fuse", options={"fuse.patterns": ["sdpa"], "fuse.interpret": True})(*heads())
    report = fusebackend.last_report()
    assert (reason is None) == (len(report.substitutions) == 1), report
    assert reason is None or any(reason in r.reason for r in report.rejections), report
