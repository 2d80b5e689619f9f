"""Whether a matrix product pays, beside the loop that Inductor generates for the sum of products.

All work is expressed in bytes of memory traffic that take as long, and only ratios of a device's rates enter, which differ little between
devices. Inductor's loop is taken to run at the rate of its caches; it is often slower.
"""

from __future__ import annotations

import dataclasses

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.contraction.legality import goes_away
from fusebackend.patterns.contraction.operands import operands
from fusebackend.patterns.contraction.sites import Site
from fusebackend.rewriting.pattern import Estimate

#: Bytes that first-level caches deliver while memory delivers one: on an H200 128 a clock and multiprocessor, 33 TB/s beside 4.8; on CPUs
#: two vector loads a clock, beside about 10 GB/s a core.
_CACHE_BYTES = 8
#: Multiplications and additions in fp32 that a library does while memory delivers a byte: at half the peak of an H200 (67 TFLOP/s).
#: On tensor cores 16-bit ones take an eighth of that, at the small sizes that are met here.
_FP32_PRODUCTS, _TENSOR_CORE_GAIN = 3, 8
#: Bytes that memory delivers while the kernels of a replacement are launched: three in 10 us on a GPU, two calls in 20 us on a core.
_LAUNCH_BYTES_CUDA, _LAUNCH_BYTES_CPU = 48 << 20, 200 << 10
#: Below which ratio of the two forms the replacement is not faster even where Inductor's loop is slower than the caches. From 1 on it is
#: faster: the loop's time is at least what is counted.
_CLEARLY_SLOWER = 0.5


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What both forms do, by the sizes that the graph was traced with.

    Attributes:
        products: multiplications of two elements, as Inductor's loop does them.
        contracted: those of the matrix product, which leaves out dims of neither factor.
        itemsize: bytes of an element.
        operands: elements of both operands.
        copied: of those that are copied first.
        result: elements of the matrix product's result.
        reordered: of the sum's result, if it lies in another order than the matrix product's.
        tensor_cores: whether the library computes on tensor cores.
    """

    products: int
    contracted: int
    itemsize: int
    operands: int
    copied: int
    result: int
    reordered: int
    tensor_cores: bool

    @property
    def inductor(self) -> float:
        """Each product loads its two factors, and nothing is kept in registers for the next."""
        return 2 * self.products * self.itemsize / _CACHE_BYTES

    @property
    def ours(self) -> float:
        """A copy reads and writes."""
        moved = self.itemsize * (self.operands + 2 * self.copied + self.result + 2 * self.reordered)
        return moved + self.contracted / (_FP32_PRODUCTS * (_TENSOR_CORE_GAIN if self.tensor_cores else 1))


def traffic(site: Site) -> Traffic:
    assert site.sizes is not None
    both = operands(site)
    counts = [site.count(operand.factor.dims) for operand in both]
    result = site.count((*site.batch, *site.free_x, *site.free_y))
    in_order = [d for dims in site.result_dims for d in dims] == [*site.batch, *site.free_x, *site.free_y]
    return Traffic(
        products=site.count(range(len(site.sizes))),
        contracted=site.count((*site.batch, *site.free_x, *site.free_y, *site.summed)),
        itemsize=site.dtype.itemsize,
        operands=sum(counts),
        copied=sum(count for count, operand in zip(counts, both) if not operand.is_view),
        result=result,
        reordered=0 if in_order else result * site.count(site.repeated),
        tensor_cores=site.device.type == "cuda" and site.dtype.itemsize == 2,
    )


def estimate(site: Site) -> Estimate:
    if site.sizes is None:
        return Estimate(False, "a size depends on data, so it is not known whether a matrix product pays", "unmeasured")
    other = next((u for u in site.other_users if not goes_away(u)), None)
    if other is not None:
        return Estimate(False, f"the product is computed all the same, for {g.describe(other)}", "fused_neighbour", other)
    if site.device.type == "cpu" and not _has_cpu_library(site.dtype):
        return Estimate(False, f"PyTorch multiplies {site.dtype} matrices element by element on this CPU")
    both = traffic(site)
    launch = _LAUNCH_BYTES_CUDA if site.device.type == "cuda" else _LAUNCH_BYTES_CPU
    if both.inductor < launch:
        return Estimate(False, f"{both.products} products: launching a matrix product takes as long as the loop")
    ratio = both.inductor / both.ours
    if ratio < _CLEARLY_SLOWER:
        return Estimate(False, f"{_sizes(site)}: the matrix product moves as much as the loop that Inductor generates")
    if ratio < 1:
        return Estimate(None, f"{_sizes(site)}: Inductor's loop may be as fast as the matrix product", "unmeasured")
    return Estimate()


def _has_cpu_library(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies 16-bit matrices on this CPU; others MKL does."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype != torch.float16 or torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _sizes(site: Site) -> str:
    return "x".join(str(site.count(d)) for d in (site.batch, site.free_x, site.free_y, site.summed)) + " (batch, m, n, k)"
