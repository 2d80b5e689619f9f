"""What is computed element by element and summed over outer dims, or read as a tensor: found in every spelling that one pass over rows can
serve."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from families.traced_graphs import traced
from gated_images import squeeze_and_excitation
from torch import nn
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.torch_version import TorchVersion

import fusebackend
from fusebackend.patterns.computed_sums.match import ComputedRows, ComputedSums
from fusebackend.patterns.computed_sums.ops import computed_rows
from fusebackend.patterns.computed_sums.program import check_types
from fusebackend.rewriting import convolution_layout
from fusebackend.rewriting.pattern import Match, Reject

pytestmark = pytest.mark.usefixtures("library")

aten, prims = torch.ops.aten, torch.ops.prims
f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ONLY = {"fuse.patterns": ["computed_sums", "computed_rows"], "fuse.strict": True}


def check(interpreted, fn, *inputs, sums=0, rows=0, **kwargs):
    """Results have eager's strides and dtypes and, in fp32, nearly its values."""
    expected = fn(*inputs)
    result = interpreted(fn, options=ONLY, **kwargs)(*inputs)
    for found, wanted in zip(torch.utils._pytree.tree_leaves(result), torch.utils._pytree.tree_leaves(expected)):
        assert found.dtype == wanted.dtype and found.stride() == wanted.stride()
        torch.testing.assert_close(
            found, wanted, equal_nan=True, rtol=1e-5 if wanted.dtype is f32 else None, atol=1e-4 if wanted.dtype is f32 else None
        )
    report = fusebackend.last_report()
    assert report.counts() == {name: n for name, n in (("computed_sums", sums), ("computed_rows", rows)) if n}, str(report)
    return report


def norm(dy, x, mean, scale):
    centred = x - mean
    dz = dy * torch.sigmoid(centred * scale)
    dims = tuple(range(x.dim() - 1))
    return dz.sum(dims), (dz * centred).sum(dims)


SUMS = {
    "norm": norm,
    "keepdim": lambda y, x, m, s: torch.relu(x - m).sum((0, 1), keepdim=True),
    "negative dims": lambda y, x, m, s: torch.relu(x * s).sum((-3, -2)),
    "dtype=": lambda y, x, m, s: torch.sigmoid(x * s).sum((0, 1), dtype=f32),
    "where": lambda y, x, m, s: torch.where(x <= m, 0.0, y).sum((0, 1)),
    "threshold_backward": lambda y, x, m, s: aten.threshold_backward(y, x, 0).sum((0, 1)),
    "gelu_backward": lambda y, x, m, s: aten.gelu_backward(y, x * s).sum((0, 1)),
    "tanh gelu": lambda y, x, m, s: F.gelu(x * s, approximate="tanh").sum((0, 1)),
    "hardswish_backward": lambda y, x, m, s: aten.hardswish_backward(y, x).sum((0, 1)),
    "clamp": lambda y, x, m, s: (x.clamp(-1, 1) + y.clamp(min=0) + y.clamp(max=0.5)).sum((0, 1)),
    "alpha": lambda y, x, m, s: (torch.add(x, y, alpha=0.5) - torch.sub(x, s, alpha=2)).abs().sum((0, 1)),
    "rsub": lambda y, x, m, s: (1 - torch.sigmoid(x)).sum((0, 1)),
    "powers": lambda y, x, m, s: (x**2 + (x.abs() + 1) ** 1.5).sum((0, 1)),
    "truth values": lambda y, x, m, s: torch.where((x > 0) & ~(y > 0) | (x == y), x * s, m).sum((0, 1)),
    "a mask as numbers": lambda y, x, m, s: ((x > 0).to(f32) * y + s).sum((0, 1)),
    "of each image": lambda y, x, m, s: (x * torch.sigmoid(y[:, :1]) + 1).sum((0, 1)),
    "of each row": lambda y, x, m, s: ((x - x.mean(-1, keepdim=True)) * y).sum((0, 1)),
    "a scalar tensor": lambda y, x, m, s: (x * m[0] + 1).sum((0, 1)),
    "divided": lambda y, x, m, s: (x / (1 + x.abs()) / 7).sum((0, 1)),
    "a view of rows": lambda y, x, m, s: torch.tanh(x * s).view(-1, x.shape[-1]).sum(0),
    "a mask as it is": lambda y, x, m, s: (x * (y > 0) + s).sum((0, 1)),
    "products and sums of masks": lambda y, x, m, s: torch.where((x > 0) * (y > 0) + (x < -1), x * s, m).sum((0, 1)),
    "masks compared": lambda y, x, m, s: torch.where((x > 0) == (y > 0), x * s, m).sum((0, 1)),
    "masks chosen": lambda y, x, m, s: torch.where(torch.where(x > 0, y > 0, y < -1), x * s, m).sum((0, 1)),
    "numbers as truth values": lambda y, x, m, s: torch.where(torch.logical_not(x.relu()), y, s).sum((0, 1)),
    "roots as powers": lambda y, x, m, s: (x.abs() ** 0.5 + (x.abs() + 1) ** -0.5 + x**3).sum((0, 1)),
    "more kept dims": lambda y, x, m, s: torch.tanh(x + y).view(x.shape[0], -1, 3, x.shape[-1] // 3).sum((0, 1)),
    "each image": lambda y, x, m, s: torch.relu(x * s + m).sum(1),
    "each image, two": lambda y, x, m, s: (torch.relu(x * s + m).sum(1), torch.tanh(y - x).sum(1)),
    "each image, keepdim": lambda y, x, m, s: (y * torch.sigmoid(x - m)).sum(1, keepdim=True),
    "each image, of gates": lambda y, x, m, s: (torch.tanh(x) * y[:, :1] + y[:, 1:2]).sum(1),
    "each image, more kept dims": lambda y, x, m, s: torch.tanh(x + y).view(-1, 2, x.shape[1], 3, x.shape[-1] // 3).sum(2),
    "means": lambda y, x, m, s: torch.tanh(x * s).mean((0, 1)),
    "means of each image": lambda y, x, m, s: F.silu(x * s + m).mean(1),
    "means of each image, keepdim": lambda y, x, m, s: F.silu(x * s + m).mean(1, keepdim=True),
    "squares of each image": lambda y, x, m, s: F.gelu(x * s).square().sum(1).sqrt(),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_spellings_of_sums(interpreted, device, name):
    inputs = (*(torch.randn(4, 70, 33, device=device) for _ in range(2)), *(torch.randn(33, device=device) for _ in range(2)))
    check(interpreted, SUMS[name], *inputs, sums=1)


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_16_bits(interpreted, device, dtype):
    tensors = [torch.randn(4, 70, 32, device=device).to(dtype) for _ in range(2)]
    vectors = [torch.randn(32, device=device) for _ in range(2)]
    report = check(interpreted, lambda y, x, m, s: norm(y.float(), x.float(), m, s), *tensors, *vectors, sums=1)
    assert "f16[4, 70, 32], f32[32] -> f32[32], f32[32]" in str(report), "tensors are read as they are"


def test_casts_round_where_inductor_is_told_to(interpreted, device):
    x = torch.randn(50, 33, device=device)

    def fn(x):
        return (torch.sigmoid(x).to(bf16).float() * x).sum(0)

    with inductor_config.patch(emulate_precision_casts=True):
        graph_alone = interpreted(fn, options={"fuse.patterns": ["permute"]})(x)  # torch 2.11 drops the casts
        torch.testing.assert_close(interpreted(fn, options=ONLY)(x), graph_alone, rtol=1e-6, atol=1e-6)
    assert fusebackend.last_report().counts() == {"computed_sums": 1}


@pytest.mark.parametrize("name", ["norm", "where", "of each image", "a view of rows", "each image, of gates", "means of each image"])
def test_symbolic_sizes_compile_once(interpreted, device, name):
    compiled = interpreted(SUMS[name], options=ONLY, dynamic=True)
    for more in (0, 3, 6):
        sizes = 4 + more, 70 + more, 33 + more
        inputs = [torch.randn(sizes, device=device) for _ in range(2)] + [torch.randn(sizes[-1], device=device) for _ in range(2)]
        with torch.compiler.set_stance("fail_on_recompile") if more else contextlib.nullcontext():
            torch.testing.assert_close(compiled(*inputs), SUMS[name](*inputs), rtol=1e-5, atol=1e-4)
    assert fusebackend.last_report().counts() == {"computed_sums": 1}


@pytest.mark.parametrize("sizes", [(4, 6, 5, 33), (0, 6, 5, 33)])
def test_columns_of_several_dims(interpreted, device, sizes):
    """Of sizes that are symbols, or 0."""

    def two(x, y):
        return torch.tanh(x - y).sum(1), torch.tanh(x + y).sum((0, 1))

    inputs = torch.randn(sizes, device=device), torch.randn(sizes[2:], device=device)
    check(interpreted, two, *inputs, sums=2, dynamic=0 not in sizes)


LEFT = {
    "a tensor that is there": lambda x: x.sum(0),
    "a product alone": lambda x: (x * x.flip(0)).sum(0),
    "the innermost dim": lambda x: torch.tanh(x).sum(-1),
    "one row": lambda x: torch.tanh(x[:1]).sum(0),
    "all": lambda x: torch.tanh(x).sum(),
    "one row of two tensors": lambda x: torch.add(x[:1] * 2, x[1:2]),
    "nothing varies by column": lambda x: torch.mm(torch.tanh(x) + 1, x.t()),
    "integers": lambda x: (x > 0).sum(0),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(interpreted, device, name):
    check(interpreted, LEFT[name], torch.randn(40, 12, device=device))


def reason_of(function, *inputs):
    graph = traced(function, *inputs)
    answers = [ComputedSums().match(n) for n in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)]
    (reject,) = [a for a in answers if isinstance(a, Reject)]
    return reject.reason


def test_refusals_say_why(kernels_for_every_device):
    x = (40, 12, f32)
    assert "float64" in reason_of(lambda x: torch.tanh(x).sum(0), (40, 12, f64))
    assert "i64" in reason_of(lambda x, i: (torch.tanh(x) * i).sum(0), x, (40, 12, torch.int64))
    assert "more than 2147483647 rows" in reason_of(lambda x: torch.tanh(x).sum(0), (2**31, 2, bf16))
    assert "more than 16 tensors" in reason_of(lambda *x: sum(torch.sin(t * (i + 2)) for i, t in enumerate(x)).sum(0), *[x] * 17)
    assert "another order" in reason_of(lambda x, y: torch.tanh(x + y.t()).sum(0), x, (12, 40, f32))
    images, rows = (6, 12, 8, f32), (12, 1, f32)
    assert "f32[12, 1]) varies along some of the dims that are kept" in reason_of(lambda x, y: torch.tanh(x * y).sum(0), images, rows)
    assert "there is no" not in reason_of(lambda x: torch.tanh(x.double()).float().sum(0), x)


@pytest.mark.parametrize("name", SUMS)
def test_programs_have_the_types_that_kernels_want(kernels_for_every_device, name):
    graph = traced(SUMS[name], (4, 70, 33, f32), (4, 70, 33, f32), (33, f32), (33, f32))
    matches = [m for n in graph.nodes if n.target in ComputedSums.anchors and isinstance(m := ComputedSums().match(n), Match)]
    assert matches
    for match in matches:
        found = match.site.expression
        check_types(found.program, [leaf.node.meta["val"].dtype for leaf in found.leaves], len(match.site.sums))


def test_roots_of_minus_infinity_are_none(interpreted, device):
    x = torch.tensor([[-float("inf"), 4.0], [0.0, 1.0]], device=device)
    check(interpreted, lambda x: (x**0.5 + 1).sum(0), x, sums=1)
    check(interpreted, lambda x: (x**-0.5 + 1).sum(0), x, sums=1)


def test_a_view_that_copies_is_not_its_tensor(interpreted, device):
    """Of a transposed tensor a view of other sizes is a copy, whose strides are those of the tensor."""

    def fn(w, x):
        return torch.tanh((w * x.t()).view(2, 18) + x.view(2, 18) * 2).sum(0)

    check(interpreted, fn, *(torch.randn(6, 6, device=device) for _ in range(2)), sums=1)


def test_a_number_on_another_device_is_refused(kernels_for_every_device):
    graph = traced(lambda x, s: (torch.tanh(x) * s).sum(0), (40, 12, f32), torch.empty(()))
    (node,) = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert isinstance(ComputedSums().match(node), Match)
    number = graph.find_nodes(op="placeholder")[1]
    with number.meta["val"].fake_mode:
        number.meta["val"] = torch.empty((), device="meta")
    answer = ComputedSums().match(node)
    assert isinstance(answer, Reject) and "is on meta" in answer.reason


def test_many_sums_of_one_tensor(interpreted, device):
    """More than are looked at together: who belongs to a group is another question after each substitution."""
    x = torch.randn(50, 5, device=device)
    compiled = interpreted(lambda x: [torch.sin(x * (i + 1)).sum(0) for i in range(80)], options=ONLY)
    for found, i in zip(compiled(x), range(80)):
        torch.testing.assert_close(found, torch.sin(x * (i + 1)).sum(0), rtol=1e-4, atol=1e-4)


def test_a_long_chain_is_left(kernels_for_every_device):
    def chain(x):
        sums = []
        for _ in range(60):
            for _ in range(5):
                x = torch.sin(x) + 0.5
            sums.append(x.sum(0) * 2)
        return sums

    graph = traced(chain, (40, 12, f32))
    answers = [ComputedSums().match(n) for n in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)]
    reasons = [a.reason for a in answers if isinstance(a, Reject)]
    assert reasons and all("more than 64 functions" in r for r in reasons)


def test_transposes_of_transposes_are_not_followed_along_every_path(kernels_for_every_device):
    """Each is read twice, so that 2^40 paths lead to the first."""

    def doubled(x):
        for _ in range(40):
            x = x.t() * 0.5 + x
        return x.sum(0)

    (node,) = traced(doubled, (8, 8, f32)).find_nodes(op="call_function", target=aten.sum.dim_IntList)
    answer = ComputedSums().match(node)
    assert isinstance(answer, Reject) and "128 values" in answer.reason


def test_sums_that_need_one_another_are_passes_of_their_own(interpreted, device):
    def twice(x, y):
        first = torch.tanh(x).sum(0)
        return first, (torch.tanh(x) * first + y).sum(0)

    check(interpreted, twice, *(torch.randn(50, 33, device=device) for _ in range(2)), sums=2)


def test_more_sums_than_a_pass_has(interpreted, device):
    def many(x):
        return [torch.sigmoid(x * (i + 1)).sum(0) for i in range(6)]

    report = check(interpreted, many, torch.randn(50, 33, device=device), sums=2)
    assert {s.note.split()[0] for s in report.substitutions} == {"4", "2"}


def test_a_tensor_that_inductor_makes_is_read_where_it_is_smaller(kernels_for_every_device):
    """A sum of five tensors that two sums read is one tensor to Inductor, so that it is to be read, and not computed again."""

    def deep(*x):
        total = x[0] + x[1] + x[2] + x[3] + x[4] + x[5]
        return torch.tanh(total).sum(0), torch.mm(total.cos(), total.sin().t())

    graph = traced(deep, *[(40, 12, f32)] * 6)
    (node,) = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    match = ComputedSums().match(node)
    assert isinstance(match, Match)
    assert [leaf.node.target for leaf in match.site.expression.leaves] == [aten.add.Tensor]


ROWS = {
    "normalised": lambda x, y, m, s, w: torch.mm((x - m) * s, w),
    "returned": lambda x, y, m, s, w: torch.relu((x - m) * s),
    "two tensors": lambda x, y, m, s, w: torch.mm(torch.tanh(x * s + m) + y, w),
    "in 16 bits": lambda x, y, m, s, w: torch.mm(((x - m) * s).to(bf16), w.to(bf16)),
    "permuted": lambda x, y, m, s, w: torch.mm(w.t(), ((x - m) * s).t()),
    "a root of a variance": lambda x, y, m, s, w: torch.mm((x - m) * torch.rsqrt(s.abs() + 1e-5), w),
}


def normalised(w, *x):
    total = functools.reduce(torch.add, x)
    centred = total.float() - total.float().mean(0)
    return torch.mm((centred * torch.rsqrt(centred.square().mean(0) + 1e-5)).to(bf16), w)


def test_a_graph_that_is_run_as_it_is_meets_no_unrounded_rows(interpreted):
    """Its nodes round: so do the rows that are computed from the same tensors as the mean."""
    inputs = (torch.randn(40, 12).to(bf16), torch.randn(100, 40).to(bf16), *((torch.randn(40) / 9 + 50).to(bf16) for _ in range(3)))
    plain, replaced = (interpreted(normalised, options={"fuse.patterns": names}) for names in ([], ["computed_rows"]))
    expected = plain(*inputs)
    torch._dynamo.reset()
    assert torch.equal(replaced(*inputs), expected)
    assert fusebackend.last_report().counts() == {"computed_rows": 1}
    compiled = torch.compile(normalised, backend="fuse", options={"fuse.gate": "off", "fuse.patterns": ["computed_rows"]})
    (graph,) = fusebackend.explain(compiled, *inputs).graphs  # as it is compiled, though it is run as it is
    assert "computed_rows" in graph.after and "=bf16(" not in graph.after


@pytest.mark.parametrize("terms", [4, 6])
def test_rows_are_rounded_where_their_statistics_are(kernels_for_every_device, terms):
    """Inductor stores a sum of more than four tensors in 16 bits before it takes its mean and its variance. In fp32 it would be another
    tensor, of another mean."""

    graph = traced(normalised, (40, 12, bf16), (100, 40, bf16), *[(40, bf16)] * (terms - 1))
    (product,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    match = ComputedRows().match(product.args[0])
    assert isinstance(match, Match)
    assert match.site.expression.program.count("bf16(") == (terms > 4)


@pytest.mark.parametrize("name", ROWS)
def test_spellings_of_rows(interpreted, device, name):
    inputs = (*(torch.randn(72, 40, device=device) for _ in range(2)), *(torch.randn(40, device=device) for _ in range(2)))
    check(interpreted, ROWS[name], *inputs, torch.randn(40, 8, device=device), rows=1)


def test_rows_of_channels_last_images(interpreted, device):
    def fn(x, m, s):
        return torch.relu((x - m.view(-1, 1, 1)) * s.view(-1, 1, 1)) + 1

    x = torch.randn(3, 8, 6, 5, device=device).to(memory_format=torch.channels_last)
    vectors = [torch.randn(8, device=device) for _ in range(2)]
    report = check(interpreted, fn, x, *vectors, rows=1)
    assert "f32[3, 8, 6, 5], f32[8] -> f32[3, 8, 6, 5]" in str(report), "no view is made of what is read, nor of the result"
    check(interpreted, fn, x.contiguous(), *vectors)


def test_squeeze_and_excitation(interpreted, device):
    make = [functools.partial(torch.randn, *size, device=device) for size in ((6, 7, 5, 24), (24,), (24,), (24, 4), (4, 24))]
    check(interpreted, squeeze_and_excitation, *(f() for f in make), sums=1, rows=1)


def test_its_gradients(device):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.norm, self.after = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1)
            self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

        def forward(self, x):
            y = F.silu(self.norm(self.before(x)))
            return self.after(y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True))))))

    model = Block().to(device, memory_format=torch.channels_last)
    x = torch.randn(2, 8, 10, 9, device=device).to(memory_format=torch.channels_last)
    # The means, the gradient of the gates, and both sums of the norm's backward.
    fusebackend.testing.assert_pattern(model, x, pattern="computed_sums", count=3, training=True)


def behind_a_convolution(monkeypatch, optimised, fn=lambda y, m, s: (y - m.view(-1, 1, 1)) * s.view(-1, 1, 1)):
    """The rows that are found behind a convolution of contiguous images, before another one."""
    monkeypatch.setattr(convolution_layout, "is_channels_last_optimised", lambda graph: optimised)

    def normalised(x, w, m, s):
        return F.conv2d(fn(F.conv2d(x, w), m, s), w)

    graph = traced(normalised, (8, 24, 30, 28, bf16), (24, 24, 1, 1, bf16), (24, bf16), (24, bf16))
    found = [ComputedRows().match(n) for n in graph.nodes if n.target in ComputedRows.anchors]
    return [m for m in found if isinstance(m, Match)]


def test_convolutions_that_inductor_runs_channels_last(monkeypatch, kernels_for_every_device):
    (match,) = behind_a_convolution(monkeypatch, True)
    assert match.site.is_relaid and match.site.order == (0, 2, 3, 1) and sorted(match.site.reading.kinds) == ["c", "c", "r"]
    found = ComputedRows().estimate(match)
    (leaf,) = [leaf.node for leaf in match.site.expression.leaves if leaf.node.target is aten.convolution.default]
    assert found.orders == found.inductor[0].orders == {leaf: (0, 2, 3, 1)}
    assert behind_a_convolution(monkeypatch, False) == behind_a_convolution(monkeypatch, None) == []
    assert behind_a_convolution(monkeypatch, True, lambda y, m, s: (y - m.view(-1, 1, 1)) * s.view(-1, 1, 1) + y.flip(0)) == []


@pytest.mark.parametrize("contiguous", [True, False])
def test_results_lie_as_inputs_do(device, contiguous):
    """Of a convolution the order is known only when Inductor lays it out."""
    image = torch.randn(3, 8, 6, 5, device=device)
    image = image if contiguous else image.to(memory_format=torch.channels_last)
    rows, vector = image.permute(0, 2, 3, 1), torch.randn(1, 1, 1, 8, device=device)
    program = "t0=mul(i0,i1);out(t0)"
    with FakeTensorMode(allow_non_fake_inputs=True):
        (fake,) = computed_rows([rows, vector], program, "f", keeps_order=True)
    (found,) = computed_rows([rows, vector], program, "f", keeps_order=True)
    assert found.stride() == fake.stride() == rows.stride() and torch.equal(found, rows * vector)
    assert computed_rows([rows, vector], program, "f")[0].is_contiguous()


@pytest.mark.parametrize("activation", [nn.Identity, nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU])
def test_a_training_step_of_batch_norm(device, activation):
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), activation(), nn.Conv2d(16, 8, 1))
    model = model.to(device, memory_format=torch.channels_last)
    x = torch.randn(2, 8, 10, 9, device=device).to(memory_format=torch.channels_last)
    for pattern, count in (("computed_sums", 1), ("computed_rows", 2)):
        fusebackend.testing.assert_pattern(model, x, pattern=pattern, count=count, training=True)


def test_wrappers_in_cpp(monkeypatch, kernels_for_every_device):
    graph = traced(lambda x, y: torch.tanh(x * y).sum(0), (40, 12, f32), (12, f32))
    (node,) = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    with inductor_config.patch(cpp_wrapper=True):
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
        answer = ComputedSums().match(node)
        assert isinstance(answer, Reject) and "lists of views" in answer.reason
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.1"))
        assert isinstance(ComputedSums().match(node), Match)
