"""What Inductor answered is kept for later processes."""

import json

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config

from fusebackend import cache_keys
from fusebackend.profitability import calibration, estimating
from fusebackend.profitability.calibration import Calibration
from fusebackend.profitability.kept_answers import KeptAnswers
from fusebackend.profitability.policy import Gate
from fusebackend.profitability.time_model import TimeModel
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.pattern import Generated, Match, Pattern, Work, Workload

aten = torch.ops.aten
library = torch.library.Library("kept_answers", "FRAGMENT")
library.define("mine(Tensor x) -> Tensor")

ANSWER = [[Work("triton", {"us": 7.0}, {"width": 3.0}), Work("triton", {"us": 0.1 + 0.2}, {})], [Work("triton reduction", {"us": 1.0})]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", str(tmp_path))
    return tmp_path / "asked"


def node(target=aten.exp.default):
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(target, (x,))
    for each in (x, made):
        each.meta["val"] = torch.empty(4, 6)
    graph.output(made)
    return made


def test_an_answer_is_found_under_its_question_alone(folder):
    nodes = [node()]
    KeptAnswers(lambda: "an H100").save("exp", nodes, ANSWER)
    assert KeptAnswers(lambda: "an H100").load("exp", nodes) == ANSWER
    assert KeptAnswers(lambda: "an H100").load("sin", nodes) is None and KeptAnswers(lambda: "an H200").load("exp", nodes) is None
    (file,) = folder.iterdir()
    assert file.stem == cache_keys.question("an H100", "exp")


def test_why_inductor_can_not_be_asked_is_kept_too(folder):
    KeptAnswers(lambda: "an H100").save("exp", [node()], "it calls a library")
    with pytest.raises(Unfit, match="it calls a library"):
        KeptAnswers(lambda: "an H100").load("exp", [node()])


def test_nothing_is_kept_of_other_operators_or_without_caches(folder, monkeypatch):
    """A program may give its own operator another lowering; whoever disables Inductor's caches wants none."""
    kept = KeptAnswers(lambda: "an H100")
    kept.save("mine", [node(), node(torch.ops.kept_answers.mine.default)], ANSWER)
    kept.save("exp", [node()], ANSWER)
    assert len(list(folder.iterdir())) == 1
    with inductor_config.patch(force_disable_caches=True):
        assert kept.load("exp", [node()]) is None
        kept.save("sin", [node()], ANSWER)
    assert len(list(folder.iterdir())) == 1


def test_without_a_device_nothing_is_kept(folder):
    def no_driver():
        raise RuntimeError("Found no NVIDIA driver")

    kept = KeptAnswers(no_driver)
    kept.save("exp", [node()], ANSWER)
    assert kept.load("exp", [node()]) is None and not list(folder.glob("*"))


@pytest.mark.parametrize("content", ["", "[]", '{"kernels": [[{"kind": "triton"}]], "why_not": ""}', '{"kernels": 3, "why_not": ""}'])
def test_what_is_no_answer_counts_as_none(content, folder):
    kept = KeptAnswers(lambda: "an H100")
    kept.save("exp", [node()], ANSWER)
    (file,) = folder.iterdir()
    file.write_text(content)
    assert kept.load("exp", [node()]) is None
    kept.save("exp", [node()], ANSWER)
    assert kept.load("exp", [node()]) == ANSWER and json.loads(file.read_text())["why_not"] == ""


class Asked(Pattern):
    """Replaces an exponential, of which Inductor is asked."""

    name, anchors = "test_kept_answers", (aten.exp.default,)

    def match(self, node):
        return Match((node,), lambda emitter: emitter.call(aten.exp.default, node.args[0]))

    def estimate(self, match):
        return Workload((Work("k", {"us": 1.0}),), (Generated(match.outputs),))


KNOWN = Calibration("a device", "2.13", "2026-01-01", 9, {"k": TimeModel(0.0, {"us": 1.0}, 1.0, noise=0.1)}, {}, call=0.0)


def test_what_an_error_prevented_is_asked_again(folder, monkeypatch):
    """It may have been memory, or the stack."""
    asked, pattern = [], Asked()

    def works_of(work):
        asked.append(work)
        try:
            raise MemoryError("no memory now")
        except MemoryError as error:
            raise Unfit("a generated kernel is not understood") from error

    monkeypatch.setattr(calibration, "of_device", lambda device: KNOWN)
    monkeypatch.setattr(estimating, "works_of", works_of)
    for _ in range(2):
        assert Gate("auto", 1.0, {}).estimate(pattern, pattern.match(node())).pays is None
    assert len(asked) == 2


@pytest.mark.parametrize("answer", [[[Work("k", {"us": 8.0})]], None])
def test_the_next_compile_does_not_ask_again(answer, folder, monkeypatch):
    asked, pattern = [], Asked()

    def works_of(work):
        asked.append(work)
        if answer is None:
            raise Unfit("it calls a library")
        return answer

    monkeypatch.setattr(calibration, "of_device", lambda device: KNOWN)
    monkeypatch.setattr(estimating, "works_of", works_of)
    found = [Gate("auto", 1.0, {}).estimate(pattern, pattern.match(node())) for _ in range(2)]
    assert len(asked) == 1 and found[0].pays is found[1].pays is (True if answer else None)
    assert found[0].reason == found[1].reason
