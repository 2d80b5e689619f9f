"""The operators against double precision and against eager's own error, on the CPU and on a GPU where there is one."""

import dataclasses
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusebackend.patterns.attention import ops
from fusebackend.rewriting import device_facts

HALVES = (torch.bfloat16, torch.float16)
LOWEST = torch.finfo(torch.bfloat16).min


def eager(q, k, v, biases, scale, causal):
    scores = q @ k.mT * scale
    for bias in biases:
        scores = scores + bias.to(scores.dtype)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return torch.softmax(scores, -1) @ v


def differentiated(q, k, v, biases, scale, causal, grad, wanted, dtype=None):
    """The result and the gradients, by autograd through eager attention, in ``dtype`` or in that of the arguments."""
    q, k, v = (x.detach().to(dtype or x.dtype).requires_grad_() for x in (q, k, v))
    biases = [b.detach().to(dtype or b.dtype).requires_grad_(w) for b, w in zip(biases, wanted)]
    out = eager(q, k, v, biases, scale, causal)
    gradients = torch.autograd.grad(out, [q, k, v, *(b for b, w in zip(biases, wanted) if w)], grad.to(out.dtype))
    return [out.detach(), *gradients]


def by_kernels(q, k, v, biases, scale, causal, grad, wanted):
    out, statistics = ops.attention(q, k, v, biases, scale, causal)
    return [out, *ops.attention_backward(grad, q, k, v, biases, out, statistics, scale, causal, wanted)]


def error(found, exact):
    """The relative error in norm; infinite if other elements are finite."""
    finite = exact.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return math.inf
    found, exact = found.double()[finite], exact[finite]
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


def check(q, k, v, biases, grad, *, causal=False, wanted=None, slack=1.05):
    """All results have no larger error than eager's, and are those of the arguments' sizes."""
    wanted = wanted or [True] * len(biases)
    scale = q.shape[-1] ** -0.5
    found = by_kernels(q, k, v, biases, scale, causal, grad, wanted)
    exact = differentiated(q, k, v, biases, scale, causal, grad, wanted, torch.float64)
    theirs = differentiated(q, k, v, biases, scale, causal, grad, wanted)
    for ours, reference, other in zip(found, exact, theirs, strict=True):
        assert ours.shape == reference.shape and ours.dtype == other.dtype
        assert error(ours, reference) <= slack * error(other, reference) + 1e-6
    return found


def arguments(device, dtype, q_shape, keys=None, value_dim=None, order="tokens"):
    """q, k, v and a gradient. ``order``: tokens outside heads, as models have them; heads outside; or rows at odd addresses."""
    *batch, heads, queries, dim = q_shape

    def rows(count, columns):
        if order == "tokens":
            return torch.randn(*batch, count, heads, columns).to(device, dtype).transpose(-3, -2)
        if order == "odd":
            return torch.randn(*batch, heads, count, columns + 1).to(device, dtype)[..., 1:]
        return torch.randn(*batch, heads, count, columns).to(device, dtype)

    value_dim = value_dim or dim
    return rows(queries, dim), rows(keys or queries, dim), rows(keys or queries, value_dim), rows(queries, value_dim)


#: q's shape, the biases' (batch, heads, queries, keys), and further arguments.
SHAPES = {
    "window": ((3, 2, 49, 32), [(1, 2, 49, 49)], {}),
    "shifted windows": ((2, 3, 2, 49, 32), [(1, 1, 2, 49, 49), (1, 3, 1, 49, 49)], {}),
    "64 rows, wide heads": ((2, 2, 64, 64), [(1, 2, 64, 64)], {}),
    "16 rows": ((3, 2, 16, 16), [(1, 2, 16, 16)], {"value_dim": 32}),
    "window of fewer keys": ((2, 2, 50, 24), [(1, 2, 50, 31)], {"keys": 31}),
    "window of more keys": ((2, 2, 10, 40), [(2, 1, 10, 60)], {"keys": 60}),
    "one query": ((2, 2, 1, 32), [(1, 2, 1, 200)], {"keys": 200}),
    "unaligned": ((2, 2, 197, 64), [(1, 2, 197, 197)], {}),
    "several tiles": ((2, 2, 130, 32), [(1, 2, 130, 130)], {}),
    "long, no bias kept": ((1, 2, 320, 64), [(1, 1, 1, 320)], {}),
    "long": ((2, 1, 328, 64), [(1, 1, 328, 328)], {}),
    "wide heads": ((2, 2, 70, 128), [(1, 2, 70, 70)], {}),
    "heads of 72": ((1, 2, 70, 72), [(1, 2, 70, 90)], {"keys": 90, "value_dim": 104}),
    "bias of every head": ((2, 2, 72, 32), [(2, 2, 72, 72)], {}),
    "bias of keys": ((2, 2, 70, 32), [(2, 1, 1, 70)], {}),
    "bias of keys, window": ((2, 2, 40, 32), [(1, 2, 1, 40)], {}),
    "one bias of many windows": ((300, 2, 49, 32), [(1, 1, 49, 49)], {}),
    "one bias of many aligned windows": ((300, 2, 48, 32), [(1, 1, 48, 48)], {}),
    "one bias of many heads": ((130, 1, 72, 32), [(1, 1, 72, 72)], {}),
    "pairs": ((2, 3, 2, 72, 32), [(2, 1, 2, 72, 72), (2, 3, 1, 1, 72)], {}),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_error_is_no_larger_than_eagers(name, dtype, device, library):
    shape, biases, options = SHAPES[name]
    q, k, v, grad = arguments(device, dtype, shape, **options)
    check(q, k, v, [torch.randn(b).to(device, dtype) for b in biases], grad)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_whose_scores_have_no_gradients(name, large, drops, device, library):
    """By a mask of which they are all hidden. The values have the gradients that they had, all else those without these rows' gradients."""
    shape, sizes, options = SHAPES[name]
    q, k, v, grad = arguments(device, torch.bfloat16, shape, **options)
    biases = [torch.randn(b).to(device, torch.bfloat16) for b in sizes]
    rows = torch.rand(shape[:-1], device=device) < 0.3
    if large:
        hidden = torch.zeros_like(rows).to(torch.bfloat16).masked_fill(rows, LOWEST)
        biases.append(hidden.unsqueeze(-1).expand(*rows.shape, k.shape[-2]).contiguous())
    dropped = (ops.attention_mask_bits(torch.rand(*shape[:-1], k.shape[-2], device=device) > 0.2), 1.25) if drops else ()
    out, statistics = ops.attention(q, k, v, biases, 0.2, False, *dropped)
    rows &= statistics[..., 1] > 0.5  # as where all weights are equal
    marked = statistics.clone()
    marked[..., 1] = torch.where(rows, -statistics[..., 1], statistics[..., 1])

    def gradients(grad, statistics):
        wanted = [i < len(sizes) for i in range(len(biases))]
        dq, dk, dv, *dbiases = ops.attention_backward(grad, q, k, v, biases, out, statistics, 0.2, False, wanted, [], *dropped)
        return dv, [dq, dk, *dbiases]

    dv, others = gradients(grad, marked)
    assert torch.equal(dv, gradients(grad, statistics)[0])
    assert all(map(torch.equal, others, gradients(grad.masked_fill(rows.unsqueeze(-1), 0), statistics)[1]))


@pytest.mark.parametrize("length", [49, 130])
def test_a_logarithm_that_rounding_made_negative_is_no_mark(length, device, library):
    """As that of a sum near 1."""
    q, k, v, grad = arguments(device, torch.bfloat16, (2, 2, length, 32))
    out, statistics = ops.attention(q, k, v, [], 0.2, False)
    statistics[:, :, 7, 1] = -(2.0**-20)
    dq, _, _ = ops.attention_backward(grad, q, k, v, [], out, statistics, 0.2, False, [])
    assert dq[:, :, 7].any(-1).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("queries, keys, dim", [(5, 5, 16), (49, 49, 32), (60, 64, 64), (3, 64, 32)])
def test_where_one_key_has_nearly_all_the_weight_the_error_is_no_larger_than_eagers(queries, keys, dim, dtype, device, library):
    """What is left of the scores' gradients is less than the rounding of the result times its gradient. In windows on GPUs, and on CPUs."""
    q, grad = (torch.randint(-4, 5, (8, 2, queries, dim)).to(device, dtype) for _ in range(2))
    k, v = (torch.randint(-4, 5, (8, 2, keys, dim)).to(device, dtype) for _ in range(2))
    check(4 * q, k, v, [torch.randint(-4, 5, (1, 2, queries, keys)).to(device, dtype)], grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_of_one_key_only_the_value_has_a_gradient(dtype, device, library):
    """A softmax of one score is 1 whatever the score: what is left of its gradient, the difference of two equal sums, is their rounding."""
    q, k, v, grad = arguments(device, dtype, (2, 2, 5, 32), keys=1)
    bias = torch.randn(1, 2, 5, 1).to(device, dtype)
    out, dq, dk, dv, dbias = by_kernels(q, k, v, [bias], 0.2, False, grad, [True])
    assert torch.equal(out, v.expand_as(out))
    torch.testing.assert_close(dv, grad.double().sum(-2, keepdim=True).to(dtype))
    terms = (grad.double().abs() * v.double().abs()).sum(-1).max().item()
    for left, factor in ((dq, k), (dk, q), (dbias, torch.ones(()))):
        assert left.double().abs().max() <= 10 * 2**-22 * terms * factor.double().abs().max()


@pytest.mark.parametrize("length", [40, 70])
def test_a_bias_of_queries_changes_nothing(length, device, library):
    """Softmax does not depend on it, and its gradient is what rounding leaves."""
    q, k, v, grad = arguments(device, torch.bfloat16, (2, 2, length, 32))
    bias = torch.randn(1, 2, length, 1, device=device)
    out, *_, dbias = by_kernels(q, k, v, [bias], 0.2, False, grad, [True])
    assert dbias.shape == bias.shape and dbias.abs().max() < 0.05
    torch.testing.assert_close(out, by_kernels(q, k, v, [], 0.2, False, grad, [])[0], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("order", ["heads", "odd"])
@pytest.mark.parametrize("length", [33, 100])
def test_any_strides_and_alignment(order, length, device, library):
    q, k, v, grad = arguments(device, torch.bfloat16, (2, 3, length, 32), order=order)
    bias = torch.randn(3, length + 3, length + 5, device=device).to(torch.bfloat16)[None, :, 3:, 5:]
    check(q, k, v, [bias], grad)
    check(q, k, v, [bias.mT], grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes, keys", [((1, 2, 72), 72), ((2, 2, 200), 200), ((60, 3, 130), 131)])
def test_a_bias_at_any_address_gives_what_an_aligned_one_gives(sizes, keys, dtype, device, library):
    """Of the last shape there are so many rows that a warp of the kernel that aligns them copies several."""
    q, k, v, grad = arguments(device, torch.bfloat16, (*sizes, 32), keys=keys)
    bias = torch.randn(*sizes, keys).to(device, dtype)
    expected = by_kernels(q, k, v, [bias], 0.2, False, grad, [True])
    for offset in range(9):
        rows = torch.empty(*sizes, keys + 8 + offset % 3, device=device, dtype=dtype)[..., offset : offset + keys].copy_(bias)
        flat = torch.empty(offset + bias.numel(), device=device, dtype=dtype)[offset:].view_as(bias).copy_(bias)
        for same in (rows, flat):
            assert all(map(torch.equal, by_kernels(q, k, v, [same], 0.2, False, grad, [True]), expected))
    columns = bias.mT.contiguous().mT
    assert all(map(torch.equal, by_kernels(q, k, v, [columns], 0.2, False, grad, [True]), expected))


@pytest.mark.parametrize("length", [40, 100])
def test_biases_of_two_dtypes_and_gradients_of_some(length, device, library):
    q, k, v, grad = arguments(device, torch.bfloat16, (2, 2, length, 32))
    biases = [torch.randn(1, 2, length, length), torch.randn(2, 1, 1, length), torch.randn(1, 1, length, length).bfloat16()]
    biases = [b.to(device) for b in biases]
    for wanted in ([True, False, True], [False, True, False], [False, False, False]):
        check(q, k, v, biases, grad, wanted=wanted)


@pytest.mark.parametrize("queries, keys", [(40, 40), (200, 200), (150, 70), (70, 150)])
def test_causal(queries, keys, device, library):
    q, k, v, grad = arguments(device, torch.bfloat16, (2, 2, queries, 32), keys)
    check(q, k, v, [], grad, causal=True)
    check(q, k, v, [torch.randn(1, 2, queries, keys, device=device)], grad, causal=True)


@pytest.mark.parametrize("length", [49, 130])
def test_masked_rows_are_what_eager_makes_of_them(length, device, library):
    """Masked by infinity: NaN. By a large finite number: equal weights, also in the gradients."""
    q, k, v, grad = arguments(device, torch.bfloat16, (2, 2, length, 32))
    for value in (-math.inf, LOWEST, -3e38, -1e38, -1e30, -1e9, -1e4):
        bias = torch.randn(1, 2, length, length).bfloat16()
        bias[..., -5:] = value  # keys that nobody sees
        check(q, k, v, [bias.to(device)], grad)
        bias[..., 7, :] = value  # queries that see nothing
        bias[..., 20:30, :] = value
        check(q, k, v, [bias.to(device)], grad)
    bias = bias.float()
    bias[..., 7, :] = torch.finfo(torch.float32).min
    check(q, k, v, [bias.to(device)], grad)


@pytest.mark.parametrize("length", [49, 130])
def test_rows_can_be_taken_out_of_the_backward(length, device, library):
    """With infinite statistics, as a caller may set them where nothing is seen, a row has probabilities of 0."""
    q, k, v, grad = arguments(device, torch.bfloat16, (1, 2, length, 32))
    bias = torch.randn(1, 2, length, length, device=device).bfloat16()
    bias[..., 7, :] = -math.inf
    out, statistics = ops.attention(q, k, v, [bias], 0.2, False)
    assert statistics[..., 7, 0].eq(-math.inf).all() and out[..., 7, :].isnan().all()
    out[..., 7, :] = 0
    statistics[..., 7, :] = math.inf
    dq, dk, dv, dbias = ops.attention_backward(grad, q, k, v, [bias], out, statistics, 0.2, False, [True])
    assert all(x.isfinite().all() for x in (dq, dk, dv, dbias))
    assert not dq[..., 7, :].any() and not dbias[..., 7, :].any()


def test_a_gpu_that_can_not_run_the_kernels_is_refused(monkeypatch, kernels_for_every_device, library):
    for capability, shared, reason in (
        ((7, 5), 64 << 10, "compute capability"),
        ((8, 6), 99 << 10, "shared memory"),
        ((8, 0), 163 << 10, None),
        ((9, 0), 227 << 10, None),
    ):
        facts = dataclasses.replace(device_facts.IMAGINED, capability=capability, block_shared_bytes=shared)
        monkeypatch.setattr(ops, "device_facts", lambda device, facts=facts: facts)
        found = ops.unavailable(torch.device("cuda", 0))
        assert found is None if reason is None else reason in found
    assert ops.unavailable(torch.device("cpu")) is None


@pytest.mark.parametrize("length", [49, 130])
def test_two_masks_may_add_up_to_infinity(length, device, library):
    q, k, v, grad = arguments(device, torch.bfloat16, (1, 2, length, 32))
    masks = [torch.zeros(1, 1, length, length).bfloat16(), torch.zeros(1, 1, 1, length).bfloat16()]
    masks[0][..., 3, :] = LOWEST
    masks[1][..., -9:] = LOWEST
    check(q, k, v, [m.to(device) for m in masks], grad, wanted=[False, False])


@pytest.mark.parametrize("length", [49, 130])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nan_and_infinity_go_where_they_go_in_eager(length, value, device, library):
    q, k, v, grad = arguments(device, torch.bfloat16, (1, 2, length, 32))
    v = v.clone()
    v[0, 0, 3, 5] = value
    out, _ = ops.attention(q, k, v, [], 1.0, False)
    assert torch.equal(out.isfinite(), eager(q, k, v, [], 1.0, False).isfinite())
    q = q.clone()
    q[0, 1, 2, 3] = value
    out, _ = ops.attention(q, k, v, [], 1.0, False)
    assert torch.equal(out.isfinite(), eager(q, k, v, [], 1.0, False).isfinite())


@pytest.mark.parametrize("length", [49, 200])
def test_every_run_gives_the_same_bits(length, device, library):
    q, k, v, grad = arguments(device, torch.bfloat16, (9, 2, length, 32))
    bias = torch.randn(1, 2, length, length).bfloat16().to(device)
    first, second = (by_kernels(q, k, v, [bias], 0.2, False, grad, [True]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("queries, keys, batch", [(0, 5, 2), (5, 0, 2), (5, 5, 0), (0, 0, 1)])
def test_empty(queries, keys, batch, device, library):
    q, k, v, grad = (torch.randn(batch, 2, n, 32, device=device).bfloat16() for n in (queries, keys, keys, queries))
    bias = torch.randn(1, 2, queries, keys, device=device).bfloat16()
    out, dq, dk, dv, dbias = by_kernels(q, k, v, [bias], 1.0, False, grad, [True])
    assert torch.equal(out, eager(q, k, v, [bias], 1.0, False))
    for x, like in ((dq, q), (dk, k), (dv, v), (dbias, bias)):
        assert torch.equal(x, torch.zeros_like(like))


def test_results_lie_as_the_fakes_say(library):
    q, k, v, grad = arguments("cpu", torch.bfloat16, (2, 3, 2, 9, 16), 11, 24)
    biases = [torch.randn(1, 3, 1, 9, 11), torch.randn(2, 1, 2, 1, 11).bfloat16()]
    found = by_kernels(q, k, v, biases, 1.0, False, grad, [True, True])
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v, grad, *biases)]
        said = by_kernels(*fakes[:3], fakes[4:], 1.0, False, fakes[3], [True, True])
    reference, statistics = ops.reference(q, k, v, biases, 1.0, False)
    gradients = ops.reference_backward(grad, q, k, v, biases, reference, statistics, 1.0, False, [True, True])
    for x, fake, other in zip(found, said, [reference, *gradients], strict=True):
        assert x.shape == fake.shape == other.shape and x.dtype == fake.dtype == other.dtype
        assert x.stride() == fake.stride() == other.stride()
        torch.testing.assert_close(x, other, atol=2e-2, rtol=2e-2)


def test_what_is_refused(device, library):
    q, k, v, grad = arguments(device, torch.bfloat16, (2, 2, 9, 16))
    bias = torch.zeros(1, 2, 9, 9, device=device)
    wrong = [
        ("D must be a multiple of", (q[..., :4], k[..., :4], v, [])),
        ("D must be a multiple of", (*(torch.zeros(1, 1, 3, 136, device=device).bfloat16() for _ in range(3)), [])),
        ("bfloat16 or float16", (q.float(), k.float(), v.float(), [])),
        ("do not fit", (q, k[:, :, :5], v, [])),
        ("do not fit", (q, k[:, :1], v[:, :1], [])),
        ("four dimensions|as many dimensions", (q, k, v, [bias[0]])),
        ("as many dimensions", (q, k, v, [bias[..., :5]])),
        ("dtype or float32", (q, k, v, [bias.half()])),
        ("at most", (q, k, v, [bias] * 5)),
        ("batch, heads, queries", (q[0], k[0], v[0], [])),
    ]
    for message, (a, b, c, biases) in wrong:
        with pytest.raises(RuntimeError, match=message):
            ops.attention(a, b, c, biases, 1.0, False)
        with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=message):
            fakes = [mode.from_tensor(x) for x in (a, b, c)]
            ops.attention(*fakes, [mode.from_tensor(x) for x in biases], 1.0, False)
    out, statistics = ops.attention(q, k, v, [bias], 1.0, False)
    for message, values in [
        ("grad and out do not fit", (grad[..., :8], q, k, v, [bias], out, statistics, 1.0, False, [True])),
        ("statistics", (grad, q, k, v, [bias], out, statistics[..., :1], 1.0, False, [True])),
        ("a flag a bias", (grad, q, k, v, [bias], out, statistics, 1.0, False, [])),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.attention_backward(*values)


@pytest.mark.codegen
def test_inductors_cpp_wrapper_takes_the_backward(library):
    """It knows tensors and lists of tensors, and no list beside tensors."""

    def gradients(grad, q, k, v, bias):
        out, statistics = ops.attention(q, k, v, [bias], 0.3, False)
        return ops.attention_backward(grad, q, k, v, [bias], out, statistics, 0.3, False, [True])

    q, k, v, grad = arguments("cpu", torch.bfloat16, (2, 3, 9, 16))
    bias = torch.randn(1, 3, 9, 9)
    compiled = torch.compile(gradients, fullgraph=True, options={"cpp_wrapper": True})
    for a, b in zip(compiled(grad, q, k, v, bias), gradients(grad, q, k, v, bias), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_by_inductor_with_dynamic_sizes(library):
    def both(grad, q, k, v, bias):
        out, statistics = ops.attention(q, k, v, [bias], 0.3, False)
        dq, dk, dv, dbias = ops.attention_backward(grad, q, k, v, [bias], out, statistics, 0.3, False, [True])
        return out + 1, dq * 2, dk, dv, dbias.relu()

    compiled = torch.compile(both, dynamic=True, fullgraph=True)
    for length in (9, 17):
        q, k, v, grad = arguments("cpu", torch.bfloat16, (2, 3, length, 16))
        bias = torch.randn(1, 3, length, length)
        for a, b in zip(compiled(grad, q, k, v, bias), both(grad, q, k, v, bias)):
            torch.testing.assert_close(a, b)


@pytest.mark.cuda
@pytest.mark.parametrize("length", [49, 200])
def test_cuda_graphs_and_side_streams(length, library):
    q, k, v, grad = arguments("cuda", torch.bfloat16, (4, 2, length, 32))
    bias = torch.randn(1, 2, length, length, device="cuda").bfloat16()
    expected = by_kernels(q, k, v, [bias], 0.2, False, grad, [True])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = by_kernels(q, k, v, [bias], 0.2, False, grad, [True])
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    with torch.cuda.graph(graph):
        found = by_kernels(q, k, v, [bias], 0.2, False, grad, [True])
    for x in found:
        x.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.cuda
@pytest.mark.usefixtures("large_memory")
def test_more_than_2_to_the_31_elements(library):
    q, k, v = (torch.randn(700_000, 49, 2, 32, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    bias = torch.randn(1, 2, 49, 49, device="cuda").bfloat16()
    assert q.numel() > 2**31
    out, statistics = ops.attention(q, k, v, [bias], 0.2, False)
    torch.testing.assert_close(out[-3:], ops.attention(q[-3:], k[-3:], v[-3:], [bias], 0.2, False)[0])
    dq, dk, dv, _ = ops.attention_backward(out, q, k, v, [bias], out, statistics, 0.2, False, [True])
    tail = ops.attention_backward(out[-3:], q[-3:], k[-3:], v[-3:], [bias], out[-3:], statistics[-3:], 0.2, False, [True])
    for x, y in zip((dq, dk, dv), tail):
        torch.testing.assert_close(x[-3:], y)
