"""What programs do around ``torch.compile``: the result is eager's, and what was substituted is on record."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import fusebackend


class Block(nn.Module):
    """A residual block around a causal depthwise convolution, as RWKV and Mamba have it."""

    def __init__(self, channels=8, taps=4):
        super().__init__()
        self.taps = taps
        self.weight = nn.Parameter(torch.randn(channels, 1, taps))
        self.linear = nn.Linear(channels, channels)

    def forward(self, x):  # (batch, time, channels)
        y = F.conv1d(F.pad(x.transpose(1, 2), (self.taps - 1, 0)), self.weight, groups=x.shape[2]).transpose(1, 2)
        return x + self.linear(y)


def gradients(fn, module, x):
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = fn(x)
    (out if out.dtype == torch.float64 else out.float()).square().sum().backward()
    return out.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]


def assert_close(found, expected):
    """By each tensor's largest value: gradients through several blocks reach thousands, and an element that nearly cancels has
    their rounding errors. Against float64 ours are no larger than eager's."""
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6 * b.abs().max().item())


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def substituted():
    found = {}
    for report in fusebackend.reports():
        for name, n in report.counts().items():
            found[name] = found.get(name, 0) + n
    return found


def inputs(device, batch=2, time=24, channels=8):
    return torch.randn(batch, time, channels, device=device)


def test_activation_checkpointing(interpreted, device):
    blocks = nn.Sequential(Block(), Block()).to(device)

    def forward(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    x = inputs(device)
    assert_close(gradients(interpreted(forward, fullgraph=True), blocks, x), gradients(forward, blocks, x))
    assert substituted()["causal_conv1d_backward"] == 2
    assert substituted()["causal_conv1d"] >= 2


def test_a_compiled_block_in_an_eager_checkpoint(interpreted, device):
    block = Block().to(device)
    compiled, x = interpreted(block), inputs(device)
    got = gradients(lambda x: checkpoint(compiled, x, use_reentrant=False), block, x)
    torch.testing.assert_close(got, gradients(block, block, x))
    assert substituted()["causal_conv1d_backward"] == 1


@pytest.mark.parametrize("outside", [False, True])
def test_autocast(interpreted, device, outside):
    block, x = Block().to(device), inputs(device)

    def forward(x):
        with torch.autocast(device.type, torch.bfloat16):
            return block(x)

    compiled = interpreted(block if outside else forward)

    def run(x):
        with torch.autocast(device.type, torch.bfloat16):
            return compiled(x)

    found, eager = gradients(run if outside else compiled, block, x), gradients(forward, block, x)
    exact = gradients(block.double(), block, x.double())
    # Element by element they differ where a sum nearly cancels: by bf16's rounding of its terms, which depends on the CPU.
    assert all(error(a, c) <= 1.5 * error(b, c) for a, b, c in zip(found, eager, exact))
    conv = next(s for r in fusebackend.reports() for s in r.substitutions if s.pattern == "causal_conv1d")
    assert conv.outputs[0].startswith("bf16")


def transposed_sum(x, y):
    return x.transpose(0, 1) + y


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: torch.func.grad(lambda x, y: f(x, y).square().sum()),
        lambda f: torch.func.vjp(f, torch.ones(6, 4), torch.ones(4, 6))[1] and (lambda x, y: torch.func.vjp(f, x, y)[0]),
        lambda f: lambda x, y: torch.func.jvp(f, (x, y), (y.t(), x.t())),
        lambda f: lambda x, y: torch.func.vmap(f)(x[None].expand(3, *x.shape), y[None].expand(3, *y.shape)),
        lambda f: lambda x, y: torch.func.vmap(f, in_dims=(0, None))(torch.stack([x, 2 * x]), y),
        lambda f: lambda x, y: torch.func.functional_call(nn.Identity(), {}, (f(x, y),)),
    ],
    ids=["grad", "vjp", "jvp", "vmap", "vmap-in_dims", "functional_call"],
)
def test_function_transforms_inside(interpreted, device, transformed):
    x, y = torch.randn(6, 4, device=device), torch.randn(4, 6, device=device)
    fn = transformed(transposed_sum)
    torch.testing.assert_close(interpreted(fn)(x, y), fn(x, y))
    assert fusebackend.reports()


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: torch.func.grad(lambda x, y: f(x, y).square().sum()),
        lambda f: lambda x, y: torch.func.vmap(f, in_dims=(0, None))(torch.stack([x, 2 * x]), y),
    ],
    ids=["grad", "vmap"],
)
def test_a_compiled_function_inside_a_transform(interpreted, transformed):
    x, y = torch.randn(6, 4), torch.randn(4, 6)
    got = transformed(interpreted(transposed_sum))(x, y)
    torch.testing.assert_close(got, transformed(transposed_sum)(x, y))


def test_a_subclass_that_is_traced_through(interpreted, device):
    """AOTAutograd takes it apart: the graph sees the two plain tensors, and each sum is substituted."""
    x, y = torch.randn(6, 4, device=device), torch.randn(4, 6, device=device)
    two = TwoTensor(x, x * 2), TwoTensor(y, y * 3)
    got = interpreted(transposed_sum)(*two)
    assert isinstance(got, TwoTensor)
    assert torch.equal(got.a, transposed_sum(x, y)) and torch.equal(got.b, transposed_sum(x * 2, y * 3))
    assert substituted() == {"transpose_add": 2}


class Tagged(torch.Tensor):
    """A subclass by ``__torch_function__`` only."""


@pytest.mark.codegen
@pytest.mark.parametrize("options", [{}, {"fuse.interpret": True}], ids=["compiled", "interpreted"])
def test_a_subclass_that_is_not_traced_through_is_refused(device, options):
    """Its instances reach the compiled code, and torch's check of custom operators at the first call can't take them."""
    x, y = torch.randn(6, 4, device=device).as_subclass(Tagged), torch.randn(4, 6, device=device)
    got = torch.compile(transposed_sum, backend="fuse", options=options)(x, y)
    assert isinstance(got, Tagged) and torch.equal(got, transposed_sum(x, y))
    assert not substituted()
    assert "Tagged: inputs of a tensor subclass" in fusebackend.last_report().notes[0]
    assert "Tagged" in str(fusebackend.explain(transposed_sum, x, y))


def test_sparse_and_complex_inputs_stay_with_inductor(interpreted):
    for x, y in [(torch.randn(6, 4).to_sparse(), torch.randn(4, 6).to_sparse()), (torch.randn(6, 4) * 1j, torch.randn(4, 6) * 1j)]:
        torch._dynamo.reset()
        torch.testing.assert_close(interpreted(transposed_sum)(x, y).to_dense(), transposed_sum(x, y).to_dense())
        assert not substituted()


@pytest.mark.codegen
def test_jagged_tensors_as_inputs(device):
    """The size of such a dim is a symbol that stands for no number."""

    def rows(*lengths):
        parts = [torch.arange(4.0 * n, device=device).view(n, 4) / n for n in lengths]
        return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)

    def fn(x):
        return ((x @ torch.eye(4, device=device)).sin() * 2 + x).cos()

    compiled = torch.compile(fn, backend="fuse")
    for lengths in ((3, 5, 2), (7, 1)):
        found, expected = rows(*lengths), rows(*lengths)
        out, wanted = compiled(found), fn(expected)
        torch.testing.assert_close(out.values(), wanted.values())
        out.values().sum().backward()
        wanted.values().sum().backward()
        torch.testing.assert_close(found.grad.values(), expected.grad.values())


def test_graph_breaks_within_nested_calls(interpreted, device):
    def inner(x, y):
        x = transposed_sum(x, y)
        torch._dynamo.graph_break()
        return transposed_sum(x, y.t())

    def outer(x, y):
        return transposed_sum(inner(x, y), y) @ x

    x, y = torch.randn(6, 4, device=device), torch.randn(4, 6, device=device)
    torch.testing.assert_close(interpreted(outer)(x, y), outer(x, y))
    assert len(fusebackend.reports()) >= 2
    assert sum(substituted().values()) == 3, "\n\n".join(map(str, fusebackend.reports()))


def test_only_some_modules_are_compiled(interpreted, device):
    """Blocks compiled alone share one compile; what is disabled inside one stays eager."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block(), Block())

        @torch.compiler.disable
        def between(self, x):
            return x + 1

        def forward(self, x):
            return self.between(self.blocks(x))

    model, x = Model().to(device), inputs(device)
    expected = gradients(model, model, x)
    for block in model.blocks:
        block.compile(backend="fuse", options={"fuse.interpret": True, "fuse.gate": "off"})
    assert_close(gradients(model, model, x), expected)
    assert len(fusebackend.reports()) == 1
    assert substituted()["causal_conv1d_backward"] == 1

    torch._dynamo.reset()
    assert_close(gradients(interpreted(model), model, x), expected)
    assert substituted()["causal_conv1d_backward"] == 3


def test_control_flow_with_subgraphs(interpreted, device):
    def fn(flag, x, y):
        return torch.cond(flag, lambda x, y: transposed_sum(x, y), lambda x, y: transposed_sum(x, y) * 2, (x, y))

    x, y = torch.randn(6, 4, device=device), torch.randn(4, 6, device=device)
    for flag in (True, False):
        given = torch.tensor(flag, device=device)
        torch.testing.assert_close(interpreted(fn)(given, x, y), fn(given, x, y))


@pytest.mark.parametrize("changed", ["x", "bias"])
def test_an_input_that_the_program_changes_after_its_use(interpreted, device, changed):
    """Eager's backward has the padded copy and the convolution's result, ours would compute them again: from new values."""

    def forward(x, weight, bias):
        y = F.silu(F.conv1d(F.pad(x, (3, 0)), weight, bias, groups=8))
        {"x": x, "bias": bias}[changed].add_(1)
        return y

    origin = [torch.randn(shape, device=device, requires_grad=True) for shape in ((2, 8, 24), (8, 1, 4), (8,))]

    def run(fn):
        inputs = [t * 1 for t in origin]
        out = fn(*inputs)
        return out, inputs, torch.autograd.grad(out.square().sum(), origin)

    torch.testing.assert_close(run(interpreted(forward, options={"fuse.strict": True})), run(forward))
    assert "causal_conv1d_backward" not in substituted()
    assert any("mutate" in r.reason for report in fusebackend.reports() for r in report.rejections)
