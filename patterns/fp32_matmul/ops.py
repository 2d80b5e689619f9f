"""The operators of the family: schemas, fakes and PyTorch references."""

from __future__ import annotations

import torch

from fusebackend.native import arguments, ops

#: The values of the operator's argument ``kernel``.
KERNEL_NAMES = ("auto", "wgmma", "mma", "ffma")


def constant(name: str) -> float:
    """A constant of the kernels, from ``csrc/fp32_matmul/constants.h``: ``tile_m``, ``tile_n``, ``block_k`` and ``exact_sums_below_k`` in
    elements, ``planes_limit`` in bytes, ``pitch_multiple`` in elements, ``half_ulp``.

    Raises:
        RuntimeError: there is no native library, or it has no such constant.
    """
    return ops.ask("fp32_matmul_constant", name)


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


def _check(a, b, d, alpha, beta, a_planes=None, a_inner=-1, b_planes=None, b_inner=-1, kernel="auto") -> None:
    """Refuses what the bindings refuse, except for a kernel that the GPU can't run."""
    torch._check(a.dim() in (2, 3) and b.dim() == a.dim(), lambda: "matmul: a and b must both have 2 or both have 3 dimensions")
    for operand in (a, b, d):
        torch._check(operand is None or operand.dtype == torch.float32, lambda: "matmul: operands must be fp32")
    arguments.check_device("matmul", a, b=b, d=d, a_planes=a_planes, b_planes=b_planes)
    fits = arguments.are_same(a.shape[-1], b.shape[-2]) and arguments.same_sizes(a.shape[:-2], b.shape[:-2])
    torch._check(fits, lambda: f"matmul: sizes {tuple(a.shape)} of a and {tuple(b.shape)} of b do not fit")
    if d is not None:
        torch._check(d.dim() <= a.dim(), lambda: "matmul: d has more dimensions than the result")
    if d is not None and beta != 0:
        result = (*a.shape[:-1], b.shape[-1])[a.dim() - d.dim() :]
        fits = all(arguments.are_same(size, 1) or arguments.are_same(size, wanted) for size, wanted in zip(d.shape, result))
        torch._check(fits, lambda: f"matmul: d, {tuple(d.shape)}, does not broadcast to the result")
    for operand, planes, inner in ((a, a_planes, a_inner), (b, b_planes, b_inner)):
        if planes is not None:
            sizes = _plane_sizes(operand, inner)
            right = planes.dtype == torch.bfloat16 and arguments.same_sizes(planes.shape, sizes) and arguments.is_contiguous(planes)
            torch._check(right, lambda: "matmul: these are not the operand's planes")
    torch._check(kernel in KERNEL_NAMES, lambda: f"matmul: kernel {kernel}: {', '.join(KERNEL_NAMES)} are known")


def _check_planes(x, inner) -> None:
    right = x.dtype == torch.float32 and x.dim() in (2, 3)
    torch._check(right, lambda: "matmul_planes: x must be an fp32 matrix, or a batch of them")
    _plane_sizes(x, inner)


def _plane_sizes(x, inner) -> tuple:
    torch._check(inner in (-1, -2), lambda: f"matmul: the inner dimension is -1 or -2, not {inner}")
    return (x.shape[0] if x.dim() == 3 else 1, 3, x.shape[-3 - inner], pitch(x.shape[inner]))


def _fake(a, b, *rest):
    _check(a, b, *rest)
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _fake_planes(x, inner):
    _check_planes(x, inner)
    return x.new_empty(_plane_sizes(x, inner), dtype=torch.bfloat16)


def _on_cpu(a, b, *rest):
    _check(a, b, *rest)
    return reference(a, b, *rest)


def _planes_on_cpu(x, inner):
    _check_planes(x, inner)
    return reference_planes(x, inner)


matmul = ops.define(
    "matmul(Tensor a, Tensor b, Tensor? d, float alpha, float beta, Tensor? a_planes=None, int a_inner=-1,"
    ' Tensor? b_planes=None, int b_inner=-1, str kernel="auto") -> Tensor',
    fake=_fake,
    python_kernels={"CPU": _on_cpu},
    layout=torch.Tag.needs_fixed_stride_order,
)
matmul_planes = ops.define(
    "matmul_planes(Tensor x, int inner) -> Tensor",
    fake=_fake_planes,
    python_kernels={"CPU": _planes_on_cpu},
    layout=torch.Tag.needs_fixed_stride_order,
)
ops.define("fp32_matmul_constant(str name) -> float", fake=constant)
