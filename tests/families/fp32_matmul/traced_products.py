"""Graphs of products on an imagined H200, for tests without a GPU."""

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusebackend.patterns.fp32_matmul import estimate, match
from fusebackend.patterns.fp32_matmul.products import TARGETS
from fusebackend.rewriting import apply, device_facts

aten = torch.ops.aten
ops = torch.ops.fusebackend


@pytest.fixture
def h200(library, monkeypatch):
    """The kernels are there, and so is the GPU that was measured. Also restores the precision setting."""
    monkeypatch.setattr(match, "unavailable", lambda device: None)
    monkeypatch.setattr(estimate, "device_facts", lambda device: device_facts.IMAGINED)
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def traced(fn, *shapes, device="cuda", dtype=torch.float32, dynamic=False):
    """The graph of ``fn`` on fake tensors of these shapes, which may be symbolic."""
    examples = [torch.empty(s, device="meta") for s in shapes]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, enable_python_dispatcher():
        if dynamic:
            shapes = [mode.from_tensor(x, static_shapes=False).shape for x in examples]
        args = [torch.empty(s, device=device, dtype=dtype) for s in shapes]
        return make_fx(fn, decomposition_table=select_decomp_table())(*args).graph


def rewritten(fn, *shapes, **kwargs):
    """The graph after every legal match was applied, as with the gate off, and the outcome."""
    graph = traced(fn, *shapes, **kwargs)
    return graph, apply.rewrite(graph, [match.Fp32Matmul()], "forward", strict=True)


def estimated(m, k, n):
    """What the pattern says of the product of an (m, k) and a (k, n) matrix."""
    (node,) = [n for n in traced(aten.mm, (m, k), (k, n)).nodes if n.target in TARGETS]
    pattern = match.Fp32Matmul()
    return pattern.estimate(pattern.match(node))


def calls(graph, target):
    return [n for n in graph.nodes if n.target is target]
