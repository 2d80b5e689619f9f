"""What a generated Triton reduction computes and moves: its code is run for a few of its blocks, and for a few steps of its loops.

A tile has rows, along which results lie, and columns, which are summed. Of what the kernel computes, operations on elements of a whole tile
are counted apart from those on a row or column of it. Loops (where the sum is longer than a tile) take as many steps as the sum needs.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.profitability import triton_access
from fusebackend.profitability.inductor_kernels import TritonKernel
from fusebackend.profitability.triton_access import (
    SAMPLES,
    WARP,
    Access,
    Language,
    Opaque,
    Plain,
    configurations,
    understanding,
)
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import log2

KIND = "triton reduction"
#: Of those that write elements of whole tiles, too, as a softmax and layer norms do: they read a row again, or keep it.
NORMALIZATION = "triton normalization"

#: That a multiprocessor runs at once.
_THREADS = 2048
#: Functions whose results are not computed element by element; of others only the shape of what they return matters.
_UNKNOWN = ("associative_scan", "dot", "reduce", "sort")
#: Where in a loop the steps stand that are run.
_STEPS = (0.3, 0.6)
#: Of calls; others compute functions such as exp.
_SIMPLE = ("sum", "max2", "min2", "any", "maximum", "minimum", "abs", "floor", "ceil", "promote_to_tensor")
_NO_ARITHMETIC = ("load", "store", "arange", "full", "program_id", "broadcast_to", "range", "where")


def works(kernel: TritonKernel, multiprocessors: int) -> list[Work]:
    """The work of a kernel in each of the configurations that Inductor would try, on a device with so many multiprocessors.

    Raises:
        Unfit: its source is not understood.
    """
    with understanding("reduction"):
        code = _body(kernel.source)
        return [_work(kernel, code, config, multiprocessors) for config in configurations(kernel)]


class _Reduction(Language):
    """Notes accesses with how often they happen, and counts operations."""

    def __init__(self, block: Sequence[int], types: Mapping[str, str], tile: int):
        super().__init__((0, 0), (1, 1), types)
        self._at = block
        self._tile, self._times = tile, 1.0
        self.times: list[float] = []
        self.steps = 0.0  # of innermost loops
        self.writes_tiles = False
        self.operations = dict.fromkeys(("operations", "divisions", "functions", "operations a row"), 0.0)

    def range(self, begin: int, end: int, step: int = 1, **_: Any) -> Iterator[int]:
        steps = -(-(end - begin) // step)
        run = sorted({int(steps * at) for at in _STEPS}) if steps > 0 else []
        for i in run:
            self._times *= steps / len(run)
            before = self.steps
            yield begin + i * step
            if self.steps == before:
                self.steps += self._times
            self._times /= steps / len(run)

    def program_id(self, axis: int) -> int:
        return self._at[axis] if axis < len(self._at) else 0

    def load(self, pointer: tuple[str, Any], mask: Any = None, **_: Any) -> torch.Tensor:
        return self._values(pointer, self._noted(False, pointer, mask))

    def store(self, pointer: tuple[str, Any], value: Any, mask: Any = None, **_: Any) -> None:
        shape = self._noted(True, pointer, mask)
        self.writes_tiles |= shape.numel() >= self._tile > 1

    def sum(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.sum(axis)

    def broadcast_to(self, x: Any, shape: list[int]) -> torch.Tensor:
        return torch.as_tensor(x).broadcast_to(shape)

    def __getattr__(self, name: str) -> Any:
        if name in _UNKNOWN:
            raise Unfit(f"a generated kernel calls {name}")
        return Opaque()

    def computed(self, value: Any, operations: int, divisions: int, functions: int) -> None:
        """Notes that ``value`` was computed by so many operations an element."""
        elements = value.numel() if isinstance(value, torch.Tensor) else 1
        whole = elements >= self._tile
        self.operations["operations" if whole else "operations a row"] += self._times * elements * operations
        self.operations["divisions"] += self._times * elements * divisions
        self.operations["functions"] += self._times * elements * functions

    def _noted(self, is_store: bool, pointer: tuple[str, Any], mask: Any) -> torch.Size:
        name, index = pointer
        offsets = torch.as_tensor(index) * self._itemsizes[name]
        if mask is not None:
            offsets, mask = torch.broadcast_tensors(offsets, torch.as_tensor(mask))
            offsets = torch.where(mask.bool(), offsets, -1)
        self.accesses.append(Access(is_store, self._itemsizes[name], offsets.reshape(-1, offsets.shape[-1] if offsets.dim() else 1)))
        self.times.append(self._times)
        return offsets.shape


class _Helpers(Opaque):
    """Stands for Inductor's ``triton_helpers``: of reductions, the shape."""

    def max2(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.sum(dim)

    min2 = any = prod = max2

    def online_softmax_reduce(self, most: torch.Tensor, total: torch.Tensor, dim: int, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return most.sum(dim), total.sum(dim)

    def online_softmax_combine(self, most: torch.Tensor, total: torch.Tensor, more: Any, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return most, total


class _Counted(Plain):
    """Follows each assignment by a note of the operations in it."""

    def visit_Assign(self, node: ast.Assign) -> Any:
        calls = [n for n in ast.walk(node.value) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        named = [n for n in calls if n.func.attr not in (*_NO_ARITHMETIC, "to", "bitcast")]  # type: ignore[attr-defined]
        binary = [n for n in ast.walk(node.value) if isinstance(n, (ast.BinOp, ast.Compare, ast.UnaryOp))]
        divisions = sum(isinstance(n, ast.BinOp) and isinstance(n.op, (ast.FloorDiv, ast.Mod)) for n in binary)
        functions = sum(n.func.attr not in _SIMPLE for n in named)  # type: ignore[attr-defined]
        new = self.generic_visit(node)
        target = node.targets[0]
        if not isinstance(target, ast.Name):
            return new
        numbers: list[ast.expr] = [
            ast.Constant(len(binary) + len(named) - divisions - functions),
            ast.Constant(divisions),
            ast.Constant(functions),
        ]
        note = ast.Call(ast.Attribute(ast.Name("tl", ast.Load()), "computed", ast.Load()), [ast.Name(target.id, ast.Load()), *numbers], [])
        return [new, ast.Expr(note)]


def _body(source: str) -> Any:
    function = triton_access.kernel_body(source)
    body: list[Any] = []
    for statement in function.body:
        found = _Counted().visit(statement)
        body += found if isinstance(found, list) else [found]
    return compile(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[])), "<generated reduction>", "exec")


def _work(kernel: TritonKernel, code: Any, config: Any, multiprocessors: int) -> Work:
    sizes, blocks_of = kernel.sizes, config.kwargs
    if "r1_numel" in sizes or "rsplit_size" in map(str.lower, blocks_of):
        raise Unfit("a generated reduction has loops of two dimensions")
    kept = [axis for axis in "xyz" if f"{axis}numel" in sizes]
    tiles = [-(-sizes[f"{axis}numel"] // blocks_of.get(f"{axis.upper()}BLOCK", 1)) for axis in kept]
    outputs, terms = math.prod(sizes[f"{axis}numel"] for axis in kept), sizes.get("r0_numel", 1)
    rows = math.prod(blocks_of.get(f"{axis.upper()}BLOCK", 1) for axis in kept)
    columns = blocks_of.get("R0_BLOCK", 1 << (terms - 1).bit_length())
    blocks = math.prod(tiles)
    itemsizes = triton_access.itemsizes_of(kernel.types)
    totals = dict.fromkeys(("read", "written", "lines", "sectors", "pages", "moved"), 0.0)
    operations: dict[str, float] = {}
    vectors, steps, kind = [], 1.0, KIND
    for first, others in SAMPLES:
        language = _Reduction([int(n * (others if i else first)) for i, n in enumerate(tiles)], kernel.types, rows * columns)
        arguments = triton_access.given(kernel) | {n: size for n, size in config.kwargs.items() if n.endswith("BLOCK")}
        names = {"tl": language, "range": language.range, "triton_helpers": _Helpers()}
        names |= {n: Opaque() for n in ("tl_math", "libdevice", "tl_extra")}
        exec(code, {**names, **arguments})
        tiles_of = triton_access.touched(language.accesses, WARP * config.num_warps)
        for access, times, part in zip(language.accesses, language.times, tiles_of):
            share = times / len(SAMPLES)
            totals["written" if access.is_store else "read"] += share * part.sectors * triton_access.SECTOR
            totals["lines"] += share * part.lines
            totals["sectors"] += share * part.requests
            totals["pages"] += share * part.pages
            totals["moved"] += share * part.elements * access.itemsize
            vectors.append(log2(part.vector))
        for name, amount in language.operations.items():
            operations[name] = operations.get(name, 0.0) + amount / len(SAMPLES)
        steps = max(language.steps, 1.0)
        kind = NORMALIZATION if language.writes_tiles else KIND
    quantities = {name: amount * blocks for name, amount in (totals | operations).items()}
    tile = rows * columns
    threads = WARP * config.num_warps
    waves = max(1.0, blocks * threads / (multiprocessors * _THREADS))
    quantities |= {
        "blocks": float(blocks),
        "padded terms": float(blocks * tile * steps),
        "steps in waves": steps * waves,
        "elements in waves": steps * max(1.0, tile / threads) * waves,
        "launches": 1.0,
    }
    shape = {
        "log2 rows": log2(rows),
        "log2 columns": log2(columns),
        "dimensions": float(len(kept)),
        "log2 steps": log2(steps),
        "log2 elements a thread": log2(tile / threads),
        "warps": float(config.num_warps),
        "log2 blocks": min(log2(blocks), 16.0),
        "log2 outputs": log2(outputs),
        "log2 terms": log2(terms),
        "edge": log2(blocks * rows * columns * steps / (outputs * terms)),
        "excess read": log2(totals["read"] / max(totals["moved"], 1)),
        "least vector": min(vectors),
        "itemsize": log2(max(itemsizes.values())),
        "operations a term": math.log2(1 + sum(operations.values()) / (tile * steps)),
        "64-bit": float(any(t == "i64" for n, t in kernel.types.items() if n.startswith("ks"))),
    }
    return Work(kind, quantities, shape)


def least_bytes(work: Work) -> float:
    """What the kernels of :func:`merged` read and write at least: each input once, but no more than they load. 0 for other work."""
    return min(work.quantities.get("bytes", 0.0), work.quantities.get("moved", 0.0)) if work.kind in (KIND, NORMALIZATION) else 0.0


def merged(kernels: list[list[Work]], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[list[Work]]:
    """Kernels of which some are reductions as one: that with the most terms, and the amounts of the others. Each input is read at
    least once."""
    kernels = sorted(kernels, key=lambda ways: -ways[0].quantities.get("padded terms", 0.0))
    more = [ways[0] for ways in kernels[1:]]
    least = sum(math.prod(g.hints(v.shape) or [0]) * v.itemsize for n in (*inputs, *outputs) if isinstance(v := g.value(n), torch.Tensor))
    ways = []
    for work in kernels[0]:
        quantities = {**work.quantities, "bytes": float(least)}
        for other in more:
            for name in work.quantities:
                quantities[name] += other.quantities.get(name, 0.0)
        ways.append(dataclasses.replace(work, quantities=quantities))
    return [ways]
