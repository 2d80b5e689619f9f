"""The graph passes alone, for those who compile with plain Inductor or with a compiler of their own on top of it.

    import torch._inductor.config as config

    config.post_grad_custom_post_pass = fusebackend.passes.post_grad(patterns=["my_norm"])
    compiled = torch.compile(model)      # Inductor, with these substitutions

A pass is a callable on an ``fx.Graph`` with a ``uuid()``: what Inductor's slots take. Each graph has a report of its own
(:func:`fusebackend.last_report`). Nothing is timed; kept verdicts and estimates decide (option ``fuse.gate``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fusebackend.native import loader
from fusebackend.options import parse
from fusebackend.report import history
from fusebackend.rewriting.inductor_pass import SLOTS
from fusebackend.rewriting.pattern import Level
from fusebackend.rewriting.registry import all_patterns, get
from fusebackend.session import Session, code_identity

Gate = Literal["auto", "off"]


def post_grad(patterns: Sequence[str] | str = "all", *, gate: Gate = "auto") -> CustomGraphPass:
    """A pass for ``torch._inductor.config.post_grad_custom_post_pass``: forward and backward graphs, each by itself.

    Args:
        patterns: as the option ``fuse.patterns``.
        gate: ``"auto"``, or ``"off"`` to apply every legal match.

    Raises:
        ValueError: no pattern of that name, or one that is of the other level.
    """
    return _Pass("post_grad", patterns, gate)


def joint(patterns: Sequence[str] | str = "all", *, gate: Gate = "auto") -> CustomGraphPass:
    """A pass for ``torch._inductor.config.joint_custom_pre_pass``: forward and backward together, where patterns given as PyTorch are found
    by default. See :func:`post_grad`."""
    return _Pass("joint", patterns, gate)


class _Pass(CustomGraphPass):
    """One pass for any number of compiles. What is registered or switched off in between counts from the next graph on."""

    def __init__(self, level: Level, patterns: Sequence[str] | str, gate: Gate):
        if gate not in ("auto", "off"):
            raise ValueError(f"passes.{level}: gate={gate!r}; 'auto' or 'off' is accepted (nothing is timed here)")
        chosen: dict[str, Any] = {"fuse.patterns": patterns, "fuse.gate": gate}
        known = all_patterns()
        self._level = level
        self._options = parse(None, chosen, known_patterns=[p.name for p in known])
        for name in () if isinstance(patterns, str) else patterns:
            if not name.startswith("-") and name != "all" and get(name).level != level:
                other = get(name).level
                raise ValueError(f"passes.{level}: pattern {name!r} is of level {other!r}: give it to passes.{other}")

    def __call__(self, graph: fx.Graph) -> None:
        # The slots hold this pass: a session that looked there would call it again.
        with inductor_config.patch(dict.fromkeys(SLOTS.values())):
            session = Session(self._options, loader.load(), all_patterns())
        history.add(session.report)
        own = session.config_patches.get(SLOTS[self._level])
        if own is not None:  # there is no pattern of this level
            own(graph)

    def uuid(self) -> str | None:
        code = code_identity(self._options, loader.load())
        return None if code is None else f"{code}-{self._level}"

    def __reduce__(self) -> tuple:  # Inductor's subprocesses are sent its configuration
        return _Pass, (self._level, tuple(self._options.patterns), self._options.gate)
