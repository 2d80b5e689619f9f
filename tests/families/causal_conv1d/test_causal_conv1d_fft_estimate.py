"""Convolutions by FFT on an imagined H200: what both forms make it do, and which would be less accurate than the FFT."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fft import irfft, rfft
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusebackend.native import loader
from fusebackend.patterns.causal_conv1d import accuracy, bench, operator_work
from fusebackend.patterns.causal_conv1d.match_fft import FftConvolution, FftConvolutionBackward
from fusebackend.rewriting import device_facts
from fusebackend.rewriting.pattern import Match, Reject

PATTERNS = (FftConvolutionBackward(), FftConvolution())


@pytest.fixture(autouse=True)
def h200(library, monkeypatch):
    """The kernels are there, and so is the GPU that they run on."""
    monkeypatch.setattr(type(loader.load()), "why_not", lambda self, device, *operators: None)
    for module in (accuracy, operator_work):
        monkeypatch.setattr(module, "device_facts", lambda device: device_facts.IMAGINED)


def convolution(u, k):
    n = u.shape[-1] + k.shape[-1]
    return irfft(rfft(u, n=n) * rfft(k, n=n), n=n)[..., : u.shape[-1]]


def joint_graph(fn, shapes, backward, device, dynamic):
    """As AOTAutograd traces it, on the CPU, and as if it were on ``device``."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=not dynamic)
    inputs = [mode.from_tensor(torch.empty(s), static_shapes=not dynamic or i > 0) for i, s in enumerate(shapes)]
    for i in backward:
        inputs[i].requires_grad_()
    with mode:
        made = aot_export_joint_simple(lambda *a: (fn(*a),), inputs, trace_joint=bool(backward), decompositions=select_decomp_table())
    for node in made.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            with value.fake_mode:
                node.meta["val"] = value.new_empty_strided(value.shape, value.stride(), device=device)
    return made.graph


def answers(fn, *shapes, backward=(), device="cuda", dynamic=False):
    """What the patterns say, by direction, of all inverse FFTs."""
    graph = joint_graph(fn, shapes, backward, device, dynamic)
    found = {}
    for pattern, node in itertools.product(PATTERNS, graph.nodes):
        if node.op == "call_function" and node.target in pattern.anchors:
            answer = pattern.match(node)
            if answer is not None:
                found.setdefault(pattern.name, []).append(answer)
    return found


def estimates(*args, **how):
    return {name: [PATTERNS[name == "fft_conv1d"].estimate(m) for m in found] for name, found in answers(*args, **how).items()}


def test_the_quantities_of_a_forward():
    batch, channels, length = 8, 768, 2048
    ((both,),) = estimates(convolution, (batch, channels, length), (channels, length)).values()
    (ours,), (theirs,) = both.ours, both.inductor
    assert (ours.kind, theirs.kind) == ("causal_conv1d", "fft convolution")
    x = 4 * batch * channels * length
    assert ours.quantities["bytes"] == 2 * x and ours.quantities["launches"] == 1 and ours.shape["tensor_cores"] == 1
    rows, taps, bins = batch * channels, channels, length + 1
    padded, spectrum = 4 * 2 * length, 8 * bins  # bytes of a row
    assert theirs.quantities == {
        "bytes": (2 * rows + taps) * (padded + spectrum),
        "points": (2 * rows + taps) * 4096 * 12 / 2,
        "complex bytes": (2 * rows + taps) * spectrum,
        "pointwise bytes": (rows + taps) * (4 * length + padded),
        "launches": 2 + 2 + 1 + 1,
    }
    assert theirs.shape["log2 points"] == 12 and theirs.shape["log2 largest factor"] == 1


def test_the_quantities_of_a_backward():
    found = estimates(lambda u, k: 2 * convolution(u, k), (8, 768, 2048), (768, 2048), backward=(0, 1))
    (backward,), (forward,) = found["fft_conv1d_backward"], found["fft_conv1d"]
    assert [w.kind for w in backward.ours] == ["causal_conv1d backward", "causal_conv1d"], "of the filter first: calibrations ask for it"
    of_filter = backward.ours[0]
    assert (of_filter.shape["of x"], of_filter.shape["of weight"]) == (0, 1)
    assert [w.kind for w in backward.inductor] == ["fft convolution backward"]
    # The gradient's transform and two back. The spectra of u and k are the forward's, which the gradients read.
    rows, taps = 8 * 768, 768
    points = backward.inductor[0].quantities["points"]
    assert points == rows * 4096 * 12 / 2 + (rows + taps) * 4096 * 12
    transforms = forward.inductor[0].quantities["points"]
    assert transforms == rows * 4096 * 12 / 2, "its transforms are needed as long as the backward is there: only the inverse one may go"


def test_factors_copies_and_sums_are_counted():
    def heads(u, k):
        return convolution(u, 2 * k.unsqueeze(1))

    ((both,),) = estimates(heads, (2, 16, 3, 1024), (16, 1024)).values()
    assert both.ours[0].quantities["launches"] == 2, "the filter is repeated for each head"
    assert both.ours[0].quantities["pointwise bytes"] == 2 * 4 * 48 * 1024

    def transposed(u, k):
        return convolution(u.transpose(1, 2), k)

    ((both,),) = estimates(transposed, (2, 1024, 16), (16, 1024)).values()
    assert both.ours[0].quantities["copied bytes"] == 2 * 4 * 2 * 16 * 1024


def test_empty_convolutions_are_left():
    ((estimate,),) = estimates(convolution, (0, 8, 64), (8, 64)).values()
    assert estimate.pays is False


@pytest.mark.parametrize(
    "batch, length, taps",
    [(8, 2048, 2048), (32, 768, 768), (2, 512, 512), (8, 4096, 4096), (1, 8192, 8192), (8, 2048, 128), (8, 2048, 24), (8, 500, 40)],
)
def test_what_is_as_accurate_as_the_fft_is_replaced(batch, length, taps):
    ((answer,),) = answers(convolution, (batch, 64, length), (64, taps)).values()
    assert isinstance(answer, Match)


@pytest.mark.parametrize(
    "batch, length, taps",
    [(1, 512, 512), (8, 2048, 100), (8, 16384, 4096), (8, 16384, 16384)],
    ids=["one row, no tensor cores", "few taps, no tensor cores", "rows beyond shared memory", "too long for our FFT"],
)
def test_long_sums_without_tensor_cores_are_left(batch, length, taps):
    ((answer,),) = answers(convolution, (batch, 64, length), (64, taps)).values()
    assert isinstance(answer, Reject) and f"sums of {taps} products, added one by one, have larger errors" in answer.reason


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_the_benchmark_times_is_described(device, dynamic):
    cases = [c for c in bench.cases() if "FFT" in c.name]
    drawn = (c for c in bench.random_cases(random.Random(dynamic), 1 / 16) if "FFT" in c.name)
    for case in [*cases, *itertools.islice(drawn, 6)]:
        shapes = [a.shape for a in case.inputs(torch.device("meta"))]
        found = answers(case.fn, *shapes, backward=case.backward, device=device, dynamic=dynamic)
        matches = [(name, m) for name, made in found.items() for m in made if isinstance(m, Match)]
        left = ("larger errors", "not known of these symbolic lengths")
        assert matches or all(any(why in m.reason for why in left) for made in found.values() for m in made), case.name
        for name, match in matches:
            workload = PATTERNS[name == "fft_conv1d"].estimate(match)
            for work in (*workload.ours, *workload.inductor):
                assert work.kind.endswith(" cpu") == (device == "cpu")
                assert all(math.isfinite(v) and v >= 0 for v in work.quantities.values()), work
                assert all(math.isfinite(v) for v in work.shape.values()), work
