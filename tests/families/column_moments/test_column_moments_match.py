"""Variances over outer dims: found in every spelling and memory order that one pass over rows can serve; the rest is refused or left."""

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F
from families.traced_graphs import traced
from torch import nn

import fusebackend
from fusebackend.patterns.column_moments import bench, estimate
from fusebackend.patterns.column_moments.match import ColumnMoments
from fusebackend.rewriting import convolution_layout
from fusebackend.rewriting.device_facts import IMAGINED
from fusebackend.rewriting.pattern import Match, Workload
from fusebackend.testing import assert_pattern

pytestmark = pytest.mark.usefixtures("library")

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ONLY = {"fuse.patterns": "column_moments", "fuse.strict": True}


def check(interpreted, fn, *inputs, count=1, **kwargs):
    """Results have eager's strides and dtypes and, in fp32 and fp64, nearly its values."""
    expected = fn(*inputs)
    result = interpreted(fn, options=ONLY, **kwargs)(*inputs)
    for found, wanted in zip(torch.utils._pytree.tree_leaves(result), torch.utils._pytree.tree_leaves(expected)):
        assert found.dtype == wanted.dtype and found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted, equal_nan=True)
    report = fusebackend.last_report()
    assert len(report.substitutions) == count, report
    return report


SPELLINGS = {
    "var_mean(0)": (lambda x: torch.var_mean(x, 0), (50, 33)),
    "var(0)": (lambda x: x.var(0), (50, 33)),
    "std(0)": (lambda x: x.std(0), (50, 33)),
    "the mean alone is read": (lambda x: torch.var_mean(x, 0)[1], (50, 33)),
    "unbiased": (lambda x: x.var(0, unbiased=False), (50, 33)),
    "correction": (lambda x: torch.var_mean(x, 0, correction=2), (50, 33)),
    "keepdim": (lambda x: torch.var_mean(x, 0, keepdim=True), (50, 33)),
    "several dims": (lambda x: torch.var_mean(x, (0, 1), correction=0), (5, 7, 33)),
    "several dims, keepdim": (lambda x: torch.var_mean(x, (1, 2), keepdim=True), (5, 7, 3, 33)),
    "a dim in the middle": (lambda x: x.var(1), (5, 70, 33)),
    "channels last": (lambda x: torch.var_mean(x.permute(0, 3, 1, 2), (0, 2, 3), correction=0, keepdim=True), (3, 5, 6, 8)),
    "norm": (lambda x: (x - x.mean(0)) * torch.rsqrt(x.var(0, unbiased=False) + 1e-5), (50, 33)),
    "norm that returns its variance": (lambda x: (torch.rsqrt((v := x.var(0, keepdim=True)) + 1e-5) * x, v), (50, 33)),
    "a root that is used twice": (lambda x: (torch.rsqrt(t := x.var(0) + 1e-5), t), (50, 33)),
    "a root of a tensor's sum": (lambda x: torch.rsqrt(x.var(0) + x[0].abs()), (50, 33)),
    "a slice of columns": (lambda x: x[:, 1:30].var(0), (50, 33)),
    "more corrected than there is": (lambda x: x.var(0, correction=9), (4, 33)),
    "empty": (lambda x: x[:0].var(0), (50, 33)),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_spellings(interpreted, device, name, dtype):
    fn, shape = SPELLINGS[name]
    check(interpreted, fn, torch.randn(shape, device=device, dtype=dtype))


@pytest.mark.parametrize("name", ["var_mean(0)", "several dims", "channels last", "keepdim"])
def test_symbolic_sizes_compile_once(interpreted, device, name):
    fn, shape = SPELLINGS[name]
    compiled = interpreted(fn, options=ONLY, dynamic=True)
    for more in (0, 2, 5):
        x = torch.randn([n + more for n in shape], device=device)
        with torch.compiler.set_stance("fail_on_recompile") if more else contextlib.nullcontext():
            torch.testing.assert_close(compiled(x), fn(x))
    assert fusebackend.last_report().counts() == {"column_moments": 1}


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_16_bits_are_read_through_a_cast(interpreted, device, dtype):
    x = torch.randn(500, 40, device=device).to(dtype)
    report = check(interpreted, lambda x: torch.var_mean(x.float(), 0), x)
    assert "f16[500, 40] -> f32[40], f32[40]" in str(report)


LEFT = {
    "over all dims": lambda x: x.var(),
    "the innermost dim": lambda x: x.var(-1),
    "contiguous images": lambda x: x.var((0, 2, 3)),
    "complex": lambda x: x.to(torch.complex64).var(0),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name, interpreted, device):
    check(interpreted, LEFT[name], torch.randn(4, 6, 8, 10, device=device), count=0)


def test_dims_with_gaps_are_refused(interpreted, device):
    report = check(interpreted, lambda x: x[:, :5].var((0, 1)), torch.randn(4, 6, 8, device=device), count=0)
    assert "gaps between" in report.rejections[0].reason


def test_a_training_step_of_batch_norm(device):
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8))
    model = model.to(device, memory_format=torch.channels_last)
    x = torch.randn(2, 8, 10, 9, device=device).to(memory_format=torch.channels_last)
    assert_pattern(model, x, pattern="column_moments", count=2, training=True)


def of_a_convolution(monkeypatch, optimised, fn=lambda x, w: F.conv2d(x, w), weight=(32, 24, 1, 1, bf16)):
    """A variance of what ``fn`` computes, and its match."""
    monkeypatch.setattr(convolution_layout, "is_channels_last_optimised", lambda graph: optimised)
    monkeypatch.setattr(estimate, "device_facts", lambda device: IMAGINED)

    def moments(x, w):
        y = fn(x, w)
        return torch.rsqrt(torch.var_mean(y.float(), (0, 2, 3), correction=0, keepdim=True)[0] + 1e-5), F.conv2d(
            y, w.reshape(1, -1, 1, 1)[:, : y.shape[1]]
        )

    graph = traced(moments, (8, 24, 30, 28, bf16), weight)
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.var_mean.correction)
    return node, ColumnMoments().match(node)


def test_a_convolution_that_inductor_runs_channels_last(monkeypatch, kernels_for_every_device):
    node, match = of_a_convolution(monkeypatch, True)
    assert isinstance(match, Match) and match.site.is_relaid and match.site.order == (0, 2, 3, 1)
    found = ColumnMoments().estimate(match)
    assert isinstance(found, Workload) and found.orders == {match.site.source: (0, 2, 3, 1)}
    (ours,) = found.ours
    assert ours.quantities["read"] == 8 * 30 * 28 * 32 * 2 and ours.quantities["written"] == 32 * 4, "the root alone is used"
    assert ours.quantities["loads"] == ours.quantities["read"] / 16, "rows are read by 16 bytes"
    (inductor,) = found.inductor
    assert inductor.kind == "inductor column moments" and inductor.quantities["read"] == ours.quantities["read"]


def test_what_else_reads_the_results_is_a_kernel_more(monkeypatch, kernels_for_every_device):
    monkeypatch.setattr(estimate, "device_facts", lambda device: IMAGINED)
    graph = traced(lambda x: x.var(0).cos(), (8000, 96, f32))
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.var.correction)
    match = ColumnMoments().match(node)
    assert isinstance(match, Match)
    found = ColumnMoments().estimate(match)
    assert [w.kind for w in found.ours] == ["column_moments", "stream"] and found.neighbour.target is torch.ops.aten.cos.default


@pytest.mark.parametrize(
    ("fn", "found"),
    [(lambda x, w: F.conv2d(x, w, groups=24), False), (lambda x, w: F.conv2d(torch.relu(x), w, groups=24), True)],
    ids=["of an input", "of what is computed"],
)
def test_a_depthwise_one_keeps_the_order_of_what_it_reads(monkeypatch, kernels_for_every_device, fn, found):
    """As soon as our operator takes its place."""
    _, match = of_a_convolution(monkeypatch, True, fn, (24, 1, 3, 3, bf16))
    assert isinstance(match, Match) == found


@pytest.mark.parametrize("optimised", [False, None])
def test_one_that_it_does_not_is_left(monkeypatch, kernels_for_every_device, optimised):
    _, match = of_a_convolution(monkeypatch, optimised)
    assert match is None


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_random_case_is_described(monkeypatch, kernels_for_every_device, dynamic):
    monkeypatch.setattr(estimate, "device_facts", lambda device: IMAGINED)
    cases = bench.random_cases(random.Random(0), 1.0)
    for _ in range(20):
        case = next(cases)
        (x,) = case.inputs(torch.device("meta"))
        graph = traced(case.fn, (*x.shape, x.dtype), dynamic=dynamic)
        (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.var_mean.correction)
        match = ColumnMoments().match(node)
        assert isinstance(match, Match), case.name
        found = ColumnMoments().estimate(match)
        (inductor,) = found.inductor
        for work in (*found.ours, inductor):
            assert all(q >= 0 for q in work.quantities.values()), case.name
        assert found.ours[0].quantities["read"] == x.numel() * x.itemsize == inductor.quantities["read"]
