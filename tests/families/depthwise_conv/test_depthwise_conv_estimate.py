"""What both ways make a device do: quantities of a few convolutions, and that whatever the benchmark draws is described."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from families.traced_graphs import estimates, traced_joint
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, SavedForBackwardsAOTOutput
from torch._inductor.graph import GraphLowering

from fusebackend.native import loader
from fusebackend.patterns.depthwise_conv import bench, estimate
from fusebackend.patterns.depthwise_conv.match import DepthwiseConv, DepthwiseConvBackward
from fusebackend.patterns.depthwise_conv.work import kernel_work
from fusebackend.profitability import calibration
from fusebackend.rewriting import device_facts
from fusebackend.rewriting.pattern import Match, Workload

PATTERNS = (DepthwiseConv(), DepthwiseConvBackward())


@pytest.fixture(autouse=True)
def h200(library, monkeypatch):
    """The kernels are there, and so is the GPU that they run on."""
    monkeypatch.setattr(type(loader.load()), "why_not", lambda self, device, *operators: None)
    monkeypatch.setattr(estimate, "device_facts", lambda device: device_facts.IMAGINED)
    monkeypatch.setattr(GraphLowering, "decide_layout_opt", lambda module, *, is_inference: False)


def workloads(fn, args, backward=(), device="cuda", dynamic=False):
    """Of each match, what its pattern says, in the order of the graph of ``fn`` and its backward, as if on ``device``."""
    return estimates(traced_joint(fn, args, backward, device, dynamic), PATTERNS)


def plain(x, w, *b):
    return F.conv2d(x, w, *b, padding=3, groups=x.shape[1])


def inputs(shape=(8, 32, 56, 56), taps=7, dtype=torch.bfloat16, channels_last=False):
    x = torch.empty(shape, dtype=dtype)
    return (x.to(memory_format=torch.channels_last) if channels_last else x), torch.empty(shape[1], 1, taps, taps, dtype=dtype)


def test_the_quantities_of_a_forward():
    (both,) = workloads(plain, inputs())
    (ours,), (theirs,) = both.ours, both.inductor
    elements = 8 * 32 * 56 * 56
    assert (ours.kind, theirs.kind) == ("depthwise_conv", "depthwise conv2d")
    assert theirs.quantities == {
        "bytes": 4 * elements,
        "results": elements,
        "products": 49 * elements,
        "launches": 1,
        "reordered bytes": 0,
    }
    assert ours.quantities["bytes"] == 4 * elements and ours.quantities["launches"] == 1 and ours.shape["band"] == 1
    assert ours.quantities["loaded bytes"] > 2 * elements and ours.quantities["products (band)"] > 49 * elements


BF16, FP32 = torch.bfloat16, torch.float32
# What is convolved, and with which kernels: forward, x's gradient, the weight's.
ROUTES = {
    "planes": (dict(), ("band", "band", "rows")),
    "planes 3x3": (dict(taps=3), ("band", "band", "rows")),
    "planes 14x14": (dict(shape=(8, 32, 14, 14)), ("band", "band", "rows")),
    "planes of an odd width": (dict(shape=(8, 32, 57, 57)), ("band", "band", "rows")),
    "planes 9x9": (dict(taps=9), ("toeplitz", "toeplitz", "outer")),
    "channels last": (dict(channels_last=True), ("channel", "channel", "channel")),
    "channels last 5x5": (dict(channels_last=True, taps=5), ("channel", "channel", "channel")),
    "channels last of odd channels": (dict(shape=(8, 33, 56, 56), channels_last=True), ("rolling", "rolling", "rolling")),
    "channels last 3x3": (dict(channels_last=True, taps=3), ("rolling", "rolling", "rolling")),
    "channels last 3x3 of odd channels": (dict(shape=(8, 33, 56, 56), channels_last=True, taps=3), ("toeplitz", "toeplitz", "outer")),
    "channels last 9x9": (dict(channels_last=True, taps=9), ("toeplitz", "toeplitz", "outer")),
    "fp32 planes": (dict(dtype=FP32), ("rolling", "rolling", "rolling")),
    "fp32 planes of an odd width": (dict(shape=(8, 32, 57, 57), dtype=FP32), ("window", "window", "window")),
    "fp32 channels last": (dict(dtype=FP32, channels_last=True), ("rolling", "rolling", "rolling")),
    "fp32 9x9": (dict(dtype=FP32, taps=9), ("direct", "direct", "direct")),
}


@pytest.mark.parametrize("form", ROUTES)
def test_the_kernel_follows_from_the_form(form):
    what, routes = ROUTES[form]
    args = inputs(**what)
    forward, backward = workloads(lambda x, w: F.conv2d(x, w, padding=w.shape[2] // 2, groups=x.shape[1]), args, (0, 1))
    works = (*forward.ours, *backward.ours)
    assert tuple(next(q for q in w.quantities if q.startswith("products")) for w in works) == tuple(f"products ({r})" for r in routes)
    transposed = args[0].dtype == BF16 and not args[0].is_contiguous() and "toeplitz" in routes and args[0].shape[1] % 8 == 0
    assert all(work.shape["transposes"] == transposed for work in works)


def dilated_facts(direction="forward", shape=(16, 512, 1, 4096), taps=3, dilation=8, left=16, dtype=BF16, orders=(False,) * 3, **more):
    """What C++ says of a convolution by one row of taps, as wide as its result."""
    n, c, h, w = shape
    numbers = {"stride": (1, 1), "height": h, "top": 0, "rows": 1, "outputs": c} | more
    sizes = [n, c, numbers["outputs"], h, w, numbers["height"], w]
    return kernel_work(
        direction, sizes, (numbers["rows"], taps), numbers["stride"], (numbers["top"], left), (1, dilation), orders, dtype, 132
    )


@pytest.mark.parametrize("direction", ["forward", "input", "weight"])
def test_which_rows_of_taps_are_dilated_rows(direction):
    for dtype, width, taps, dilation, left in itertools.product((BF16, torch.float16, FP32), (4096, 4095), (2, 8), (2, 300), (-3, 5000)):
        facts = dilated_facts(direction, (2, 3, 5, width), taps, dilation, left, dtype)
        # Many windows that would have to be shifted are left to tensor cores, which take what they reach.
        shifted = direction != "weight" and dtype != FP32 and taps == 8 and dilation == 2
        assert facts["dilated" if not shifted else "toeplitz"] == 1 and facts["dilated"] + facts["toeplitz"] + facts["window"] == 1
    others = dict(dilation=1), dict(taps=1), dict(taps=9), dict(stride=(1, 2)), dict(outputs=1024), dict(orders=(True,) * 3)
    for other in (*others, dict(shape=(2, 3, 5, 64), top=1, height=7), dict(shape=(2, 3, 9, 64), rows=3, top=1)):
        assert dilated_facts(direction, **other)["dilated"] == 0, other


def test_which_gradients_of_dilated_rows_are_one_kernel():
    for dtype, width, taps, dilation, left in itertools.product((BF16, torch.float16, FP32), (4096, 4095), (2, 8), (2, 300), (-3, 8, 5000)):
        facts = dilated_facts("gradients", (2, 3, 5, width), taps, dilation, left, dtype)
        # Where there is more padding than the taps reach, no tap's windows have the incoming gradient's first columns, for the bias's.
        apart = left > dilation * (taps - 1)
        assert not any(facts.values()) if apart else facts["dilated"] == 1
    others = dict(dilation=1), dict(taps=1), dict(taps=9), dict(stride=(1, 2)), dict(outputs=1024), dict(orders=(True,) * 3)
    for other in (*others, dict(orders=(False, False, True)), dict(orders=(False, True, False)), dict(shape=(2, 3, 9, 64), rows=3, top=1)):
        assert not any(dilated_facts("gradients", **other).values()), other


def test_both_gradients_of_dilated_rows_move_three_tensors():
    args = torch.empty(16, 512, 4096, dtype=BF16), torch.empty(512, 1, 3, dtype=BF16)

    def centred(x, w):
        return F.conv1d(x, w, padding=8, dilation=8, groups=512)

    (_, together), (_, of_x), (_, of_weight) = (workloads(centred, args, wanted) for wanted in ((0, 1), (0,), (1,)))
    (one,), tensor = together.ours, 2 * 16 * 512 * 4096
    assert one.kind == "depthwise_conv of weight" and one.quantities["bytes"] == 3 * tensor and one.quantities["launches"] == 2
    apart = (*of_x.ours, *of_weight.ours)
    assert [work.quantities["bytes"] for work in apart] == [2 * tensor, 2 * tensor]
    assert one.quantities["products (rolling)"] == sum(work.quantities["products (rolling)"] for work in apart)
    known = calibration.for_device("cuda", "NVIDIA H200")
    assert 0.6 < known.time([one]).expected / sum(known.time([work]).expected for work in apart) < 0.9


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_calibrations_that_are_older_than_dilated_rows_estimate_them(dtype):
    args = torch.empty(16, 512, 4096, dtype=dtype), torch.empty(512, 1, 3, dtype=dtype)
    forward, backward = workloads(lambda x, w: F.conv1d(x, w, padding=16, dilation=8, groups=512)[..., :-16], args, (0, 1))
    known = calibration.for_device("cuda", "NVIDIA H200")
    for work in (*forward.ours, *backward.ours):
        if work.kind.startswith("depthwise_conv"):
            assert work.shape["dilated"] == work.shape["rolling"] == 1 and work.quantities["products (rolling)"] > 0
            # Not below what the memory takes, nor far above.
            assert 1 < known.time([work]).expected / known.memory_us(work.quantities["bytes"]) < 4


def test_dilated_rows_load_what_they_need_once():
    elements = 16 * 512 * 4096
    for direction, tensors in (("forward", 1), ("input", 1), ("weight", 2)):
        facts = dilated_facts(direction)
        assert facts["loaded"] == tensors * elements and facts["products"] == 3 * elements
        # Each thread has two vectors; no multiprocessor is without blocks.
        assert 132 <= facts["blocks"] <= elements / 8 / 256 / 2
    assert dilated_facts()["blocks"] == elements / 8 / 256 / 2
    # One where four windows may begin anywhere, or there are more taps.
    assert dilated_facts(dilation=9)["blocks"] == elements / 8 / 256 / 2
    for more in (dict(taps=4, dilation=9), dict(taps=5), dict(taps=8)):
        assert dilated_facts(**more)["blocks"] == elements / 8 / 256, more
    both = dilated_facts("gradients")
    assert both["loaded"] == 2 * elements and both["products"] == 6 * elements and both["blocks"] == 512
    assert both["partial_bytes"] == 4 * 4 * both["blocks"]
    assert dilated_facts("weight")["partial_bytes"] == 4 * 4 * dilated_facts("weight")["blocks"]
    assert dilated_facts("weight", (1, 1, 1, 100000))["blocks"] > 10  # one channel is split


def test_threads_have_eight_columns_of_large_fp32_planes():
    def loaded(batch, taps=7, width=56, direction="forward"):
        numbers = (taps, taps), (1, 1), (taps // 2, taps // 2), (1, 1), (False,) * 3
        return kernel_work(direction, [batch, 96, 96, 56, width, 56, width], *numbers, FP32, 132)["loaded"] / (batch * 96)

    # Of a row of x sixteen columns for eight results, instead of twelve for four; a thread walks down all rows.
    for direction in ("forward", "input"):
        assert loaded(64, direction=direction) == 7 * (56 + 6) * 16
    assert loaded(64, direction="weight") == 14 * ((56 + 6) * 12 + 56 * 4)
    # There are fewer strips for more threads, and only of many taps there is enough to multiply.
    assert loaded(4) == 14 * 8 * (7 + 6) * 12
    assert loaded(64, taps=5) % (14 * 12) == 0 and loaded(64, taps=3) % (14 * 12) == 0


@pytest.mark.parametrize("taps", [3, 5, 7])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_strided_channels_last_rolls(taps, dtype):
    args = inputs((64, 32, 56, 56), taps, dtype, channels_last=True)
    forward, backward = workloads(lambda x, w: F.conv2d(x, w, stride=2, padding=taps // 2, groups=32), args, (0, 1))
    works = (*forward.ours, *backward.ours)
    assert len(works) == 3
    # Each product of a result and a tap once, and those of the strips' edges.
    shares = [work.quantities["products (rolling)"] / (taps**2 * 64 * 32 * 28 * 28) for work in works]
    assert all(1 <= share < 2 for share in shares), shares


def test_the_bias_is_a_kernel_of_inductors_unless_the_next_one_adds_it():
    args = (*inputs(), torch.empty(32, dtype=torch.bfloat16))
    (alone,), (fused,) = workloads(plain, args), workloads(lambda *a: torch.sin(plain(*a)), args)
    assert [w.kind for w in alone.inductor] == ["depthwise conv2d", "stream"] and [w.kind for w in fused.inductor] == ["depthwise conv2d"]
    assert alone.inductor[1].quantities == {"bytes": 4 * 8 * 32 * 56 * 56}


def test_an_epilogue_is_a_kernel_of_inductors_unless_the_next_one_computes_it():
    def normed(x, w, v, *after):
        y = F.silu(F.batch_norm(plain(x, w), v, v, v, v))
        return after[0](y) if after else y

    args = (*inputs(), torch.empty(32))
    for device in ("cuda", "cpu"):
        (alone,) = workloads(normed, args, device=device)
        (fused,) = workloads(lambda *a: normed(*a, torch.sin), args, device=device)
        (last, *following), (before,) = alone.inductor, fused.inductor
        assert [w.quantities for w in following] == [{"bytes": 4 * 8 * 32 * 56 * 56}] and following[0].kind.startswith("stream")
        # What is convolved is the same, by the library and by us.
        (convolved,) = workloads(plain, inputs(), device=device)
        assert last == before == convolved.inductor[0] and alone.ours == fused.ours == convolved.ours


def test_what_a_pooling_stores_of_an_epilogue_is_written_once_less():
    """Squeeze-and-excitation: Inductor's pooling computes the epilogue and stores its result for the product; behind ours it only reads."""

    def squeezed(x, w, v, *, affine=True):
        y = F.silu(F.batch_norm(plain(x, w), v, v, *((v, v) if affine else ())))
        return y * torch.sigmoid(y.mean((2, 3), keepdim=True))

    args, elements = (*inputs(), torch.empty(32)), 8 * 32 * 56 * 56
    (both,) = workloads(squeezed, args)
    assert [w.quantities["bytes"] for w in both.ours[1:]] == [2 * elements]
    assert [w.quantities["bytes"] for w in both.inductor[1:]] == [4 * elements]
    # What reads few tensors is computed twice instead, and what nothing else reads is not stored.
    (few,) = workloads(lambda *a: squeezed(*a, affine=False), args)
    (alone,) = workloads(lambda x, w, v: F.silu(F.batch_norm(plain(x, w), v, v, v, v)).mean((2, 3)), args)
    assert len(few.ours) == len(few.inductor) == len(alone.ours) == len(alone.inductor) == 1


def test_the_quantities_of_a_backward():
    _, both = workloads(plain, inputs(), (0, 1))
    of_x, of_weight = both.ours
    (theirs,) = both.inductor
    elements = 8 * 32 * 56 * 56
    assert [w.kind for w in both.ours] == ["depthwise_conv of x", "depthwise_conv of weight"]
    assert theirs.quantities["launches"] == 2 and theirs.quantities["products of x"] == 49 * elements
    assert of_weight.quantities["launches"] == 2 and of_weight.quantities["partial bytes"] > 0 and of_weight.shape["rows"] == 1


def test_one_gradient_alone():
    _, of_x = workloads(plain, inputs(), (0,))
    _, of_weight = workloads(plain, inputs(), (1,))
    assert [w.kind for w in of_x.ours] == ["depthwise_conv of x"] and of_x.inductor[0].quantities["products of weight"] == 0
    assert [w.kind for w in of_weight.ours] == ["depthwise_conv of weight"] and of_weight.inductor[0].quantities["products of x"] == 0


def optimised(monkeypatch, *answers):
    """Inductor decides so of the layout of graphs, for training and for inference."""
    monkeypatch.setattr(GraphLowering, "decide_layout_opt", lambda module, *, is_inference: answers[is_inference])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_where_inductor_chooses_another_memory_order_it_copies_what_is_given(device, monkeypatch):
    optimised(monkeypatch, True, True)
    (both,) = workloads(plain, inputs(), device=device)
    (ours,), (theirs,) = both.ours, both.inductor
    elements = 8 * 32 * 56 * 56
    assert theirs.shape["channels last"] == theirs.shape["result channels last"] == 1
    assert theirs.quantities["reordered bytes"] == 8 * elements and theirs.quantities["launches"] == 3
    assert ours.shape["channels last"] == ours.shape["result channels last"] == 0
    assert "channels last" in both.untimed
    (both,) = workloads(plain, inputs(channels_last=True), device=device)
    assert both.inductor[0].quantities["reordered bytes"] == 0 and not both.untimed


@pytest.mark.parametrize("followed", [False, True])
def test_before_another_convolution_ours_gets_its_order(followed, monkeypatch):
    def block(x, w, v):
        y = torch.sin(F.conv2d(torch.cos(F.conv2d(x, v)), w, padding=3, groups=32))
        return F.conv2d(y, v) if followed else y

    args = (*inputs(), torch.empty(32, 32, 1, 1, dtype=torch.bfloat16))
    optimised(monkeypatch, True, True)
    graph = traced_joint(block, args)
    (both,) = [found for found in block_estimates(graph) if isinstance(found, Workload)]
    assert both.inductor[0].quantities["reordered bytes"] == 0 and both.inductor[0].quantities["launches"] == 1
    assert both.ours[0].shape["channels last"] == both.ours[0].shape["result channels last"] == followed
    # Where both forms have that order, both can be timed in it.
    assert bool(both.untimed) is not followed and list(both.orders.values()) == [(0, 2, 3, 1)] * followed


def block_estimates(graph):
    """As ``estimates``, where some convolutions are not depthwise."""
    for node in graph.nodes:
        if node.target in PATTERNS[0].anchors and isinstance(match := PATTERNS[0].match(node), Match):
            yield PATTERNS[0].estimate(match)


def test_where_inductor_does_not_say_in_which_order_nothing_is_estimated(monkeypatch):
    optimised(monkeypatch, False, True)  # whether the graph is of a training is not known here
    (found,) = workloads(plain, inputs())
    assert found.pays is False and found.code == "unmeasured" and "memory order" in found.reason


def test_the_order_of_a_training_is_that_of_a_training(monkeypatch):
    """As of EfficientViT, whose grouped convolutions Inductor lays out anew in inference alone."""
    optimised(monkeypatch, False, True)
    graph = traced_joint(plain, inputs())
    graph.output_node().meta["desc"] = [PlainAOTOutput(0)]
    (both,) = estimates(graph, PATTERNS)
    assert both.inductor[0].shape["channels last"] == 1 and both.inductor[0].quantities["reordered bytes"] > 0
    graph = traced_joint(plain, inputs())
    graph.output_node().meta["desc"] = [PlainAOTOutput(0), SavedForBackwardsAOTOutput(0)]
    (both,) = estimates(graph, PATTERNS)
    assert both.inductor[0].shape["channels last"] == 0
    (found,) = workloads(plain, inputs(channels_last=True))
    assert isinstance(found, Workload)


def test_the_cpus_kernel_follows_from_order_and_channels():
    routes = {}
    cases = {"channels": inputs(channels_last=True), "planes": inputs(), "few channels": inputs((8, 3, 56, 56), channels_last=True)}
    for name, args in cases.items():
        forward, backward = workloads(plain, args, (0, 1), device="cpu")
        routes[name] = [next(q for q in work.quantities if q.startswith("products")) for work in (*forward.ours, *backward.ours)]
    assert routes == {
        "channels": ["products (channels)"] * 3,
        "planes": ["products (planes)"] * 3,
        "few channels": ["products (loops)"] * 3,
    }


def test_an_empty_convolution_is_left():
    (estimated,) = workloads(plain, inputs((0, 8, 9, 9)))
    assert estimated.pays is False


def is_described(workload, device):
    assert isinstance(workload, Workload), workload
    for work in (*workload.ours, *workload.inductor):
        assert work.kind.endswith(" cpu") == (device == "cpu")
        assert all(math.isfinite(v) and v >= 0 for v in work.quantities.values()), work
        assert all(math.isfinite(v) for v in work.shape.values()), work


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_the_benchmark_times_is_described(device, dynamic):
    cases = [*bench.cases(), *itertools.islice(bench.random_cases(random.Random(dynamic), 1 / 16), 12)]
    for case in cases:
        args = [a.to("cpu") for a in case.inputs(torch.device("cpu"))]
        found = workloads(case.fn, args, case.backward, device, dynamic)
        assert len(found) == 1 + bool(case.backward), case.name
        for workload in found:
            is_described(workload, device)
