"""Which spellings of attention are found, with results no further from float64 than eager's."""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_programs import check, error, heads, randn, refused
from families.traced_graphs import traced

import fusebackend
from fusebackend import backend
from fusebackend.patterns.attention.facts import attended
from fusebackend.patterns.attention.match import read_site

pytestmark = pytest.mark.usefixtures("library")


def plain(q, k, v, b):
    return (q @ k.transpose(-1, -2) * 0.25 + b).softmax(-1) @ v


def scaled_queries(q, k, v, b):
    return ((q * 0.25) @ k.transpose(-1, -2) + b).softmax(-1) @ v


def scaled_keys(q, k, v, b):
    return (b + q @ (k / 4).transpose(-1, -2)).softmax(-1) @ v


def two_square_roots(q, k, v, b):
    return ((q / 2) @ (k * 0.5).mT + b).softmax(-1) @ v


def divided_by_a_tensor(q, k, v, b):
    return (q @ k.mT / torch.sqrt(torch.tensor(16.0)) + b).softmax(-1) @ v


def scaled_after_the_bias(q, k, v, b):
    return ((q @ k.mT + b) / 4).softmax(-1) @ v


def subtracted(q, k, v, b):
    return (q @ k.mT * 0.25 - b).softmax(-1) @ v


def times_alpha(q, k, v, b):
    return torch.add(q @ k.mT * 0.25, b, alpha=0.5).softmax(-1) @ v


def in_float32(q, k, v, b):
    return F.softmax((q @ k.mT * 0.25 + b).float(), dim=-1).type_as(q) @ v


def dtype_of_the_softmax(q, k, v, b):
    return F.softmax(q @ k.mT * 0.25 + b, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def product_in_float32(q, k, v, b):
    return F.softmax((q @ k.mT).float() * 0.25 + b.float(), dim=-1).to(q.dtype) @ v


def constant_added(q, k, v, b):
    return (q @ k.mT * 0.25 + b + 3.0).softmax(-1) @ v


def einsum(q, k, v, b):
    return torch.einsum("bhts,bhsd->bthd", (torch.einsum("bhtd,bhsd->bhts", q, k) * 0.25 + b).softmax(-1), v)


def keys_first(q, k, v, b):
    return (((k @ q.mT) * 0.25).mT + b).softmax(-1) @ v


def values_first(q, k, v, b):
    return (v.mT @ (q @ k.mT * 0.25 + b).softmax(-1).mT).mT


def along_the_first_of_two(q, k, v, b):
    return ((k @ q.mT) * 0.25 + b.mT).softmax(-2).mT @ v


def baddbmm(q, k, v, b):
    batch, count, t, d = q.shape
    flat = [x.reshape(batch * count, t, d) for x in (q, k, v)]
    bias = b.expand(batch, count, t, t).reshape(batch * count, t, t)
    return torch.bmm(torch.baddbmm(bias, flat[0], flat[1].mT, alpha=0.25).softmax(-1), flat[2])


def scaled_dot_product(q, k, v, b):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=b)


SPELLINGS = [
    plain, scaled_queries, scaled_keys, two_square_roots, divided_by_a_tensor, scaled_after_the_bias, subtracted, times_alpha, in_float32,
    dtype_of_the_softmax, product_in_float32, constant_added, einsum, keys_first, values_first, along_the_first_of_two, baddbmm,
    scaled_dot_product,
]  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_a_spelling_is_found(spelling, training):
    torch.manual_seed(0)
    report = check(spelling, (*heads(), randn(4, 9, 9)), training=training)
    assert ("1 of them with a gradient" in report.substitutions[0].note) == training


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [9, 5, 2])
def test_dtypes_and_lengths(dtype, keys, training):
    check(plain, (*heads(keys=keys, dtype=dtype), randn(4, 9, keys, dtype=dtype)), training=training)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("queries, keys", [(1, 9), (9, 1), (1, 2)])
def test_one_query_or_one_key(queries, keys, training):
    """Products of columns and rows are decomposed: those of the backward, and of the probabilities of one key."""
    check(plain, (*heads(queries=queries, keys=keys), randn(4, queries, keys)), training=training)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("depth", [6, 20, 127])
def test_heads_of_any_size_are_padded(depth, training):
    """TNT has heads of 6 elements, MobileViT of 20."""

    def of_tokens(q, k, v, b):
        q, k, v = (x.view(2, 9, 4, depth).transpose(1, 2) for x in (q, k, v))
        return plain(q, k, v, b).transpose(1, 2).reshape(2, 9, 4 * depth)

    def narrow_queries(q, k, v, b):
        return plain(q[..., :4], k[..., :4], v, b)

    for fn in (plain, narrow_queries):
        report = check(fn, (*heads(depth=depth), randn(4, 9, 9)), training=training)
        assert "aten.constant_pad_nd.default" in report.substitutions[0].replacement
    check(of_tokens, (*(randn(2, 9, 4 * depth) for _ in range(3)), randn(4, 9, 9)), training=training)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(9, 9), (1, 9), (9, 1), (4, 9, 9), (4, 1, 9), (1, 4, 9, 9), (2, 1, 1, 9), (2, 1, 9, 9), (2, 4, 9, 9), (2, 4, 1, 9), (2, 4, 9, 1)],
)
def test_a_bias_may_be_broadcast_along_any_dims(shape, training):
    learned = shape[-1] > 1  # what is the same for all keys has no gradient but rounding
    check(plain, (*heads(), randn(*shape, grad=learned)), training=training)


@pytest.mark.parametrize("training", [False, True])
def test_a_bias_may_be_float32(training):
    check(plain_in_wide, (*heads(), randn(4, 9, 9, dtype=torch.float32)), training=training)


def plain_in_wide(q, k, v, b):
    return (q @ k.mT * 0.25 + b).softmax(-1).to(q.dtype) @ v


@pytest.mark.parametrize("training", [False, True])
def test_several_biases_are_not_added_up(training):
    def fn(q, k, v, a, b, c):
        return (a + (q @ k.mT * 0.25 + b) + c).softmax(-1) @ v

    report = check(fn, (*heads(), randn(4, 9, 9), randn(2, 1, 1, 9), randn(9, 9, grad=False)), training=training)
    assert "with 3 biases" in report.substitutions[0].note


def test_two_biases_of_one_shape():
    def fn(q, k, v, a, b):
        return (q @ k.mT * 0.25 + a - 2 * b).softmax(-1) @ v

    report = check(fn, (*heads(), randn(4, 9, 9), randn(4, 9, 9)), training=True)
    assert "with 2 biases, 1 of them with a gradient" in report.substitutions[0].note  # the other one's is a multiple of it


@pytest.mark.parametrize("training", [False, True])
def test_windows_have_a_batch_dim_of_their_own(training):
    def fn(q, k, v, b, mask):
        scores = ((q * 0.25) @ k.mT + b).view(2, 3, 4, 9, 9) + mask[None, :, None]
        return (scores.view(-1, 4, 9, 9).softmax(-1) @ v).transpose(1, 2).reshape(6, 9, 64)

    mask = torch.where(torch.rand(3, 9, 9) < 0.3, -100.0, 0.0).to(torch.bfloat16)
    report = check(fn, (*heads(6), randn(4, 9, 9), mask), training=training)
    assert "with 2 biases" in report.substitutions[0].note


@pytest.mark.parametrize("training", [False, True])
def test_triangle_attention(training):
    def fn(q, k, v, pair, mask):
        return ((q @ k.mT) * 0.25 + mask[:, :, None, None] + pair[:, None]).softmax(-1) @ v

    q, k, v = (randn(2, 5, 4, 9, 16) for _ in range(3))
    check(fn, (q, k, v, randn(2, 4, 9, 9), randn(2, 5, 9, grad=False)), training=training)


@pytest.mark.parametrize("training", [False, True])
def test_projections_are_read_and_written_without_copies(training):
    def fn(x, w, b):
        q, k, v = (x @ w).view(2, 9, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return ((q * 0.25) @ k.mT + b).softmax(-1).matmul(v).transpose(1, 2).reshape(2, 9, 64) @ w[:64, :64]

    report = check(fn, (randn(2, 9, 64), (randn(64, 192).detach() / 8).requires_grad_(), randn(4, 9, 9)), training=training)
    made = report.substitutions[0].replacement
    assert made.count("aten.clone.default") == (
        3 if training else 0
    )  # into the concatenation of the three gradients, with which they are fused
    assert "aten.mul.Tensor" not in made


@pytest.mark.parametrize("training", [False, True])
def test_heads_that_share_keys(training):
    def fn(q, k, v, b):
        k, v = (x[:, :, None].expand(2, 2, 2, 9, 16).reshape(2, 4, 9, 16) for x in (k, v))
        return (q @ k.mT * 0.25 + b).softmax(-1) @ v

    q, _, _ = heads()
    check(fn, (q, *heads(count=2)[:2], randn(4, 9, 9)), training=training)


def in_wide_heads(q, k, v, times):
    """Keys and values are repeated in float32: their gradients are summed up before they are rounded."""
    k, v = (x.float()[:, :, None].expand(2, 2, 2, 9, 16).reshape(2, 4, 9, 16) for x in (k, v))
    return ((q.float() @ (k * times).mT).softmax(-1) @ v).to(q.dtype)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("times", [0.25, 0.3])
def test_heads_that_share_keys_in_float32(times, dtype, training):
    def exact(q, k, v, times):
        k, v = (x[:, :, None].expand(2, 2, 2, 9, 16).reshape(2, 4, 9, 16) for x in (k, v))
        return (q @ (k * times).mT).softmax(-1) @ v

    args = (heads(dtype=dtype)[0], *heads(count=2, dtype=dtype)[:2], times)
    report = check(in_wide_heads, args, training=training, exact=exact)
    assert not training or report.substitutions[0].replacement.count("aten.sum") == 0  # they stay in the graph


@pytest.mark.parametrize("training", [False, True])
def test_a_bias_that_several_layers_share(training):
    def fn(q, k, v, b):
        b = b.expand(2, 4, 9, 9)
        for _ in range(2):
            q = (q @ k.mT * 0.25 + b).softmax(-1) @ v
        return q

    check(fn, (*heads(), randn(4, 9, 9)), training=training, count=2)


@pytest.mark.parametrize("training", [False, True])
def test_without_batch_dims(training):
    check(plain, (*(x.detach()[0, 0].clone().requires_grad_() for x in heads()), randn(9, 9)), training=training)


@pytest.mark.parametrize("which", range(5))
def test_gradients_that_are_not_needed(which):
    args = [*heads(), randn(4, 9, 9)]
    for i, x in enumerate(args):
        x.requires_grad_(i == which if which < 4 else i in (0, 3))
    check(plain, tuple(args), training=True)


@pytest.mark.parametrize("training", [False, True])
def test_queries_that_are_keys_and_values(training):
    def fn(x, b):
        return (x @ x.mT * 0.25 + b).softmax(-1) @ x

    check(fn, (heads()[0], randn(4, 9, 9)), training=training)


@pytest.mark.parametrize("training", [False, True])
def test_other_sizes_do_not_recompile(training):
    torch._dynamo.reset()
    graphs: list[int] = []

    def counted(gm, inputs):
        graphs.append(len(gm.graph.nodes))
        return backend.fuse(
            gm, inputs, options={"fuse.patterns": ["attention"], "fuse.interpret": True, "fuse.gate": "off", "fuse.strict": True}
        )

    fn = torch.compile(scaled_queries, backend=counted)
    for batch, queries, keys in ((3, 11, 7), (2, 9, 9), (5, 17, 4)):
        q, k, v = (randn(batch, 4, n, 16) for n in (queries, keys, keys))
        args = (q, k, v, randn(4, queries, keys))
        for x in args:
            torch._dynamo.mark_dynamic(x, x.dim() - 2)
        for x in args[:3]:
            torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(args[3], 2)
        with torch.set_grad_enabled(training):
            out = fn(*args)
        found = [out, *torch.autograd.grad(out.sum(), args)] if training else [out]
        exact = scaled_queries(*(x.double() for x in args))
        reference = [exact, *torch.autograd.grad(exact.sum(), args)] if training else [exact]
        for mine, precise in zip(found, reference, strict=True):
            assert error(mine, precise) < 0.02
    assert len(graphs) == 1
    assert len(fusebackend.last_report().substitutions) == 1


def test_a_head_of_symbolic_size_is_refused():
    torch._dynamo.reset()
    options = {"fuse.patterns": ["attention"], "fuse.interpret": True, "fuse.gate": "off", "fuse.strict": True}
    torch.compile(scaled_queries, backend="fuse", options=options, dynamic=True)(
        *heads(3, 4, 11, 7, grad=False), randn(4, 11, 7, grad=False)
    )
    report = fusebackend.last_report()
    assert not report.substitutions
    assert any("the size of a head is symbolic" in r.reason for r in report.rejections), report


def test_a_softmax_that_is_written_out():
    def without_maximum(q, k, v, b=0.5):
        weights = (q @ k.mT * 0.25 + b).exp()
        return (weights / weights.sum(-1, keepdim=True)) @ v

    def with_maximum(q, k, v, b):
        scores = q @ k.mT * 0.25 + b
        weights = (scores - scores.max(-1, keepdim=True)[0]).exp()
        return (weights / weights.sum(-1, keepdim=True)) @ v

    args = (*heads(), randn(4, 9, 9))
    check(with_maximum, args, training=False)
    check(without_maximum, args[:3], training=False)
    refused(without_maximum, args, "no maximum is subtracted", training=False)  # a row that the bias hides would be NaN


def test_scales_are_exact_numbers():
    def fn(q, k, v, b):
        return ((q * 0.3) @ (k / 1.7).mT / math.sqrt(2.0) + b).softmax(-1) @ v

    for training in (False, True):
        check(fn, (*heads(), randn(4, 9, 9)), training=training)


@pytest.mark.parametrize("training", [False, True])
def test_a_bias_that_is_the_sum_of_two(training):
    """As in SAM, whose relative positions along height and width are added up first."""

    def fn(q, k, v, high, across):
        b = (high[..., None] + across[..., None, :]).reshape(4, 9, 9)
        return (q @ k.mT * 0.25 + b).softmax(-1) @ v

    def in_blocks(q, k, v, high, across):
        b = high[..., None] + across[..., None, :]
        return ((q @ k.mT * 0.25).view(2, 4, 9, 3, 3) + b).view(2, 4, 9, 9).softmax(-1) @ v

    for each in (fn, in_blocks):
        check(each, (*heads(), randn(4, 9, 3), randn(4, 9, 3)), training=training)


@pytest.mark.parametrize("training", [False, True])
def test_scores_that_are_scaled_in_place(training):
    def fn(q, k, v, b):
        scores = q @ k.mT
        scores /= 4.0
        return (scores.view(8, 9, 9).view(2, 4, 9, 9) + b).softmax(-1) @ v

    check(fn, (*heads(), randn(4, 9, 9)), training=training)


@pytest.mark.codegen
@pytest.mark.parametrize("training", [False, True])
def test_with_generated_code(training):
    def fn(x, w, b, seen):
        q, k, v = (x @ w).view(2, 9, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        scores = ((q * 0.25) @ k.mT + b).masked_fill(~seen, -math.inf)
        return scores.softmax(-1).matmul(v).transpose(1, 2).reshape(2, 9, 64) @ w[:64, :64]

    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    args = (randn(2, 9, 64), (randn(64, 192).detach() / 8).requires_grad_(), randn(4, 9, 9), seen)
    check(fn, args, training=training, interpret=False)


def test_what_an_estimate_is_told():
    def fn(q, k, v, b, mask):
        return (((q * 0.25) @ k.mT + b).view(2, 3, 4, 9, 16) + mask[None, :, None]).view(6, 4, 9, 16).softmax(-1).to(v.dtype) @ v

    q, k, v = (torch.empty(6, 4, n, 32, dtype=torch.bfloat16) for n in (9, 16, 16))
    graph = traced(fn, q, k, v, torch.empty(4, 9, 16), torch.empty(3, 9, 16, dtype=torch.bfloat16))
    site = read_site(graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)[0])
    facts = attended(site)
    assert facts.sizes == (2, 3, 4, 9, 16, 32, 32) and facts.itemsize == 2 and not facts.dynamic
    assert [(b.sizes, b.itemsize, b.aligned, b.gradient_itemsize) for b in facts.biases] == [
        ((1, 1, 4, 9, 16), 4, True, 0),
        ((1, 3, 1, 9, 16), 2, True, 0),
    ]


@pytest.mark.parametrize(
    "scaled_queries, why", [(False, "Inductor calls PyTorch's attention here itself"), (True, "the CPU's kernels are portable")]
)
def test_without_biases_it_depends_on_the_spelling_what_inductor_makes_of_it(scaled_queries, why):
    """Its patterns miss queries that are scaled before the product: then it multiplies, and that is estimated as elsewhere."""

    def fn(q, k, v):
        scores = (q * 0.25) @ k.mT if scaled_queries else torch.matmul(q, k.transpose(-2, -1)).div(4.0)
        return scores.softmax(dim=-1).matmul(v)

    args = [x.detach().contiguous() for x in heads()]
    torch.compile(fn, backend="fuse", options={"fuse.patterns": ["attention"], "fuse.interpret": True})(*args)
    assert any(why in r.reason for r in fusebackend.last_report().rejections), fusebackend.last_report()
