"""Whether a copy pays: rules that were fitted to timings of random shapes on an H200 and on two CPU cores (README.md has the figures)."""

from __future__ import annotations

import math

from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.permute.inductor_tiles import CACHE_LINE, SECTOR, Tile
from fusebackend.patterns.permute.sites import Copy, Reordering
from fusebackend.rewriting.pattern import Estimate

# Bytes of a copy below which the call of an operator takes as long as the copy does: on CUDA beside PyTorch's kernel, and on a CPU.
_MIN_BYTES_CUDA, _MIN_BYTES_CPU = 2 << 20, 1 << 17
# The same beside Inductor's kernel, which begins sooner than ours.
_MIN_BYTES_INDUCTOR = 12 << 20
# Bytes from which the time of a copy on a GPU is that of its memory traffic; and which fit in no cache.
_MEMORY_BOUND_BYTES, _UNCACHED_BYTES = 24 << 20, 64 << 20


def estimate_copy(copy: Copy) -> Estimate:
    """Whether it pays to make ``copy`` by ``permute_copy``."""
    reordering = copy.reordering
    if copy.by_inductor and (neighbour := _fused_neighbour(copy)) is not None:
        return Estimate(False, f"Inductor fuses it with its neighbour {g.describe(neighbour)}", "fused_neighbour")
    if reordering.bytes < (_MIN_BYTES_CUDA if copy.device.type == "cuda" else _MIN_BYTES_CPU):
        return Estimate(False, f"{reordering.bytes} bytes: calling an operator takes as long as copying them")
    if not copy.by_inductor:  # PyTorch's strided kernel, which is slower at any size
        return Estimate()
    return estimate_on_cpu(reordering) if copy.device.type == "cpu" else estimate_on_gpu(reordering)


def _fused_neighbour(copy: Copy) -> fx.Node | None:
    if copy.argument is None:
        return g.fused_neighbour(copy.node)
    producer = g.through_views(copy.source)
    return producer if g.is_fusable(producer) else None


def estimate_on_cpu(copy: Reordering) -> Estimate:
    """Beside Inductor's loop, which transposes squares in wider registers than the kernel's. It copies element by element where rows of
    the result are short; under symbolic sizes, also where those of the source are."""
    if copy.keeps_innermost_dim:
        return _unmeasured("rows stay whole: Inductor's copy on a CPU may be as fast")
    short_run = copy.result_run if copy.static else min(copy.result_run, copy.source_run)
    if copy.itemsize in (2, 4) and short_run <= 4:
        return Estimate()
    return _unmeasured("rows are long, or elements are not of 2 or 4 bytes: Inductor's copy on a CPU may be as fast")


def estimate_on_gpu(copy: Reordering) -> Estimate:
    """Beside Inductor's Triton kernel."""
    if copy.bytes < _MIN_BYTES_INDUCTOR:
        return Estimate(False, "so few bytes that the call of an operator or a kernel's first microsecond counts")
    if _keeps_long_rows(copy):
        return _whole_rows_on_gpu(copy)
    return _static_on_gpu(copy) if copy.static else _dynamic_on_gpu(copy)


def _keeps_long_rows(copy: Reordering) -> bool:
    return copy.keeps_innermost_dim and copy.result_run * copy.itemsize >= CACHE_LINE


def _whole_rows_on_gpu(copy: Reordering) -> Estimate:
    # Of bytes, and of 2-byte elements in rows of an odd number, Inductor's kernel loads fewer elements at once.
    loads_narrowly = (copy.itemsize == 1 and copy.bytes >= _MEMORY_BOUND_BYTES) or (
        copy.itemsize == 2 and copy.result_run % 2 == 1 and copy.bytes >= _UNCACHED_BYTES
    )
    if copy.static and not loads_narrowly:
        return Estimate(False, "long rows stay whole and sizes are static: Inductor's copy is as fast")
    return Estimate()


def _has_even_runs(copy: Reordering) -> bool:
    return all(run * copy.itemsize % 16 == 0 for run in (copy.result_run, copy.source_run))


def _dynamic_on_gpu(copy: Reordering) -> Estimate:
    """Under symbolic sizes Inductor's kernel has no tiles. Few copies lose all the same."""
    if copy.keeps_innermost_dim:
        return Estimate()
    if copy.source_run < 8 and copy.itemsize != 2:
        return Estimate(False, "the elements of a cache line go to few rows: Inductor's loop is as fast")
    if copy.itemsize >= 4:
        even_plane = _has_even_runs(copy) and copy.merged_dims <= 3
        large_plane = copy.merged_dims == 2 and min(copy.result_run, copy.source_run) >= 128
        if even_plane or large_plane:
            return Estimate(False, "a large or even transpose of 4-byte elements: Inductor's loop is as fast")
    return Estimate()


def _static_on_gpu(copy: Reordering) -> Estimate:
    """Inductor's tiled kernel is slower where it moves much more than the elements: sectors that many tiles read in part are read again,
    and those that two write in part are read as well; and where it transposes large planes of 2-byte elements."""
    if not copy.keeps_innermost_dim and copy.itemsize >= 4 and _has_even_runs(copy) and min(copy.result_run, copy.source_run) >= 128:
        return Estimate(False, "static, even sizes of elements of 4 and more bytes: Inductor's tiles are as fast")
    if copy.itemsize not in (2, 4, 8):
        return _unmeasured("elements that are not of 2, 4 or 8 bytes: Inductor's copy may be as fast")
    if _has_short_misaligned_rows(copy):
        return _unmeasured("short rows that end within sectors: our kernel may be slow, too")
    tile = Tile.of(copy)
    memory_bound_gains = (_shares_written_sectors, _transposes_large_plane, _rereads_sectors, _tiles_beyond_plane)
    if copy.bytes >= _MEMORY_BOUND_BYTES and any(gains(copy, tile) for gains in memory_bound_gains) or _gathers_short_rows(copy, tile):
        return Estimate()
    return _unmeasured("static sizes that waste little of what Inductor's kernel moves: its copy may be as fast")


def _has_short_misaligned_rows(copy: Reordering) -> bool:
    """Rows of the result that cost our kernel, too."""
    row_bytes = copy.result_run * copy.itemsize
    least = 0 if copy.source_run * copy.itemsize >= 64 else SECTOR
    return copy.itemsize == 2 and least < row_bytes < 768 and row_bytes % SECTOR != 0


def _shares_written_sectors(copy: Reordering, tile: Tile) -> bool:
    """Of the sectors that a tile of Inductor's writes, another one writes more than a quarter, too."""
    if not tile.outer or tile.plane_width <= tile.width:
        return False
    aligned = math.gcd(tile.plane_width * copy.itemsize, SECTOR) / SECTOR
    shared = 2 * SECTOR * (1 - aligned) / (tile.width * copy.itemsize)
    return shared > 0.25 and copy.result_run * copy.itemsize >= 8


def _transposes_large_plane(copy: Reordering, tile: Tile) -> bool:
    """2-byte elements that are neighbours in long rows of the result lie a cache line or more apart in the source; and what is moved is a
    plane of one run by one, or whole cache lines."""
    if copy.itemsize != 2 or copy.keeps_innermost_dim or copy.result_run < 64:
        return False
    if copy.strides[copy.result_order[-1]] * copy.itemsize < CACHE_LINE:
        return False
    whole_lines = tile.plane_width >= 4096 and copy.result_run * copy.itemsize % CACHE_LINE == 0
    return whole_lines or (tile.plane_width == copy.result_run and copy.merged_dims <= 3)


def _rereads_sectors(copy: Reordering, tile: Tile) -> bool:
    """A tile of Inductor's reads sectors of about twice its own bytes."""
    read = tile.sectors_read(copy) * SECTOR / (tile.height * tile.width * copy.itemsize)
    return read >= (1.9 if copy.itemsize < 8 else 2.2)


def _tiles_beyond_plane(copy: Reordering, tile: Tile) -> bool:
    """Inductor's last tiles across a plane are mostly beyond it, and read sectors that others read."""
    padding = -tile.plane_height % tile.height
    if not (tile.height == 32 < tile.plane_height and padding >= 0.2 * tile.plane_height):
        return False
    return copy.source_run * copy.itemsize % SECTOR != 0 and copy.result_run * copy.itemsize >= SECTOR


def _gathers_short_rows(copy: Reordering, tile: Tile) -> bool:
    """Short rows of the source lie side by side along long ones of the result: no sector is read twice, but many instructions read each."""
    source_bytes, result_bytes = copy.source_run * copy.itemsize, copy.result_run * copy.itemsize
    inside = copy.source_order[copy.source_order.index(copy.result_order[-1]) + 1 :]
    side_by_side = math.prod(copy.sizes[d] for d in inside) == copy.source_run
    few = source_bytes < (SECTOR / 2 if result_bytes >= 512 else 12)
    return tile.height == 32 <= copy.result_run and result_bytes >= 256 and few and side_by_side


def _unmeasured(reason: str) -> Estimate:
    return Estimate(None, reason, "unmeasured")
