"""What the tests of both convolutions with an epilogue share: compiling one and comparing it with fp64, in inference and in training."""

from __future__ import annotations

import torch

import fusebackend
from fusebackend.backend import fuse

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the largest error, over the largest result: of one rounding, and of fp32 sums.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 4e-6, torch.float16: 7e-4, torch.bfloat16: 6e-3}
#: What reports call the activations.
NAMES = {"relu": "ReLU", "relu6": "ReLU6", "hardswish": "hardswish", "silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU"}


def absorbed_by(pattern, fn, *args, dynamic=None, dtype=torch.float32):
    """Compiles a function, compares its value with fp64, and returns what the report says of each convolution."""
    torch.compiler.reset()
    cast = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args]
    if isinstance(fn, torch.nn.Module):
        fn = fn.to(dtype)
    options = {"fuse.strict": True, "fuse.gate": "off", "fuse.interpret": True, "fuse.patterns": [pattern]}
    with torch.no_grad():
        want = fn(*cast)
        got = torch.compile(fn, backend=fuse, dynamic=dynamic, options=options)(*cast)
        exact = (fn.double() if isinstance(fn, torch.nn.Module) else fn)(*(a.double() if isinstance(a, torch.Tensor) else a for a in cast))
    assert (got.dtype, got.stride()) == (want.dtype, want.stride())
    largest = exact.abs().max()
    assert (got.double() - exact).abs().max() <= TOLERANCE[dtype] * largest + 1.2 * (want.double() - exact).abs().max()
    return [s.note for s in fusebackend.last_report().substitutions]


def draw_statistics(norm):
    """Batch norm as if it had been trained."""
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        for p in norm.parameters():
            p.normal_()


def check_training(pattern, block, x):
    """That the pattern absorbs nothing that the backward needs, and that gradients are eager's."""
    options = {"fuse.strict": True, "fuse.gate": "off", "fuse.interpret": True}
    got = torch.compile(block, backend=fuse, options=options)(x)
    want = block(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    notes = {s.pattern: s.note for s in fusebackend.last_report().substitutions}
    assert notes[pattern] == ""
    leaves = (x, *block.parameters())
    for a, b in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def check_generated_code(model, x):
    """Of Inductor, for a model with one convolution that absorbs batch norm and SiLU."""
    torch.compiler.reset()
    dtype = x.dtype
    with torch.no_grad():
        got = torch.compile(model, backend=fuse, options={"fuse.strict": True, "fuse.gate": "off"})(x)
        exact = model.double()(x.double())
    assert "absorbs batch norm and SiLU" in [s.note for s in fusebackend.last_report().substitutions]
    assert (got.double() - exact).abs().max() <= 2 * TOLERANCE[dtype] * exact.abs().max()
