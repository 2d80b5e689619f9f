"""Several ranks of a job: the first to ask finds out, for all of them. With processes: tests/compat/test_distributed.py."""

import collections
import dataclasses
import threading

import pytest
import torch

from fusebackend.profitability import channels_last, distributed, region_timing
from fusebackend.profitability.budget import Budget, clock
from fusebackend.profitability.distributed import Ranks
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.measurements import Answer, Measurements

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")

CPU = torch.device("cpu")
MEASUREMENT = Measurement(False, 2.0, 1.0, "region")


@pytest.fixture
def ranks():
    """Three ranks with one store. They are of this process, but count what they asked by themselves."""
    store = torch.distributed.HashStore()
    made = [Ranks(Budget(300.0), 5.0) for _ in range(3)]
    for number, each in enumerate(made):
        each._store, each._rank, each._asked = store, number, collections.Counter()
    return made


def never():
    raise AssertionError("another rank has found out")


def test_the_first_to_ask_finds_out_for_all(ranks):
    answer = Answer(MEASUREMENT, "measured", "key", MEASUREMENT)
    assert ranks[1].agreed("k", CPU, lambda: answer, Answer) == (answer, None)
    assert ranks[0].agreed("k", CPU, never, Answer) == ranks[2].agreed("k", CPU, never, Answer) == (answer, 1)
    assert ranks[2].agreed("other", CPU, lambda: answer, Answer) == (answer, None), "whoever is the only one to ask waits for nobody"


def test_what_one_spends_all_have_spent(ranks):
    def find():
        ranks[0]._budget.charge(7.0, 2.0)
        return Answer(None, "no time left")

    ranks[1]._budget.spent = 1.0
    ranks[0].agreed("k", CPU, find, Answer)
    ranks[1].agreed("k", CPU, never, Answer)
    assert (ranks[0]._budget.spent, ranks[1]._budget.spent) == (7.0, 8.0)
    assert ranks[0]._budget.spent_apart == ranks[1]._budget.spent_apart == 2.0


def test_the_next_compile_may_have_time(ranks):
    ranks[0].agreed("k", CPU, lambda: Answer(None, "no time left"), Answer)
    assert ranks[1].agreed("k", CPU, never, Answer) == (Answer(None, "no time left"), 0)
    assert ranks[1].agreed("k", CPU, lambda: Answer(MEASUREMENT, "measured"), Answer)[1] is None
    assert ranks[0].agreed("k", CPU, never, Answer) == (Answer(MEASUREMENT, "measured"), 1)


def test_what_fails_there_is_left_to_the_estimate_everywhere(ranks):
    def find():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        ranks[0].agreed("k", CPU, find, Answer)
    assert ranks[1].agreed("k", CPU, never, Answer) == (None, 0)


def test_a_rank_waits_for_the_one_that_is_timing(ranks):
    asked, told = threading.Event(), threading.Event()

    def find():
        asked.set()
        told.wait(5)
        return Answer(MEASUREMENT, "measured")

    thread = threading.Thread(target=ranks[0].agreed, args=("k", CPU, find, Answer))
    thread.start()
    asked.wait(5)
    threading.Timer(0.05, told.set).start()
    assert ranks[1].agreed("k", CPU, never, Answer) == (Answer(MEASUREMENT, "measured"), 0)
    thread.join()


def test_a_rank_whose_gpu_waits_for_another_is_not_waited_for(ranks, monkeypatch):
    """Rank 0's stream waits for what rank 1 sends once it has its answer."""
    sent = threading.Event()

    class Stream:
        def synchronize(self):
            assert sent.wait(5), "rank 1 waits for rank 0"

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    found = []

    def rank_0():
        found.append(ranks[0].agreed("k", torch.device("cuda"), never, Answer))

    thread = threading.Thread(target=rank_0)
    thread.start()
    assert ranks[1].agreed("k", CPU, lambda: Answer(MEASUREMENT, "measured"), Answer) == (Answer(MEASUREMENT, "measured"), None)
    sent.set()
    thread.join()
    assert found == [(Answer(MEASUREMENT, "measured"), 1)]


@pytest.mark.parametrize("fault", ["silent", "gone", "garbled", "of another version"])
def test_nobody_waits_for_ever_or_fails(ranks, fault):
    own, store = Answer(None, "own"), ranks[0]._store
    ranks[1]._patience = 0.05
    if fault == "gone":
        ranks[1]._store = object()
    else:
        store.add("k 1 asked", 1)
        if fault == "garbled":
            store.set("k 1", "half a mess")
        if fault == "of another version":
            store.set("k 1", '{"found": {"measured": 1}, "rank": 0, "seconds": [0, 0]}')
    assert ranks[1].agreed("k", CPU, lambda: own, Answer) == (own, None)
    assert ranks[1].agreed("more", CPU, lambda: own, Answer) == (own, None) and not store.check(["more 1"]), "it goes on by itself"
    assert (ranks[1]._budget.spent >= 0.05) is (fault == "silent")


def test_what_another_rank_measured_is_kept_here(ranks, own_cache):
    zero, one = (Measurements(each._budget, each, compiled=False, strict=True) for each in ranks[:2])
    called = dataclasses.replace(MEASUREMENT, kept=True)
    zero.agreed("0a", CPU, lambda: Answer(MEASUREMENT, "measured", "0b-calls", called), kept=False)
    assert one.agreed("0a", CPU, never, kept=True).why == "measured, by rank 0"
    assert one.ask("0b-calls", never, None).measurement == called and one.ask("0a", never, "no time").why == "no time"
    zero.agreed("0c", CPU, lambda: Answer(MEASUREMENT, "measured"), kept=False)
    one.agreed("0c", CPU, never, kept=False)
    assert one.ask("0c", never, "no time").measurement is None
    zero.agreed("0c", CPU, lambda: Answer(MEASUREMENT, "measured"), kept=False)
    one.agreed("0c", CPU, never, kept=True)
    assert one.ask("0c", never, "no time").measurement == MEASUREMENT


def test_one_rank_asks_no_store():
    alone = Ranks(Budget(1.0), 1.0)
    assert alone._store is None and alone.agreed("k", CPU, lambda: Answer(None, ""), Answer) == (Answer(None, ""), None)


def test_first_calls_count_where_others_wait(monkeypatch):
    assert region_timing.first_calls is channels_last.first_calls is distributed.first_calls
    for several in (False, True):
        monkeypatch.setattr(distributed, "has_several_ranks", lambda several=several: several)
        began = clock()
        with distributed.first_calls():
            threading.Event().wait(0.05)
        assert (clock() - began >= 0.05) is several
