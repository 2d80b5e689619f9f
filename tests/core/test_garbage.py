"""The garbage collector is paused while graphs are rewritten, and is afterwards as it was."""

import contextlib
import gc

import pytest
import torch
from torch import fx

from fusebackend.garbage import collection_paused, collection_resumed
from fusebackend.rewriting.apply import rewrite
from fusebackend.rewriting.pattern import Pattern

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _collector_restored():
    yield
    gc.enable()


def test_paused_blocks_nest_and_end_as_they_began():
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        with collection_resumed():
            assert gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with collection_paused(), collection_resumed():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_resumed_outside_of_a_pause_changes_nothing():
    with collection_resumed():
        assert gc.isenabled()
    assert gc.isenabled()


class Seeing(Pattern):
    name, anchors = "seeing", (aten.sin.default,)

    def __init__(self, fails: bool):
        self.fails, self.seen = fails, []

    def match(self, node):
        self.seen.append(gc.isenabled())
        if self.fails:
            raise KeyboardInterrupt


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_rewritten_without_it(fails):
    graph = fx.symbolic_trace(lambda x: aten.sin.default(x)).graph
    pattern = Seeing(fails)
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        rewrite(graph, [pattern], "forward", strict=True)
    assert pattern.seen == [False] and gc.isenabled()
