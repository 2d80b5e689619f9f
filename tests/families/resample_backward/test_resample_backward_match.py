"""Gradients of interpolations: which are found, in which spellings and orders, what they give, and what is left with a reason."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from families.traced_graphs import traced

import fusebackend
from fusebackend.fuzz.imagined_gpu import imagined_gpu
from fusebackend.native import loader
from fusebackend.patterns.resample_backward.match import ResampleBackward
from fusebackend.rewriting.pattern import Match

aten = torch.ops.aten
f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
PATTERN = ResampleBackward()
OPTIONS = {"fuse.patterns": PATTERN.name, "fuse.strict": True, "fuse.gate": "off", "fuse.interpret": True}

MODES = [
    ("linear", (2, 3, 9), "2 terms"),
    ("nearest", (2, 3, 5, 7), "1 by 1 terms"),
    ("nearest-exact", (2, 3, 5, 7), "1 by 1 terms"),
    ("bilinear", (2, 3, 5, 7), "2 by 2 terms"),
    ("bicubic", (2, 3, 5, 7), "4 by 4 terms"),
    ("trilinear", (2, 3, 3, 4, 5), "2 by 2 by 2 terms"),
    ("nearest", (2, 3, 3, 4, 5), "1 by 1 by 1 terms"),
]


def interpolation(mode, **size):
    corners = None if mode.startswith("nearest") else size.pop("align_corners", False)
    return lambda x: F.interpolate(x, mode=mode, align_corners=corners, **size)


def gradient_of(fn, x, dynamic=False):
    """The compiled gradient, checked against float64 and eager's error, and the report."""
    torch._dynamo.reset()
    x = x.detach().requires_grad_()
    out = fn(x)
    grad = torch.randn_like(out)
    (eager,) = torch.autograd.grad(out, x, grad)
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(fn(wide), wide, grad.double())
    with imagined_gpu():
        (found,) = torch.autograd.grad(torch.compile(fn, backend="fuse", options=OPTIONS, dynamic=dynamic)(x), x, grad)
    error, eagers = (float((g.double() - exact).norm() / exact.norm().clamp_min(1e-30)) for g in (found, eager))
    # Eager's weights are those of its own formulas, so in fp32 the errors are alike, not ordered.
    assert found.dtype == x.dtype and error <= max(1.2 * eagers, 8 * torch.finfo(x.dtype).eps)
    return fusebackend.last_report()


def only(report):
    assert report.counts() == {PATTERN.name: 1}, str(report)
    (made,) = report.substitutions
    return made


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
@pytest.mark.parametrize(("mode", "shape", "note"), MODES)
def test_every_mode_to_larger_and_smaller_sizes(mode, shape, note, dtype):
    for factor in (2, 1.7, 0.6):
        made = only(gradient_of(interpolation(mode, scale_factor=factor), torch.randn(shape).to(dtype)))
        assert made.note == note


@pytest.mark.parametrize(("mode", "shape", "note"), MODES)
def test_dynamic_sizes(mode, shape, note):
    assert only(gradient_of(interpolation(mode, scale_factor=2.0), torch.randn(shape), dynamic=True)).note == note


def test_aligned_corners_sizes_and_one_pixel():
    x = torch.randn(2, 3, 5, 7)
    only(gradient_of(interpolation("bilinear", size=(11, 9), align_corners=True), x))
    only(gradient_of(interpolation("bilinear", size=(5, 14)), x))
    only(gradient_of(interpolation("bicubic", size=(1, 9)), x))


def test_a_gradient_that_is_expanded_keeps_the_graphs_order():
    torch._dynamo.reset()
    x = torch.randn(2, 3, 5, 7, requires_grad=True)
    with imagined_gpu():
        torch.compile(lambda x: interpolation("bilinear", scale_factor=2)(x.sin()).sum(), backend="fuse", options=OPTIONS)(x).backward()
    assert "aten.clone.default" not in only(fusebackend.last_report()).replacement


def test_casts_are_absorbed_and_no_tensor_of_fp32_is_left():
    made = only(gradient_of(lambda x: F.interpolate(x.sin(), scale_factor=2, mode="bilinear"), torch.randn(2, 3, 5, 7, dtype=bf16)))
    assert not any("convert" in str(op) for op in made.replacement)


def test_channels_last():
    x = torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last)
    for mode in ("bilinear", "nearest"):
        made = only(gradient_of(interpolation(mode, scale_factor=2), x))
        assert "clone" in str(made.replacement)  # in the graph the result is contiguous
    assert "clone" not in str(only(gradient_of(interpolation("bilinear", scale_factor=2), torch.randn(2, 8, 5, 7))).replacement)


def test_a_sum_with_other_gradients():
    fn = interpolation("bilinear", scale_factor=2)
    only(gradient_of(lambda x: torch.cat([fn(x).flatten(), x.sin().flatten()]), torch.randn(2, 3, 5, 7)))
    report = gradient_of(lambda x: fn(x) + F.interpolate(x, size=(10, 14), mode="nearest"), torch.randn(2, 3, 5, 7))
    assert report.counts()[PATTERN.name] >= 1


def test_indexing_by_a_grid():
    x = torch.randn(2, 5, 7, 3)
    i, j = torch.arange(8)[:, None] % 5, torch.arange(9) * 3 % 7 - 7
    only(gradient_of(lambda x: x[:, i, j], x))
    only(gradient_of(lambda x: x.sin()[:, i.int(), j.int()] * 2, x.to(f16)))


def match_of(fn, *args):
    graph = traced(fn, *args, device="cuda")
    (node,) = graph.find_nodes(op="call_function", target=aten.index_put.default)
    with mock.patch.object(loader.Native, "why_not", lambda *_: None):
        return PATTERN.match(node)


def test_only_grids():
    def fn(values, i, j):
        return values.new_zeros(4, 6).index_put((i, j), values, accumulate=True)

    rows, columns, values = torch.arange(3)[:, None], torch.arange(4), torch.randn(3, 4)
    assert isinstance(match_of(fn, values, rows, columns), Match)
    assert "the indices are no grid" in match_of(fn, values, rows, torch.arange(12).view(3, 4) % 6).reason
    assert "the indices are no grid" in match_of(fn, values, columns, rows).reason
    assert match_of(fn, values[0], columns, columns) is None


def test_what_is_left():
    i, j, values = torch.arange(3)[:, None], torch.arange(4), torch.randn(2, 3, 4)

    def onto(x, i, j, values):
        return x.index_put((torch.arange(2)[:, None, None], i, j), values, accumulate=True)

    def without_accumulating(i, j, values):
        return values.new_zeros(4, 6).index_put((i, j), values, accumulate=False)

    def broadcast(i, j, values):
        return aten.index_put(values.new_zeros(2, 4, 6), [None, i, j], values, True)

    assert match_of(onto, torch.randn(2, 4, 6), i, j, values).reason == "the sum is onto what is not zero"
    assert match_of(without_accumulating, i, j, values[0]) is None
    assert match_of(broadcast, i, j, values[:1]).reason == "the values are broadcast"


def test_there_is_no_kernel_for_cpus():
    def fn(i, j, values):
        return values.new_zeros(4, 6).index_put((i, j), values, accumulate=True)

    graph = traced(fn, torch.arange(3)[:, None], torch.arange(4), torch.randn(3, 4), device="cpu")
    (node,) = graph.find_nodes(op="call_function", target=aten.index_put.default)
    assert PATTERN.match(node).code == "no_kernel"
