"""PyTorch's memory-efficient attention, which runs on GPUs only: graphs of it are matched as they are, and run with its formula."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from families.traced_graphs import traced_joint
from torch import fx

import fusebackend
from fusebackend import fx_utils
from fusebackend.patterns.attention.memory_efficient import MemoryEfficientAttention
from fusebackend.profitability import calibration
from fusebackend.profitability.estimating import Estimator
from fusebackend.profitability.random_inputs import Samples
from fusebackend.profitability.region import alone, library_calls
from fusebackend.rewriting.apply import rewrite
from fusebackend.rewriting.outcome import GraphOutcome
from fusebackend.tools.verify import print_verifications

aten = torch.ops.aten
bf16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("library")


def efficient(q, k, v, bias, dropout=0.0, causal=False, scale=None):
    """As scaled_dot_product_attention calls it: rows of the mask begin at multiples of 16 bytes, and it has the sizes of the scores."""
    keys = k.shape[-2]
    if bias is not None:
        bias = torch.nn.functional.pad(bias, (0, -keys % 8))[..., :keys].expand(*q.shape[:3], keys)
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout, causal, scale=scale)[0]


def operands(batch=3, heads=2, queries=9, keys=13, depth=16, dtype=bf16):
    made = [torch.randn(batch, n, heads, depth).to(dtype).transpose(1, 2) for n in (queries, keys, keys)]
    return [*made, torch.randn(1, heads, queries, keys).to(dtype)]


def replaced(fn, args, backward=(0, 1, 2, 3), device="cpu") -> tuple[fx.Graph, GraphOutcome]:
    graph = traced_joint(fn, args, backward, device=device)
    outcome = rewrite(graph, [MemoryEfficientAttention()], "joint", strict=True)
    return graph, outcome


class Formula(fx.Interpreter):
    """Runs a graph; the attention of GPUs by its definition, with products and sums in fp64."""

    def call_function(self, target, args, kwargs):
        if target is aten._scaled_dot_product_efficient_attention.default:
            return self.forward(*args, **kwargs)
        if target is aten._scaled_dot_product_efficient_attention_backward.default:
            return self.backward(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    @staticmethod
    def attend(q, k, v, bias, causal, scale):
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return aten._safe_softmax(scores, -1) @ v

    def forward(self, q, k, v, bias, _, dropout=0.0, causal=False, *, scale=None):
        out = self.attend(*(x.double() for x in (q, k, v, bias)), causal, scale).to(q.dtype)
        return out.transpose(1, 2).contiguous().transpose(1, 2), torch.zeros(()), torch.zeros(()), torch.zeros(())

    def backward(self, grad, q, k, v, bias, out, lse, seed, offset, dropout, mask, causal=False, *, scale=None):
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
        with torch.enable_grad():
            result = self.attend(*leaves, causal, scale)
        return tuple(d.to(q.dtype) for d in torch.autograd.grad(result, leaves, grad.double()))


def check(fn, args, backward=(0, 1, 2, 3), count=1):
    """Both forms agree within roundings, and the replaced one calls nothing of PyTorch's."""
    original = traced_joint(fn, args, backward, device="cpu")
    graph, outcome = replaced(fn, args, backward)
    assert len(outcome.substitutions) == count, outcome.rejections
    assert not any("efficient" in str(n.target) for n in graph.nodes)
    given = [a.detach() for a in args]
    if backward:
        given.append(torch.randn_like(given[0]).to(args[0].dtype))
    wanted, found = (Formula(fx.GraphModule(torch.nn.Module(), g)).run(*given) for g in (original, graph))
    for theirs, ours in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (wanted, found)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))
    return graph


@pytest.mark.parametrize("dtype", [bf16, torch.float16])
@pytest.mark.parametrize(("queries", "keys"), [(9, 13), (16, 16), (70, 81)])
def test_forward_and_backward_are_replaced_together(dtype, queries, keys):
    graph = check(efficient, operands(queries=queries, keys=keys, dtype=dtype))
    backward = next(n for n in graph.nodes if "attention_backward" in str(n.target))
    (bias,) = backward.args[4]
    assert tuple(bias.meta["val"].shape) == (1, 2, queries, keys), "it is read before it was expanded"
    assert not graph.find_nodes(op="call_function", target=aten.sum.dim_IntList), "its gradient is summed inside"


def test_without_gradients():
    check(efficient, operands(), backward=())


def test_scale_and_causality_are_kept():
    check(lambda q, k, v, b: efficient(q, k, v, b, causal=True, scale=0.3), operands(queries=13))


@pytest.mark.parametrize("wanted", [(3,), (0, 2), (1,)])
def test_some_gradients_only(wanted):
    check(efficient, operands(), wanted)


@pytest.mark.parametrize("shape", [(3, 1, 9, 13), (1, 1, 1, 13), (3, 2, 1, 13), (9, 13), (2, 9, 13), (3, 2, 9, 13)])
def test_biases_of_other_sizes(shape):
    q, k, v, _ = operands()
    check(efficient, [q, k, v, torch.randn(shape).to(bf16)])


def test_rows_that_are_hidden_wholly_are_zeros():
    q, k, v, bias = operands()
    bias[:, :, 4] = -math.inf
    check(efficient, [q, k, v, bias])


def test_graphs_for_gpus_are_matched(kernels_for_every_device):
    graph, outcome = replaced(efficient, operands(64, 4, 49, 49, 32), device="cuda")
    assert len(outcome.substitutions) == 1


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda q, k, v, b: efficient(q, k, v, b, dropout=0.1), "dropout"),
        (lambda q, k, v, b: efficient(q[..., :12], k[..., :12], v, b), "heads of 12 elements"),
        (lambda q, k, v, b: efficient(q.float(), k.float(), v.float(), b.float()), "float32 queries"),
    ],
)
def test_refusals(fn, reason):
    graph, outcome = replaced(fn, operands())
    assert not outcome.substitutions and [reason in r.reason for r in outcome.rejections] == [True], outcome.rejections


def test_a_logsumexp_that_is_returned_is_refused():
    def fn(q, k, v, b):
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, b.expand(3, 2, 9, 13), True)
        return out + lse[..., :9, None].to(out.dtype)

    _, outcome = replaced(fn, operands(), ())
    assert not outcome.substitutions and "uses the logsumexp" in outcome.rejections[0].reason


def test_a_gradient_of_the_bias_that_is_used_before_it_is_summed_is_refused():
    graph = traced_joint(efficient, operands(), (3,), device="cpu")
    summed = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)[-1]
    output = graph.output_node()
    output.args = ((*output.args[0], summed.args[0]),)
    outcome = rewrite(graph, [MemoryEfficientAttention()], "joint", strict=True)
    assert not outcome.substitutions and "otherwise than summed" in outcome.rejections[0].reason


class ExpandedUnderAutocast(torch.autograd.Function):
    """A bias that is expanded where the backward is traced under autocast too, which sums in fp32; autograd rounds to the bias's dtype."""

    @staticmethod
    def forward(ctx, bias, sizes):
        ctx.dtype = bias.dtype
        return bias.expand(sizes)

    @staticmethod
    def backward(ctx, grad):
        summed = grad.sum(0, keepdim=True, dtype=torch.float32)
        return summed.to(ctx.dtype), None


def under_autocast(q, k, v, bias):
    expanded = ExpandedUnderAutocast.apply(bias, (*q.shape[:3], k.shape[-2]))
    return aten._scaled_dot_product_efficient_attention(q, k, v, expanded, True, 0.0, False)[0]


def test_a_model_that_is_compiled_under_autocast():
    graph = check(under_autocast, operands())
    assert not graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)


def test_a_sum_in_fp32_that_is_not_rounded_is_refused():
    graph = traced_joint(under_autocast, operands(), (3,), device="cpu")
    (summed,) = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    rounded = next(iter(summed.users))
    rounded.replace_all_uses_with(summed)
    outcome = rewrite(graph, [MemoryEfficientAttention()], "joint", strict=True)
    assert not outcome.substitutions and "otherwise than summed" in outcome.rejections[0].reason


def test_without_a_bias_it_is_no_site():
    _, outcome = replaced(lambda q, k, v: efficient(q, k, v, None), operands()[:3], (0, 1, 2))
    assert not outcome.substitutions and not outcome.rejections


def matched(device, backward=(0, 1, 2, 3), fn=efficient, **kwargs):
    graph = traced_joint(fn, operands(**kwargs), backward, device=device)
    pattern = MemoryEfficientAttention()
    (node,) = (n for n in graph.nodes if n.op == "call_function" and n.target in pattern.anchors)
    return pattern, pattern.match(node)


def test_whether_it_pays_may_be_timed(kernels_for_every_device):
    """Both calls are a library's, which the default gate may time."""
    _, match = matched("cuda")
    calls = library_calls(match.nodes)
    assert len([n for n in calls if not fx_utils.is_view(n)]) == 2
    module, fakes, _ = alone(calls)
    assert len(module.graph.find_nodes(op="placeholder")) == len(fakes)


def test_what_both_forms_do(kernels_for_every_device):
    pattern, match = matched("cuda", keys=16)
    said = pattern.estimate(match)
    assert [w.kind for w in said.ours] == ["attention", "attention backward", "stream"]
    *calls, summed = said.inductor
    assert [w.kind for w in calls] == ["memory-efficient attention", "memory-efficient attention backward"]
    assert [n.target for n in summed.nodes] == [aten.sum.dim_IntList], "the library writes the gradient for each head of the batch"
    scores, tensors = 3 * 2 * 9 * 16, 3 * 2 * (9 + 16) * 32 * 2
    assert [w.quantities["biases"] for w in calls] == [scores, scores]
    assert [w.quantities["bytes"] for w in calls] == [tensors, 2 * tensors + 2 * scores]
    assert said.ours[1].shape["bias gradients"] == 1 and said.ours[2].quantities["bytes"] == 2 * 3 * 2 * 9 * 16 * 2


def test_what_both_forms_do_under_autocast(kernels_for_every_device):
    pattern, match = matched("cuda", keys=16, fn=under_autocast)
    *calls, summed = pattern.estimate(match).inductor
    assert len(calls) == 2 and [str(n.target) for n in summed.nodes] == ["aten.sum.dim_IntList", "prims.convert_element_type.default"]


def test_what_both_forms_do_without_gradients(kernels_for_every_device):
    pattern, match = matched("cuda", backward=(), keys=16)
    said = pattern.estimate(match)
    assert [w.kind for w in said.ours] == ["attention", "stream"]
    assert [w.kind for w in said.inductor] == ["memory-efficient attention"]


def test_a_calibration_that_does_not_know_the_library_leaves_it_open(kernels_for_every_device):
    pattern, match = matched("cuda", backward=(), keys=16)
    _, known = calibration._read(calibration.FOLDER / "NVIDIA-H200-torch2.11.json")
    known = dataclasses.replace(known, models={k: m for k, m in known.models.items() if not k.startswith("memory-efficient")})
    estimate = Estimator(known).estimate([pattern.estimate(match)], "joint", match.outputs, match.nodes)
    assert estimate.pays is None and estimate.ours is not None
    assert "'memory-efficient attention' takes was not calibrated" in estimate.reason


def test_it_is_verified_where_its_examples_run(capsys):
    if not torch.cuda.is_available():
        verification = fusebackend.verify("memory_efficient_attention")
        assert not verification.checks and "its examples run on cuda" in str(verification)
        assert print_verifications(["memory_efficient_attention"], None) == 1, "it was asked for"
    for fn, arguments in MemoryEfficientAttention().examples():
        check(fn, arguments, backward=())


def test_its_calls_can_be_timed_by_themselves():
    """The backward reads the state of a random generator that the forward returns: no integers that anything is indexed by."""
    graph = traced_joint(efficient, operands(), (0, 1, 2, 3), device="cpu")
    (forward,) = graph.find_nodes(op="call_function", target=aten._scaled_dot_product_efficient_attention.default)
    calls = library_calls(sorted({forward, *MemoryEfficientAttention().match(forward).nodes}))
    module, fakes, _ = alone(calls)
    assert len(module.graph.find_nodes(op="call_function", target=aten._scaled_dot_product_efficient_attention_backward.default)) == 1
    assert not any(isinstance(f, torch.Tensor) and f.dtype is torch.int64 for f in fakes)
    Samples(module.graph, fakes)
