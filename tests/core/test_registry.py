"""Which patterns are known and which are on."""

import pytest

import fusebackend
from fusebackend.rewriting import registry, switches


def test_patterns_are_switched_off_and_on_for_a_block():
    names = lambda: {p.name for p in switches.select(("all",))}  # noqa: E731
    with fusebackend.disable("transpose_add"):
        assert "transpose_add" not in names()
        with fusebackend.enable("transpose_add"):
            assert "transpose_add" in names()
        assert "transpose_add" not in names()
        assert "transpose_add" in {p.name for p in switches.select(("transpose_add",))}
    assert "transpose_add" in names()
    with pytest.raises(ValueError, match="did you mean 'transpose_add'"):
        fusebackend.disable("transpose_ad")


def test_another_packages_patterns_come_by_entry_point(monkeypatch):
    calls = []

    class Entry:
        name = "theirs"

        def __init__(self, load):
            self.load = load

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry(lambda: lambda: calls.append(group)), Entry(lambda: 1 / 0)])
    registry._load.__wrapped__()
    assert calls == ["fusebackend.patterns"]
