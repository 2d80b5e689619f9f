"""The operator ``fusebackend::strided_bmm`` and its reference in PyTorch. The kernels are in csrc/strided_bmm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusebackend.native import arguments, loader, ops
from fusebackend.rewriting.device_facts import device_facts

#: Those that the kernels multiply.
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})

#: Of a sum in fp32: the kernels add short runs, and these one after another. A library adds more of them in a better order.
MOST_FP32_TERMS = 128

#: At multiples of these the operands' data begin.
ALIGNED_BYTES = 16


def reference(x: torch.Tensor, y: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """What the kernels compute.

    Args:
        x, y: (outer, batch, m, k) and (outer, batch, n, k), of one dtype, of any strides. A library multiplies those that :func:`refusal`
            refuses: Inductor may lay out anew what a match has seen.
        order: the result's dims from the outermost to the innermost in memory, where it has no gaps.

    Returns:
        ``x @ y.mT``, (outer, batch, m, n). The terms of an element are added in fp32, those of fp32 operands in runs of up to 16, and the
        sum is rounded once.
    """
    product = torch.matmul(x.float(), y.float().mT).to(x.dtype)
    return _empty(x, y, order).copy_(product)


def refusal(sizes: Sequence[int], x_strides: Sequence[int], y_strides: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> str:
    """Why there is no kernel for a product; empty if there is one. Without a library nothing is refused: nothing calls its operators then.

    Args:
        sizes: outer, batch, m, n, k.
        x_strides, y_strides: of the operands' four dims, in elements. Their data begin at multiples of :data:`ALIGNED_BYTES`.
        order: as for :func:`reference`.
    """
    return ops.ask("strided_bmm_refusal", *map(tuple, (sizes, x_strides, y_strides, order)), dtype, default="")


def unavailable(device: torch.device) -> str | None:
    """Why there is no kernel for this device; None if there is one."""
    missing = loader.load().why_not(device, strided_bmm)
    if missing or device.type != "cuda":
        return missing or "strided products are computed on GPUs"
    return device_facts(device).why_not(ops.ask("strided_bmm_shared_bytes", default=0))


def plan_facts(
    sizes: Sequence[int], x_strides: Sequence[int], y_strides: Sequence[int], order: Sequence[int], dtype: torch.dtype
) -> Mapping[str, float]:
    """``rows`` and ``columns`` of the tile that a block computes, and of how many ``entries`` of the batch, for the arguments of
    :func:`refusal`, which it does not refuse."""
    return _plan(list(sizes), list(x_strides), list(y_strides), list(order), dtype)


def _empty(x: torch.Tensor, y: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    sizes = (*x.shape[:3], y.shape[2])
    return x.new_empty([sizes[d] for d in order]).permute([list(order).index(d) for d in range(len(order))])


def _check(x: torch.Tensor, y: torch.Tensor, order: Sequence[int]) -> None:
    torch._check(x.dim() == 4 and y.dim() == 4, lambda: "strided_bmm: x and y must have four dims: outer, batch, rows, terms")
    arguments.check_dtype("strided_bmm", x, y=y)
    torch._check(x.dtype in DTYPES, lambda: f"strided_bmm: x and y must be float16, bfloat16 or float32, not {x.dtype}")
    arguments.check_device("strided_bmm", x, y=y)
    fit = arguments.same_sizes((*x.shape[:2], x.shape[3]), (*y.shape[:2], y.shape[3]))
    torch._check(fit, lambda: f"strided_bmm: {tuple(x.shape)} and {tuple(y.shape)} do not fit to one another")
    torch._check(sorted(order) == [0, 1, 2, 3], lambda: f"strided_bmm: order={list(order)} is no permutation of the result's four dims")


def _fake(x: torch.Tensor, y: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    _check(x, y, order)
    return _empty(x, y, order)


def _on_cpu(x: torch.Tensor, y: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    _check(x, y, order)
    return reference(x, y, order)


# Implemented by csrc/strided_bmm for GPUs.
strided_bmm = ops.define(
    "strided_bmm(Tensor x, Tensor y, int[] order) -> Tensor",
    fake=_fake,
    python_kernels={"CPU": _on_cpu},
    layout=ops.UNPADDED,
)

# Implemented by csrc/strided_bmm/bind.cpp. They do not appear in graphs.
_PRODUCT = "int[] sizes, int[] x_strides, int[] y_strides, int[] order, ScalarType dtype"
ops.define(f"strided_bmm_refusal({_PRODUCT}) -> str", fake=refusal)
ops.define("strided_bmm_shared_bytes() -> int", fake=lambda: ops.ask("strided_bmm_shared_bytes", default=0))
_plan = ops.define_facts(f"strided_bmm_plan({_PRODUCT}) -> str")
