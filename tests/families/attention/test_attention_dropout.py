"""Dropout of the probabilities: the operators with bits of a mask, and how it is found."""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_programs import check, compiled, error, heads, randn, refused, run, wide
from families.compiled_results import alike

from fusebackend import backend
from fusebackend.patterns.attention import ops

pytestmark = pytest.mark.usefixtures("library")

SCALE = 1 / 0.9


# ---- the operators ----


def kept(*shape, device="cpu"):
    return torch.rand(*shape, device=device) > 0.2


@pytest.mark.parametrize(
    "make",
    [
        lambda d: kept(2, 3, 70, 130, device=d),
        lambda d: kept(2, 2, 3, 64, 128, device=d),
        lambda d: kept(1, 2, 1, 1, device=d),
        lambda d: kept(2, 3, 96, 65, device=d).mT,
        lambda d: kept(2, 1, 33, 80, device=d).expand(2, 3, 33, 80),
        lambda d: kept(2, 3, 40, 150, device=d)[..., 3:147],
        lambda d: kept(2, 0, 40, 150, device=d),
    ],
    ids=["odd", "five dims", "one", "transposed", "expanded", "sliced", "empty"],
)
def test_the_bits_are_those_of_the_mask(make, device):
    mask = make(device)
    bits = ops.attention_mask_bits(mask)
    assert torch.equal(bits, ops.reference_mask_bits(mask))
    assert torch.equal(ops.mask_of_bits(bits, *mask.shape[-2:]), mask)


#: q's shape, keys, the biases' sizes and which are learned.
SHAPES = {
    "window": ((3, 2, 49, 32), 49, [(1, 2, 49, 49)], [True]),
    "no bias": ((2, 2, 130, 64), 96, [], []),
    "bias of keys": ((2, 3, 200, 64), 264, [(2, 1, 1, 264)], [False]),
    "learned bias": ((2, 3, 136, 64), 136, [(1, 3, 136, 136)], [True]),
    "narrow heads": ((2, 3, 136, 32), 136, [(1, 3, 136, 136)], [True]),
    "wide heads": ((2, 2, 70, 128), 70, [(1, 2, 70, 70)], [True]),
    "two biases": ((2, 2, 197, 64), 197, [(1, 2, 197, 197), (2, 1, 197, 197)], [True, True]),
    "pairs": ((2, 3, 2, 72, 32), 72, [(2, 1, 2, 72, 72), (2, 3, 1, 1, 72)], [True, False]),
}


def eager(q, k, v, biases, mask, causal):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    for bias in biases:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return (scores.float().softmax(-1).to(q.dtype) if q.dtype != torch.float64 else scores.softmax(-1)) * mask * SCALE @ v


def differentiated(operands, biases, learned, mask, causal, grad, dtype):
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in operands)
    biases = [b.detach().to(dtype).requires_grad_(w) for b, w in zip(biases, learned)]
    out = eager(q, k, v, biases, mask, causal)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, *(b for b in biases if b.requires_grad)], grad.to(dtype))]


@pytest.mark.parametrize(("wide_gradients", "causal"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_the_error_is_no_larger_than_eagers(name, dtype, wide_gradients, causal, device):
    torch.manual_seed(0)
    shape, keys, sizes, learned = SHAPES[name]
    q, grad = (torch.randn(shape).to(device, dtype) for _ in range(2))
    k, v = (torch.randn(*shape[:-2], keys, shape[-1]).to(device, dtype) for _ in range(2))
    biases = [torch.randn(b).to(device, dtype) for b in sizes]
    mask = kept(*shape[:-1], keys, device=device)
    dropped = ops.attention_mask_bits(mask), SCALE

    def by_kernels():
        out, statistics = ops.attention(q, k, v, biases, shape[-1] ** -0.5, causal, *dropped)
        flags = learned, learned if wide_gradients else []
        return [out, *ops.attention_backward(grad, q, k, v, biases, out, statistics, shape[-1] ** -0.5, causal, *flags, *dropped)]

    found = by_kernels()
    assert all(map(torch.equal, found, by_kernels()))  # the same bits in every run
    exact, theirs = (differentiated((q, k, v), biases, learned, mask, causal, grad, d) for d in (torch.float64, dtype))
    assert all(d.dtype == (torch.float32 if wide_gradients else dtype) for d in found[4:])
    for ours, reference, other in zip(found, exact, theirs, strict=True):
        assert ours.shape == reference.shape
        assert error(ours, reference) <= 1.05 * error(other, reference) + 1e-6


def test_all_dropped_gives_zeros_and_all_kept_changes_nothing(device):
    q, k, v, grad = (torch.randn(2, 2, 100, 64, device=device).to(torch.bfloat16) for _ in range(4))
    for mask, scale in ((torch.zeros, 2.0), (torch.ones, 1.0)):
        dropped = ops.attention_mask_bits(mask(2, 2, 100, 100, dtype=torch.bool, device=device)), scale
        out, statistics = ops.attention(q, k, v, [], 0.125, False, *dropped)
        gradients = ops.attention_backward(grad, q, k, v, [], out, statistics, 0.125, False, [], [], *dropped)
        if mask is torch.zeros:
            assert not any(x.any() for x in (out, *gradients))
        else:
            plain, same = ops.attention(q, k, v, [], 0.125, False)
            others = ops.attention_backward(grad, q, k, v, [], plain, same, 0.125, False, [])
            assert all(map(torch.equal, (out, statistics, *gradients), (plain, same, *others)))


# ---- what is found ----


def by_bool(p, mask):
    return p * mask * SCALE


def by_float(p, mask):
    return p * (mask.to(p.dtype) * SCALE)


def divided(p, mask):
    return mask * p / 0.9


def by_where_of_ones(p, mask):
    return p * SCALE * mask


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("drop", [by_bool, by_float, divided, by_where_of_ones], ids=lambda f: f.__name__)
@pytest.mark.parametrize("softmax_in", [torch.float32, torch.bfloat16])
def test_a_mask_of_the_probabilities_is_found(drop, softmax_in, training):
    torch.manual_seed(0)

    def fn(q, k, v, b, mask):
        p = (q @ k.mT * 0.25 + b).to(softmax_in).softmax(-1).to(q.dtype)
        return drop(p, mask) @ v

    def exact(q, k, v, b, mask):
        return drop((q @ k.mT * 0.25 + b).softmax(-1), mask) @ v

    report = check(fn, (*heads(), randn(4, 9, 9), kept(2, 4, 9, 9)), training=training, exact=exact)
    assert "fusebackend.attention_mask_bits.default" in report.substitutions[0].replacement


def test_a_mask_of_merged_heads_is_found():
    def fn(q, k, v, mask):
        p = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1)
        return torch.bmm(p * mask * SCALE, v.flatten(0, 1)).view(2, 4, 9, 16)

    check(fn, (*heads(), kept(8, 9, 9)), training=True)


def layer(q, k, v, b):
    return F.dropout((q @ k.mT * 0.25 + b).float().softmax(-1).to(q.dtype), 0.1) @ v


def by_sdpa(q, k, v, b):
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=b, dropout_p=0.1)


@pytest.mark.parametrize("fn", [layer, by_sdpa], ids=["dropout", "scaled dot product"])
def test_the_random_numbers_are_those_without_the_pattern(fn):
    args = (*heads(), randn(2, 4, 9, 9))
    outcomes = []
    for patterns in ([], ["attention"]):
        torch._dynamo.reset()
        options = {"fuse.patterns": patterns, "fuse.interpret": True, "fuse.gate": "off", "fuse.strict": True}
        torch.manual_seed(3)
        outcomes.append(run(torch.compile(fn, backend=backend.fuse, options=options), args, True))
    for theirs, ours in zip(*outcomes, strict=True):
        assert alike(ours, theirs)
        assert error(ours, theirs) < 0.02


def test_what_is_saved_for_the_backward_are_bits():
    """Of each score one, where the mask itself has a byte."""
    torch._dynamo.reset()
    saved: list[torch.Tensor] = []
    options = {"fuse.patterns": ["attention"], "fuse.interpret": True, "fuse.gate": "off", "fuse.strict": True}
    fn = torch.compile(layer, backend=backend.fuse, options=options)
    args = [x.detach().requires_grad_() for x in (*heads(queries=64), randn(4, 64, 64))]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        fn(*args)
    assert not any(t.dtype == torch.bool for t in saved)
    assert [t.numel() * t.itemsize for t in saved if t.dtype == torch.int64] == [2 * 4 * 64 * 64 // 8]


def test_two_masks_are_refused():
    def fn(q, k, v, a, b):
        return ((q @ k.mT * 0.25).softmax(-1) * a * b) @ v

    refused(fn, (*heads(), kept(2, 4, 9, 9), kept(2, 4, 9, 9)), "between the softmax and the product", training=False)


def test_dropped_probabilities_that_are_used_elsewhere_are_refused():
    def fn(q, k, v, mask):
        p = (q @ k.mT * 0.25).softmax(-1) * mask * SCALE
        return torch.cat([p @ v, p], -1)

    for training in (False, True):
        _, report = compiled(fn, (*heads(), kept(2, 4, 9, 9)), training)
        assert not report.substitutions and report.rejections, report


def test_a_gradient_by_another_mask_is_refused():
    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p, mask, other):
            ctx.save_for_backward(other)
            return p * mask * SCALE

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * SCALE, None, None

    def fn(q, k, v, mask, other):
        return Dropped.apply((q @ k.mT * 0.25).softmax(-1), mask, other) @ v

    _, report = compiled(fn, (*heads(), kept(2, 4, 9, 9), kept(2, 4, 9, 9)), True)
    assert not report.substitutions and report.rejections, report


@pytest.mark.parametrize("training", [False, True])
def test_a_mask_that_fills_in_a_finite_number_beside_dropout(training):
    """As in DeBERTa. Rows that it hides wholly have gradients of the values, through what is kept, and none of the scores."""

    def fn(q, k, v, b, hidden, mask):
        p = (q @ k.mT * 0.25 + b).masked_fill(hidden, torch.finfo(torch.bfloat16).min).softmax(-1)
        return (p * mask * SCALE) @ v

    hidden = ~kept(2, 1, 9, 9)
    hidden[0, :, 3] = True
    hidden[1, :, :4] = True
    check(fn, (*heads(), randn(2, 4, 9, 9), hidden, kept(2, 4, 9, 9)), training=training)


# ---- masks that hide nothing, and gradients in fp32 ----


def layers_of_t5(q, k, v, table):
    """As transformers gives an encoder without padding its bias: filled in by a mask of positions, in every batch."""
    positions = torch.arange(q.shape[-2])
    seen = (positions[:, None] >= 0)[None, None].expand(q.shape[0], -1, -1, k.shape[-2])
    bias = table.permute(2, 0, 1).unsqueeze(0)
    return (q @ k.mT + torch.where(seen, bias, torch.finfo(torch.bfloat16).min).to(q.dtype)).softmax(-1) @ v


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_behind_a_mask_that_holds_everywhere_is_read_as_it_is(dtype, training):
    report = check(layers_of_t5, (*heads(), randn(9, 9, 4, dtype=dtype)), training=training)
    (site,) = report.substitutions
    assert "aten.where.self" not in site.replacement
    assert "bf16[2, 4, 9, 9]" not in str(report) and math.prod((9, 9, 4))  # no tensor of all scores


@pytest.mark.parametrize(
    "condition",
    [
        lambda p: p[:, None] >= 1,
        lambda p: p[None] < 8,
        lambda p: p[:, None] - p[None] > -9 + p[:, None] * 0,
        lambda p: p[:, None] > -p[None],
    ],
)
def test_a_mask_that_may_hide_is_not_taken_for_one_that_does_not(condition):
    def fn(q, k, v, b):
        hidden = condition(torch.arange(9))
        return (q @ k.mT + torch.where(hidden.expand(9, 9), b, torch.finfo(torch.bfloat16).min)).softmax(-1) @ v

    args = (*heads(), randn(2, 4, 9, 9))
    reference, eager_result = run(fn, wide(args), False), run(fn, args, False)
    found, _ = compiled(fn, args, False)
    assert error(found[0], reference[0]) <= max(error(eager_result[0], reference[0]), torch.finfo(torch.bfloat16).eps)


def test_sizes_may_be_symbolic_where_a_mask_holds_everywhere():
    torch._dynamo.reset()
    options = {"fuse.patterns": ["attention"], "fuse.interpret": True, "fuse.gate": "off", "fuse.strict": True}
    fn = torch.compile(layers_of_t5, backend=backend.fuse, options=options, dynamic=True)
    for length in (9, 13):
        args = (*heads(queries=length), randn(length, length, 4))
        with torch.no_grad():
            assert error(fn(*args), layers_of_t5(*wide(args))) < 0.02
