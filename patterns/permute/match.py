"""permute -> contiguous: transposes that must be materialised, at the speed of a copy.

Why it pays: Inductor tiles such a copy well where all sizes are static and even. Under symbolic sizes it does not tile (1.5x
to 130x slower than a copy on an H200), nor where a dim is short or odd (up to 1.7x); a matmul library that is given operands
in an order that it does not take copies them by PyTorch's strided kernel (3x to 6x). The tile engine here (csrc/tile) takes
shapes at run time and moves whole cache lines both ways.

What is looked for is a copy into another memory order, whatever made it: attention heads, NCHW <-> NHWC, window partition,
channel shuffle, a reshape that copies, an operand of ``bmm`` or of a 1-D convolution that must be brought into order first.

    permute: f32[8, 256, 512] = aten.permute(x, [0, 2, 1])         permute = aten.permute(x, [0, 2, 1])
    clone:   f32[8, 256, 512] = aten.clone(permute)            ->  clone = fusebackend.permute_copy(permute, [0, 1, 2])
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader, ops
from fusebackend.rewriting.pattern import Emitter, Match, Pattern, Reject

aten = torch.ops.aten


def reference(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """What the kernels compute, in PyTorch.

    Args:
        x: a tensor of any dtype of 1 to 16 bytes and any strides.
        order: the result's dims from outermost to innermost in memory.

    Returns:
        The same bits, laid out as ``torch.empty_permuted(x.shape, order)``.
    """
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device).copy_(x)


def _fake(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)


permute_copy = ops.define("permute_copy(Tensor x, int[] order) -> Tensor", fake=_fake)


@dataclasses.dataclass(frozen=True)
class Site:
    """A copy into another memory order.

    Attributes:
        source: what is copied.
        order: the copy's dims from outermost to innermost in memory.
        argument: the index of ``source`` among the anchor's arguments, if the anchor makes the copy for itself; None if it is the copy.
        fusable: whether Inductor writes the copy itself, so that a pointwise neighbour could join it.
        unproven: why it is not known that Inductor's copy is slower, as for :class:`Match`.
    """

    source: fx.Node
    order: list[int]
    argument: int | None = None
    fusable: bool = True
    unproven: str = ""


@dataclasses.dataclass(frozen=True)
class Move:
    """What is known of a copy: sizes and strides of the source, in elements; its memory order and the copy's, without dims of size 1."""

    sizes: list[int]
    strides: list[int]
    itemsize: int
    before: list[int]
    after: list[int]
    static: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize

    @functools.cached_property
    def rows(self) -> int:
        """Elements along the copy's inner dims that are one dim in the source, too."""
        return g.run_length(self.sizes, self.after, self.before)

    @functools.cached_property
    def columns(self) -> int:
        """Elements along the source's inner dims that are one dim in the copy, too."""
        return g.run_length(self.sizes, self.before, self.after)


class Permute(Pattern):
    """Matches ``aten.clone`` that changes the memory order (a reshape that copies is one too), and operands that their consumer copies."""

    name = "permute"
    priority = -1  # what computes something goes first
    anchors = (aten.clone.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default)

    def match(self, node: fx.Node) -> Match | Reject | None:
        answers = [_judge(node, site) for site in _sites(node)]
        sites = [a for a in answers if isinstance(a, Site)]
        if not sites:
            return next((a for a in answers if a is not None), None)

        def emit(e: Emitter) -> fx.Node:
            copies = {s.argument: e.call(permute_copy, s.source, s.order) for s in sites}
            if None in copies:
                return copies[None]
            return e.call(node.target, *(copies.get(i, a) for i, a in enumerate(node.args)), **node.kwargs)

        return Match((node,), emit, unproven=next((s.unproven for s in sites if s.unproven), ""))

    def examples(self) -> list[tuple[Callable, tuple]]:
        def transposed(x):
            return x.transpose(1, 2).contiguous()

        def shuffled(x):
            return x.view(x.shape[0], 4, -1, x.shape[2]).transpose(1, 2).reshape(x.shape)

        dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)
        x = torch.randn(5, 260, 259) * 50
        return [(f, (x.to(t),)) for f in (transposed, shuffled) for t in dtypes]


def _sites(node: fx.Node) -> list[Site]:
    """The copies that ``node`` is or makes, whether or not they change the order."""
    call = g.arguments(node)
    if node.target is aten.clone.default:
        return [site] if (site := _clone(node, call["self"], call["memory_format"])) else []
    if node.target is aten.convolution.default:
        return [site] if (site := _convolved(node, call["input"])) else []
    return [site for i, operand in enumerate(node.args) if (site := _multiplied(operand, i))]


def _clone(node: fx.Node, x: fx.Node, memory_format: torch.memory_format | None) -> Site | None:
    order = list(range(g.value(node).dim())) if memory_format is torch.contiguous_format else g.memory_order(g.value(node))
    return None if order is None else Site(x, order)


def _multiplied(operand: object, index: int) -> Site | None:
    """cuBLAS wants one dim of a matrix contiguous; PyTorch's strided kernel copies what is not, Inductor on the CPU."""
    if not g.is_tensor(operand) or g.value(operand).dim() != 3:
        return None
    strides = g.hints(g.value(operand).stride())
    if strides is None or 1 in strides[1:]:
        return None
    order = [0, *sorted((1, 2), key=lambda d: -strides[d])]
    return Site(operand, order, index, fusable=g.value(operand).device.type == "cpu")


def _convolved(node: fx.Node, x: fx.Node) -> Site | None:
    """Inductor brings the input of a 1-D convolution into its output's order. (Those of 2-D ones it may lay out anew.)"""
    if g.value(x).dim() != 3 or g.memory_order(g.value(node)) != [0, 1, 2]:
        return None
    return Site(x, [0, 1, 2], 0)


def _judge(node: fx.Node, site: Site) -> Site | Reject | None:
    """The site if it is worth replacing, why it is not, or None if nothing is permuted."""
    x = g.value(site.source)
    before, after = _varying(x, g.memory_order(x)), _varying(x, site.order)
    if before is None or after is None:
        return Reject("sizes are not known before run time (unbacked symbols)", node)
    if before == after or 0 in g.hints(x.stride()):  # an expanded tensor is read from cache
        return None
    if x.is_conj() or x.is_neg() or x.layout is not torch.strided:
        return Reject("a lazily conjugated or negated tensor is not only moved", node)
    if site.fusable:
        neighbour = g.fused_neighbour(node) if site.argument is None else _producer(site.source)
        if neighbour is not None:
            return Reject(f"Inductor fuses it with its neighbour {g.describe(neighbour)}", node)
    static = all(isinstance(n, int) for n in (*x.shape, *x.stride()))
    move = Move(g.hints(x.shape), g.hints(x.stride()), x.itemsize, before, after, static)
    reason = _loses(move, x.device, site)
    if reason:
        return Reject(reason, node)
    unproven = _unproven_on_cpus if x.device.type == "cpu" else _unproven_on_gpus
    return dataclasses.replace(site, unproven=unproven(move) if site.fusable else "")


def _varying(x: torch.Tensor, order: list[int] | None) -> list[int] | None:
    """``order`` without dims of size 1, which lie anywhere; None if a size is not known."""
    sizes = g.hints(x.shape)
    return None if sizes is None or order is None else [d for d in order if sizes[d] != 1]


def _producer(source: fx.Node) -> fx.Node | None:
    producer = g.through_views(source)
    return producer if g.is_fusable(producer) else None


def _loses(move: Move, device: torch.device, site: Site) -> str | None:
    """Why Inductor's (or PyTorch's) own copy is as good, by what was measured on an H200; None if it is not."""
    unavailable = loader.load().why_not(device, permute_copy)
    if unavailable:
        return unavailable
    if move.bytes < (_SMALL_CUDA if device.type == "cuda" else _SMALL_CPU):
        return f"{move.bytes} bytes: a call of an operator costs as much as they do"
    if device.type == "cpu" or not site.fusable:  # there PyTorch's strided kernel is the peer: 1.5x to 6x slower than a copy
        return None
    return _loses_to_triton(move)


def _unproven_on_cpus(move: Move) -> str:
    """Where it is not known that Inductor's copy is slower: it turns squares in wider registers than the kernel's. Where rows of the
    copy (under symbolic sizes: of either side) are short it goes one by one: 2x to 30x slower than ours."""
    if move.before[-1] == move.after[-1]:
        return "rows stay whole: Inductor's copy on a CPU may be as fast"
    if move.itemsize in (2, 4) and (move.rows if move.static else min(move.rows, move.columns)) <= 4:
        return ""
    return "rows are long, or elements are not of 2 or 4 bytes: Inductor's copy on a CPU may be as fast"


def _loses_to_triton(move: Move) -> str | None:
    """The same of Inductor's kernel on a GPU.

    By random shapes of 2 to 160 MB: of static ones below 12 MB, most lost, since our kernels begin 1 us later. Of dynamic ones few
    lost: elements of 4 bytes from short rows, or in large planes."""
    itemsize, rows, columns = move.itemsize, move.rows, move.columns
    if move.bytes < _SMALL:
        return "so few bytes that the call of an operator or a kernel's first microsecond counts"
    even = all(n * itemsize % 16 == 0 for n in (rows, columns))
    if _keeps_rows(move):
        # Of bytes, and of 2-byte elements that lie in no pairs, it loads fewer at once.
        narrow = itemsize == 1 and move.bytes >= _LARGE or itemsize == 2 and rows % 2 == 1 and move.bytes >= _HUGE
        return "long rows stay whole and sizes are static: Inductor's copy is as fast" if move.static and not narrow else None
    if move.before[-1] == move.after[-1]:
        return None
    if move.static:
        large = itemsize >= 4 and even and min(rows, columns) >= 128
        return "static, even sizes of elements of 4 and more bytes: Inductor's tiles are as fast" if large else None
    if columns < 8 and itemsize != 2:
        return "the elements of a cache line go to few rows: Inductor's loop is as fast"
    dims = _merged(move.before, move.after)
    plane = itemsize >= 4 and (even and dims <= 3 or dims == 2 and min(rows, columns) >= 128)
    return "a large or even transpose of 4-byte elements: Inductor's loop is as fast" if plane else None


def _keeps_rows(move: Move) -> bool:
    return move.before[-1] == move.after[-1] and move.rows * move.itemsize >= _LINE


def _unproven_on_gpus(move: Move) -> str:
    """Where it is not known that Inductor's kernel for static sizes is slower on a GPU.

    It is where it moves much more than the elements, and where it turns large planes of 2-byte elements. Of 1,195 random shapes from
    12 MB on that were drawn on an H200 after these rules four lost, up to 7 %; the others were at 0.98 to 10 times its speed. It copies
    blocks of 1024 elements: 32 along the result's inner dims, up to the one that is innermost in the source, by 32 along the others; or,
    where those inner dims have few elements, along the result. Memory moves by sectors of 32 bytes: read in part by many blocks, they
    are read again; written in part by two, they are read as well."""
    if not move.static or _keeps_rows(move):
        return ""
    sizes, itemsize, before, after, rows, columns = move.sizes, move.itemsize, move.before, move.after, move.rows, move.columns
    if itemsize not in (2, 4, 8):
        return "elements that are not of 2, 4 or 8 bytes: Inductor's copy may be as fast"
    middle = after.index(before[-1]) + 1
    outer, inner = (after[:middle], after[middle:]) if math.prod(sizes[d] for d in after[middle:]) > 4 else ([], after)
    height, width = (math.prod(sizes[d] for d in dims) for dims in (outer, inner))
    across, along = _block(height, width) if outer else (1, 1024)
    # Rows of the result that begin within sectors: of the sectors that a block writes, those that another one writes, too.
    aligned = math.gcd(width * itemsize, _SECTOR) / _SECTOR
    shared = 2 * _SECTOR * (1 - aligned) / (along * itemsize) if outer and width > along else 0
    least = 0 if columns * itemsize >= 64 else _SECTOR
    if itemsize == 2 and least < rows * itemsize < 768 and rows * itemsize % _SECTOR:
        return "short rows that end within sectors: our kernel may be slow, too"
    if move.bytes >= _LARGE:
        if shared > 0.25 and rows * itemsize >= 8:
            return ""
        # Small elements that are neighbours in long rows of the result, and a cache line or more apart in the source: in planes of one run
        # by one, or where what is moved as one is whole lines.
        if itemsize == 2 and before[-1] != after[-1] and rows >= 64 and move.strides[after[-1]] * itemsize >= _LINE:
            if width >= 4096 and rows * itemsize % _LINE == 0 or width == rows and _merged(before, after) <= 3:
                return ""
        read = _sectors_read(move, outer, inner, across, along) * _SECTOR / (across * along * itemsize)
        if read >= (1.9 if itemsize < 8 else 2.2):
            return ""
        # Blocks that are mostly beyond the plane read sectors that others read, too.
        if across == 32 < height and -height % across >= 0.2 * height and columns * itemsize % _SECTOR and rows * itemsize >= _SECTOR:
            return ""
    # Short rows of the source, side by side along long ones of the result: no sector is read twice, but many instructions read each.
    beside = math.prod(sizes[d] for d in before[before.index(after[-1]) + 1 :]) == columns
    few = columns * itemsize < (_SECTOR / 2 if rows * itemsize >= 512 else 12)
    if across == 32 <= rows and rows * itemsize >= 256 and few and beside:
        return ""
    return "static sizes that waste little of what Inductor's kernel moves: its copy may be as fast"


def _block(height: int, width: int) -> tuple[int, int]:
    """Elements of a block of Inductor's kernel across and along a plane: 1024, powers of two."""
    most = [1 << (n - 1).bit_length() for n in (height, width)]
    across, along = (min(32, n) for n in most)
    along = min(most[1], 1024 // across)
    return min(most[0], 1024 // along), along


def _sectors_read(move: Move, outer: list[int], inner: list[int], across: int, along: int) -> int:
    """The sectors that hold the elements of a block amid the plane of the dims ``outer`` by ``inner``."""

    def offsets(dims: list[int], count: int) -> list[int]:
        total = math.prod(move.sizes[d] for d in dims)
        first, found = total // count // 2 * count, []
        for index in range(first, min(first + count, total)):
            offset = 0
            for d in reversed(dims):
                index, i = divmod(index, move.sizes[d])
                offset += i * move.strides[d]
            found.append(offset)
        return found

    return len({(x + y) * move.itemsize // _SECTOR for x in offsets(inner, along) for y in offsets(outer, across)})


def _merged(before: list[int], after: list[int]) -> int:
    """How many dims are left once those that stay side by side are one."""
    following = dict(zip(before, before[1:]))
    return 1 + sum(following.get(dim) != then for dim, then in zip(after, after[1:]))


# Bytes below which a copy takes no longer than the call that launches it, beside PyTorch's kernel and on a CPU; below which it may as
# well be Inductor's; from which what its kernel wastes decides; and which no cache holds. (Of 11 random dynamic copies of 16 to 32 MB ten
# gained 1.06 to 4.9 times on the device, and one lost 5 %.)
_SMALL_CUDA, _SMALL_CPU, _SMALL, _LARGE, _HUGE = 2 << 20, 1 << 17, 12 << 20, 24 << 20, 64 << 20
_SECTOR, _LINE = 32, 128  # bytes that a GPU's memory moves at once, and that its caches hold together
