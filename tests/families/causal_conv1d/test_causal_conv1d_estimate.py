"""What both ways make a device do: quantities of a few convolutions, and that whatever the benchmark draws is described."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from families.traced_graphs import estimates, traced_joint

from fusebackend.native import loader
from fusebackend.patterns.causal_conv1d import bench, operator_work
from fusebackend.patterns.causal_conv1d.match import CausalConv1d, CausalConv1dBackward
from fusebackend.rewriting import device_facts
from fusebackend.rewriting.pattern import Workload

PATTERNS = (CausalConv1d(), CausalConv1dBackward())


@pytest.fixture(autouse=True)
def h200(library, monkeypatch):
    """The kernels are there, and so is the GPU that they run on."""
    monkeypatch.setattr(type(loader.load()), "why_not", lambda self, device, *operators: None)
    monkeypatch.setattr(operator_work, "device_facts", lambda device: device_facts.IMAGINED)


def workloads(graph):
    """Of each match, all that its pattern says, in the order of the graph."""
    return [made if isinstance(made, tuple) else (made,) for made in estimates(graph, PATTERNS)]


def convolution(taps, channels, btc=False, silu=False, after=None):
    def fn(x, weight, *bias):
        x = x.transpose(1, 2) if btc else x
        y = F.conv1d(F.pad(x, (taps - 1, 0)), weight, *bias, groups=channels)
        y = F.silu(y) if silu else y
        return after(y) if after else y

    return fn


def inputs(batch, channels, samples, taps, btc=False, dtype=torch.bfloat16, bias=False):
    x = torch.empty((batch, samples, channels) if btc else (batch, channels, samples), dtype=dtype)
    return (x, torch.empty(channels, 1, taps, dtype=dtype), *([torch.empty(channels, dtype=dtype)] if bias else []))


def test_the_quantities_of_a_short_forward():
    ((both,),) = workloads(traced_joint(convolution(4, 64), inputs(2, 64, 128, 4)))
    (ours,), (theirs,) = both.ours, both.inductor
    elements, padded = 2 * 64 * 128, 2 * 64 * 131
    assert (ours.kind, theirs.kind) == ("causal_conv1d", "depthwise conv")
    assert ours.quantities == {
        "bytes": 2 * 2 * elements,
        "copied bytes": 0,
        "pointwise bytes": 0,
        "launches": 1,
        "products (short)": 4 * elements * 132 / 64,  # 64 blocks on 132 multiprocessors
        "blocks": 64,
        "activations": 0,
    }
    assert theirs.quantities == {
        "bytes": 2 * (padded + elements),
        "outputs": elements,
        "products": 4 * elements,
        "pointwise bytes": 2 * (elements + padded),
        "launches": 2,
    }
    assert ours.shape["short"] == 1 and ours.shape["log2 taps"] == 2 and theirs.shape["cudnn"] == 0


def test_silu_and_bias_are_a_kernel_of_inductors_unless_the_next_one_computes_them():
    sites = [inputs(2, 64, 128, 4, bias=True)] * 2
    alone, fused = (workloads(traced_joint(convolution(4, 64, silu=True, after=f), s))[0][0] for f, s in zip((None, torch.sin), sites))
    elements = 2 * 64 * 128
    assert alone.inductor[0].quantities["launches"] == 3 and fused.inductor[0].quantities["launches"] == 2
    difference = alone.inductor[0].quantities["pointwise bytes"] - fused.inductor[0].quantities["pointwise bytes"]
    assert difference == 2 * 2 * elements
    assert alone.ours[0].quantities["activations"] == elements and alone.ours[0].quantities["launches"] == 1


def test_what_computes_x_writes_it_padded():
    plain = convolution(4, 64)
    ((both,),) = workloads(traced_joint(lambda x, w: plain(torch.sin(x), w), inputs(2, 64, 128, 4)))
    assert both.inductor[0].quantities["launches"] == 1


def test_copies_into_another_memory_order_are_counted():
    ((both,),) = workloads(traced_joint(convolution(64, 64, btc=True), inputs(2, 64, 128, 64, btc=True)))
    assert both.ours[0].quantities["copied bytes"] == 2 * 2 * 2 * 64 * 128 and both.ours[0].quantities["launches"] == 2
    assert both.ours[0].shape["tensor_cores"] == 1


def test_the_quantities_of_a_backward():
    forward, (both,) = workloads(traced_joint(convolution(4, 64, silu=True), inputs(2, 64, 2048, 4), (0, 1)))
    (ours,), (theirs,) = both.ours, both.inductor
    elements, padded = 2 * 64 * 2048, 2 * 64 * 2051
    assert (ours.kind, theirs.kind) == ("causal_conv1d backward", "depthwise conv backward")
    assert ours.quantities["bytes"] == 2 * 3 * elements and ours.quantities["launches"] == 2 and ours.shape["one pass"] == 1
    assert theirs.quantities["launches"] == 2 + 3, "the gradients; SiLU's, padding x again, the crop"
    assert theirs.quantities["pointwise bytes"] == 2 * ((elements + padded) + 3 * elements + 2 * elements)
    assert theirs.quantities["samples"] == 2 * 2048 and theirs.quantities["products"] == 2 * 4 * elements
    assert len(forward) == 2, "with SiLU, and without"


def test_silu_costs_the_original_convolution_where_its_backward_stays():
    graph = traced_joint(convolution(4, 64, silu=True), inputs(2, 64, 2048, 4), (0, 1))
    (whole, plain), _ = workloads(graph)
    assert [w.kind for w in whole.ours] == ["causal_conv1d", "depthwise conv"]
    assert [w.kind for w in plain.ours] == ["causal_conv1d"] and plain.match is not None and not plain.match.site.silu
    assert plain.ours[0].quantities["pointwise bytes"] == 2 * 2 * 2 * 64 * 2048
    whole, _ = workloads(traced_joint(convolution(4, 64, silu=True), inputs(2, 64, 2048, 4)))[0]
    assert [w.kind for w in whole.ours] == ["causal_conv1d"], "in inference nothing else needs the value before SiLU"


@pytest.mark.parametrize("dtype, channels, cudnn", [(torch.float16, 32, 1), (torch.float16, 31, 0), (torch.bfloat16, 32, 0)])
def test_the_library_that_pytorch_calls(dtype, channels, cudnn):
    ((both,),) = workloads(traced_joint(convolution(3, channels), inputs(2, channels, 64, 3, dtype=dtype)))
    theirs = both.inductor[0]
    assert theirs.shape["cudnn"] == cudnn and ("outputs of cuDNN" in theirs.quantities) == bool(cudnn)


def test_an_empty_convolution_and_one_of_unknown_size_are_left():
    graph = traced_joint(convolution(3, 8), inputs(0, 8, 16, 3))
    (node,) = [n for n in graph.nodes if n.target in CausalConv1d.anchors]
    assert CausalConv1d().estimate(CausalConv1d().match(node)).pays is False


def is_described(workload, device):
    assert isinstance(workload, Workload), workload
    for work in (*workload.ours, *workload.inductor):
        assert work.kind.endswith(" cpu") == (device == "cpu")
        assert all(math.isfinite(v) and v >= 0 for v in work.quantities.values()), work
        assert all(math.isfinite(v) for v in work.shape.values()), work


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_the_benchmark_times_is_described(device, dynamic):
    drawn = itertools.islice(bench.random_cases(random.Random(dynamic), 1 / 16), 16)
    cases = [case for case in (*bench.cases(), *drawn) if "FFT" not in case.name]
    for case in cases:
        args = [a.to("cpu") for a in case.inputs(torch.device("cpu"))]
        found = workloads(traced_joint(case.fn, args, case.backward, device, dynamic))
        assert len(found) == 1 + bool(case.backward), case.name
        for workload in itertools.chain(*found):
            is_described(workload, device)
            assert {w.shape["dynamic"] for w in workload.ours} == {float(dynamic)}, case.name
