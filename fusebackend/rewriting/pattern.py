"""The vocabulary of rewriting: ``Pattern``, ``Match``, ``Reject``, ``Estimate``, ``Emitter``.

A pattern names the operators it anchors on. Shown such a node, it answers one of three things: a ``Match``, what to replace by what; a
``Reject``, a near miss with its reason, which is reported; or ``None``, not a candidate. Matching never changes the graph:
:mod:`fusebackend.rewriting.apply` does, and checks each replacement first.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from fusebackend import cache_keys
from fusebackend.native import ops

Level = Literal["joint", "post_grad"]

#: Why a site was left to Inductor: what is there, what pays, and what the user asked for.
Code = Literal[
    "unsupported", "illegal", "no_kernel", "failed",
    "fused_neighbour", "estimated_slower", "unmeasured", "measured_slower",
    "overlap", "out_of_fuel",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reject:
    """A near miss: the anchor was a candidate and a guard failed.

    Attributes:
        reason: one sentence for the user: what was found, and what is accepted.
        node: the node at which the guard failed; the anchor if None.
        code: the kind of reason.
            ``"unsupported"``: no kernel covers this form. ``"illegal"``: the replacement would be wrong. ``"no_kernel"``: there is
            none for this device. ``"failed"``: the pattern raised. ``"fused_neighbour"``: Inductor would fuse the site with a
            neighbour. ``"estimated_slower"``, ``"measured_slower"``: it does not pay. ``"unmeasured"``: whether it pays is not known.
            ``"overlap"``: another substitution took a part of it. ``"out_of_fuel"``: the option ``fuse.fuel`` stopped it.
    """

    reason: str
    node: fx.Node | None = None
    code: Code = "unsupported"


@dataclasses.dataclass(frozen=True)
class Interval:
    """A time in microseconds, and between which two it probably lies."""

    expected: float
    low: float
    high: float

    @classmethod
    def around(cls, expected: float, half_width: float) -> Interval:
        """``half_width`` is a logarithm: an interval from ``expected / exp(half_width)`` to ``expected * exp(half_width)``."""
        return cls(expected, expected * math.exp(-half_width), expected * math.exp(half_width))

    def __add__(self, other: Interval | None) -> Interval:
        """One time after the other, with independent errors."""
        if other is None:
            return self
        expected = self.expected + other.expected
        error = math.hypot(self.expected * self.half_width, other.expected * other.half_width) / expected if expected > 0 else 0.0
        return Interval.around(expected, error)

    def at_least(self, least: float) -> Interval:
        """The same time, of which it is known that it is not less than ``least``."""
        if least <= self.low:
            return self
        expected = max(self.expected, least)
        return Interval(expected, least, max(self.high, expected * math.exp(self.half_width)))

    @property
    def half_width(self) -> float:
        return math.log(self.high / self.expected) if self.expected > 0 else 0.0

    def __str__(self) -> str:
        return f"{self.expected:.3g} us ({self.low:.3g} to {self.high:.3g})"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Whether a legal match pays, as far as that can be told without timing it.

    Attributes:
        pays: True, False, or None where it can't be told: such a match is applied only if a measurement says so.
        reason: why it does not pay, or why that can't be told, in a sentence for the user; empty where it pays.
        code: the kind of reason, as for :class:`Reject`.
        node: the node that decides, e.g. the neighbour; the anchor if None.
        instead: the same site with less of it replaced, where only that pays, or may; what is said here is then said of it.
        ours, inductor: how long the replacement and the original take, where that was estimated.
        generated: how long what Inductor generates for the original takes, where the rest, its library calls, was not.
        orders: as for :class:`Workload`.
        around: the part of ``ours`` that kernels around the replacement take; None if there are none.
        rival: where ``ours`` is not known: the same site replaced otherwise, of which both times are. It is taken, if it pays, where a
            measurement does not show this form to be faster.
        untimed: as for :class:`Workload`.
        is_lighter: whether its library calls take less of the host than the original's: where both take the device as long, the replacement
            is taken.
    """

    pays: bool | None = True
    reason: str = ""
    code: Code = "estimated_slower"
    node: fx.Node | None = None
    instead: Match | None = None
    ours: Interval | None = None
    inductor: Interval | None = None
    generated: Interval | None = None
    orders: Mapping[fx.Node, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    around: Interval | None = None
    rival: Estimate | None = None
    untimed: str = ""
    is_lighter: bool = False


@dataclasses.dataclass(frozen=True)
class Work:
    """What one kernel, or one library call, makes a device do, as far as its time depends on it.

    Attributes:
        kind: which model of a calibration knows how long that takes, e.g. ``"permute"``.
        quantities: how much of each thing, by name: bytes, cache lines, blocks, operations; each at least 0. Each takes time at a rate that
            the calibration knows.
        shape: what else the efficiency depends on, by name: lengths of runs, alignments, whether sizes are dynamic. Numbers that span
            orders of magnitude are given as logarithms.
        share: the part of its time that is counted here, where other sites use the result too.
        otherwise: the same as work of a more general kind, for a calibration that does not know this one.
        around: whether it is a kernel around the replacement, which is not timed with it: of a neighbour that is not fused any more.
    """

    kind: str
    quantities: Mapping[str, float]
    shape: Mapping[str, float] = dataclasses.field(default_factory=dict)
    share: float = 1.0
    otherwise: Work | None = None
    around: bool = False


@dataclasses.dataclass(frozen=True)
class Generated:
    """The work of what Inductor generates for some nodes by themselves: it is asked.

    Attributes:
        nodes: the nodes.
        outputs: those whose values are wanted; all that other nodes read if there are none.
        otherwise: the work where Inductor can't be asked, or what it generates is not understood; None if it is not known then.
        family: whose sites these are, where a calibration may know more of such kernels than of all that Inductor generates.
        is_unlike_others: whether what is known of all that Inductor generates tells nothing of the family's.
        orders: as for :class:`Workload`.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...] = ()
    otherwise: Work | None = None
    family: str = ""
    is_unlike_others: bool = False
    orders: Mapping[fx.Node, tuple[int, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What both forms of a match make the device do. A calibration turns it into times, which decide (:class:`Estimate`).

    Attributes:
        ours: of the replacement, with what is paid for it elsewhere: a neighbour that Inductor can't fuse any more is a kernel of its own.
            What Inductor generates there is around the replacement.
        inductor: of the original.
        neighbour: the node whose fusion would be lost, for the report.
        match: the same site with less of it replaced, or replaced otherwise, if that is what is described; None for the match itself.
        is_alternative: whether ``match`` replaces the whole site, in another way: its time and the match's may be compared.
        untimed: why timing both forms alone would not tell which is faster in this graph. Where a calibration does not tell either, the
            site is left to Inductor.
        orders: the dims from the outermost to the innermost in memory of inputs that Inductor will lay out otherwise than the graph
            says: both forms are timed on such.
        spared: what Inductor is spared, at most, where what it generates for all of the original can't be described: it is not asked where
            the work of the replacement that is described takes longer.
    """

    ours: tuple[Work | Generated, ...]
    inductor: tuple[Work | Generated, ...]
    neighbour: fx.Node | None = None
    match: Match | None = None
    is_alternative: bool = False
    untimed: str = ""
    orders: Mapping[fx.Node, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    spared: tuple[Work, ...] = ()


@dataclasses.dataclass(frozen=True)
class Match:
    """What to replace by what.

    Attributes:
        outputs: the nodes whose values the replacement computes, in the order in which ``emit`` returns them. What ``emit`` returns
            must agree with them in shape, dtype, stride, device and aliasing, or nothing is changed.
        emit: builds the replacement with the :class:`Emitter` it is given and returns the new node (or a tuple of them). It may use
            any node that stands before the outputs.
        interior: further nodes that the replacement makes unnecessary; no node outside the match may use them.
        note: shown in the report, e.g. what was absorbed.
        unproven: why it can't be told whether the replacement is faster, for a pattern without an ``estimate`` of its own. Such a
            match is applied only if a measurement says so.
        site: what the pattern parsed at this site, for its ``estimate``.
        draws_nothing: matched nodes of random operators that draw no random numbers with the arguments that they have, such as attention
            without dropout.
    """

    outputs: tuple[fx.Node, ...]
    emit: Callable[[Emitter], fx.Node | Sequence[fx.Node]]
    interior: tuple[fx.Node, ...] = ()
    note: str = ""
    unproven: str = ""
    site: Any = None
    draws_nothing: frozenset[fx.Node] = frozenset()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (*self.interior, *self.outputs)


class Refusal(RuntimeError):
    """An operator's fake refuses its arguments, as its kernel would."""


class Emitter:
    """Inserts the nodes of a replacement into the graph, each with its fake value computed at once.

    With one output they are inserted right before it. With several, which may stand as far apart as forward and backward, each is
    inserted right behind the last of its inputs, so that it is computed before any user of an output.
    """

    def __init__(self, outputs: tuple[fx.Node, ...], fake_mode: Any):
        self._outputs = outputs
        self._fake_mode = fake_mode
        self.nodes: list[fx.Node] = []

    def call(self, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        """Inserts ``target(*args, **kwargs)``; arguments may hold nodes, also inside lists."""
        held = target if isinstance(target, torch._ops.OpOverload) and ops.holds_strides(target) else None
        if held is not None:
            args, kwargs = ops.with_self_by_position(held, args, kwargs)
        anchor = min(self._outputs)
        inputs: list[fx.Node] = []
        fx.node.map_arg((args, kwargs), inputs.append)
        behind = max(inputs) if len(self._outputs) > 1 and inputs else None
        if behind is not None and behind.op == "placeholder":  # placeholders stay together at the top
            behind = max(anchor.graph.find_nodes(op="placeholder"))
        with anchor.graph.inserting_before(anchor) if behind is None else anchor.graph.inserting_after(behind):
            node = anchor.graph.call_function(target, args, kwargs)
        self.nodes.append(node)
        node.meta.update(inherited_meta(anchor))
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._fake_mode:
            try:
                node.meta["val"] = target(*fake_args, **fake_kwargs)
            except RuntimeError as error:
                if getattr(target, "namespace", "") in ("", "aten", "prims"):
                    raise
                raise Refusal(str(error)) from error
        if held is not None:
            # Without it Inductor takes the operator for one of a pass that reads any order: it runs what stands between convolutions
            # channels last, and would give it that.
            node.meta["eager_input_vals"] = fake_args, fake_kwargs
        return node

    def before(self, node: fx.Node) -> Emitter:
        """An emitter that inserts right before ``node``, which must not stand behind the outputs: for what other matches will use too.
        What it inserts is checked, and taken back if the match is refused, together with the rest."""
        earlier = Emitter((node,), self._fake_mode)
        earlier.nodes = self.nodes
        return earlier


def inherited_meta(node: fx.Node) -> dict[str, Any]:
    """The metadata that a replacement takes over from the node that it replaces: where it comes from, not what its value is."""
    return {k: v for k, v in node.meta.items() if k not in _META_OF_VALUES}


_META_OF_VALUES = frozenset({"val", "tensor_meta", "unbacked_bindings", "eager_input_vals", "arg_kwarg_vals", "original_aten"})


class Pattern(abc.ABC):
    """One thing to look for. Subclass it, and give an instance to :func:`fusebackend.register`.

    Attributes:
        name: how options and reports call it.
        anchors: the operators at whose nodes ``match`` is called.
        level: ``"post_grad"``, after Inductor's decompositions, on forward and backward graphs alike; or ``"joint"``,
            before forward and backward are partitioned, for families that rewrite both together.
        priority: of two matches that overlap the higher wins, then the larger.
        devices: the types of devices on which the operators that it looks for run, and so its examples.
        last: whether it is looked for in what the others leave, once these are applied: what else it would find may be theirs.
        replaces_scatters: whether it replaces the gradients of gathered pixels by what takes as long channels last as in planes, where
            Inductor's scatters take several times as long: they are not charged to that memory order then.
    """

    name: str
    anchors: tuple[torch._ops.OpOverload, ...]
    level: Level = "post_grad"
    priority: int = 0
    devices: tuple[str, ...] = ("cpu", "cuda")
    last: bool = False
    replaces_scatters: bool = False

    @abc.abstractmethod
    def match(self, node: fx.Node) -> Match | Reject | None:
        """Whether the site around one anchor node may be replaced, not whether that pays.

        Must not change the graph and must not add guards on symbolic sizes.
        """

    def nearest(self, node: fx.Node) -> tuple[float, Reject] | None:
        """How much of what is looked for is at one anchor node, from 0 to 1, and what differs; None where that can't be told.

        For ``explain(..., pattern=)``, which asks it where ``match`` answers None.
        """
        return None

    def estimate(self, match: Match) -> Estimate | Workload | Sequence[Workload]:
        """Whether ``match`` pays at its site, or what both forms do, from which a calibration tells whether it pays. Of several workloads,
        which describe less and less of the match, the one that gains most is taken. Called before the replacement is built; must not change
        the graph.

        By default a match pays, unless it says itself that this is not known (:attr:`Match.unproven`).
        """
        return Estimate(None, match.unproven, "unmeasured") if match.unproven else Estimate()

    def examples(self) -> list[tuple[Callable, tuple]]:
        """Functions with arguments in which this pattern must be found; :func:`fusebackend.verify` runs them."""
        return []

    def fingerprint(self) -> str:
        """Identifies what this pattern does, across processes; a part of the key of compiled graphs.

        By default it covers the source of the module that defines the pattern, the instance's attributes, and the functions, classes and
        constants of other modules that its methods read; PyTorch and installed packages by their version.

        Raises:
            fusebackend.identity.UnidentifiableError: the source can't be read (a class that was typed in), or a value can't be told apart
                across processes (a tensor). Nothing that is compiled with the pattern is cached then.
        """
        return cache_keys.pattern(self)

    def __repr__(self) -> str:
        return f"<pattern {self.name}>"
