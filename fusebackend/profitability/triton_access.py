"""What a generated Triton kernel moves: its index arithmetic is run for a few of its blocks, and the memory behind it is counted.

A GPU moves sectors of 32 bytes; a warp's load or store touches some cache lines of 128, one after the other. Which elements one warp holds
follows from how Triton lays a tile out: along the dimension in which neighbours in memory lie, in vectors of up to 16 bytes.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.runtime import hints, triton_heuristics

from fusebackend import fx_utils as g
from fusebackend.profitability.inductor_kernels import TritonKernel
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import log2

KIND = "triton"

SECTOR, _LINE, _VECTOR, WARP = 32, 128, 16, 32
PAGE = 2 << 20  # of the GPU's address translation
_MAX_REQUESTS = 64  # looked at of each access
#: Where in the grid the blocks stand that are run.
SAMPLES = ((0.5, 0.5), (0.31, 0.71))
ITEMSIZES = {"fp64": 8, "i64": 8, "u64": 8, "fp32": 4, "i32": 4, "u32": 4, "fp16": 2, "bf16": 2, "i16": 2, "i8": 1, "u8": 1, "i1": 1}
#: Integers that may say where something lies; smaller ones are flags.
_PLACES = ("*i64", "*i32")
_DECORATOR = re.compile(r"@triton_heuristics\.(pointwise|reduction|persistent_reduction)\(\n(.*?)\n\)\n@triton\.jit\n", re.DOTALL)


def works(kernel: TritonKernel) -> list[Work]:
    """The work of a kernel in each of the configurations that Inductor would try.

    Raises:
        Unfit: its source is not understood.
    """
    with understanding("kernel"):
        return [_work(kernel, config) for config in configurations(kernel)]


@contextlib.contextmanager
def understanding(what: str) -> Iterator[None]:
    """A block that runs generated code on real tensors, and raises Unfit whatever goes wrong in it."""
    try:
        with g.plain_tensors():
            yield
    except Unfit:
        raise
    except Exception as error:
        raise Unfit(f"a generated {what} is not understood: {type(error).__name__}: {error}") from error


def configurations(kernel: TritonKernel) -> list[Any]:
    """Inductor's configurations for the kernel, from its own heuristics."""
    decorator = _DECORATOR.search(kernel.source)
    if decorator is None:
        raise Unfit("a generated kernel has other heuristics than those that are known")
    names = {n: getattr(hints, n) for n in ("TileHint", "DeviceProperties", "AutotuneHint", "ReductionHint") if hasattr(hints, n)}
    arguments = eval(f"dict({decorator[2]})", {**names, "__file__": None})
    arguments["filename"] = None
    configs = getattr(triton_heuristics, decorator[1])(**arguments, return_configs=True)
    distinct = {repr((sorted(c.kwargs.items()), c.num_warps)): c for c in configs}
    return list(distinct.values())


@dataclasses.dataclass
class Access:
    is_store: bool
    itemsize: int
    offsets: torch.Tensor  # in bytes, (rows of the tile, columns); -1 where masked


class Language:
    """Stands for ``triton.language`` while a kernel's arithmetic is run: loads and stores are noted, values are zeros.

    Integers that are loaded may be where to load next. What stands at place i of their tensor is i, up to the bound that is asserted:
    neighbours lead to neighbours, as positions do.
    """

    constexpr = int1 = int8 = int16 = int32 = int64 = float16 = float32 = float64 = bfloat16 = uint8 = None

    def __init__(self, block: tuple[int, int], shape: tuple[int, int], types: Mapping[str, str]):
        self._block, self._shape = block, shape
        self._itemsizes = itemsizes_of(types)
        self._places = {n for n, t in types.items() if t in _PLACES}
        self.accesses: list[Access] = []

    def program_id(self, axis: int) -> int:
        return self._block[axis] if axis < 2 else 0

    def num_programs(self, axis: int) -> int:
        return 1

    def arange(self, begin: int, end: int) -> torch.Tensor:
        return torch.arange(begin, end)

    def full(self, shape: list[int], value: Any, dtype: Any = None) -> torch.Tensor:
        return torch.full(shape, value)

    def load(self, pointer: tuple[str, Any], mask: Any = None, **_: Any) -> torch.Tensor:
        self._note(False, pointer, mask)
        return self._values(pointer, self._shape)

    def store(self, pointer: tuple[str, Any], value: Any, mask: Any = None, **_: Any) -> None:
        self._note(True, pointer, mask)

    def where(self, condition: Any, x: Any, y: Any) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition).bool(), torch.as_tensor(x), torch.as_tensor(y))

    def within(self, place: Any, bound: int) -> torch.Tensor:
        return torch.as_tensor(place) % bound

    def atomic_add(self, *_: Any, **__: Any) -> None:
        raise Unfit("a generated kernel adds atomically")

    def __getattr__(self, name: str) -> Any:
        return Opaque()

    def _values(self, pointer: tuple[str, Any], shape: Sequence[int]) -> torch.Tensor:
        name, index = pointer
        values = torch.as_tensor(index) if name in self._places else torch.zeros((), dtype=torch.int64)
        return values.broadcast_to(shape)

    def _note(self, is_store: bool, pointer: tuple[str, Any], mask: Any) -> None:
        name, index = pointer
        itemsize = self._itemsizes[name]
        offsets = torch.as_tensor(index).broadcast_to(self._shape) * itemsize
        if mask is not None:
            offsets = torch.where(torch.as_tensor(mask).broadcast_to(self._shape), offsets, -1)
        self.accesses.append(Access(is_store, itemsize, offsets))


class Opaque:
    """A function, or a namespace of functions, of values: what it returns is of no interest."""

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return next((a for a in arguments if isinstance(a, torch.Tensor)), torch.zeros((), dtype=torch.int64))

    def __getattr__(self, name: str) -> Opaque:
        return self


def itemsizes_of(types: Mapping[str, str]) -> dict[str, int]:
    """Bytes of an element of what each pointer points to."""
    return {n: ITEMSIZES[t.removeprefix("*")] for n, t in types.items() if t.startswith("*")}


class Pointer:
    def __init__(self, name: str):
        self.name = name

    def __add__(self, offset: Any) -> tuple[str, Any]:
        return self.name, offset


def given(kernel: TritonKernel) -> dict[str, Any]:
    """The arguments that a kernel is run with here, but for the sizes of its tile."""
    pointers = {n: Pointer(n) for n, t in kernel.types.items() if t.startswith("*")}
    return pointers | dict(kernel.sizes) | dict.fromkeys(kernel.numbers, 1)


def kernel_body(source: str) -> ast.FunctionDef:
    return next(n for n in ast.parse(source[source.index("@triton.jit") :]).body if isinstance(n, ast.FunctionDef))


def _body(source: str) -> tuple[ast.Module, int]:
    """The statements of the kernel, and how many divisions they have."""
    function = kernel_body(source)
    divisions = sum(isinstance(n, ast.BinOp) and isinstance(n.op, (ast.FloorDiv, ast.Mod)) for n in ast.walk(function))
    module = ast.Module(body=[Plain().visit(s) for s in function.body], type_ignores=[])
    return ast.fix_missing_locations(module), divisions


class Plain(ast.NodeTransformer):
    """Drops conversions: ``x.to(tl.float32)`` is x. Where ``x < bound`` is asserted, it holds from then on."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "device_assert"):
            return node
        for asserted in ast.walk(call):
            if isinstance(asserted, ast.Compare) and isinstance(asserted.ops[0], ast.Lt) and isinstance(asserted.left, ast.Name):
                name, bound = asserted.left.id, asserted.comparators[0]
                within = ast.Call(ast.Attribute(ast.Name("tl", ast.Load()), "within", ast.Load()), [asserted.left, bound], [])
                return ast.Assign([ast.Name(name, ast.Store())], within)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "bitcast"):
            return node.func.value
        return node


def _work(kernel: TritonKernel, config: Any) -> Work:
    blocks = {axis: config.kwargs[f"{axis}BLOCK"] for axis in "XY" if f"{axis}BLOCK" in config.kwargs}
    width, height = blocks["X"], blocks.get("Y", 1)
    columns, rows = kernel.sizes["xnumel"], kernel.sizes.get("ynumel", 1)
    grid = -(-columns // width), -(-rows // height)
    body, divisions = _body(kernel.source)
    code = compile(body, "<generated kernel>", "exec")
    itemsizes = itemsizes_of(kernel.types)
    totals = dict.fromkeys(("read", "written", "lines read", "lines written", "sectors", "pages"), 0.0)
    vectors, moved = [], 0.0
    for x, y in SAMPLES:
        language = Language((int(grid[0] * x), int(grid[1] * y)), (height, width), kernel.types)
        arguments = given(kernel) | {f"{axis}BLOCK": size for axis, size in blocks.items()}
        # The kernel's first two dimensions are (y, x) in a tile, and x alone in a row.
        names = {"tl": language, "tl_math": Opaque(), "libdevice": Opaque(), "triton_helpers": Opaque(), "tl_extra": Opaque()}
        exec(code, {**names, **arguments})
        for access, tile in zip(language.accesses, touched(language.accesses, WARP * config.num_warps)):
            kind = "written" if access.is_store else "read"
            totals[kind] += tile.sectors * SECTOR / len(SAMPLES)
            totals[f"lines {kind}"] += tile.lines / len(SAMPLES)
            totals["sectors"] += tile.requests / len(SAMPLES)
            totals["pages"] += tile.pages / len(SAMPLES)
            vectors.append(log2(tile.vector * access.itemsize))
            moved += tile.elements * access.itemsize / len(SAMPLES)
    blocks_run = math.prod(grid)
    quantities = {name: amount * blocks_run for name, amount in totals.items()}
    quantities |= {"moved": moved * blocks_run, "blocks": float(blocks_run), "divisions": float(blocks_run * width * height * divisions)}
    wide = any(t == "i64" for n, t in kernel.types.items() if n.startswith("ks"))
    shape = {
        "excess read": log2(totals["read"] / max(moved, 1)),
        "excess written": log2(totals["written"] / max(moved, 1)),
        "log2 pages of a block": log2(totals["pages"]),
        "least vector": min(vectors),
        "last vector": vectors[-1],
        "itemsize": log2(max(itemsizes.values())),
        "accesses": float(len(itemsizes)),
        "height": log2(height),
        "width": log2(width),
        "warps": float(config.num_warps),
        "rows": min(log2(rows), 16.0),
        "columns": min(log2(columns), 16.0),
        "edge": log2(blocks_run * width * height / (rows * columns)),
        "divisions an element": float(divisions),
        "64-bit": float(wide and divisions > 0),
    }
    return Work(KIND, quantities, shape)


@dataclasses.dataclass(frozen=True)
class Touched:
    """What a tile touches of memory.

    Attributes:
        sectors, pages: by the tile.
        lines, requests: lines and sectors by its warps, request by request.
        vector: the elements that a thread takes at once.
        elements: that are not masked.
    """

    sectors: float
    pages: float
    lines: float
    requests: float
    vector: int
    elements: int


def touched(accesses: Sequence[Access], threads: int) -> list[Touched]:
    """What each access of a tile by so many threads touches. Most tensors that a kernel reads are laid out alike, and looked at once."""
    known: list[tuple[Access, Touched]] = []
    found = []
    for access in accesses:
        alike = (tile for other, tile in known if other.itemsize == access.itemsize and torch.equal(other.offsets, access.offsets))
        tile = next(alike, None)
        if tile is None:
            tile = _touched(access.offsets, access.itemsize, threads)
            known.append((access, tile))
        found.append(tile)
    return found


def _touched(tile: torch.Tensor, itemsize: int, threads: int) -> Touched:
    if tile.shape[0] > 1 and _step(tile.T) < _step(tile):
        tile = tile.T
    vector = min(_vector(tile, itemsize), max(1, tile.numel() // threads))
    flat = tile.reshape(-1)
    requests = flat.reshape(-1, min(WARP * vector, flat.numel()))
    looked_at = requests[:_MAX_REQUESTS]
    share = len(requests) / len(looked_at)
    lines, sectors = distinct(looked_at, (_LINE, SECTOR))
    whole, pages = distinct(flat[None], (SECTOR, PAGE))
    return Touched(float(whole), float(pages), share * lines, share * sectors, vector, int((flat >= 0).sum()))


def distinct(offsets: torch.Tensor, units: Sequence[int]) -> list[int]:
    """How many units of memory, of each of these sizes, each row touches, summed. Negative offsets touch none."""
    if bool((offsets[:, 1:] < offsets[:, :-1]).any()):
        offsets = offsets.sort(dim=1).values
    found = []
    for unit in units:
        places = offsets.div(unit, rounding_mode="floor")  # in order; those of negative offsets are negative, and first
        changes = (places[:, 1:] != places[:, :-1]) & (places[:, 1:] >= 0)
        found.append(int((places[:, 0] >= 0).sum() + changes.sum()))
    return found


def _vector(tile: torch.Tensor, itemsize: int) -> int:
    """The longest vector, up to 16 bytes, in which aligned neighbours along the last dimension lie side by side."""
    rows, width = tile[:4], 1
    while 2 * width * itemsize <= _VECTOR and 2 * width <= rows.shape[1]:
        groups = rows.reshape(len(rows), -1, 2 * width)
        side_by_side = groups - groups[..., :1] == torch.arange(2 * width) * itemsize
        aligned = groups[..., 0] % (2 * width * itemsize) == 0
        if not bool(((side_by_side.all(-1) & aligned) | (groups < 0).all(-1)).all()):
            break
        width *= 2
    return width


def _step(tile: torch.Tensor) -> float:
    """The usual distance of neighbours along the last dimension."""
    if tile.shape[1] < 2:
        return math.inf
    steps = (tile[:4, 1:] - tile[:4, :-1]).abs()[(tile[:4, 1:] >= 0) & (tile[:4, :-1] >= 0)]
    return float(steps.median()) if steps.numel() else math.inf
