"""What Inductor answered when it was asked for kernels, kept on disk: of a model that was changed a little, only what is new is asked.

One small file an answer, as for measurements. Inductor's own caches hold whole graphs, and what we ask of is a part of one.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from fusebackend import cache_keys
from fusebackend.log import log
from fusebackend.native import cache, kept_files
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.pattern import Work


@dataclasses.dataclass(frozen=True)
class _Kernel:
    kind: str
    quantities: dict[str, float]
    shape: dict[str, float]


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The kernels, each in the ways that Inductor would try, or why it can't be asked."""

    kernels: list[list[_Kernel]]
    why_not: str


class KeptAnswers:
    """Answers about nodes on one device, under Inductor's settings of now. None are kept, or found, where its caches are disabled.

    Args:
        measured_with: tells what answers depend on besides the question (:func:`fusebackend.cache_keys.measuring`).
    """

    def __init__(self, measured_with: Callable[[], str]):
        self._measured_with = functools.cache(measured_with)

    def load(self, question: str, nodes: Sequence[fx.Node]) -> list[list[Work]] | None:
        """What Inductor answered; None if nothing is kept.

        Args:
            question: names ``nodes``, at their sizes, and what is wanted of them.

        Raises:
            Unfit: it could not be asked, as was kept.
        """
        if not _may_be_kept(nodes):
            return None
        try:
            path = self._path(question)
        except Exception as error:  # no cache directory, or a device that is only imagined
            log.debug("no kept answers: %s", error)
            return None
        found = kept_files.read(path, lambda data: kept_files.decoded(_Answer, data))
        if found is None:
            return None
        if found.why_not:
            raise Unfit(found.why_not)
        return [[Work(way.kind, way.quantities, way.shape) for way in kernel] for kernel in found.kernels]

    def save(self, question: str, nodes: Sequence[fx.Node], answer: list[list[Work]] | str) -> None:
        """Keeps an answer, or why there is none. Where the cache can't be written, nothing is kept."""
        if not _may_be_kept(nodes):
            return
        if isinstance(answer, str):
            made = _Answer([], answer)
        else:
            made = _Answer([[_Kernel(way.kind, dict(way.quantities), dict(way.shape)) for way in kernel] for kernel in answer], "")
        try:
            kept_files.write(self._path(question), dataclasses.asdict(made))
        except Exception as error:
            log.debug("answer not kept: %s", error)

    def _path(self, question: str) -> Path:
        return cache.directory("asked") / f"{cache_keys.question(self._measured_with(), question)}.json"


def _may_be_kept(nodes: Sequence[fx.Node]) -> bool:
    """An operator that is not PyTorch's may have another lowering tomorrow."""
    return not inductor_config.force_disable_caches and all(_is_pytorchs(n.target) for n in nodes if n.op == "call_function")


def _is_pytorchs(target: Any) -> bool:
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and torch._library.utils.is_builtin(target))
