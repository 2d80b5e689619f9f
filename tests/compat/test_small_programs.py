"""Programs of the kind that PyTorch's own tests of Inductor are made of, many of them around our families: with ``fuse``
they give eager's values, strides, gradients, mutations and exceptions.

Interpreted; ``FUSEBACKEND_TEST_PROGRAMS=codegen`` compiles them, with C++ or Triton.
"""

import os

import pytest
import torch
import torch.nn.functional as F

import fusebackend

CODEGEN = os.environ.get("FUSEBACKEND_TEST_PROGRAMS") == "codegen"
PROGRAMS = {}


def program(*inputs, dynamic=None, fullgraph=True, grad=False):
    """Registers a function with what makes its inputs: shapes (fp32, random), or functions."""

    def register(fn):
        PROGRAMS[fn.__name__] = (fn, inputs, {"dynamic": dynamic, "fullgraph": fullgraph}, grad)
        return fn

    return register


def longs(bound, *shape):
    return lambda: torch.arange(torch.Size(shape).numel()).reshape(shape) % bound


@torch.library.custom_op("fuzztest::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("fuzztest::bump_", mutates_args=("x",))
def bump_(x: torch.Tensor) -> None:
    x.add_(1)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return x.mT + 2 * y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.mT * 3 + x * 0, grad


@program((8, 6), (6, 8), grad=True)
def autograd_function(x, y):
    return Scaled.apply(x, y)


@program((8, 6), (6, 8))
def custom_operator_between(x, y):
    return torch.ops.fuzztest.twice(x.mT + y).mT + x


@program((8, 6), (6, 8))
def mutating_custom_operator_between(x, y):
    a = x.mT + y
    torch.ops.fuzztest.bump_(a)
    torch.ops.fuzztest.bump_(x)
    return a, x.mT + y


@program((8, 6), (6, 8))
def mutation_between_the_operands(x, y):
    t = x.mT
    x.add_(1)
    z = t + y
    x.mul_(2)
    return z, t + y


@program((8, 6), (6, 8), longs(8, 5), (5, 6))
def mutation_of_a_view(x, y, i, s):
    row = x[1:5]
    row.mul_(3)
    x.index_add_(0, i, s)
    row.copy_(y[:4, :6])
    return x.mT + y


@program((8, 6), longs(8, 5), (5, 6))
def out_variants(x, i, s):
    out = torch.empty_like(x)
    torch.index_add(x, 0, i, s, out=out)
    return torch.add(out, x, out=torch.empty_like(x))


@program((8, 6), (6, 8))
def conditional(x, y):
    return torch.cond(x.sum() > 0, lambda x, y: x.transpose(0, 1) + y, lambda x, y: x.transpose(0, 1) - y, (x, y))


@program((4, 6), (6, 4), fullgraph=False)
def graph_breaks(x, y):
    z = x.mT + y
    torch._dynamo.graph_break()
    if z.sum().item() > 1e9:
        return z
    return z.mT.contiguous() + x


@program((4, 6), (6, 4))
def random_numbers_are_the_seeds(x, y):
    return (x.mT + y).shape, F.dropout(x.mT + y, 0.0, True), torch.rand_like(x).shape


@program((0, 6), (6, 0), longs(1, 0), (0, 6))
def empty_tensors(x, y, i, s):
    return x.mT + y, x.new_zeros(3, 6).index_add(0, i, s), x.new_zeros(0, 6).index_add(0, i, s), x.mT.contiguous()


@program((1, 1), (1,), (), lambda: torch.tensor([0]), lambda: torch.tensor(0))
def one_element(x, v, s, i, zero):
    return x.mT + x, v.index_add(0, i, v), x + s, v[zero.view(1)], v.index_put((zero,), s, accumulate=True), x.permute(1, 0).clone()


@program(
    lambda: torch.arange(12).reshape(3, 4),
    lambda: torch.arange(12, dtype=torch.int32).reshape(4, 3),
    lambda: torch.arange(12).reshape(3, 4) % 2 == 0,
)
def integers_and_booleans(x, y, b):
    return x.mT + y, x.mT + x.mT.long(), b.mT | (y > 3), b.mT + b.mT.clone(), x.mT.to(torch.uint8) + b.mT, b.mT.contiguous()


@program(lambda: torch.randn(3, 4, dtype=torch.complex64), lambda: torch.randn(4, 3, dtype=torch.complex64))
def complex_numbers(x, y):
    return x.mT + y, x.mH + y, x.real.mT + y.imag, torch.view_as_real(x).permute(1, 0, 2).contiguous()


@program((6, 4), longs(6, 7), (7, 4))
def several_outputs_that_alias(x, i, s):
    z = x.index_add(0, i, s)
    return z, z.mT, z[2:], x, x.view(-1), z.mT.contiguous().view(-1)


@program((6, 4), longs(6, 7), (7, 4))
def an_output_twice(x, i, s):
    z = x.index_add(0, i, s)
    return z, z, x, x


@program((2, 8, 16), (8, 1, 4), (8,), grad=True)
def convolution_with_many_users(x, w, b):
    pre = F.conv1d(F.pad(x, (3, 0)), w, b, groups=8)
    return F.silu(pre), pre.mT, pre.sum(), F.conv1d(x, w, b, groups=8, padding=3)[..., :16]


@program((2, 8, 16), (8, 1, 4), grad=True)
def one_weight_in_two_convolutions(x, w):
    y = F.silu(F.conv1d(F.pad(x, (3, 0)), w, groups=8))
    return F.silu(F.conv1d(F.pad(y, (3, 0)), w, groups=8)) + x


@program((2, 8, 16), (8, 1, 4), grad=True)
def a_tied_weight_that_is_changed(x, w):
    return F.conv1d(F.pad(x, (3, 0)), w * 2, groups=8) + F.conv1d(F.pad(x, (3, 0)), w.flip(2), groups=8)


@program((5, 4), longs(5, 3, 2), grad=True)
def lookups_of_one_table(table, i):
    return F.embedding(i, table, padding_idx=2) + table[i] + table.index_select(0, i.flatten()).view(3, 2, 4)


@program((6, 4), longs(6, 7), (7, 4), dynamic=True)
def shapes_in_the_result(x, i, s):
    z = x.index_add(0, i, s)
    return z.view(-1).reshape(x.shape[1], x.shape[0]) + x.mT, x.shape[0] * 2, i.new_full((i.shape[0],), x.shape[1])


@program((6, 4), longs(6, 7), (7, 4), dynamic=True, grad=True)
def dynamic_training(x, i, s):
    return x.index_add(0, i, s * 2).mT + x.new_ones(4, 6), s[i % 7].sum(0)


@program((4, 6), (6, 4))
def scalars_and_promotion(x, y):
    return x.mT + y.double(), x.mT + 1, x.mT.half() + y.half(), torch.add(x.mT, y, alpha=0), torch.sub(x.mT, y, alpha=-0.5)


@program((3, 4, 5), (5, 4, 3))
def chains_of_views(x, y):
    return (
        x.permute(2, 1, 0).flatten(1).unflatten(1, (4, 3)) + y,
        x.transpose(0, 2)[1:, ::2] + y[1:, ::2],
        x.swapaxes(0, 2).unbind(0)[1] + y[1],
    )


@program((6, 4), (6, 4))
def as_strided_and_overlap(x, y):
    return x.as_strided((4, 6), (1, 2)) + y.mT, x.unfold(0, 2, 1).permute(2, 0, 1) + 1, x.expand(2, 6, 4).permute(2, 1, 0).contiguous()


@program((6, 4), longs(6, 9), (9, 4), (9,))
def scatter_forms(x, i, s, w):
    wide = i.view(-1, 1).expand(9, 4)
    return (
        x.scatter_add(0, wide, s),
        x.scatter_reduce(0, wide, s, "sum"),
        x.scatter_reduce(0, wide, s, "sum", include_self=False),
        x.scatter_reduce(0, wide, s, "amax"),
        x.index_reduce(0, i, s, "mean"),
        x.new_zeros(6, 4).index_add(0, i, s * w[:, None], alpha=0.5),
        x.index_put((i,), s),
        x.index_put((i, i % 4), w, accumulate=True),
    )


@program((6, 4), longs(6, 9), (9, 4))
def a_loop(x, i, s):
    for k in range(3):
        x = x.index_add(0, (i + k) % 6, s * k)
    return x


def run(fn, inputs, grad):
    outputs = fn(*inputs)
    outputs = [o for o in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]
    found = {f"output {i}": o for i, o in enumerate(outputs)}
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    if grad:
        leaves = [t for t in inputs if t.requires_grad]
        differentiable = [o for o in tensors if o.requires_grad]
        found["gradients"] = torch.autograd.grad(differentiable, leaves, [torch.ones_like(o) for o in differentiable])
    found["inputs"] = [t.detach().clone() for t in inputs]
    found["strides"] = [o.stride() for o in tensors]
    found["aliases"] = [o.data_ptr() == t.data_ptr() for o in tensors for t in inputs if t.numel() and o.numel()]
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, device):
    fn, makers, settings, grad = PROGRAMS[name]

    def inputs():
        torch.manual_seed(0)
        made = [(torch.randn(m) if isinstance(m, tuple) else m()).to(device) for m in makers]
        return [t.requires_grad_() if grad and t.is_floating_point() else t for t in made]

    expected = run(fn, inputs(), grad)
    options = {"fuse.strict": True, "fuse.interpret": not CODEGEN}
    got = run(torch.compile(fn, backend="fuse", options=options, **settings), inputs(), grad)
    assert fusebackend.reports()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
