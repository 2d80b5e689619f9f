"""Inductor runs what stands between convolutions channels last; a replacement gets what its operator was matched with."""

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import fusebackend
from fusebackend import Match, Pattern
from fusebackend.native import direct_calls
from fusebackend.rewriting import convolution_layout

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


class FewConvolutions(nn.Module):
    """Inductor lays out convolutions if they are more than one in 300 nodes: both together are, the first alone is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(72, 72, 3, padding=1), nn.Conv2d(72, 72, 3, padding=1, groups=72)

    def forward(self, x):
        x = self.second(self.first(x))
        for _ in range(400):
            x = x.sin()
        return x


@pytest.mark.codegen
@pytest.mark.parametrize("training", [False, True])
def test_what_is_replaced_changes_no_layout_of_what_is_left(library, laid_out, training):
    model, x = FewConvolutions(), torch.randn(2, 72, 6, 6)
    with torch.set_grad_enabled(training):
        want = torch.compile(model)(x)
        expected = list(laid_out)
        torch._dynamo.reset()
        laid_out.clear()
        options = {"fuse.gate": "off", "fuse.patterns": ["depthwise_conv"]}
        got = torch.compile(model, backend="fuse", options=options)(x)
    assert fusebackend.last_report().counts()["depthwise_conv"] == 1
    assert laid_out[0] is expected[0] is True
    torch.testing.assert_close(got, want)


@pytest.mark.codegen
def test_a_pass_alone_leaves_a_convolution_on_which_the_layout_of_others_depends(library, laid_out):
    own = fusebackend.passes.post_grad(patterns=["depthwise_conv"])
    with torch.no_grad(), inductor_config.patch(post_grad_custom_post_pass=own):
        torch.compile(FewConvolutions())(torch.randn(2, 72, 6, 6))
    report = fusebackend.last_report()
    assert laid_out[0] is True and not report.substitutions
    assert "the graph's other convolutions in another memory order" in report.rejections[0].reason


def test_a_graph_without_values_is_compiled_as_it_is():
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    graph.output((graph.call_function(aten.convolution.default, (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 8)),))
    module = torch.fx.GraphModule(nn.Module(), graph)
    compiled = convolution_layout.deciding_first(lambda gm, inputs, *, is_inference: (gm, inputs, is_inference))
    assert compiled(module, [1], is_inference=True) == (module, [1], True)
