"""What changed between two reports of a program: what is substituted now or no longer, other reasons, other times, another context."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable

from fusebackend.report.model import Report
from fusebackend.report.module_paths import condensed
from fusebackend.rewriting.outcome import Rejection, Substitution, Verdict

_Site = tuple[str, str, str]  # pattern, graph, module or function and file


@dataclasses.dataclass(frozen=True)
class Change:
    """What happened to sites that are alike: ``count`` of them in ``modules``, written short.

    Attributes:
        what: ``"no longer substituted"``, ``"substituted now"``, ``"other replacement"``, ``"other reason"``, ``"other time"``,
            ``"near miss gone"`` or ``"new near miss"``.
        before, after: what was said of them then, and now.
    """

    what: str
    pattern: str
    graph: str
    modules: str
    count: int
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The changes, and what differs between the contexts and coverages, as (name, before, after)."""

    changes: list[Change]
    context: list[tuple[str, str, str]]

    def __str__(self) -> str:
        lines = [f"compared with the earlier report: {len(self.changes)} changes" if self.changes else "no site changed"]
        lines += [f"  {name}: {before} -> {after}" for name, before, after in self.context]
        for c in self.changes:
            where = f"{c.pattern} in {c.graph}" + (f" at {c.modules}" if c.modules else "") + (f" (x{c.count})" if c.count > 1 else "")
            lines.append(f"  {c.what}: {where}")
            lines += [f"    {when}: {said}" for when, said in (("then", c.before), ("now", c.after)) if said]
        return "\n".join(lines)


def compare(old: Report, new: Report) -> Comparison:
    """Compares two reports. Sites are told apart by pattern, graph, module path, file and function: not by line, which an edit elsewhere
    changes."""
    before, after = _said(old), _said(new)
    found: dict[tuple[str, str, str, str, str], list[str]] = collections.defaultdict(list)
    for site in dict.fromkeys((*before, *after)):
        pattern, graph, place = site
        olds, news = before.get(site, []), after.get(site, [])
        for then, now in _unequal(olds, news):
            what = _what(then, now)
            if what:
                found[what, pattern, graph, then[1], now[1]].append(place.partition("\0")[0])
    changes = [
        Change(what, pattern, graph, condensed(modules), len(modules), then, now)
        for (what, pattern, graph, then, now), modules in found.items()
    ]
    return Comparison(sorted(changes, key=lambda c: _ORDER.index(c.what)), _contexts(old, new))


_ORDER = ["no longer substituted", "substituted now", "other replacement", "other reason", "other time", "near miss gone", "new near miss"]
_NOTHING = ("", "")


def _said(report: Report) -> dict[_Site, list[tuple[str, str]]]:
    """What a report says of each site: (``"substituted"``, ``"rejected"`` or ``"timed"``, the words)."""
    found: dict[_Site, list[tuple[str, str]]] = collections.defaultdict(list)
    for s in report.substitutions:
        found[_site(s)].append(("substituted", s.note or " ".join(s.replacement)))
    for r in report.rejections:
        found[_site(r)].append(("rejected", r.reason))
    for v in report.verdicts:
        if v.gain is not None:
            found[_site(v)].append(("timed", str(v)))
    return found


def _site(item: Substitution | Rejection | Verdict) -> _Site:
    graph = re.sub(r"^\d+: ", "", item.graph)  # the number of the compile within an explanation
    return item.pattern, graph, f"{item.module}\0{item.source.file}\0{item.source.function}"


def _unequal(olds: Iterable[tuple[str, str]], news: Iterable[tuple[str, str]]) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """What is said in one report only, in pairs as far as there are two; times apart from the rest."""
    pairs = []
    for timed in (False, True):
        then, now = (collections.Counter(w for w in words if (w[0] == "timed") == timed) for words in (olds, news))
        left, right = list((then - now).elements()), list((now - then).elements())
        count = max(len(left), len(right))
        pairs += list(zip(left + [_NOTHING] * (count - len(left)), right + [_NOTHING] * (count - len(right))))
    return pairs


def _what(then: tuple[str, str], now: tuple[str, str]) -> str:
    kinds = then[0], now[0]
    if "timed" in kinds:
        return "other time" if then[0] == now[0] else ""  # what was timed only once can't be compared
    if kinds == ("substituted", "substituted"):
        return "other replacement"
    if "substituted" in kinds:
        return "substituted now" if now[0] == "substituted" else "no longer substituted"
    return "other reason" if all(kinds) else "new near miss" if now[0] else "near miss gone"


def _contexts(old: Report, new: Report) -> list[tuple[str, str, str]]:
    names = [name for name in dict.fromkeys((*old.context, *new.context)) if old.context.get(name) != new.context.get(name)]
    found = [(name, old.context.get(name, "not said"), new.context.get(name, "not said")) for name in names]
    before, after = ("not counted" if c is None else str(c) for c in (old.coverage(), new.coverage()))
    return found + ([("coverage", before, after)] if before != after else [])
