"""Programs as users write them, for the type checker (``mypy`` reads it, nobody runs it): the public API says what it takes and gives."""

from collections.abc import Callable
from typing import Any, assert_type

import torch
from torch import fx

import fusebackend
from fusebackend import Estimate, Match, Pattern, Reject, Report
from fusebackend.testing import assert_pattern


def explain(model: torch.nn.Module, x: torch.Tensor) -> None:
    report = fusebackend.explain(model, x, scale=2.0)
    assert_type(report, Report)
    assert_type([s.pattern for s in report.substitutions], list[str])
    assert_type([r.reason for r in report.rejections], list[str])
    assert_type(report.counts(), dict[str, int])
    assert_type(fusebackend.last_report(), Report | None)
    assert_type(fusebackend.reports(), list[Report])
    assert_type([e.relative for e in fusebackend.numeric_errors()], list[float])
    assert_type(fusebackend.inductor_configs(mode="max-autotune", options={"fuse.strict": True}), dict[str, Any])


class Doubled(Pattern):
    name = "doubled"
    anchors = (torch.ops.aten.add.Tensor,)

    def match(self, node: fx.Node) -> Match | Reject | None:
        x = node.args[0]
        if not isinstance(x, fx.Node):
            return Reject("not a tensor", node)
        return Match((node,), lambda emit: emit.call(torch.ops.aten.mul.Tensor, x, 2), interior=(x,), note="doubled")

    def estimate(self, match: Match) -> Estimate:
        return Estimate(len(match.nodes) > 1, "a single node is as fast", "estimated_slower")


def register() -> None:
    assert_type(fusebackend.register(Doubled()), Pattern)
    with fusebackend.disable("doubled"):
        fusebackend.prioritize("doubled", 3)
    assert_type(fusebackend.unregister("doubled"), Pattern)
    print(fusebackend.verify("doubled"))


@fusebackend.register_pattern("silu_mul", example_inputs=(torch.randn(4, 8), torch.randn(4, 8)))
def silu_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * y


@silu_mul.replace_with
def replacement(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sigmoid() * x * y


def kernel(fake: Callable[..., torch.Tensor]) -> None:
    op = fusebackend.load_kernel("mine::op", sources={"op.cpp": ""}, schema="(Tensor x) -> Tensor", fake=fake, reference=fake)
    assert_type(op, torch._ops.OpOverload)
    assert_type(assert_pattern(fake, torch.randn(3), pattern="doubled", count=1), Report)
