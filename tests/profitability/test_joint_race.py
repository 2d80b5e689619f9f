"""A race drops what is slower before the partitioner too, forward and backward, and says so.

No test here judges a time: what is slow on purpose is slower by orders of magnitude. Inductor calls a library for every graph, so none
waits for a compiler.
"""

import pytest
import torch
from slow_product import mm, slow_mm
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import fusebackend
from fusebackend.profitability import region_timing, timer
from fusebackend.rewriting.pattern import Match, Pattern


class Product(Pattern):
    """Replaces matrix products by others before the partitioner: all of them, or those of the forward or of the backward."""

    def __init__(self, name, old, new, where="everywhere", level="joint"):
        self.name, self.anchors, self.new, self.where, self.level = name, (old,), new, where, level

    def match(self, node):
        if self.where != "everywhere" and (self.where == "backward") != reads_tangents(node):
            return None
        return Match((node,), lambda e: e.call(self.new, *node.args))


def reads_tangents(node):
    return "tangents" in node.name or any(map(reads_tangents, node.all_input_nodes))


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def every_region_seems_to_pay(monkeypatch):
    monkeypatch.setattr(region_timing, "MARGIN", 0.0)


def compiled(fn, patterns, **options):
    given = {"fuse.gate": "race", "fuse.patterns": patterns, "fuse.strict": True, **options}
    return torch.compile(fn, backend="fuse", options=given)


def square(n=16):
    return torch.randn(n, n, requires_grad=True), torch.randn(n, n, requires_grad=True)


def trained(fn, *inputs):
    """The result and the gradients of one step."""
    for i in inputs:
        i.grad = None
    out = fn(*inputs)
    out.backward(torch.ones_like(out))
    return [out.detach(), *(i.grad.clone() for i in inputs)]


def races(report):
    return {v.graph: v for v in report.verdicts if not v.pattern}


@pytest.mark.parametrize("where", ["everywhere", "forward", "backward"])
def test_what_is_slow_before_the_partitioner_is_dropped_in_training(temporary_pattern, where):
    temporary_pattern(Product("test_slow", mm, slow_mm, where))
    inputs = square()
    torch.testing.assert_close(trained(compiled(torch.mm, ["test_slow"]), *inputs), trained(torch.mm, *inputs))
    report = fusebackend.last_report()
    assert not report.substitutions
    verdict = races(report)["joint"]
    assert verdict.replaced_ms > 20 > verdict.inductor_ms and not verdict.applied
    expected = {"everywhere": 3, "forward": 1, "backward": 2}[where]
    assert [r.code for r in report.rejections] == ["measured_slower"] * expected
    assert "the graph was gated out: " in str(report)
    assert all("slow_mm" not in c.after for c in report.graphs)


def test_what_is_slow_at_that_level_is_dropped_in_inference(temporary_pattern):
    temporary_pattern(Product("test_slow", mm, slow_mm))
    x, y = (t.detach() for t in square())
    torch.testing.assert_close(compiled(torch.mm, ["test_slow"])(x, y), x @ y)
    report = fusebackend.last_report()
    assert not report.substitutions and not races(report)["forward (joint level)"].applied
    assert all("slow_mm" not in c.after for c in report.graphs)


@pytest.mark.parametrize("training", [True, False])
def test_what_is_fast_before_the_partitioner_is_kept(temporary_pattern, training):
    temporary_pattern(Product("test_fast", slow_mm, mm))
    inputs = square() if training else [t.detach() for t in square()]
    fn = compiled(lambda x, y: slow_mm(x, y), ["test_fast"])
    if training:
        torch.testing.assert_close(trained(fn, *inputs), trained(torch.mm, *inputs))
    else:
        torch.testing.assert_close(fn(*inputs), torch.mm(*inputs))
    report = fusebackend.last_report()
    assert report.counts() == {"test_fast": 1}
    (verdict,) = races(report).values()
    assert verdict.applied and verdict.inductor_ms > 20 > verdict.replaced_ms


def test_later_substitutions_are_raced_by_themselves(temporary_pattern):
    """The slow one of the joint graph goes, the fast one of the forward stays."""
    temporary_pattern(Product("test_slow", mm, slow_mm, "backward"))
    temporary_pattern(Product("test_fast", slow_mm, mm, level="post_grad"))
    inputs = square()
    fn = compiled(lambda x, y: slow_mm(x, y), ["test_slow", "test_fast"])
    torch.testing.assert_close(trained(fn, *inputs), trained(torch.mm, *inputs))
    report = fusebackend.last_report()
    assert report.counts() == {"test_fast": 1}
    assert {graph: v.applied for graph, v in races(report).items()} == {"joint": False, "forward": True}


def test_equal_steps_are_raced_once_and_the_code_comes_from_the_cache(temporary_pattern, monkeypatch, tmp_path):
    temporary_pattern(Product("test_slow", mm, slow_mm))
    fn, inputs = compiled(torch.mm, ["test_slow"]), square()

    def step():
        torch._dynamo.reset()
        trained(fn, *inputs)
        return fusebackend.last_report()

    assert not step().from_cache
    monkeypatch.setattr(timer, "times_ms", lambda *_, **__: pytest.fail("timed again"))
    second = step()
    assert second.from_cache and not second.substitutions
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "another"))
    third = step()
    assert not third.from_cache and not third.substitutions and races(third)["joint"].why == "cached"


def test_symbolic_sizes_are_raced_at_their_hints(temporary_pattern):
    temporary_pattern(Product("test_slow", mm, slow_mm))
    options = {"fuse.gate": "race", "fuse.patterns": ["test_slow"], "fuse.strict": True}
    fn = torch.compile(torch.mm, backend="fuse", dynamic=True, options=options)
    for n in (16, 24):
        inputs = square(n)
        torch.testing.assert_close(trained(fn, *inputs), trained(torch.mm, *inputs))
    assert len(fusebackend.reports()) == 1, "racing must not make the graph recompile"
    assert not fusebackend.last_report().substitutions and not races(fusebackend.last_report())["joint"].applied


class UsersPartitioner(CustomPartitionerFn):
    def __init__(self):
        self.calls = 0

    def __call__(self, gm, joint_inputs, **kwargs):
        self.calls += 1
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self):
        return "test_joint_race"


def test_the_users_partitioner_partitions_both_forms(temporary_pattern):
    temporary_pattern(Product("test_slow", mm, slow_mm))
    users, inputs = UsersPartitioner(), square()
    with torch._inductor.config.patch(custom_partitioner_fn=users):
        trained(compiled(torch.mm, ["test_slow"]), *inputs)
    assert users.calls == 2 and not fusebackend.last_report().substitutions


def test_what_cannot_be_raced_is_left_to_its_regions_with_the_reason(temporary_pattern, monkeypatch):
    temporary_pattern(Product("test_slow", mm, slow_mm))
    real = timer.times_ms

    def times_ms(*a, launches=None, **k):  # only a race says whether launches count
        if launches is not None:
            raise RuntimeError("no timer today")
        return real(*a, **k)

    monkeypatch.setattr(timer, "times_ms", times_ms)
    inputs = square()
    fn = compiled(torch.mm, ["test_slow"], **{"fuse.strict": False})
    torch.testing.assert_close(trained(fn, *inputs), trained(torch.mm, *inputs))
    report = fusebackend.last_report()
    assert report.counts() == {"test_slow": 3}
    assert "not timed: timing raised RuntimeError: no timer today" in str(report)
