"""Whether a product pays: a cost model of the kernel against the best rate that cuBLAS reaches in fp32."""

from __future__ import annotations

import dataclasses

import torch

from fusebackend.patterns.fp32_matmul.ops import constant
from fusebackend.patterns.fp32_matmul.products import Product
from fusebackend.rewriting.pattern import Estimate


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of the kernel and of cuBLAS on one GPU: microseconds, and bytes or operations a microsecond.

    Attributes:
        measured_on: the GPU.
        sm_count: its multiprocessors.
        call: a call of the operator, before any work.
        block: one k block of a tile.
        exact_block: the same for a K below which the kernel adds without error (``exact_sums_below_k``).
        tile_ends: the prologue and epilogue of a tile.
        unaligned_tile_ends: added to that where the rows of the result don't begin at 32-byte boundaries.
        part: a part of a tile, where there are so few tiles that they are split along K.
        split: the rate at which operands are split: bytes read and written.
        cublas: the best rate that cuBLAS reaches in fp32.
    """

    measured_on: str
    sm_count: int
    call: float
    block: float
    exact_block: float
    tile_ends: float
    unaligned_tile_ends: float
    part: float
    split: float
    cublas: float


#: By compute capability. Products on other GPUs are left to cuBLAS, see ``NOT_MEASURED``.
COSTS: dict[tuple[int, int], Costs] = {
    (9, 0): Costs("NVIDIA H200", 132, 8.0, 1.7, 2.1, 4.5, 5.5, 2.0, 3.5e6, 51e6),
}
#: What is known of other compute capabilities. Nothing was measured on any of them: the rates are those of data sheets.
NOT_MEASURED = {
    (8, 0): 'the kernel for it, "mma", has not been measured there (bf16 at 16 times the rate of fp32 arithmetic: it may well win)',
    (8, 6): "bf16 at two to four times the rate of fp32 arithmetic, so six products can't pay; not measured",
    (8, 7): "bf16 at two to four times the rate of fp32 arithmetic, so six products can't pay; not measured",
    (8, 9): "bf16 at two to four times the rate of fp32 arithmetic, so six products can't pay; not measured",
}


def pays(m: int, k: int, n: int, batch: int = 1, costs: Costs = COSTS[9, 0], sm_count: int | None = None) -> bool:
    """Whether the kernel is faster than cuBLAS at its best rate, on ``sm_count`` multiprocessors (by default those of ``costs``).

    On an H200 square products pay from 1024 on. Thin, small and shallow ones don't.
    """
    rows, columns, block_k = (int(constant(name)) for name in ("tile_m", "tile_n", "block_k"))
    sm_count = sm_count or costs.sm_count
    tiles = batch * min(-(-m // rows) * -(-n // columns), -(-n // rows) * -(-m // columns))
    block = costs.block if k >= constant("exact_sums_below_k") else costs.exact_block
    per_tile = -(-k // block_k) * block + costs.tile_ends + (costs.unaligned_tile_ends if n % 8 else 0)
    product = tiles / sm_count * per_tile + costs.part * (sm_count // max(tiles, 1))
    split = 10 * batch * k * (m + n) / costs.split
    return costs.call + split + product < 2 * batch * m * n * k / costs.cublas


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def estimate(product: Product) -> Estimate:
    """Whether a product on a GPU pays. Sizes and GPUs that nobody measured are False, not None: they are timed only where the user asks
    for measurements, not by default."""
    sizes = product.sizes
    if sizes is None:
        return Estimate(False, "a size depends on data, so it is not known whether the product pays", "unmeasured")
    here = capability(product.device)
    costs = COSTS.get(here)
    if costs is None:
        why = NOT_MEASURED.get(here, "not measured")
        return Estimate(False, f"cuBLAS stays on compute capability {here[0]}.{here[1]}: {why}", "unmeasured")
    m, k, n, batch = sizes
    if not pays(*sizes, costs, sm_count(product.device)):
        shape = "x".join(map(str, ([batch] if batch > 1 else []) + [m, n, k]))
        return Estimate(False, f"cuBLAS is as fast or faster at {shape} (m, n, k): too small, too thin or too shallow")
    return Estimate()
