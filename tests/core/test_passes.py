"""The graph passes without the backend: given to Inductor as they are."""

import copy
import pickle

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusebackend
from fusebackend import fx_utils, passes
from fusebackend.rewriting.pattern import Match, Pattern


class SineOfPass(Pattern):
    anchors = (torch.ops.aten.sin.default,)

    def __init__(self, name, level):
        self.name, self.level = name, level

    def match(self, node):
        return Match((node,), lambda e: e.call(torch.ops.aten.sin.default, e.call(torch.ops.aten.clone.default, *node.args)), note="a copy")


@pytest.fixture
def sines(temporary_pattern):
    for level in ("joint", "post_grad"):
        temporary_pattern(SineOfPass(f"test_{level}", level))


@pytest.mark.codegen
@pytest.mark.parametrize("level", ["joint", "post_grad"])
def test_plain_inductor_with_our_pass(sines, level):
    slot = {"joint": "joint_custom_pre_pass", "post_grad": "post_grad_custom_post_pass"}[level]
    with config.patch({slot: getattr(passes, level)([f"test_{level}"], gate="off"), "force_disable_caches": True}):
        for fn in (lambda x: torch.sin(x) + 1, lambda x: torch.sin(x) * 3):  # one pass serves many compiles
            torch._dynamo.reset()
            x = torch.randn(5)
            torch.testing.assert_close(torch.compile(fn, backend="inductor")(x), fn(x))
            assert fusebackend.last_report().counts() == {f"test_{level}": 1}
    torch._dynamo.reset()


class _Asking(CustomGraphPass):
    """Asks each graph whether a backward follows it."""

    def __init__(self):
        self.answers = []

    def __call__(self, graph):
        self.answers.append(fx_utils.is_inference(graph))

    def uuid(self):
        return None


@pytest.mark.codegen
def test_graphs_tell_whether_a_backward_follows():
    asking = _Asking()
    # Trained, with something saved and with an input saved alone; inference of what could be trained; nothing that could be.
    weight, x = torch.randn(4, requires_grad=True), torch.randn(4)
    with config.patch({"post_grad_custom_post_pass": asking, "force_disable_caches": True}):
        for fn in (lambda w, x: torch.sin(torch.exp(w) * x), lambda w, x: w * x):
            torch._dynamo.reset()
            torch.compile(fn, backend="inductor")(weight, x).sum().backward()
        assert asking.answers == [False] * 4
        with torch.no_grad():
            torch.compile(lambda w, x: torch.cos(w) * x, backend="inductor")(weight, x)
        torch.compile(lambda x: torch.tan(x), backend="inductor")(x)
    assert asking.answers[4:] == [True] * 2
    torch._dynamo.reset()


def test_its_uuid_follows_what_it_does(sines):
    all_of_them, one = passes.post_grad(), passes.post_grad(["test_post_grad"])
    assert all_of_them.uuid() != one.uuid() != passes.joint().uuid()
    assert one.uuid() == passes.post_grad(["test_post_grad"]).uuid() == copy.deepcopy(one).uuid()
    assert pickle.loads(pickle.dumps(one)).uuid() == one.uuid()
    before = one.uuid()
    fusebackend.prioritize("test_post_grad", 3)
    assert one.uuid() != before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: passes.post_grad(["test_joint"]), "pattern 'test_joint' is of level 'joint': give it to passes.joint"),
        (lambda: passes.post_grad(["no_such"]), "no_such"),
        (lambda: passes.post_grad(gate="race"), "gate='race'; 'auto' or 'off' is accepted"),
    ],
)
def test_a_wrong_argument_is_refused(sines, make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert words in str(error.value)
