"""The options of ``torch.compile(model, backend="fuse", options={...})``.

Names that begin with ``fuse.`` are ours. ``mode`` is torch.compile's, which refuses ``mode=`` together with ``options=``, so it is accepted
here. Everything else is passed to Inductor, whose own checks then apply.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

#: Our options: name -> (what it accepts, what it does). ``python -m fusebackend env`` prints this table.
OPTIONS: dict[str, tuple[str, str]] = {
    "fuse.patterns": ('"all", or a list of pattern names; "-name" leaves one out', "which patterns are tried"),
    "fuse.channels_last": (
        "bool",
        "run a graph's 2-D convolutions channels last where that was timed to be faster, whatever Inductor's rule; by default "
        "unless patterns are named",
    ),
    "fuse.strict": ("bool", "raise when a pattern fails instead of leaving its site to Inductor"),
    "fuse.fuel": (
        "int >= 0 or None",
        "apply only the first n substitutions since torch._dynamo.reset(); switches Inductor's caches off",
    ),
    "fuse.gate": (
        '"auto", "measure", "race" or "off"',
        "whether a substitution pays: kept verdicts and cheap timings; every region timed; whole graphs too; apply all",
    ),
    "fuse.gate_seconds": ("number >= 0", "how long one compile may spend on timing (default 300); looked at before each"),
    "fuse.check": (
        '"off" or "numeric"',
        "run the original beside each substitution; fusebackend.numeric_errors() tells",
    ),
    "fuse.interpret": ("bool", "run the rewritten graph without Inductor's code generation (for debugging; slow)"),
}

_CHOICES = {"fuse.check": ("off", "numeric"), "fuse.gate": ("auto", "measure", "race", "off")}


@dataclasses.dataclass(frozen=True)
class Options:
    """Parsed options. ``inductor`` holds those that are passed to Inductor; ``mode`` is torch.compile's mode or None."""

    patterns: tuple[str, ...] = ("all",)
    channels_last: bool | None = None
    strict: bool = False
    fuel: int | None = None
    interpret: bool = False
    check: str = "off"
    gate: str = "auto"
    gate_seconds: float = 300.0
    mode: str | None = None
    inductor: tuple[tuple[str, Any], ...] = ()

    def given(self) -> dict[str, Any]:
        """What differs from the defaults, under the names that the user gives."""
        ours = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "inductor"}
        named = {name if name == "mode" else f"fuse.{name}": value for name, value in ours.items() if value != getattr(Options(), name)}
        return {**named, **dict(self.inductor)}

    @property
    def chooses_memory_order(self) -> bool:
        """Whether the order in which convolutions run may be chosen: unless told, not where somebody names the patterns that they want."""
        if self.channels_last is not None:
            return self.channels_last
        named = [n for n in self.patterns if n != "all" and not n.startswith("-")]
        return bool(self.patterns) and not named and "-all" not in self.patterns

    @property
    def cacheable(self) -> bool:
        """Whether compiled code may be kept."""
        return self.fuel is None and not self.interpret


def parse(mode: str | None = None, options: dict[str, Any] | None = None, *, known_patterns: Iterable[str]) -> Options:
    """Checks and sorts what the user gave to ``torch.compile``.

    Args:
        known_patterns: the names that ``fuse.patterns`` accepts.

    Raises:
        ValueError: an unknown option or mode, or a value outside what an option accepts. The message names the
            argument, what was given and what is accepted.
    """
    if not isinstance(options, (dict, type(None))):
        raise ValueError(f"options={options!r}; a dict is accepted")
    own: dict[str, Any] = {}
    inductor: list[tuple[str, Any]] = []
    for name, value in (options or {}).items():
        if not isinstance(name, str):
            raise ValueError(f"names of options are strings, got {name!r}")
        if name == "mode":
            if mode is not None and value != mode:
                raise ValueError(f"mode was given twice: mode={mode!r} and options['mode']={value!r}")
            mode = value
        elif name.startswith("fuse."):
            if name not in OPTIONS:
                raise ValueError(_unknown(name, list(OPTIONS)))
            own[name.removeprefix("fuse.")] = _checked(name, value, known_patterns)
        else:
            _check_inductor_name(name)
            inductor.append((name, value))
    _check_mode(mode)
    return Options(mode=mode, inductor=tuple(inductor), **own)


def _checked(name: str, value: Any, known_patterns: Iterable[str]) -> Any:
    accepted = OPTIONS[name][0]
    wrong = ValueError(f"option {name!r}: got {value!r}, accepted: {accepted}")
    if name == "fuse.patterns":
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise wrong
        known = list(known_patterns)
        for n in names:
            if n.removeprefix("-") not in (*known, "all"):
                raise ValueError(_unknown(n.removeprefix("-"), known, what=f"pattern in option {name!r}"))
        return tuple(names)
    if name == "fuse.fuel":
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise wrong
        return value
    if name == "fuse.gate_seconds":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise wrong
        try:
            return float(value)
        except OverflowError:
            raise wrong from None
    if name in _CHOICES:
        if not isinstance(value, str) or value not in _CHOICES[name]:
            raise wrong
        return value
    if not isinstance(value, bool):
        raise wrong
    return value


def _check_inductor_name(name: str) -> None:
    from torch._inductor import config

    known = config.get_config_copy()
    if name.replace("-", "_") not in known:
        raise ValueError(_unknown(name, [*OPTIONS, "mode", *known], listed=[*OPTIONS, "mode"]))


def _check_mode(mode: str | None) -> None:
    from torch._inductor import list_mode_options

    modes = list(list_mode_options())
    if mode is not None and mode not in modes:
        raise ValueError(_unknown(str(mode), modes, what="mode"))


def _unknown(name: str, known: list[str], what: str = "option", listed: list[str] | None = None) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    more = "" if listed is None else ", or any of Inductor's (torch._inductor.list_options())"
    return f"unknown {what} {name!r}{hint} Accepted: {', '.join(listed if listed is not None else known)}{more}"
