"""Which patterns are known and which are on."""

import threading

import pytest
import torch

import fusebackend
from fusebackend import Match, Pattern
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
    with fusebackend.disable("all"):
        assert not names()
        with fusebackend.enable("all"):
            assert "transpose_add" in names()
    for switch in fusebackend.disable, fusebackend.enable:
        with pytest.raises(ValueError, match=rf'{switch.__name__}\(\) takes names of patterns, or "all"; got none'):
            switch()


class Entry:
    """An entry point of another package."""

    dist = None

    def __init__(self, name, load):
        self.name, self.load = name, load


@pytest.fixture
def unloaded(monkeypatch):
    """As before the first compile of a process."""
    monkeypatch.setattr(registry, "_patterns", {})
    monkeypatch.setattr(registry, "_origins", {})
    monkeypatch.setattr(registry, "_failed", {})
    monkeypatch.setattr(registry, "_loaded", False)


def test_another_packages_patterns_come_by_entry_point(monkeypatch, unloaded, caplog):
    calls = []
    found = [Entry("theirs", lambda: lambda: calls.append("called")), Entry("broken", lambda: 1 / 0)]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == "fusebackend.patterns" else [])
    assert "transpose_add" in registry.known_names() and calls == ["called"]
    (record,) = [r for r in caplog.records if r.name == "fusebackend"]
    assert record.getMessage() == "fusebackend: the patterns of entry point 'broken' could not be loaded and are off"
    assert registry.failed_packages() == {"broken, entry point 'broken'": "ZeroDivisionError: division by zero"}


def sine(x):
    return torch.sin(x) * 2


def test_an_entry_point_may_be_a_function_that_registers(monkeypatch, unloaded, caplog):
    """Registering asks which names are taken, and so for all patterns."""

    def patterns():
        fusebackend.register_replacement(sine, lambda x: 2 * torch.sin(x), (torch.randn(4),), name="plug")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry("plug", lambda: patterns)])
    assert {"plug", "transpose_add"} <= set(registry.known_names())
    assert not [r for r in caplog.records if r.name == "fusebackend"]


def test_loading_that_was_interrupted_begins_again(monkeypatch, unloaded, caplog):
    def interrupted(group):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(registry, "entry_points", interrupted)
        registry.known_names()
    assert "transpose_add" in registry.known_names()
    assert not [r for r in caplog.records if r.name == "fusebackend"]


class Sine(Pattern):
    """Takes effect wherever there is a sine; ``waiting`` is called when a graph is matched."""

    anchors = (torch.ops.aten.sin.default,)

    def __init__(self, name, waiting=None, **attributes):
        self.name, self.waiting = name, waiting
        vars(self).update(attributes)

    def match(self, node):
        if self.waiting is not None:
            self.waiting()
        return Match((node,), lambda e: e.call(torch.ops.aten.sin.default, *node.args), note=self.name)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (Sine("early", level="pre_grad"), "pattern 'early': level='pre_grad'; 'joint' or 'post_grad' is accepted"),
        (Sine(None), "Sine.name is None; a string is needed"),
        (Sine("-x"), "Sine.name is '-x'"),
        (Sine("packet", anchors=(torch.ops.aten.sin,)), "a tuple of operators is needed"),
        (Sine("single", anchors=torch.ops.aten.sin.default), "a tuple of operators is needed"),
        (Sine("urgent", priority="high"), "priority='high'; an int is needed"),
        (Sine, "an instance of a subclass of fusebackend.Pattern is needed"),
    ],
)
def test_a_pattern_that_no_compile_could_use_is_refused(pattern, words):
    with pytest.raises(ValueError) as error:
        fusebackend.register(pattern)
    assert words in str(error.value)


def test_a_level_that_is_not_rewritten_is_refused_before_anything_is_traced():
    with pytest.raises(fusebackend.RegistrationError, match="level='pre_grad'; 'joint' or 'post_grad' is accepted"):
        fusebackend.register_replacement(sine, None, (torch.randn(4),), name="early", level="pre_grad")
    with pytest.raises(fusebackend.RegistrationError, match="priority=None; an int is needed"):
        fusebackend.register_replacement(sine, None, (torch.randn(4),), name="early", priority=None)


def test_blocks_of_several_threads_may_end_in_any_order():
    on = lambda: "transpose_add" in {p.name for p in switches.select(("all",))}  # noqa: E731
    first, second, permute = fusebackend.disable("transpose_add"), fusebackend.disable("transpose_add"), fusebackend.disable("permute")
    first.__enter__(), second.__enter__(), permute.__enter__()
    first.__exit__()
    assert not on(), "the second block is open"
    second.__exit__()
    assert on()
    permute.__exit__()
    assert {"transpose_add", "permute"} <= {p.name for p in switches.select(("all",))}


def test_a_compile_keeps_the_patterns_that_it_began_with(temporary_pattern, interpreted):
    """While it matches, another thread takes its pattern away, adds others, changes priorities, and switches it off."""
    began, may_go_on = threading.Event(), threading.Event()

    def waiting():
        began.set()
        assert may_go_on.wait(60)

    temporary_pattern(Sine("test_late"))
    fusebackend.unregister("test_late")
    fusebackend.register(Sine("test_first", waiting, priority=1))
    fusebackend.register(Sine("test_second"))
    reports = []

    def compile_():
        interpreted(lambda x: torch.sin(x) + 1)(torch.ones(3))
        reports.append(fusebackend.last_report())

    thread = threading.Thread(target=compile_)
    thread.start()
    try:
        assert began.wait(60)
        fusebackend.register(Sine("test_late", priority=5))
        fusebackend.prioritize("test_second", 10)
        with fusebackend.disable("test_first"):
            fusebackend.unregister("test_first")
            may_go_on.set()
            thread.join(60)
    finally:
        may_go_on.set()
        fusebackend.unregister("test_second")
    (report,) = reports
    assert report.counts() == {"test_first": 1}
    assert {r.pattern for r in report.rejections} == {"test_second"}


def test_threads_register_trace_and_compile_at_once(interpreted):
    errors, done = [], threading.Event()

    def guarded(work):
        def run():
            try:
                while not done.is_set():
                    work()
            except Exception as error:
                errors.append(error)

        return threading.Thread(target=run)

    def register_and_forget():
        name = f"test_thread_{threading.get_ident()}"
        fusebackend.register(Sine(name))
        with fusebackend.disable(name), fusebackend.enable(name):
            fusebackend.prioritize(name, 3)
        fusebackend.unregister(name)

    def trace():
        fusebackend.register_replacement(sine, lambda x: 2 * torch.sin(x), (torch.randn(4),), name="test_traced", verify=False)
        fusebackend.unregister("test_traced")

    threads = [guarded(register_and_forget), guarded(register_and_forget), guarded(trace)]
    for thread in threads:
        thread.start()
    try:
        x, y = torch.randn(6, 4), torch.randn(4, 6)
        for _ in range(10):
            torch._dynamo.reset()
            fn = lambda x, y: torch.sin(x).t() + y  # noqa: E731
            torch.testing.assert_close(interpreted(fn)(x, y), fn(x, y))
            assert fusebackend.last_report().counts()["transpose_add"] == 1
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert not [n for n in registry.known_names() if n.startswith("test_")]
    for slot in ("joint_custom_pre_pass", "post_grad_custom_post_pass"):
        assert getattr(torch._inductor.config, slot) is None, "a configuration that was left behind"
