"""Nothing is committed before it was checked: patterns made wrong on purpose must leave the graph and the result alone."""

import dataclasses

import pytest
import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode

import fusebackend
from fusebackend import Match, Pattern
from fusebackend import fx_utils as g
from fusebackend.rewriting.apply import rewrite

aten = torch.ops.aten


class Replace(Pattern):
    """Replaces aten.sin by whatever it is given."""

    name = "test_replace"
    anchors = (aten.sin.default,)

    def __init__(self, emit, **match):
        self.emit, self.extra = emit, match

    def match(self, node):
        return Match((node,), lambda e: self.emit(e, node.args[0]), **self.extra)


def run(interpreted, fn=torch.sin, options=None, shape=(6, 4)):
    x = torch.randn(shape)
    result = interpreted(fn, options=options or {})(x)
    return result, fn(x), fusebackend.last_report()


def test_a_right_replacement_is_made(interpreted, temporary_pattern):
    temporary_pattern(Replace(lambda e, x: e.call(aten.neg.default, e.call(aten.neg.default, e.call(aten.sin.default, x)))))
    result, expected, report = run(interpreted)
    assert torch.equal(result, expected)
    (substitution,) = report.substitutions
    assert substitution.replacement == ("aten.sin.default", "aten.neg.default", "aten.neg.default")
    assert "neg" in report.graphs[0].after and "neg" not in report.graphs[0].before


def traced_graph(*targets):
    """``targets`` applied one after the other to a vector, as a graph with fake values."""
    graph = torch.fx.Graph()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(4))
    node = graph.placeholder("x")
    node.meta["val"] = fake
    for target in targets:
        node = graph.call_function(target, (node,))
        node.meta["val"] = fake
    graph.output((node,))
    torch.fx.GraphModule(torch.nn.Module(), graph)
    return graph


class Noise(Replace):
    anchors = (aten.bernoulli.default,)


def test_a_random_operator_is_refused():
    outcome = rewrite(traced_graph(aten.bernoulli.default), [Noise(lambda e, x: e.call(aten.neg.default, x))], "forward")
    assert not outcome.substitutions
    assert "aten.bernoulli.default draws random numbers" in outcome.rejections[0].reason


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (lambda e, x: e.call(aten.unsqueeze.default, x, 0), "shape (6, 4) became (1, 6, 4)"),
        (lambda e, x: e.call(aten._to_copy.default, x, dtype=torch.float64), "dtype torch.float32 became torch.float64"),
        (lambda e, x: e.call(aten.empty_permuted.default, [6, 4], [1, 0]), "stride (4, 1) became (1, 6)"),
        (lambda e, x: e.call(aten.view.default, x, [6, 4]), "aliases"),
        (lambda e, x: x, "aliases arg"),
        (lambda e, x: e.call(aten.rand_like.default, x), "aten.rand_like.default draws random numbers"),
        (lambda e, x: e.call(aten.sin_.default, e.call(aten.clone.default, x)), "aten.sin_.default writes to memory"),
        (lambda e, x: (e.call(aten.sin.default, x),) * 2, "1 outputs became 2"),
        (lambda e, x: next(iter(x.users)), "it is sin, which it replaces"),
        (lambda e, x: e.call(aten.mm.default, x, x), "building the replacement raised"),
        (lambda e, x: 1 / 0, "building the replacement raised ZeroDivisionError"),
    ],
)
def test_a_wrong_replacement_is_refused_and_leaves_no_trace(interpreted, temporary_pattern, emit, reason):
    temporary_pattern(Replace(emit))
    result, expected, report = run(interpreted)
    assert torch.equal(result, expected)
    assert not report.substitutions
    assert reason in report.rejections[0].reason
    assert report.graphs[0].before == report.graphs[0].after


def test_an_output_that_is_the_argument_itself_is_not_made_of_a_copy(interpreted, temporary_pattern):
    """The caller may write to the one and read the other."""

    class Uncopied(Replace):
        anchors = (aten.clone.default,)
        level = "joint"

    temporary_pattern(Uncopied(lambda e, x: x))
    x = torch.zeros(6, 4)
    y = interpreted(lambda x: x.clone())(x)
    y.add_(1)
    assert not x.any() and "aliases" in fusebackend.last_report().rejections[0].reason


def test_two_outputs_do_not_become_one(temporary_pattern):
    class Both(Replace):
        def match(self, node):
            return Match((node, node.next), lambda e: (e.call(aten.sin.default, node.args[0]),) * 2)

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    both = [graph.call_function(aten.sin.default, (x,)) for _ in range(2)]
    graph.output(tuple(both))
    with FakeTensorMode() as mode:
        for node in (x, *both):
            node.meta["val"] = mode.from_tensor(torch.randn(4))
    torch.fx.GraphModule(torch.nn.Module(), graph)
    outcome = rewrite(graph, [Both(None)], "forward")
    assert not outcome.substitutions and "share memory" in outcome.rejections[0].reason


def test_what_an_operators_fake_refuses_is_a_refusal_with_its_reason(interpreted, temporary_pattern, caplog):
    """It is no failure of the pattern: nothing is warned of, and fuse.strict does not raise."""
    temporary_pattern(Replace(lambda e, x: e.call(torch.ops.fusebackend.permute_copy.default, x, [1, 1])))
    result, expected, report = run(interpreted, options={"fuse.strict": True})
    assert torch.equal(result, expected) and not report.substitutions
    assert not [r for r in caplog.records if r.name.startswith("fusebackend") and r.levelname == "WARNING"]
    (miss,) = report.rejections
    assert (miss.reason, miss.code) == (
        "the operator refuses it: permute_copy: order=[1, 1] is no permutation of 2 dimensions",
        "unsupported",
    )


class Answers(Pattern):
    """Answers whatever it is given."""

    name = "test_answers"
    anchors = (aten.sin.default,)

    def __init__(self, answer):
        self.answer = answer

    def match(self, node):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (3, "match returned 3; a Match, a Reject or None is needed"),
        (Match, "a Match, a Reject or None is needed"),
        (Match((), lambda e: []), "match returned a Match with outputs=(), interior=(); nodes of the graph are needed"),
        (Match(("sin",), lambda e: []), "match returned a Match with outputs=('sin',)"),
    ],
)
def test_what_is_no_answer_is_a_near_miss_and_raises_if_strict(interpreted, temporary_pattern, answer, reason):
    temporary_pattern(Answers(answer))
    result, expected, report = run(interpreted)
    assert torch.equal(result, expected) and not report.substitutions
    assert reason in report.rejections[0].reason
    with pytest.raises(Exception, match="match returned"):
        run(interpreted, options={"fuse.strict": True})


def test_strict_raises_what_a_pattern_raises(interpreted, temporary_pattern):
    temporary_pattern(Replace(lambda e, x: 1 / 0))
    with pytest.raises(Exception, match="division by zero"):
        run(interpreted, options={"fuse.strict": True})


def test_an_estimate_that_raises_costs_only_its_site(temporary_pattern, caplog):
    class Unsure(Replace):
        def estimate(self, match):
            raise RuntimeError("on purpose")

    temporary_pattern(Unsure(lambda e, x: e.call(aten.sin.default, x)))
    fn = torch.compile(torch.sin, backend="fuse", options={"fuse.interpret": True})
    assert torch.equal(fn(torch.ones(3)), torch.sin(torch.ones(3)))
    (miss,) = fusebackend.last_report().rejections
    assert (miss.reason, miss.code) == ("estimating raised RuntimeError: on purpose", "failed")


def test_the_outcome_of_a_graph_is_immutable():
    outcome = rewrite(traced_graph(aten.sin.default), [Replace(lambda e, x: e.call(aten.mm.default, x, x))], "forward")
    assert [(r.pattern, r.code) for r in outcome.rejections] == [("test_replace", "failed")]
    assert outcome.graph == outcome.code.name == "forward" and outcome.code.before == outcome.code.after and outcome.seconds > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        outcome.substitutions = ()


class Pair(Pattern):
    """Replaces cos(sin(x)) by sin and cos in one; ``size`` and ``priority`` to make two of them overlap."""

    anchors = (aten.cos.default,)

    def __init__(self, name, whole, priority=0):
        self.name, self.whole, self.priority = name, whole, priority

    def match(self, node):
        inner = node.args[0]
        if inner.target is not aten.sin.default:
            return None
        if self.whole:
            return Match((node,), lambda e: e.call(aten.cos.default, e.call(aten.sin.default, inner.args[0])), interior=(inner,))
        return Match((node,), lambda e: e.call(aten.cos.default, inner))


def test_an_interior_value_that_others_use_is_refused(interpreted, temporary_pattern):
    temporary_pattern(Pair("test_pair", whole=True))

    def fn(x):
        s = torch.sin(x)
        return torch.cos(s), torch.exp(s)

    result, expected, report = run(interpreted, fn)
    assert torch.equal(result[0], expected[0])
    assert "also used by aten.exp" in report.rejections[0].reason


@pytest.mark.parametrize(("priorities", "winner"), [((0, 0), "test_whole"), ((1, 0), "test_part")])
def test_of_two_that_overlap_priority_then_size_wins(interpreted, temporary_pattern, priorities, winner):
    temporary_pattern(Pair("test_part", whole=False, priority=priorities[0]))
    temporary_pattern(Pair("test_whole", whole=True, priority=priorities[1]))
    result, expected, report = run(interpreted, lambda x: torch.cos(torch.sin(x)))
    assert torch.equal(result, expected)
    assert report.counts() == {winner: 1}
    assert "overlaps" in report.rejections[0].reason and winner in report.rejections[0].reason


def test_a_match_across_a_mutation_is_refused():
    graph = torch.fx.Graph()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(4))
    x = graph.placeholder("x")
    s = graph.call_function(aten.sin.default, (x,))
    m = graph.call_function(aten.neg_.default, (x,))
    c = graph.call_function(aten.cos.default, (s,))
    graph.output((c, m))
    for node in (x, s, m, c):
        node.meta["val"] = fake
    torch.fx.GraphModule(torch.nn.Module(), graph)
    outcome = rewrite(graph, [Pair("test_pair", whole=True)], "forward")
    assert not outcome.substitutions
    assert "aten.neg_.default mutates memory" in outcome.rejections[0].reason


class OfSines(Replace):
    """Its replacement reads what the argument of the argument was computed from."""

    def match(self, node):
        return Match((node,), lambda e: e.call(aten.sin.default, node.args[0].args[0].args[0]))


class OfCosines(Replace):
    name = "test_of_cosines"
    anchors = (aten.cos.default,)


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_replacement_left_without_a_use_is_erased_and_is_no_site(kept):
    graph = traced_graph(aten.neg.default, aten.cos.default, aten.sin.default)
    x, _, cosine, sine, output = graph.nodes
    with detect_fake_mode([g.value(x)]):
        for node in (cosine, sine):
            node.meta["val"] = torch.empty(4)  # of its own: what is computed shares no memory with x
    if kept:
        output.args = ((sine, cosine),)
    patterns = [OfSines(None), OfCosines(lambda e, y: e.call(aten.cos.default, y))]
    outcome = rewrite(graph, patterns, "forward", strict=True, priorities={"test_replace": 1})
    assert [s.pattern for s in outcome.substitutions] == ["test_replace", "test_of_cosines"][: 1 + kept]
    assert [n.target for n in graph.nodes if n.op == "call_function"].count(aten.neg.default) == kept
    graph.lint()


class Wide(Replace):
    """Reads the shape of its argument's argument, as the families' matchers do."""

    def match(self, node):
        assert g.value(node.args[0]).dim()
        return super().match(node)


@pytest.mark.parametrize("pattern", [Replace, Wide])
@pytest.mark.parametrize("unknown", [0, 1])
def test_a_node_that_a_pass_made_without_a_value_is_left_alone(pattern, unknown):
    graph = traced_graph(aten.cos.default, aten.sin.default, aten.cos.default)
    node = list(graph.nodes)[1 + unknown]
    del node.meta["val"]
    outcome = rewrite(graph, [pattern(lambda e, x: e.call(aten.sin.default, x))], "forward", strict=True)
    assert not outcome.substitutions and [r.code for r in outcome.rejections] == ["unsupported"]
    reason = outcome.rejections[0].reason
    assert f"a pass made {node.target} without its shape and dtype" in reason
    assert ("matching raised" in reason) == (pattern is Wide and unknown == 0)  # what read it is told as well


def test_reading_a_size_is_not_fusable():
    """Inductor fuses loops; a size, which some versions keep in the graph as a node, is read on the host."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    size, doubled = graph.call_function(torch.ops.aten.sym_size.int, (x, 0)), graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    x.meta["val"] = doubled.meta["val"] = torch.empty(4)
    size.meta["val"] = 4
    assert not g.is_fusable(size) and g.is_fusable(doubled)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bucketize_is_fusable_where_inductor_has_a_loop_for_it(device):
    graph = torch.fx.Graph()
    x, bounds = graph.placeholder("x"), graph.placeholder("bounds")
    found = graph.call_function(torch.ops.aten.bucketize.Tensor, (x, bounds))
    found.meta["val"] = torch.empty(4, dtype=torch.int64, device=device)
    assert g.is_fusable(found) == (device != "cpu")
