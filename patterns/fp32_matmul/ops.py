"""The operators of the family: schemas, fakes and PyTorch references."""

from __future__ import annotations

import functools

import torch

from fusebackend.native import loader, ops


@functools.cache
def constant(name: str) -> float:
    """A constant of the kernels, from ``csrc/fp32_matmul/constants.h``: ``tile_m``, ``tile_n``, ``block_k`` and ``exact_sums_below_k`` in
    elements, ``planes_limit`` in bytes, ``pitch_multiple`` in elements, ``half_ulp``.

    Raises:
        RuntimeError: there is no native library, or it has no such constant.
    """
    library = loader.load()
    if library.path is None:
        raise RuntimeError(f"no native library: {library.reason}")
    with torch.utils._python_dispatch._disable_current_modes():
        return fp32_matmul_constant(name)


def reference(a, b, d, alpha, beta, a_planes=None, a_inner=-1, b_planes=None, b_inner=-1, kernel="auto") -> torch.Tensor:
    """What ``fusebackend::matmul`` computes: ``alpha * a @ b + beta * d``, contiguous.

    Args:
        a, b: two fp32 matrices, or two batches of equally many, of any strides.
        d: broadcasts to the result; not read if ``beta`` is 0.
        a_planes, b_planes: what ``matmul_planes`` made of the operand or of its transpose; then the operand is not split again.
        a_inner, b_inner: the dimension of ``a`` (``b``) that is innermost in its planes, -1 or -2. Transposing an operand swaps them.
        kernel: on a GPU, ``"wgmma"``, ``"mma"``, ``"ffma"``, or ``"auto"`` for the one that suits the GPU.
    """
    product = torch.matmul(a, b) * alpha
    return (product if d is None or beta == 0 else product + beta * d).contiguous()


def reference_planes(x: torch.Tensor, inner: int) -> torch.Tensor:
    """What ``fusebackend::matmul_planes`` computes: the bf16 planes of ``x``, ``(batch, 3, outer, pitch)``.

    Dimension ``inner`` (-1 or -2) of ``x`` is innermost in the planes. Its size is rounded up to ``pitch``, a multiple of 64; the rest
    of a row is zeros. For finite ``x`` of at least 2^-109 the planes sum to ``x`` within 2^-24 of it: the last plane is raised, so that the
    tensor cores' truncation becomes rounding (``kHalfUlp`` in ``csrc/fp32_matmul/constants.h``).
    """
    rows = x if inner == -1 else x.mT
    hi = rows.bfloat16()
    hi = torch.where(hi.isinf(), (rows.view(torch.int32) & -65536).view(torch.float32).bfloat16(), hi)
    rest = rows - hi.float()
    mid = rest.bfloat16()
    lo = rest - mid.float()
    lo = torch.where(lo == 0, lo, lo + constant("half_ulp") * hi.float())
    planes = torch.stack([hi, mid, lo.bfloat16()], dim=-3)
    planes = planes if x.dim() == 3 else planes.unsqueeze(0)
    return torch.nn.functional.pad(planes, (0, pitch(rows.shape[-1]) - rows.shape[-1])).contiguous()


def pitch(size):
    """Elements from one row of planes to the next, for a row of ``size``, which may be symbolic."""
    multiple = int(constant("pitch_multiple"))
    return (size + multiple - 1) // multiple * multiple


def _fake(a, b, *rest):
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _fake_planes(x, inner):
    batch = x.shape[0] if x.dim() == 3 else 1
    return x.new_empty((batch, 3, x.shape[-3 - inner], pitch(x.shape[inner])), dtype=torch.bfloat16)


matmul = ops.define(
    "matmul(Tensor a, Tensor b, Tensor? d, float alpha, float beta, Tensor? a_planes=None, int a_inner=-1,"
    ' Tensor? b_planes=None, int b_inner=-1, str kernel="auto") -> Tensor',
    fake=_fake,
    python_kernels={"CPU": reference},
    layout=torch.Tag.needs_fixed_stride_order,
)
matmul_planes = ops.define(
    "matmul_planes(Tensor x, int inner) -> Tensor",
    fake=_fake_planes,
    python_kernels={"CPU": reference_planes},
    layout=torch.Tag.needs_fixed_stride_order,
)
fp32_matmul_constant = ops.define("fp32_matmul_constant(str name) -> float", fake=lambda name: constant(name))
