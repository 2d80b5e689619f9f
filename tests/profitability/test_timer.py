"""What a timing makes of runs that something else made longer."""

import itertools
import time

import torch

from fusebackend.profitability import timer


class Nothing:
    mutated: list[int] = []

    def settle(self, form):
        pass

    def draw(self):
        return []


def test_runs_that_something_else_made_longer_do_not_count():
    """Of each three runs of the first function two are disturbed."""
    runs = itertools.count()

    def disturbed(inputs):
        if next(runs) % 3:
            time.sleep(0.01)

    ours, theirs = timer.times_ms([disturbed, lambda inputs: time.sleep(0.002)], Nothing(), torch.device("cpu"), seconds=0.1)
    assert ours < 1 < theirs
