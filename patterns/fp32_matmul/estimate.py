"""What a product makes a device do: our kernels and cuBLAS."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.fp32_matmul.products import Product
from fusebackend.patterns.fp32_matmul.work import kernel_work
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Work, Workload
from fusebackend.rewriting.workload import alignment, library_tiles, log2

_ELEMENT = 4


def estimate(product: Product, scaled: fx.Node | None = None, splits: Sequence[float] = (1.0, 1.0)) -> Estimate | Workload:
    """The work of ``product`` both ways.

    Args:
        scaled: the multiplication behind it that our kernel takes over.
        splits: for each operand, which share of the work of splitting it falls to this product: others may use the same planes.
    """
    sizes, strides = product.sizes, [_strides(g.value(x)) for x in (product.a, product.b)]
    if sizes is None or any(s is None for s in strides):
        return Estimate(None, "a size depends on data, so it is not known whether the product pays", "unmeasured")
    m, k, n, batch = sizes
    if m * k * n * batch == 0:
        return Estimate(False, "the product is empty")
    facts = device_facts(product.device)
    ours = _kernel((m, n, k, batch), strides, _addend_bytes(product), splits, facts.capability, facts.multiprocessors)
    theirs = _cublas((m, n, k, batch), strides, _addend_bytes(product), facts.multiprocessors)
    dynamic = {"dynamic": float(any(isinstance(s, torch.SymInt) for x in product.operands for s in x.shape))}
    both = [Work(w.kind, w.quantities, {**w.shape, **dynamic}) for w in (ours, theirs)]
    factor = [] if scaled is None or _is_fused(scaled) else [Work("stream", {"bytes": 2.0 * _ELEMENT * batch * m * n})]
    return Workload((both[0],), (both[1], *factor))


def _strides(tensor: torch.Tensor) -> list[int] | None:
    """Of rows, columns and batch, and the bytes from an aligned address to the first element."""
    strides, offset = g.hints(tensor.stride()), g.hint(tensor.storage_offset())
    if strides is None or offset is None:
        return None
    batch = strides[0] if tensor.dim() == 3 else 0
    return [strides[-2], strides[-1], batch, offset * _ELEMENT]


def _addend_bytes(product: Product) -> int:
    sizes = g.hints(g.value(product.d).shape) if product.d is not None and product.beta else None
    return _ELEMENT * math.prod(sizes) if sizes else 0


def _is_fused(scaled: fx.Node) -> bool:
    """Whether Inductor computes the multiplication in a kernel that there is anyway."""
    return any(g.is_fusable(user) for user in g.consumers(scaled))


def _common_shape(sizes: Sequence[int], strides: Sequence[Sequence[int]], addend_bytes: int) -> dict[str, float]:
    m, n, k, batch = sizes
    return {
        "log2 m": log2(m),
        "log2 n": log2(n),
        "log2 k": log2(k),
        "log2 batch": log2(batch),
        "log2 shorter": log2(min(m, n)),
        "log2 flops per byte": log2(m * n * k / (m * k + k * n + m * n)),
        "a by columns": float(strides[0][0] == 1 and strides[0][1] != 1),
        "b by columns": float(strides[1][0] == 1 and strides[1][1] != 1),
        "m alignment": alignment(_ELEMENT * m),
        "n alignment": alignment(_ELEMENT * n),
        "k alignment": alignment(_ELEMENT * k),
        "addend": float(addend_bytes > 0),
    }


def _kernel(
    sizes: tuple[int, int, int, int],
    strides: Sequence[Sequence[int]],
    addend_bytes: int,
    splits: Sequence[float],
    capability: tuple[int, int],
    multiprocessors: int,
) -> Work:
    m, n, k, batch = sizes
    architectures = loader.load().architectures
    # A library without code for GPUs describes one that has all of it.
    has_wgmma = not architectures or "90a" in architectures
    facts = kernel_work(sizes, strides[0], strides[1], (*capability, multiprocessors, has_wgmma))
    swapped = bool(facts["swaps"])  # the kernel's operands are b and a then
    split = {0: 0.0, 1: 0.0}
    planes = 0.0
    for side, elements, share in zip("ba" if swapped else "ab", (m * k, k * n), splits):
        plane_bytes = facts[f"{side}_plane_bytes"]
        planes += plane_bytes
        if plane_bytes:
            split[int(facts[f"{side}_gathers"])] += share * (_ELEMENT * batch * elements + plane_bytes)
    quantities = {
        "flops": facts["flops"],
        "exact flops": facts["exact_flops"],
        "ends": facts["ends"],
        "unpaired ends": facts["ends"] * facts["unpaired"],
        "parts": facts["parts"],
        "staged bytes": facts["staged_bytes"],
        "bytes": planes + addend_bytes + _ELEMENT * batch * m * n,
        "split bytes": split[0],
        "gathered bytes": split[1],
    }
    shape = {name: facts[name] for name in ("wgmma", "mma", "shares", "swaps", "a_mn_inner", "b_mn_inner")}
    shape["log2 used"] = log2(facts["blocks"] / multiprocessors)
    shape["log2 padded"] = log2((facts["flops"] + facts["exact_flops"]) * facts["blocks"] / (m * n * k * batch))
    return Work("fp32_matmul", quantities, {**_common_shape(sizes, strides, addend_bytes), **shape})


def _cublas(sizes: tuple[int, int, int, int], strides: Sequence[Sequence[int]], addend_bytes: int, multiprocessors: int) -> Work:
    m, n, k, batch = sizes
    quantities = {
        "flops": 2.0 * batch * m * n * k,
        "bytes": float(_ELEMENT * batch * (m * k + k * n + m * n) + addend_bytes),
    }
    shape = _common_shape(sizes, strides, addend_bytes) | {"batched": float(batch > 1)}
    for tile, tiles, waves in library_tiles(batch, m, n, multiprocessors):
        # Each tile takes a time by its depth, however few there are. Products without a batch may be split along k instead.
        quantities[f"{'batched ' if batch > 1 else ''}depth in waves of {tile}"] = float(waves * k)
        shape[f"log2 waves of {tile}"] = log2(tiles / multiprocessors)
        shape[f"last wave of {tile}"] = tiles / multiprocessors / waves
        shape[f"log2 padded to {tile}"] = log2(tiles * tile * tile / (batch * m * n))
    return Work("cublas fp32", quantities, shape)
