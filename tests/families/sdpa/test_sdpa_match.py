"""What is given to PyTorch's attention, how it is computed, and what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from sdpa_programs import check, compiled, error, heads, refused, wide

import fusebackend
from fusebackend import backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scaled_queries(q, k, v):
    return ((q * 0.25) @ k.mT).softmax(-1) @ v


def transformers_eager(q, k, v, mask):
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.25
    weights = weights + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def by_einsum(q, k, v):
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / 4
    return torch.einsum("bhts,bhsd->bthd", scores.softmax(-1), v)


def without_batch(q, k, v):
    return ((q[0, 0] * 0.25) @ k[0, 0].mT).softmax(-1) @ v[0, 0]


def repeated_keys(q, k, v):
    """As in Llama, whose queries share keys and values."""
    k, v = (x[:, :1, None].expand(-1, -1, 3, -1, -1).reshape(2, 3, -1, 16) for x in (k, v))
    return (q @ k.transpose(2, 3) * 0.25).softmax(-1) @ v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fn", [scaled_queries, by_einsum, without_batch, repeated_keys], ids=lambda f: f.__name__)
def test_spellings(fn, dtype):
    args = tuple(heads(2, 3, 140, 16, dtype=dtype))
    check(fn, args, note="without a mask")


@pytest.mark.parametrize("keys", [9, 40])
def test_more_keys_than_queries(keys):
    check(scaled_queries, tuple(heads(2, 3, 9, 16, keys=keys)))


def multiplied(q, k, v, s, mask):
    return (q @ k.mT * s + mask).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tensor_that_multiplies_the_scores(dtype):
    check(multiplied, (*heads(dtype=dtype), torch.rand(3, 1, 1).to(dtype), torch.randn(2, 1, 1, 9).to(dtype)))


def test_a_tensor_that_multiplies_the_scores_is_refused_in_float32():
    """Queries times it would be rounded before they are multiplied by keys."""
    args = (*heads(keys=160, dtype=torch.float32), torch.rand(3, 1, 1), torch.randn(2, 1, 1, 160))
    refused(multiplied, args, "a tensor multiplies scores that are not rounded to 16 bits")


def causal_by_tril(q, k, v):
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT * 0.25).masked_fill(~seen, -math.inf).softmax(-1) @ v


def causal_by_positions(q, k, v):
    """As transformers makes a mask."""
    rows, columns = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    seen = (columns[None, :] <= rows[:, None])[None, None].expand(q.shape[0], 1, -1, -1)
    mask = torch.where(seen, torch.tensor(0.0, dtype=q.dtype), torch.finfo(q.dtype).min)
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def causal_by_where(q, k, v):
    """As in GPT-2."""
    scores = q @ k.mT * 0.25
    seen = torch.tril(torch.ones((9, 9), dtype=torch.bool)).view(1, 1, 9, 9)
    return torch.where(seen, scores, torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)).softmax(-1) @ v


@pytest.mark.parametrize("fn", [causal_by_tril, causal_by_positions, causal_by_where], ids=lambda f: f.__name__)
def test_causal_masks_are_recognised(fn):
    check(fn, tuple(heads()), note="causal")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_of_a_negative_scale_are_not_called_causal(dtype):
    """PyTorch's causal attention gives NaN for them on CPUs."""

    def fn(q, k, v):
        hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return (q @ k.mT * -0.25).masked_fill(hidden, -math.inf).softmax(-1) @ v

    (made,) = check(fn, tuple(heads(2, 4, 1100, 16, dtype=dtype)), note="with 1 bias").substitutions
    assert made.pattern == "sdpa"


@pytest.mark.parametrize("diagonal", [-1, 0, 2])
def test_other_triangles_are_masks(diagonal):
    def fn(q, k, v):
        hidden = torch.ones(9, 9, dtype=torch.bool).triu(diagonal)
        return (q @ k.mT * 0.25).masked_fill(hidden, -10000.0 if diagonal < 1 else -math.inf).softmax(-1) @ v

    check(fn, tuple(heads()), note="1 bias")


@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (2, 1, 9, 9), (1, 3, 9, 9), (9, 9), (9,), (2, 3, 9, 1)], ids=str)
def test_masks_of_any_shape(shape):
    mask = torch.randn(shape).bfloat16()
    mask[..., 0] = -1000.0
    check(transformers_eager, (*heads(), mask))


def test_several_masks_are_added_up():
    def fn(q, k, v, first, second):
        return (first + (q @ k.mT * 0.25 - second)).softmax(-1) @ v

    masks = (torch.randn(shape).to(torch.bfloat16) for shape in ((2, 1, 1, 9), (9, 9)))
    check(fn, (*heads(), *masks), note="2 biases")


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.bfloat16).min], ids=str)
@pytest.mark.parametrize("hidden", ["no rows", "some rows"])
def test_rows_that_are_hidden_wholly_are_what_eager_makes_of_them(hidden, lowest):
    seen = torch.rand(2, 1, 9, 9) < 0.6
    seen[..., 0] = True
    if hidden == "some rows":
        seen[0, :, 3:5] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, lowest).to(torch.bfloat16)
    check(transformers_eager, (*heads(), mask))


def test_a_number_that_absorbs_scores_in_eager_absorbs_them_here():
    """In float64 it would not."""
    mask = torch.zeros(2, 1, 9, 9)
    mask[0, :, 3:5] = -1e9
    args = (*heads(), mask)
    ours, report = compiled(transformers_eager, args)
    assert len(report.substitutions) == 1, report
    assert error(ours, transformers_eager(*args)) <= 4 * torch.finfo(ours.dtype).eps


def test_nan_in_a_mask_reaches_what_it_reaches_in_eager():
    mask = torch.zeros(2, 1, 9, 9)
    mask[1, 0, 4, 2] = math.nan
    check(transformers_eager, (*heads(), mask.bfloat16()))


def test_scaled_dot_product_attention_that_was_decomposed_gives_zeros_for_hidden_rows():
    def fn(q, k, v, mask):
        scores = q @ k.mT * 0.25 + mask
        nothing = torch.logical_not(torch.any(torch.logical_not(torch.eq(scores, -math.inf)), -1, keepdim=True))
        return torch.where(nothing, torch.zeros((), dtype=q.dtype), scores.softmax(-1)) @ v

    mask = torch.zeros(140, 140)
    mask[4] = -math.inf
    check(fn, (*heads(2, 3, 140, 16, dtype=torch.float32), mask))


def test_queries_that_are_keys_and_values():
    check(lambda x: ((x * 0.25) @ x.mT).softmax(-1) @ x, (heads()[0],))


@pytest.mark.parametrize("masked", [False, True])
def test_other_sizes_do_not_recompile(masked):
    torch._dynamo.reset()
    graphs: list[int] = []
    options = {"fuse.patterns": ["sdpa"], "fuse.interpret": True, "fuse.gate": "off", "fuse.strict": True}

    def counted(gm, inputs):
        graphs.append(len(gm.graph.nodes))
        return backend.fuse(gm, inputs, options=options)

    def with_mask(q, k, v, mask):
        return ((q * 0.25) @ k.mT + mask).softmax(-1) @ v

    fn = with_mask if masked else scaled_queries
    compiled = torch.compile(fn, backend=counted)
    for batch, queries, keys in ((3, 11, 7), (2, 9, 9), (5, 17, 4)):
        args = [*heads(batch, 3, queries, 16, keys=keys), *([torch.randn(batch, 1, 1, keys).bfloat16()] if masked else [])]
        for x in args[:3]:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
        if masked:
            torch._dynamo.mark_dynamic(args[3], 0)
            torch._dynamo.mark_dynamic(args[3], 3)
        found, right = compiled(*args), fn(*wide(tuple(args)))
        assert (found - right).norm() <= 8 * torch.finfo(torch.bfloat16).eps * right.norm()
    assert len(graphs) == 1
    assert len(fusebackend.last_report().substitutions) == 1


def test_rows_that_are_not_contiguous_are_copied():
    def fn(q, k, v):
        return ((q.mT * 0.25) @ k).softmax(-1) @ v.mT

    check(fn, tuple(torch.randn(2, 3, 16, 9).to(torch.bfloat16) for _ in range(3)))


def test_results_are_the_same_in_every_run():
    args = tuple(heads(2, 3, 70, 16))
    first, _ = compiled(scaled_queries, args)
    for _ in range(3):
        assert torch.equal(first, compiled(scaled_queries, args)[0])


@pytest.mark.codegen
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_with_generated_code(kind):
    def fn(x, w, mask):
        q, k, v = (x @ w).view(2, 9, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * 0.25) @ k.mT
        if kind == "mask":
            scores = scores + mask
        if kind == "causal":
            scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf)
        return scores.softmax(-1).matmul(v).transpose(1, 2).reshape(2, 9, 64) @ w[:64, :64]

    args = (torch.randn(2, 9, 64), torch.randn(64, 192) / 8, torch.randn(2, 1, 1, 9))
    args = tuple(x.to(torch.bfloat16) for x in args)
    check(fn, args, interpret=False)


# ---- refusals ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_gradients_are_computed_it_is_refused(dtype):
    """Where one key has nearly all the weight, PyTorch's kernel has 1.9 times eager's error: it starts from the rounded result."""
    args = tuple(x.requires_grad_() for x in heads(2, 3, 140, 16, dtype=dtype))
    refused(scaled_queries, args, "the gradients of PyTorch's attention have larger errors")
    with torch.no_grad():
        check(scaled_queries, args)


def test_values_of_another_size_are_refused():
    q, k, _ = heads()
    refused(scaled_queries, (q, k, torch.randn(2, 3, 9, 8).bfloat16()), "of one size")


def test_float64_is_refused():
    refused(scaled_queries, tuple(heads(dtype=torch.float64)), "torch.float64 queries")


def test_few_keys_in_float32_are_refused():
    refused(scaled_queries, tuple(heads(dtype=torch.float32)), "fewer than 128 keys")


def test_dropout_is_refused():
    def fn(q, k, v):
        return F.dropout(((q * 0.25) @ k.mT).softmax(-1), 0.1) @ v

    refused(fn, tuple(heads()), "dropout")


def test_probabilities_that_are_returned_are_refused():
    def fn(q, k, v):
        p = ((q * 0.25) @ k.mT).softmax(-1)
        return torch.cat([p @ v, p], -1)

    refused(fn, tuple(heads()), "also uses the probabilities")


def test_where_inductor_calls_the_same_kernel_itself_it_is_left():
    """Its pass comes behind ours and has this spelling."""

    def fn(q, k, v):
        return torch.matmul(q, k.transpose(-2, -1)).div(4.0).softmax(dim=-1).matmul(v)

    args = [x.detach().contiguous() for x in heads(2, 3, 140, 16, dtype=torch.float32)]
    torch.compile(fn, backend="fuse", options={"fuse.patterns": ["sdpa"], "fuse.interpret": True})(*args)
    found = fusebackend.last_report().rejections
    assert any("Inductor calls PyTorch's attention here itself" in r.reason for r in found), fusebackend.last_report()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_are_no_further_from_float64_than_eager(dtype):
    """Long rows, where blocks of keys are added up one after the other."""
    check(causal_by_tril, tuple(heads(1, 2, 1100, 16, dtype=dtype)), roundings=0.0)
