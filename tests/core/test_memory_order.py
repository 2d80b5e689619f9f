"""Inductor runs what stands between convolutions channels last; a replacement gets what its operator was matched with."""

import pytest
import torch
from torch import nn

import fusebackend
from fusebackend import Match, Pattern
from fusebackend.native import direct_calls

aten = torch.ops.aten
library = torch.library.Library("memory_order", "DEF")


def square_plus(x, factor=1.0, self=None):
    return torch.mul(x, x) + x


def operator(name, *tags, arguments="Tensor x"):
    library.define(f"{name}({arguments}) -> Tensor", tags=tags)
    library.impl(name, square_plus, "CPU")
    torch.library.register_fake(f"memory_order::{name}", lambda x, *_: torch.empty_like(x), lib=library)
    return getattr(torch.ops.memory_order, name).default


OPERATORS = {
    "exact": operator("exact", torch.Tag.needs_exact_strides),
    "untagged": operator("untagged"),
    "named": operator("named", torch.Tag.needs_exact_strides, arguments="Tensor x, float factor=1.0, Tensor? self=None"),
    "any": operator("any", torch.Tag.flexible_layout),
}


class SquarePlus(Pattern):
    name = "memory_order.square_plus"
    anchors = (aten.add.Tensor,)

    def __init__(self, op):
        self.op = op

    def match(self, node):
        product, x = node.args
        if getattr(product, "target", None) is not aten.mul.Tensor or product.args != (x, x):
            return None
        return Match((node,), lambda e: e.call(self.op, x), (product,))


def strides_seen(monkeypatch, *operators):
    """Notes the strides of the tensors of each call."""
    seen = []

    def noted(call):
        def noting(*args, **kwargs):
            seen.append([x.stride() for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)])
            return call(*args, **kwargs)

        return noting

    for operator in operators:
        monkeypatch.setattr(operator, "_op", noted(operator._op))
    return seen


@pytest.mark.codegen
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", OPERATORS)
def test_a_users_operator_gets_the_strides_that_it_was_matched_with(library, temporary_pattern, monkeypatch, kind, dynamic):
    temporary_pattern(SquarePlus(OPERATORS[kind]))
    first, second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    function = lambda x: second(square_plus(first(x).relu()))  # noqa: E731
    x = torch.randn(2, 8, 16, 16)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(function, backend="fuse", options={"fuse.gate": "off"}, dynamic=dynamic)
        compiled(x)
        seen = strides_seen(monkeypatch, OPERATORS[kind])
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-5, atol=1e-5)
    assert [s.pattern for s in fusebackend.last_report().substitutions] == ["memory_order.square_plus"]
    assert seen == [[(2048, 1, 128, 8) if kind == "any" else (2048, 256, 16, 1)]]


class Block(nn.Module):
    """Attention between convolutions along time, as Conformers have it, with a bias."""

    def __init__(self, heads=2, width=32):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.Conv1d(width, width, 3, padding=1), nn.Conv1d(width, width, 3, padding=1)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x, bias):
        y = self.before(x).transpose(1, 2)
        q, k, v = (m(y).view(*y.shape[:2], self.heads, -1).transpose(1, 2) for m in self.qkv)
        scores = (q * 0.5) @ (k * 1.5).mT + bias * 2
        return self.after((scores.softmax(-1) @ (v + 1)).transpose(1, 2).flatten(2).mT)


@pytest.mark.codegen
def test_attention_reads_rows_between_convolutions(library, monkeypatch):
    monkeypatch.setattr(direct_calls, "has_kernel", lambda op, device_type: False)  # what is called by the dispatcher can be noted
    block, x, bias = Block().bfloat16(), torch.randn(2, 32, 24).bfloat16(), torch.randn(2, 2, 24, 24).bfloat16().requires_grad_()
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(block, backend="fuse", options={"fuse.gate": "off", "fuse.patterns": ["attention"]})
        compiled(x, bias).sum().backward()
        seen = strides_seen(monkeypatch, torch.ops.fusebackend.attention.default, torch.ops.fusebackend.attention_backward.default)
        compiled(x, bias).sum().backward()
    assert [s.pattern for s in fusebackend.last_report().substitutions] == ["attention"]
    forward, backward = seen
    assert all(s[-1] == 1 for s in forward + backward)
