"""The graph passes that are handed to Inductor, and how they join those that the user has set."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from fusebackend import fx_utils as g
from fusebackend.profitability.policy import Gate
from fusebackend.report import model as report
from fusebackend.rewriting.apply import Fuel, rewrite
from fusebackend.rewriting.pattern import Level
from fusebackend.rewriting.registry import select

#: Inductor's configuration entry for each level. Post-grad passes run after Inductor's own, on a cleaner graph.
SLOTS: dict[Level, str] = {"joint": "joint_custom_pre_pass", "post_grad": "post_grad_custom_post_pass"}


class FusePass(CustomGraphPass):
    """Rewrites one graph with the patterns of one level.

    Inductor keys its caches by ``uuid()``, never by this object, so each compile has instances of its own, which carry
    where to report to.
    """

    def __init__(
        self,
        level: Level,
        names: tuple[str, ...],
        uuid: str | None,
        result: report.Report | None = None,
        *,
        strict: bool = False,
        fuel: Fuel | None = None,
        check: bool = False,
        gate: Gate | None = None,
        code: bool = False,
        prefix: str = "",
        done: Callable[[], None] = lambda: None,
    ):
        self.level = level
        self.names = names
        # Taken now: a backward is compiled later, when other patterns may be switched on, under the same cache key.
        self.patterns = [p for p in select(names) if p.level == level]
        self.result = result if result is not None else report.Report()
        self.strict = strict
        self.fuel = fuel
        self.check = check
        self.gate = gate
        # The graphs before forward and backward are parted are of interest only where something was found in them.
        self.code = code if level == "post_grad" else None
        self.prefix = prefix
        self.done = done
        self._uuid = uuid
        self.seen: dict[str, int] = {}

    def __call__(self, graph: fx.Graph) -> None:
        began = time.perf_counter()
        name = self.graph_name(graph)
        self.result.drop_graph(name)
        options: dict[str, Any] = {"strict": self.strict, "fuel": self.fuel, "check": self.check, "code": self.code, "gate": self.gate}
        try:
            rewrite(graph, self.patterns, name, self.result, **options)
        finally:
            if self.gate is not None:
                self.gate.close()
        self.done()
        self.result.seconds += time.perf_counter() - began

    def graph_name(self, graph: fx.Graph) -> str:
        """``forward``, ``backward`` or ``joint``; numbered where one compile has several (subgraphs of control flow)."""
        tangents = g.is_joint(graph)
        kind = "backward" if tangents else "forward"
        if self.level == "joint":
            kind = "joint" if tangents else "forward (joint level)"
        count = self.seen[kind] = self.seen.get(kind, 0) + 1
        return f"{self.prefix}{kind}" + (f" #{count}" if count > 1 else "")

    def uuid(self) -> str | None:
        return self._uuid

    def __reduce__(self):
        # Inductor's subprocess compiles send their configuration along; what is reported there stays there.
        return FusePass, (self.level, self.names, self._uuid)

    def __deepcopy__(self, memo: dict) -> FusePass:
        return self  # copies of Inductor's configuration must go on reporting to the same place


class Chain(CustomGraphPass):
    """Runs several passes in turn, for versions of torch whose slots take one callable. Its parts decide on caching."""

    def __init__(self, passes: tuple[Callable[[fx.Graph], None], ...]):
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any | None:
        parts = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if None in parts else tuple(map(repr, parts))


def chained(slot: str, ours: FusePass, user_patches: dict[str, Any]) -> Any:
    """The value of an Inductor slot: the user's passes (from options or torch._inductor.config), then ours."""
    users = user_patches.get(slot, getattr(inductor_config, slot))
    if users is None:
        return ours
    users = tuple(users) if isinstance(users, (list, tuple)) else (users,)
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):  # lists are taken from some version on
        return [*users, ours]
    return Chain((*users, ours))
