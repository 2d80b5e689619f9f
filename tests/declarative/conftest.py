"""Fixtures of the tests of patterns given as PyTorch functions."""

import itertools

import pytest

import fusebackend

counter = itertools.count()


@pytest.fixture
def pattern():
    """A function that registers a pattern for one test and returns its name."""
    names = []

    def add(search_fn, replace_fn, *example, verify=False, **kwargs):
        name = f"test_traced_{next(counter)}"
        fusebackend.register_replacement(
            search_fn, replace_fn, example[0] if len(example) == 1 else list(example), name=name, verify=verify, **kwargs
        )
        names.append(name)
        return name

    yield add
    for name in names:
        fusebackend.unregister(name)
