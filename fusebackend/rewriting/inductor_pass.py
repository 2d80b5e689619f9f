"""The graph passes that Inductor is given, and how they join those that the user has set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from fusebackend import fx_utils as g
from fusebackend.native import fallbacks
from fusebackend.rewriting import known_indices
from fusebackend.rewriting.apply import rewrite
from fusebackend.rewriting.fuel import Fuel
from fusebackend.rewriting.outcome import GraphOutcome
from fusebackend.rewriting.pattern import Level, Pattern
from fusebackend.rewriting.profitability_policy import ProfitabilityPolicy
from fusebackend.rewriting.switches import select

#: Inductor's configuration entry for each level. Post-grad passes run after Inductor's own, on a cleaner graph.
SLOTS: dict[Level, str] = {"joint": "joint_custom_pre_pass", "post_grad": "post_grad_custom_post_pass"}


@dataclasses.dataclass(frozen=True)
class Original:
    """A graph that was rewritten in place: the outcome's name, the rewritten graph, and a copy of what it was."""

    name: str
    rewritten: fx.GraphModule | None
    copy: Any


class FusePass(CustomGraphPass):
    """Rewrites each graph of one compile with the patterns of one level.

    Inductor keys its caches by ``uuid()``, never by this object, so each compile has passes of its own.

    Args:
        names: the option ``fuse.patterns``.
        uuid: what enters the key of Inductor's caches; None switches them off.
        report_to: called with the outcome of each graph.
        code: whether a graph in which nothing was found is reported with its code.
        prefix: of the graphs' names.
        patterns: those that ``names`` selects, where that was asked before.
        inputs_called: the user's names of the inputs of Dynamo's graph.
        copy: copies a graph before it is rewritten, for ``originals``; None keeps none.

    Attributes:
        outcomes: of the graphs so far, by name.
        originals: the graphs in which something was substituted, until somebody takes them out.
    """

    def __init__(
        self,
        level: Level,
        names: tuple[str, ...],
        uuid: str | None,
        report_to: Callable[[GraphOutcome], None] = lambda outcome: None,
        *,
        strict: bool = False,
        fuel: Fuel | None = None,
        check: bool = False,
        policy: ProfitabilityPolicy | None = None,
        code: bool = False,
        prefix: str = "",
        patterns: Sequence[Pattern] | None = None,
        inputs_called: tuple[str, ...] = (),
        copy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ):
        self.level = level
        self.names = names
        # Selected now: a backward is compiled later, under the same cache key, when other patterns may be switched on.
        self.patterns = [p for p in (select(names) if patterns is None else patterns) if p.level == level]
        self._priorities = {p.name: p.priority for p in self.patterns}
        self.report_to = report_to
        self._settings: dict[str, Any] = dict(strict=strict, fuel=fuel, check=check, policy=policy, inputs_called=inputs_called)
        self._policy = policy
        # Graphs in which forward and backward are still together are shown only where something was found in them.
        self._code = code if level == "post_grad" else None
        self._prefix = prefix
        self._uuid = uuid
        self.seen: dict[str, int] = {}  # how many graphs had each name
        self.outcomes: dict[str, GraphOutcome] = {}
        self._copy = copy
        self.originals: list[Original] = []

    def __call__(self, graph: fx.Graph) -> None:
        name = self.graph_name(graph)
        if self.level == "joint":
            known_indices.note(graph)
        fallbacks.register()  # before anything is timed
        programs_own = fallbacks.custom_operators(graph)
        module = graph.owning_module
        original = Original(name, module, self._copy(module)) if self._copy is not None and module is not None else None
        try:
            outcome = rewrite(graph, self.patterns, name, code=self._code, priorities=self._priorities, **self._settings)
        finally:
            if self._policy is not None:
                self._policy.close()
        fallbacks.register(fallbacks.custom_operators(graph) - programs_own)
        if name in self.outcomes:  # a graph that is compiled a second time, say as a CUDA graph after a race
            outcome = dataclasses.replace(outcome, seconds=outcome.seconds + self.outcomes[name].seconds)
        self.outcomes[name] = outcome
        if original is not None and outcome.substitutions:
            self.originals.append(original)
        self.report_to(outcome)

    def graph_name(self, graph: fx.Graph) -> str:
        """``forward``, ``backward`` or ``joint``; numbered where one compile has several (subgraphs of control flow)."""
        tangents = g.is_joint(graph)
        kind = "backward" if tangents else "forward"
        if self.level == "joint":
            kind = "joint" if tangents else "forward (joint level)"
        count = self.seen[kind] = self.seen.get(kind, 0) + 1
        return f"{self._prefix}{kind}" + (f" #{count}" if count > 1 else "")

    def uuid(self) -> str | None:
        return self._uuid

    def __reduce__(self):
        # Inductor's subprocesses are sent its configuration; what they would report stays with them.
        return FusePass, (self.level, self.names, self._uuid)

    def __deepcopy__(self, memo: dict) -> FusePass:
        return self  # a copy of Inductor's configuration must report to the same place


class Chain(CustomGraphPass):
    """Runs several passes in turn, for versions of torch whose slots take one callable. Code is cached if each pass has a uuid."""

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
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):  # later versions take lists
        return [*users, ours]
    return Chain((*users, ours))
