"""Casts of weights and of gradients, as autocast asks for: found where a library reads or leaves the tensor, and nowhere else; in groups of
little memory."""

import contextlib
import gc
import weakref

import pytest
import torch
from families.traced_graphs import traced as traced_with_dead_code
from torch import nn
from torch._inductor import config as inductor_config

import fusebackend
from fusebackend.fuzz.imagined_gpu import imagined_gpu
from fusebackend.patterns.foreach_cast import groups
from fusebackend.patterns.foreach_cast.match import ForeachCast
from fusebackend.patterns.foreach_cast.ops import foreach_cast
from fusebackend.rewriting.apply import rewrite
from fusebackend.rewriting.pattern import Match, Pattern, Reject

aten = torch.ops.aten
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
ONLY = {"fuse.patterns": "foreach_cast", "fuse.strict": True, "fuse.gate": "off", "fuse.interpret": True}


@pytest.fixture(autouse=True)
def kernels(library, monkeypatch):
    """There is a kernel for every device."""
    monkeypatch.setattr("fusebackend.native.loader.Native.why_not", lambda self, device, *operators: None)


def traced(fn, *inputs, **kwargs):
    graph = traced_with_dead_code(fn, *inputs, **kwargs)
    graph.eliminate_dead_code()
    return graph


def found(fn, *inputs, device="cuda"):
    """The sizes of groups, of the graph of ``fn``."""
    graph = traced(fn, *inputs, device=device)
    answers = [ForeachCast().match(n) for n in graph.find_nodes(op="call_function", target=groups.CAST)]
    return [len(a.outputs) for a in answers if isinstance(a, Match)]


X, V, W = (5, 8, bf16), (8, 6, f32), (8, 9, f32)
IMAGE, POINT, BAND, BIAS = (2, 8, 5, 5, bf16), (6, 8, 1, 1, f32), (6, 8, 3, 3, f32), (6, f32)


def convolved(x, *weights, **kwargs):
    return [aten.convolution(x, w.bfloat16(), None, [1, 1], [0, 0], [1, 1], False, [0, 0], kwargs.get("groups", 1)) for w in weights]


def gradients(x, weight):
    grad = x[:, :6] * 1
    return aten.convolution_backward(grad, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])


FOUND = {
    "products": (lambda x, v, w: (x @ v.bfloat16(), x @ w.bfloat16()), (X, V, W), [2]),
    "views between": (lambda x, v, w: (x @ v.bfloat16().t().t(), w.bfloat16().t() @ x.t()), (X, V, W), [2]),
    "addends": (lambda x, b, w: torch.addmm(b.bfloat16(), x, w.bfloat16()), (X, (9, f32), W), [2]),
    "batches": (lambda x, v, w: (torch.bmm(x, v.half()), torch.bmm(x, w.half())), ((2, 5, 8, f16), (2, 8, 6, f32), (2, 8, 9, f32)), [2]),
    "what is returned, too": (lambda x, v, w: (x @ (h := v.bfloat16()), h, w.bfloat16()), (X, V, W), [2]),
    "1x1 convolutions": (lambda x, v, w: convolved(x, v, w), (IMAGE, POINT, POINT), [2]),
    "of depthwise ones": (lambda x, v, w: convolved(x, v, w, groups=8), (IMAGE, (8, 1, 3, 3, f32), (8, 1, 5, 5, f32)), [2]),
    "results of products": (lambda x, v: ((x @ v).float(), (x.t() @ x).float()), (X, (8, 6, bf16)), [2]),
    "permuted results": (lambda x, v: ((x @ v).t().float(), (x.t() @ x).t().float()), (X, (8, 6, bf16)), [2]),
    "gradients of convolutions, of which a loop reads others": (
        lambda x, v, w: [r for c in (v, w) for dx, dw, _ in [gradients(x, c)] for r in (dx * 2, dw.float())],
        (IMAGE, (6, 8, 1, 1, bf16), (6, 8, 1, 1, bf16)),
        [2],
    ),
    "a kind each": (
        lambda x, v, w: ((x @ v.bfloat16()).float(), (x @ w.bfloat16()).float(), x.half().float()),
        (X, V, W),
        [2, 2],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    fn, inputs, sizes = FOUND[name]
    assert found(fn, *inputs) == sizes


LEFT = {
    "one cast": (lambda x, v: x @ v.bfloat16(), (X, V)),
    "read by a loop": (lambda v, w: (v.bfloat16() + 1, w.bfloat16() * 2), (V, W)),
    "read by a loop, too": (lambda x, v, w: (x @ (h := v.bfloat16()), h + 1, x @ w.bfloat16()), (X, V, W)),
    "what is computed": (lambda x, v, w: (x @ (v + 1).bfloat16(), x @ (w * 2).bfloat16()), (X, V, W)),
    "results of loops": (lambda v, w: ((v + 1).float(), (w * 2).float()), ((8, 6, bf16), (8, 9, bf16))),
    "results that are read": (lambda x, v: ((x @ v).float() + 1, (x.t() @ x).float() * 2), (X, (8, 6, bf16))),
    "weights whose order may change": (lambda x, v, w: convolved(x, v, w), (IMAGE, BAND, BAND)),
    "biases of convolutions": (
        lambda x, w, a, b: [aten.convolution(x, w, c.bfloat16(), [1, 1], [0, 0], [1, 1], False, [0, 0], 1) for c in (a, b)],
        (IMAGE, (6, 8, 1, 1, bf16), BIAS, BIAS),
    ),
    "other dtypes": (lambda x, v, w: (x @ v.double(), x @ w.double()), ((5, 8, torch.float64), V, W)),
    "integers": (lambda x, v, w: (x @ v.bfloat16(), x @ w.bfloat16()), (X, (8, 6, torch.int32), (8, 9, torch.int32))),
    "read by a loop before": (lambda x, v, w: (x @ v.bfloat16(), x @ w.bfloat16(), v * 2), (X, V, W)),
    "results that a loop reads": (lambda x, v: ((y := x @ v).float(), y * 2, (x.t() @ x).float()), (X, (8, 6, bf16))),
    "gradients that a loop reads": (
        lambda x, v, w: [r for c in (v, w) for _, dw, _ in [gradients(x, c)] for r in (dw * 2, dw.float())],
        (IMAGE, (6, 8, 1, 1, bf16), (6, 8, 1, 1, bf16)),
    ),
    "sums": (lambda x, y: (x.sum(0).float(), y.sum(0).float()), (X, X)),
    "nothing": (lambda x, v, w: (x @ v.bfloat16(), x @ w.bfloat16()), ((5, 0, bf16), (0, 6, f32), (0, 9, f32))),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    fn, inputs = LEFT[name]
    assert found(fn, *inputs) == []


def test_gaps_and_cpus_are_left():
    v, w = torch.empty(8, 12, dtype=f32)[:, ::2], torch.empty(1, 9).expand(8, 9)
    fn = FOUND["products"][0]
    assert found(fn, X, v, w) == []
    assert found(fn, X, V, W, device="cpu") == []


def test_symbolic_sizes_are_left():
    graph = traced(lambda x, v, w: (x @ v.bfloat16(), x @ w.bfloat16()), X, V, W, dynamic=True)
    assert all(ForeachCast().match(n) is None for n in graph.find_nodes(op="call_function", target=groups.CAST))


def test_parameters_beside_symbolic_sizes_are_found():
    torch._dynamo.reset()
    model = network()
    with imagined_gpu():
        compiled = torch.compile(model, backend="fuse", options=ONLY, dynamic=True)
        for batch in (8, 5, 11):
            with torch.compiler.set_stance("fail_on_recompile") if batch != 8 else contextlib.nullcontext():
                trained(compiled, model, torch.randn(batch, 16))
    assert [s.note for s in fusebackend.last_report().substitutions] == ["8 casts in one kernel", "4 casts in one kernel"]


def test_mutated_inputs_are_left():
    graph = traced(lambda x, v, w: (x @ v.bfloat16(), x @ w.bfloat16()), X, V, W)
    casts = graph.find_nodes(op="call_function", target=groups.CAST)
    assert isinstance(ForeachCast().match(casts[0]), Match)
    with graph.inserting_before(casts[1]):
        graph.call_function(aten.mul_.Tensor, (casts[0].args[0], 2)).meta["val"] = casts[0].args[0].meta["val"]
    assert all(ForeachCast().match(n) is None for n in casts)


def test_a_group_of_which_a_part_has_gone_is_found_anew():
    graph = traced(lambda x, u, v, w: (x @ u.bfloat16(), x @ v.bfloat16(), x @ w.bfloat16()), X, V, V, W)
    casts = graph.find_nodes(op="call_function", target=groups.CAST)
    assert len(ForeachCast().match(casts[0]).outputs) == 3
    casts[1].replace_all_uses_with(casts[0])
    graph.erase_node(casts[1])
    assert ForeachCast().match(casts[0]).outputs == (casts[0], casts[2])
    assert ForeachCast().match(casts[2]) is None  # in the middle of it


class TakesProduct(Pattern):
    """Replaces the product with one of the weights, with its cast."""

    name = "takes_product"
    anchors = (aten.mm.default,)

    def __init__(self, which):
        self.which = which

    def match(self, node):
        if [*node.graph.find_nodes(op="placeholder")].index(node.args[1].args[0]) != 1 + self.which:
            return None
        x, weight = node.args
        return Match((node,), lambda e: e.call(aten.mm.default, x, e.call(aten.new_zeros.default, x, [8, 6])), (weight,))


@pytest.mark.parametrize(("which", "sizes"), [(0, [2, 2]), (1, [2, 2]), (4, [2, 2]), (5, [2, 2])])
def test_what_another_pattern_takes_from_a_group_leaves_it_the_rest(monkeypatch, which, sizes):
    """Groups of two of six casts, of which one goes: the fifth is alone then."""
    monkeypatch.setattr(groups, "_MOST_CASTS", 2)
    graph = traced(lambda x, *weights: [x @ w.bfloat16() for w in weights], X, *[V] * 6)
    outcome = rewrite(graph, [ForeachCast(), TakesProduct(which)], "a graph")
    assert [len(s.outputs) for s in outcome.substitutions if s.pattern == "foreach_cast"] == sizes
    assert not outcome.rejections and len(graph.find_nodes(op="call_function", target=groups.CAST)) == 1


def test_no_group_is_across_what_may_write_to_memory():
    graph = traced(lambda x, *weights: [x @ w.bfloat16() for w in weights], X, *[V] * 5)
    casts = graph.find_nodes(op="call_function", target=groups.CAST)
    with graph.inserting_before(casts[2]):
        graph.call_function(torch.ops.higher_order.invoke_subgraph, (casts[0],)).meta["val"] = casts[0].meta["val"]
    casts[0].users.popitem()  # as if it read something else
    assert [len(answer.outputs) for n in casts if (answer := ForeachCast().match(n))] == [2, 3]


def test_the_call_stands_where_the_first_cast_stood():
    graph = traced(lambda x, v, w: ((x + 1) @ v.bfloat16(), x @ w.bfloat16()), X, V, W)
    assert rewrite(graph, [ForeachCast()], "a graph").substitutions
    names = [getattr(n.target, "__name__", str(n.target)) for n in graph.nodes if n.op == "call_function"]
    assert names.index("add.Tensor") < names.index("foreach_cast.default") < names.index("mm.default")


def test_a_graph_is_not_kept_alive():
    graph = traced(FOUND["products"][0], X, V, W)
    assert isinstance(ForeachCast().match(graph.find_nodes(op="call_function", target=groups.CAST)[0]), Match)
    reference = weakref.ref(graph)
    del graph
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("most", "limit", "sizes"), [("_MOST_BYTES", {"inputs": 8 * 8 * 2 * 3}, [3, 3, 2]), ("_MOST_CASTS", 2, [2, 2, 2, 2])]
)
def test_groups_are_limited(monkeypatch, most, limit, sizes):
    monkeypatch.setattr(groups, most, limit)
    assert found(lambda x, *w: [x @ v.bfloat16() for v in w], X, *[(8, 8, f32)] * 8) == sizes


def test_what_inductor_tunes_is_left():
    graph = traced(FOUND["products"][0], X, V, W)
    with inductor_config.patch(max_autotune_gemm=True):
        answer = ForeachCast().match(graph.find_nodes(op="call_function", target=groups.CAST)[0])
    assert isinstance(answer, Reject) and answer.code == "fused_neighbour" and "max_autotune" in answer.reason


def network(layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, dtype=f32) for _ in range(layers)))


def trained(compiled, model, x, dtype=bf16):
    model.zero_grad()
    with torch.autocast("cpu", dtype):
        out = compiled(x)
    out.float().square().sum().backward()
    return [out, *(p.grad.clone() for p in model.parameters())]


def test_training_under_autocast():
    """The same bits as without it."""
    torch._dynamo.reset()
    model, x = network(), torch.randn(8, 16)
    with imagined_gpu():
        compiled = torch.compile(model, backend="fuse", options=ONLY)
        results = trained(compiled, model, x)
    report = fusebackend.last_report()
    assert [s.note for s in report.substitutions] == ["9 casts in one kernel", "4 casts in one kernel"]
    torch._dynamo.reset()
    wanted = trained(torch.compile(model, backend="fuse", options=ONLY | {"fuse.patterns": "-all"}), model, x)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(results, wanted))


def test_many_tensors_take_one_line_of_a_report():
    torch._dynamo.reset()
    model = network(12)
    with imagined_gpu():
        trained(torch.compile(model, backend="fuse", options=ONLY), model, torch.randn(8, 16))
    lines = str(fusebackend.last_report()).splitlines()
    assert max(map(len, lines)) < 300 and any("18 more -> bf16" in line for line in lines)


def test_the_estimate_is_that_of_kernels_that_move_as_much():
    graph = traced(FOUND["products"][0], X, V, W)
    match = ForeachCast().match(graph.find_nodes(op="call_function", target=groups.CAST)[0])
    work = ForeachCast().estimate(match)
    assert [w.quantities["bytes"] for w in work.ours] == [6.0 * (8 * 6 + 8 * 9)]
    assert [w.quantities["bytes"] for w in work.inductor] == [6.0 * 8 * 6, 6.0 * 8 * 9]


def test_refusals():
    x = torch.randn(4, 6)
    for tensors, dtype, reason in [
        ([x], torch.float64, "float32 to torch.float64 is not supported"),
        ([x.half()], bf16, "float16 to torch.bfloat16 is not supported"),
        ([x, x.half()], bf16, r"tensors\[1\] is torch.float16, others torch.float32"),
        ([x, x[:, ::2]], bf16, r"tensors\[1\] has gaps"),
        ([x[:1].expand(4, 6)], f16, r"tensors\[0\] has gaps, or elements that share memory"),
    ]:
        with pytest.raises(RuntimeError, match=reason):
            foreach_cast(tensors, dtype)
