"""What computed sums and rows are estimated by: the work of both forms, with what Inductor has at hand beside them, and what it is left."""

import random

import pytest
import torch
import torch.nn.functional as F
from families.traced_graphs import traced
from gated_images import squeeze_and_excitation

from fusebackend.patterns.computed_sums import bench
from fusebackend.patterns.computed_sums.match import ComputedRows, ComputedSums
from fusebackend.rewriting.pattern import Generated, Match, Workload

pytestmark = pytest.mark.usefixtures("library")

aten = torch.ops.aten
f32, bf16 = torch.float32, torch.bfloat16


def works(function, *inputs):
    graph = traced(function, *inputs)
    (match,) = [m for n in graph.nodes if n.target in ComputedSums.anchors and isinstance(m := ComputedSums().match(n), Match)]
    found = ComputedSums().estimate(match)
    assert isinstance(found, Workload) and isinstance(found.inductor[0], Generated)
    return [(work.kind, work.around) for work in found.ours], found


def test_the_work_of_sums_of_each_image(kernels_for_every_device):
    x, vector = (64, 14, 14, 48, bf16), (48, f32)
    ours, found = works(squeeze_and_excitation, (64, 14, 14, 48, f32), vector, vector, (48, 4, f32), (4, 48, f32))
    assert ours == [("computed sums of images", False)], "what is gated needs the means: Inductor can't compute it along"
    assert found.ours[0].shape["batch"] == 6 and 2 ** found.ours[0].shape["rows"] == pytest.approx(196)
    assert found.ours[0].quantities["read"] == 64 * 196 * 48 * 4 and found.ours[0].quantities["written"] == 64 * 48 * 4
    ours, found = works(lambda x, m, s: (F.silu((x - m) * s).mean((1, 2)), (x * 2).sin()), x, vector, vector)
    assert ours == [("computed sums of images", False), ("stream", True)] and found.neighbour.target is aten.sin.default
    ours, _ = works(lambda x, m, s: (F.silu((x - m) * s).mean((1, 2)), x.amax((1, 2))), x, vector, vector)
    assert ours == [("computed sums of images", False), ("stream", True)], "one pass of Inductor's has both"

    def kept(x, m, s, a, b, w):  # a tensor that Inductor makes for loops that come later
        mean, t = F.silu((x - m) * s).mean((1, 2)), (x - m) * s * a + b
        return t.sigmoid() * t * torch.mm(mean, w)[:, None, None]

    ours, _ = works(kept, x, *[vector] * 4, (48, 48, bf16))
    assert ours == [("computed sums of images", False)]
    ours, _ = works(lambda x, m, s: (F.silu((x - m) * s).mean((0, 1, 2)), x * 2), x, vector, vector)
    assert ours == [("computed sums", False)], "which Inductor divides among kernels"


def test_images_of_few_rows_are_left(kernels_for_every_device):
    graph = traced(lambda x, m, s: F.silu((x - m) * s).mean((1, 2)), (64, 3, 5, 48, bf16), (48, f32), (48, f32))
    (match,) = [m for n in graph.nodes if n.target in ComputedSums.anchors and isinstance(m := ComputedSums().match(n), Match)]
    found = ComputedSums().estimate(match)
    assert found.pays is False and "images of 15 rows" in found.reason


def test_what_inductor_loads_inside_of_its_sum_becomes_a_tensor_first(kernels_for_every_device):
    """Gathered rows, and all that is computed of them, are column_sum's: Inductor takes 82 ms for 50 million rows of two columns."""
    x, i, vector = (640, 48, bf16), (5000, torch.int64), (48, f32)
    gathered = traced(lambda x, i, w: (torch.relu(x[i]) * w).sum(0), x, i, vector)
    assert [ComputedSums().match(n) for n in gathered.nodes if n.target in ComputedSums.anchors] == [None]

    def padded(x, m, s):
        return F.silu((F.pad(x, (0, 0, 3, 0)) - m) * s).sum(0)

    ours, found = works(padded, x, vector, vector)
    assert ours == [("computed sums", False), ("stream", True)] and found.ours[1].quantities["bytes"] == (640 + 643) * 48 * 2
    pad = aten.constant_pad_nd.default
    assert pad in [n.target for n in found.inductor[0].nodes] and found.neighbour.target is pad


def of_rows(function, *inputs):
    graph = traced(function, *inputs)
    graph.eliminate_dead_code()  # which Inductor's decomposition of products leaves
    (match,) = [m for n in graph.nodes if n.target in ComputedRows.anchors and isinstance(m := ComputedRows().match(n), Match)]
    return ComputedRows().estimate(match)


def test_rows_that_inductor_sums_up_are_left(kernels_for_every_device):
    """A layer norm is one kernel of Inductor's: MLP-Mixer was slower in inference where its second half was computed here."""

    def normalised(x, a, b, w):
        return torch.mm(F.layer_norm(x, x.shape[-1:], a, b), w)

    x, vector, w = (640, 48, bf16), (48, bf16), (48, 16, bf16)
    found = of_rows(normalised, x, vector, vector, w)
    assert found.pays is False and "var_mean" in found.reason
    found = of_rows(lambda x, m, a, b, w: torch.mm((x - m) * a + b, w), x, (640, 1, bf16), vector, vector, w)
    assert isinstance(found, Workload), "the means are there already"


def test_what_inductor_has_at_hand_is_read_once_more(kernels_for_every_device):
    def added(x, y, a, b, w):
        z = torch.mm(x, w) + y
        return z, torch.mm(z, w), torch.mm(z * a + b, w)

    x, vector, w = (640, 48, bf16), (48, bf16), (48, 48, bf16)
    found = of_rows(added, x, x, vector, vector, w)
    assert [(work.kind, work.around) for work in found.ours] == [("computed rows", False), ("stream", True)]
    assert found.ours[1].quantities["bytes"] == 640 * 48 * 2
    found = of_rows(lambda x, a, b, w: torch.mm(torch.mm(x, w) * a + b, w), x, vector, vector, w)
    assert [work.kind for work in found.ours] == ["computed rows"], "a library has computed what is read"


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_random_case_is_described(kernels_for_every_device, dynamic):
    cases = bench.random_cases(random.Random(0), 1.0)
    for _ in range(30):
        case = next(cases)
        inputs = case.inputs(torch.device("meta"))
        graph = traced(case.fn, *((*t.shape, t.dtype) for t in inputs), dynamic=dynamic)
        pattern = ComputedRows() if case.name.startswith(("gradient", "result")) else ComputedSums()
        matches = [m for n in graph.nodes if n.target in pattern.anchors and isinstance(m := pattern.match(n), Match)]
        if case.name.startswith("sums none"):
            continue  # of which one is a product with what is centred, and the other a plain sum
        assert matches, case.name
        found = pattern.estimate(matches[0])
        assert isinstance(found, Workload) and isinstance(found.inductor[0], Generated), case.name
        full = sum(t.numel() * t.itemsize for t in inputs if t.shape == inputs[0].shape)
        assert found.ours[0].quantities["read"] == full, case.name
