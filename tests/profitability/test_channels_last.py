"""The order in which convolutions run where Inductor's rule is against channels last: what is timed, what follows, and who says no."""

import dataclasses
import json

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode

import fusebackend
from fusebackend import cache_keys
from fusebackend.options import Options
from fusebackend.profitability import calibration, channels_last
from fusebackend.profitability.budget import Budget
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.measurements import Measurements
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting import convolution_layout

aten = torch.ops.aten
CPU = torch.device("cpu")


class Grouped(nn.Module):
    """Inductor's rule is against channels last in training: one convolution is grouped. Another one is depthwise."""

    def __init__(self, norm=None):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = norm or nn.Identity()
        self.grouped = nn.Conv2d(64, 128, 3, stride=2, groups=4, bias=False)
        self.depthwise = nn.Conv2d(128, 128, 3, groups=128)

    def forward(self, x):
        return self.depthwise(self.grouped(self.norm(self.first(x)).relu()))


def forward_graph(model, x):
    """The forward graph of a training step, as Inductor is given it."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return torch._functorch.aot_autograd.make_boxed_func(gm.forward)

    backend = torch._dynamo.backends.common.aot_autograd(
        fw_compiler=keep, decompositions=select_decomp_table(), partition_fn=min_cut_rematerialization_partition
    )
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x)
    return graphs[0].graph


def convolutions_of(graph):
    return [n for n in graph.nodes if n.target is aten.convolution.default and n.args[-1] != 128]


def calls_of(model, x):
    return channels_last.calls_of(convolutions_of(forward_graph(model, x)))


def passes():
    (path,) = (calibration.FOLDER / "channels_last").glob("*.json")
    return json.loads(path.read_text())["passes"]


def test_convolutions_and_their_gradients_are_called():
    counts = calls_of(Grouped(), torch.randn(2, 3, 12, 12)).counts
    forwards = {c.x[1]: c for c in counts if not c.gradients}
    gradients = {c.x[1]: c.gradients for c in counts if c.gradients}
    assert set(counts.values()) == {1} and set(forwards) == {3, 64}
    assert forwards[3].has_bias and not forwards[64].has_bias
    assert forwards[64].weight == (128, 16, 3, 3) and forwards[64].result == (2, 128, 5, 5) and forwards[64].geometry[-1] == 4
    assert gradients == {3: (False, True), 64: (True, True)}  # an image has none


def test_equal_convolutions_are_counted():
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))
    calls = calls_of(model, torch.randn(2, 8, 6, 6))
    assert sorted((c.gradients, n) for c, n in calls.counts.items()) == [((), 3), ((True, True), 3)]


def test_nothing_is_kept_for_a_backward_in_inference():
    with torch.no_grad():
        counts = calls_of(Grouped().eval(), torch.randn(2, 3, 12, 12)).counts
    assert not any(c.gradients for c in counts)


def test_a_cast_weight_is_kept_as_the_parameter_or_as_it_is():
    with torch.autocast("cpu", torch.bfloat16):
        counts = calls_of(Grouped(), torch.randn(2, 3, 12, 12)).counts
    assert {c.dtype for c in counts} == {torch.bfloat16}
    assert {c.x[1]: c.gradients for c in counts if c.gradients} == {3: (False, True), 64: (True, True)}


@pytest.mark.parametrize(
    "norm, kind",
    [
        (None, None),
        (nn.BatchNorm2d(64), "channel"),
        (nn.InstanceNorm2d(64), "channel"),
        (nn.GroupNorm(8, 64), "group"),
    ],
)
def test_sums_over_pixels_are_charged(norm, kind):
    calls = calls_of(Grouped(norm), torch.randn(2, 3, 12, 12))
    result = 2 * 64 * 144 * 4
    image, bias_gradient = 2 * (2 * 3 * 144 * 4), passes()["channel"]["forward"] * result
    of_norm = sum(passes()[kind].values()) * result if kind else 0
    assert calls.extra_bytes == pytest.approx(image + bias_gradient + of_norm, abs=1)


def test_the_norm_of_a_pixels_channels_is_not_charged():
    class OfChannels(nn.Module):
        def forward(self, x):
            return nn.functional.layer_norm(x.permute(0, 2, 3, 1), (64,)).permute(0, 3, 1, 2)

    class OfTokens(nn.Module):
        def forward(self, x):
            tokens = nn.functional.layer_norm(x.flatten(2).transpose(1, 2), (64,))
            return tokens.transpose(1, 2).view(x.shape)

    x = torch.randn(2, 3, 12, 12)
    without = calls_of(Grouped(), x).extra_bytes
    assert calls_of(Grouped(OfChannels()), x).extra_bytes == calls_of(Grouped(OfTokens()), x).extra_bytes == without


class Orders(TorchDispatchMode):
    """Notes in which order each call of a library gets its operands."""

    def __init__(self):
        super().__init__()
        self.seen, self.copies = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten.convolution.default, aten.convolution_backward.default):
            tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 4]
            orders = [t.is_contiguous(memory_format=torch.channels_last) for t in tensors if 1 not in t.shape]
            self.seen.append((func, all(orders), any(orders)))
        self.copies += func is aten.clone.default and (kwargs or {}).get("memory_format") is None
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("last", [True, False])
def test_each_form_calls_everything_in_its_order(last):
    calls = calls_of(Grouped(nn.GroupNorm(8, 64)), torch.randn(2, 3, 12, 12))
    tensors = channels_last._Tensors(calls.counts, CPU)
    with Orders() as orders:
        channels_last._form(calls, tensors, channels_last=last)([])
    assert len(orders.seen) == sum(calls.counts.values()) == 4
    assert all((whole, some) == (last, last) for _, whole, some in orders.seen)
    assert orders.copies == (round(calls.extra_bytes / (2 * tensors.largest.nbytes)) if last else 0)


def test_operands_share_buffers_and_are_as_large_as_the_largest():
    calls = calls_of(Grouped(), torch.randn(2, 3, 12, 12))
    tensors = channels_last._Tensors(calls.counts, CPU)
    assert tensors.largest.numel() == 2 * 64 * 144
    for call in calls.counts:
        for role in ("x", "weight", "result"):
            assert tensors.planes(call, role).shape == tensors.channels_last(call, role).shape == getattr(call, role)
            assert tensors.planes(call, role).isfinite().all()


def test_planes_that_are_clearly_faster_are_not_timed_on(monkeypatch):
    taken = iter([16.0, 10.0])
    monkeypatch.setattr(channels_last.timer, "once_ms", lambda form, device: next(taken))
    monkeypatch.setattr(channels_last.timer, "times_ms", lambda *_, **__: pytest.fail("it was timed on"))
    found = channels_last.time_both_orders(calls_of(Grouped(), torch.randn(2, 3, 12, 12)), CPU)
    assert (found.kept, found.replaced_ms, found.inductor_ms) == (False, 16.0, 10.0)


def test_both_orders_are_timed():
    found = channels_last.time_both_orders(calls_of(Grouped(), torch.randn(2, 3, 12, 12)), CPU)
    assert found.replaced_ms > 0 and found.inductor_ms > 0 and found.how == "calls"
    assert found.kept is (found.replaced_ms * channels_last.MARGIN <= found.inductor_ms)


@pytest.fixture
def laid_out(laid_out, monkeypatch):
    """The same, with a CPU in the place of the GPU for which the order is chosen."""
    monkeypatch.setattr(convolution_layout, "_DEVICES", ("cpu",))
    return laid_out


@pytest.fixture
def measured(monkeypatch):
    """What is timed, and what timing finds: channels last takes ``measured.ms``, planes 2 ms."""

    class Measured(list):
        ms = 1.0

    calls = Measured()

    def time_both_orders(of, device):
        calls.append(of)
        return Measurement(calls.ms < 2.0, calls.ms, 2.0, "calls", "convolutions", "a machine")

    monkeypatch.setattr(channels_last, "time_both_orders", time_both_orders)
    return calls


def step(model, x, **options):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fuse", options={f"fuse.{n}": v for n, v in options.items()})
    out = compiled(x)
    out.sum().backward()
    return out


def order_in_report():
    return [v for v in fusebackend.last_report().verdicts if v.pattern == "channels_last"]


@pytest.mark.codegen
@pytest.mark.parametrize("ms, kept", [(1.0, True), (3.0, False)])
def test_the_faster_order_is_taken_and_reported(library, laid_out, measured, own_cache, ms, kept):
    measured.ms = ms
    model, x = Grouped(), torch.randn(2, 3, 12, 12)
    out = step(model, x)
    gradient = model.grouped.weight.grad.clone()
    assert laid_out[0] is kept and len(measured) == 1
    assert measured[0].extra_bytes > 2 * out.nbytes  # it leaves as planes, and so does its gradient come
    (verdict,) = order_in_report()
    assert verdict.why.startswith("measured")
    assert (verdict.applied, verdict.replaced_ms, verdict.inductor_ms) == (kept, ms, 2.0)
    assert verdict.graph == "forward" and verdict.source.function == "forward"
    assert "channels_last" in str(fusebackend.last_report())
    model.zero_grad()
    want = model(x)
    want.sum().backward()
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, model.grouped.weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.codegen
def test_it_is_timed_once(library, laid_out, measured, own_cache):
    model, x = Grouped(), torch.randn(2, 3, 12, 12)
    step(model, x)
    step(model, x)
    assert len(measured) == 1 and [v.why.partition(":")[0] for v in order_in_report()] == ["cached"]


@pytest.mark.codegen
def test_code_from_the_cache_says_it_too(library, laid_out, measured, own_cache):
    model, x = Grouped(), torch.randn(2, 3, 12, 12)
    with inductor_config.patch(force_disable_caches=False):
        step(model, x)
        step(model, x)
    assert fusebackend.last_report().from_cache and laid_out == [True, False]  # a backward has strides of its own
    assert len(measured) == 1 and [(v.applied, v.why) for v in order_in_report()] == [(True, "cached")]


def test_an_explanation_says_what_would_be_timed(library, laid_out, measured, own_cache):
    report = fusebackend.explain(Grouped(), torch.randn(2, 3, 12, 12))
    (verdict,) = [v for v in report.verdicts if v.pattern == "channels_last"]
    assert not measured and not verdict.applied and verdict.why == "not timed: nothing is compiled here"


@pytest.mark.codegen
@pytest.mark.parametrize("options", [{"channels_last": False}, {"gate": "off"}, {"patterns": []}, {"patterns": ["permute"]}, {"fuel": 0}])
def test_who_says_no_gets_inductors_order(library, laid_out, measured, own_cache, options):
    step(Grouped(), torch.randn(2, 3, 12, 12), **options)
    assert laid_out[0] is False and not measured and not order_in_report()


@pytest.mark.codegen
@pytest.mark.parametrize("setting, expected", [({"layout_optimization": False}, False), ({"force_layout_optimization": True}, True)])
def test_what_the_user_told_inductor_stays(library, laid_out, measured, own_cache, setting, expected):
    with inductor_config.patch(setting):
        step(Grouped(), torch.randn(2, 3, 12, 12))
    assert laid_out[0] is expected and not measured


@pytest.mark.codegen
def test_a_model_that_lies_channels_last_has_its_order(library, laid_out, measured, own_cache):
    last = {"memory_format": torch.channels_last}
    step(Grouped().to(**last), torch.randn(2, 3, 12, 12).to(**last))
    assert laid_out[0] is False and not measured and not order_in_report()


@pytest.mark.codegen
def test_what_cannot_be_timed_stays_and_says_why(library, laid_out, monkeypatch, own_cache):
    def refuse(calls, device):
        raise Unfit("there is no memory to call the convolutions in")

    monkeypatch.setattr(channels_last, "time_both_orders", refuse)
    step(Grouped(), torch.randn(2, 3, 12, 12))
    (verdict,) = order_in_report()
    assert laid_out[0] is False and not verdict.applied and "no memory" in verdict.why


class Stage(nn.Module):
    def __init__(self, model, wrap):
        super().__init__()
        self.model, self.wrap = model, wrap

    def forward(self, x):
        return self.wrap(self.model, x)


def with_checkpoint(model, x):
    return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)


def in_a_branch(model, x):
    return torch.cond(x.sum() > 0, lambda x: model(x), lambda x: model(x) + 1, (x,))


@pytest.mark.codegen
@pytest.mark.parametrize("wrap", [with_checkpoint, in_a_branch])
def test_convolutions_that_inductor_decides_on_elsewhere_are_left(library, laid_out, measured, own_cache, wrap):
    with torch.set_grad_enabled(wrap is with_checkpoint):
        torch.compile(Stage(Grouped(), wrap), backend="fuse")(torch.randn(2, 3, 12, 12))
    assert not any(laid_out) and not measured


@pytest.mark.codegen
def test_gradients_in_the_same_graph_are_left(library, laid_out, measured, own_cache):
    model = Grouped()
    parameters = dict(model.named_parameters())

    @torch.compile(backend="fuse")
    def gradients(parameters, x):
        return torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)

    gradients(parameters, torch.randn(2, 3, 12, 12))
    assert not any(laid_out) and not measured


@pytest.mark.codegen
def test_one_input_channel_and_transposed_ones_are_timed(library, laid_out, measured, own_cache):
    model = nn.Sequential(nn.Conv2d(1, 64, 3), nn.Conv2d(64, 64, 3, groups=8), nn.ConvTranspose2d(64, 64, 2, 2, groups=64))
    step(model, torch.randn(2, 1, 12, 12))
    assert {c.x[1] for c in measured[0].counts} == {1, 64} and len([c for c in measured[0].counts if not c.gradients]) == 3


@pytest.mark.codegen
def test_what_control_flow_reads_stays_as_planes(library, laid_out, measured, own_cache):
    """In a forced order Inductor compiles the branches for the strides in the graph, and refuses what they are given."""

    class Branching(Grouped):
        def forward(self, x):
            x = super().forward(x)
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with torch.no_grad():
        torch.compile(Branching(), backend="fuse")(torch.randn(2, 3, 12, 12))
    assert not any(laid_out) and not measured


def test_settings_of_cudnn_are_in_the_keys():
    before = cache_keys._numeric_settings()
    with torch.backends.cudnn.flags(enabled=True, benchmark=not torch.backends.cudnn.benchmark):
        assert cache_keys._numeric_settings() != before
    assert cache_keys._numeric_settings() == before


def test_measurements_of_another_order_have_other_keys(library):
    known = Measurements(Budget(0.0), None, compiled=False, strict=True)
    before = known.measured_with(CPU)
    with inductor_config.patch(force_layout_optimization=True):
        assert known.measured_with(CPU) != before
    assert known.measured_with(CPU) == before


@pytest.mark.codegen
def test_dynamic_sizes_are_timed_as_they_are(library, laid_out, measured, own_cache):
    """Inductor runs no convolutions of dynamic sizes channels last, ungrouped ones neither. One compile serves all batches, as with
    Inductor, for which heights and widths are numbers."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2))
    compiled = torch.compile(model, backend="fuse", dynamic=True)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 3, 12, 14)
        gradients = []
        for fn in (compiled, model):
            model.zero_grad()
            out = fn(x)
            out.square().sum().backward()
            gradients.append([out, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    assert laid_out[0] is True and len(laid_out) == 2 and len(measured) == 1
    forwards = {c.x[1]: c for c in measured[0].counts if not c.gradients}
    assert forwards[64].x == (2, 64, 12, 14) and forwards[64].result == (2, 128, 5, 6)
    passes_of_norm = sum(passes()["channel"].values()) * 2 * 64 * 12 * 14 * 4
    assert measured[0].extra_bytes > passes_of_norm


@pytest.mark.codegen
def test_a_padding_that_is_a_symbol_is_timed_as_it_is(library, laid_out, measured, own_cache):
    torch._dynamo.reset()
    model = nn.Conv2d(64, 128, 3)

    def padded(x):
        return nn.functional.conv2d(x, model.weight, model.bias, padding=x.shape[2] // 4)

    with torch.no_grad():
        for size in (12, 16):
            x = torch.randn(2, 64, size, 12)
            torch.testing.assert_close(torch.compile(padded, backend="fuse", dynamic=True)(x), padded(x), rtol=1e-3, atol=1e-3)
    assert measured and all(type(n) is int for calls in measured for call in calls.counts for n in call.geometry[1])


@pytest.mark.codegen
def test_sizes_that_depend_on_data_are_left(library, laid_out, measured, own_cache):
    torch._dynamo.reset()
    model = nn.Conv2d(64, 128, 3)

    def of_some(x, chosen):
        rows = chosen.nonzero()[:, 0]
        torch._check(rows.shape[0] >= 2)
        return model(x[rows])

    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x, chosen = torch.randn(4, 64, 12, 12), torch.tensor([True, False, True, True])
        torch.testing.assert_close(torch.compile(of_some, backend="fuse")(x, chosen), of_some(x, chosen))
    assert not any(laid_out) and not measured


@pytest.mark.parametrize(
    "patterns, chooses",
    [
        (("all",), True),
        (("-permute",), True),
        (("all", "-permute"), True),
        ((), False),
        (("permute",), False),
        (("-all", "permute"), False),
    ],
)
def test_those_who_name_their_patterns_get_no_other_order(patterns, chooses):
    assert Options(patterns=patterns).chooses_memory_order is chooses
    for told in (True, False):
        assert dataclasses.replace(Options(patterns=patterns), channels_last=told).chooses_memory_order is told


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_order_is_timed_and_results_stay(library, own_cache, dtype):
    model = nn.Sequential(nn.Conv2d(64, 256, 3, padding=1), nn.BatchNorm2d(256), nn.ReLU(), nn.Conv2d(256, 256, 3, groups=8)).cuda()
    x = torch.randn(16, 64, 56, 56, device="cuda")
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        out = step(model, x)
        want = model(x)
    (verdict,) = order_in_report()
    assert verdict.replaced_ms is not None and verdict.why.startswith("measured")
    assert (out.float() - want.float()).norm() <= 0.02 * want.float().norm()


def test_scatters_to_pixels_are_charged_unless_they_are_replaced():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 8, 3, padding=1)

        def forward(self, x):
            return self.up(nn.functional.interpolate(self.down(x), scale_factor=2, mode="bilinear"))

    convolutions = convolutions_of(forward_graph(UNet(), torch.randn(2, 3, 6, 6)))
    charged, spared = (channels_last.calls_of(convolutions, scatters=scatters).extra_bytes for scatters in (True, False))
    result = 2 * 64 * 12 * 12 * 4
    assert charged - spared == pytest.approx(4 * passes()["scatter"]["backward"] * result, abs=1)
    with torch.no_grad():
        inference = [
            channels_last.calls_of(convolutions_of(forward_graph(UNet(), torch.randn(2, 3, 6, 6))), scatters=s) for s in (True, False)
        ]
    assert inference[0] == inference[1]
