"""Graphs on a CPU that are matched and rewritten as if on a GPU, for machines without one.

Most families take only what is on a GPU, or take more of it there. In the block, passes see every tensor of a graph on a GPU, the library
has kernels for it, and Inductor leaves products whole that it takes apart for a CPU. What comes out is on the CPU again, where operators
that have no kernel for it are computed by their references. Numbers on the CPU, which graphs of a GPU may have, move as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from fusebackend.native import loader
from fusebackend.rewriting import inductor_pass

aten = torch.ops.aten

#: The device's name to the fuzzer.
IMAGINED_DEVICE = "imagined"

_GPU, _CPU = torch.device("cuda", 0), torch.device("cpu")

#: What Inductor decomposes for a CPU alone.
_WHOLE_ON_GPUS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


@contextlib.contextmanager
def imagined_gpu() -> Iterator[None]:
    """In the block, ``backend="fuse"`` rewrites what it compiles for a CPU as it would for a GPU. Nothing can be timed there, so
    ``fuse.gate`` must be ``"off"``, and nothing that runs on a GPU alone be generated, so ``fuse.interpret`` must be set."""
    rewrite, table = inductor_pass.rewrite, select_decomp_table()

    def rewrite_on_gpu(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        try:
            _move(graph, _CPU, _GPU)
            return rewrite(graph, *args, **kwargs)
        finally:
            _move(graph, _GPU, _CPU)

    with (
        mock.patch.object(inductor_pass, "rewrite", rewrite_on_gpu),
        mock.patch.object(loader.Native, "why_not", lambda self, device, *operators: None),
        mock.patch.dict(table),
    ):
        for op in _WHOLE_ON_GPUS:
            table.pop(op, None)
        yield


def _move(graph: fx.Graph, old: torch.device, new: torch.device) -> None:
    """The same graph with what is on ``old`` on ``new``: fake values, and devices among the arguments."""

    def moved(value: FakeTensor) -> FakeTensor:
        if value.fake_device.type == old.type:
            value.fake_device = new
        return value

    def with_device(argument: Any) -> Any:
        return new if isinstance(argument, torch.device) and argument.type == old.type else argument

    for node in graph.nodes:
        for name in node.meta.keys() & {"val", "example_value"}:
            node.meta[name] = tree_map_only(FakeTensor, moved, node.meta[name])
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), with_device)
        if (args, kwargs) != (node.args, node.kwargs):  # assigning them orders the users of what they name anew
            node.args, node.kwargs = args, kwargs
