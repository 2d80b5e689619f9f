"""Which code comes from Inductor's caches, where the default gate timed something of it, and what compiles it again."""

import dataclasses

import pytest
import torch
from slow_product import are_from_cache, compiled, mm, slow_mm, square
from timed_patterns import Alternatives, Exchanged, Open, OpenProduct

import fusebackend
from fusebackend.profitability import measurement_store
from fusebackend.profitability.budget import Budget


@pytest.mark.parametrize("pays", [None, True])
@pytest.mark.parametrize("to_slow", [False, True])
def test_code_of_which_library_calls_were_timed_comes_from_the_cache(pays, to_slow, temporary_pattern, timed):
    """Whether the estimate said so or not."""
    old, new = (mm, slow_mm) if to_slow else (slow_mm, mm)
    temporary_pattern(Exchanged(old, new, pays))
    fn = compiled(lambda x, y: old(x, y), "auto", ["test_exchanged"])
    assert are_from_cache(fn, *square(), times=3) == [False, True, True]
    assert fusebackend.last_report().counts() == ({} if to_slow else {"test_exchanged": 1})
    ((key, kept),) = measurement_store.stored()
    measurement_store.save(key, dataclasses.replace(kept, kept=not kept.kept))
    assert are_from_cache(fn, *square()) == [False, True], "until the times are others"
    assert fusebackend.last_report().counts() == ({"test_exchanged": 1} if to_slow else {})


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_code_of_which_a_replacement_was_timed_comes_from_the_cache(seconds, temporary_pattern, timed):
    temporary_pattern(Open(seconds, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3)))
    fn, x = compiled(torch.sin, "auto", ["test_open"]), torch.randn(64)
    assert are_from_cache(fn, x, times=3) == [False, True, True] and len(timed) == 1
    assert len(fusebackend.last_report().substitutions) == (seconds == 0)
    if seconds == 0:
        measurement_store.clear()
        assert are_from_cache(fn, x) == [False, True] and len(timed) == 2


@pytest.mark.parametrize("ended", [1, 2], ids=["before it was built", "when it was built"])
def test_what_was_timed_later_in_a_compile_is_no_reason_for_another(ended, temporary_pattern, timed, monkeypatch):
    """For the first of two like sites there is no time, and for the second there is."""
    asked = []
    monkeypatch.setattr(Budget, "why_default_spent", lambda self, *what: asked.append(what) or ("none" if len(asked) == ended else None))
    temporary_pattern(Open(0.0, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3)))
    fn = compiled(lambda x, y: (x.sin() + 1, y.sin().exp()), "auto", ["test_open"])
    assert are_from_cache(fn, torch.randn(64), torch.randn(64)) == [False, True]
    assert fusebackend.last_report().counts() == {"test_open": 1} and len(timed) == 1


def test_what_was_timed_and_did_not_tell_is_no_reason_for_another_compile(temporary_pattern, timed, monkeypatch):
    """Then there was no time for a like site."""
    monkeypatch.setattr(Budget, "why_default_spent", lambda self, *_: "none" if timed else None)
    temporary_pattern(OpenProduct(0.02))
    fn = compiled(lambda x, y, z: ((x @ y).sin() + 1, (y @ z).sin().exp()), "auto", ["test_open"])
    assert are_from_cache(fn, *(torch.randn(64, 64) for _ in range(3))) == [False, True]
    assert not fusebackend.last_report().substitutions and len(timed) == 1


def test_code_is_compiled_again_for_times_that_may_say_that_a_site_pays(temporary_pattern, timed, monkeypatch):
    """Of other compiles: a graph in which there was no time for the site, and one in which there was."""
    spent = ["none"]
    monkeypatch.setattr(Budget, "why_default_spent", lambda self, *_: spent[0])
    temporary_pattern(Exchanged(slow_mm, mm, None))
    fn, inputs = compiled(slow_mm, "auto", ["test_exchanged"]), square()
    assert are_from_cache(fn, *inputs) == [False, True]
    spent[0] = None
    compiled(lambda x, y: slow_mm(x, y) + 1, "auto", ["test_exchanged"])(*inputs)
    ((key, kept),) = measurement_store.stored()
    assert kept.kept
    measurement_store.save(key, dataclasses.replace(kept, kept=False))
    assert are_from_cache(fn, *inputs) == [True, True], "they say that it does not"
    measurement_store.save(key, kept)
    assert are_from_cache(fn, *inputs) == [False, True]
    assert fusebackend.last_report().counts() == {"test_exchanged": 1}


def test_code_that_was_estimated_to_pay_is_compiled_again_once_it_was_timed_to_be_slower(temporary_pattern, timed, monkeypatch):
    """When it was compiled there was no time."""
    spent = ["none"]
    monkeypatch.setattr(Budget, "why_default_spent", lambda self, *_: spent[0])
    temporary_pattern(Exchanged(mm, slow_mm, True))
    fn, inputs = compiled(lambda x, y: torch.mm(x, y) * 2, "auto", ["test_exchanged"]), square()
    assert are_from_cache(fn, *inputs) == [False, True] and fusebackend.last_report().counts() == {"test_exchanged": 1}
    spent[0] = None
    compiled(lambda x, y: torch.mm(x, y) + 1, "auto", ["test_exchanged"])(*inputs)
    spent[0] = "none"
    assert are_from_cache(fn, *inputs) == [False, True] and not fusebackend.last_report().substitutions


def test_code_with_a_rival_comes_from_the_cache(temporary_pattern, timed):
    temporary_pattern(Alternatives(0.0))
    assert are_from_cache(compiled(torch.sin, "auto", ["test_open"]), torch.randn(64), times=3) == [False, True, True]
