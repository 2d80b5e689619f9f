"""The graph passes without the backend: given to Inductor as they are."""

import copy
import pickle

import pytest
import torch
from torch._inductor import config

import fusebackend
from fusebackend import passes
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
