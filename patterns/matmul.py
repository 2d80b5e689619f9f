"""fp32 matmuls on Hopper's bf16 tensor cores, with a smaller error than cuBLAS fp32's and at more than twice its rate.

``mm``, ``addmm``, ``bmm`` and ``baddbmm`` in fp32 become ``fusebackend::matmul`` where the user's precision setting
asks for true fp32. Each operand is split, exactly, into three bf16 planes; six of the nine plane products are summed on
tensor cores, smallest first, and every 32 of K added to an fp32 result, because tensor cores add with truncation. What
that costs: six products at bf16's rate, one pass over the operands before, and 1.5 times the operands' bytes of
temporary memory. An operand of several products (the gradient of a linear layer's output; the input of q, k and v) is
split once.

On an H200, microseconds with the splits (cuBLAS fp32 in brackets):

    m, n, k                                   m, n, k (GPT-2 small, 8 x 1024 tokens)
    1024, 1024, 1024          48 (67)         8192, 2304, 768           258 (678)
    2048, 2048, 2048         158 (348)        8192, 768, 3072           362 (859)
    4096, 4096, 4096        1044 (2708)       3072, 768, 8192 (dW)      370 (794)
    8192, 8192, 8192        7990 (21769)      8192, 50257, 768         5021 (12462)

What it gives at the edges: infinities, NaNs and overflow as fp32 does; an operand's elements below 2^-109 (1.5e-33)
lose low bits, by at most 2^-134 each, so only matrices that are tiny throughout notice. A CPU's vendor library is left
as it is: nothing is matched there, and the op's CPU implementation, which is its reference, is for tests.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from .. import graph as g
from .. import native, ops
from ..pattern import Emitter, Match, Pattern, Reject
from ..registry import register

aten = torch.ops.aten


def reference(a, b, d, alpha, beta, a_planes=None, a_inner=-1, b_planes=None, b_inner=-1) -> torch.Tensor:
    """What ``fusebackend::matmul`` computes: ``alpha * a @ b + beta * d``, contiguous.

    Args:
        a, b: two fp32 matrices or two equally long batches of them, of any strides.
        d: broadcasts to the result; not read if ``beta`` is 0.
        a_planes, b_planes: what ``matmul_planes`` made of the operand or of its transpose; saves splitting it again.
        a_inner, b_inner: the dimension of a (b) that its planes have innermost: -1 or -2.
    """
    product = torch.matmul(a, b) * alpha
    return (product if d is None or beta == 0 else product + beta * d).contiguous()


def reference_planes(x: torch.Tensor, inner: int) -> torch.Tensor:
    """What ``fusebackend::matmul_planes`` computes: bf16 ``(batch, 3, outer, pitch)``, dimension ``inner`` innermost.

    The planes of finite x of at least 2^-109 sum to x. ``pitch`` is the inner size rounded up to 64; the rest of a row
    may hold anything.
    """
    rows = x if inner == -1 else x.mT
    hi = rows.bfloat16()
    hi = torch.where(hi.isinf(), (rows.view(torch.int32) & -65536).view(torch.float32).bfloat16(), hi)
    rest = rows - hi.float()
    mid = rest.bfloat16()
    planes = torch.stack([hi, mid, (rest - mid.float()).bfloat16()], dim=-3)
    planes = planes if x.dim() == 3 else planes.unsqueeze(0)
    return torch.nn.functional.pad(planes, (0, -rows.shape[-1] % 64)).contiguous()


def _fake(a, b, d, alpha, beta, a_planes=None, a_inner=-1, b_planes=None, b_inner=-1):
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _fake_planes(x, inner):
    batch = x.shape[0] if x.dim() == 3 else 1
    return x.new_empty((batch, 3, x.shape[-3 - inner], (x.shape[inner] + 63) // 64 * 64), dtype=torch.bfloat16)


ops.define(
    "matmul(Tensor a, Tensor b, Tensor? d, float alpha, float beta,"
    " Tensor? a_planes=None, int a_inner=-1, Tensor? b_planes=None, int b_inner=-1) -> Tensor",
    fake=_fake,
    python_kernels={"CPU": reference},
    layout=torch.Tag.needs_fixed_stride_order,
)
ops.define(
    "matmul_planes(Tensor x, int inner) -> Tensor",
    fake=_fake_planes,
    python_kernels={"CPU": reference_planes},
    layout=torch.Tag.needs_fixed_stride_order,
)


def asks_for_fp32() -> bool:
    """Whether the user's setting is true fp32 for matmuls, whichever of torch's two interfaces it was made through."""
    return torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")


# Measured on an H200, in microseconds: a call, before it does anything; a tile of 128 x 256 of the result, for each 32
# of K, to begin and finish, and where rows of the result don't begin at 32-byte boundaries; a part of a tile, where
# tiles are so few that they are split along K. Bytes and operations a microsecond: the split of the operands; the best
# that cuBLAS reaches.
_CALL, _TILE_STEP, _TILE, _UNALIGNED_TILE, _PART = 8.0, 1.9, 5.5, 7.0, 2.0
_SPLIT_RATE, _CUBLAS_RATE, _MULTIPROCESSORS = 3.5e6, 51e6, 132


def pays(m: int, n: int, k: int, batch: int = 1) -> bool:
    """Whether the kernels beat cuBLAS even at its best. Thin, small and shallow products stay with cuBLAS.

    Square products pay from 1024 on, m = 8192 with n = 768 from k = 128 on.
    """
    tiles = batch * min(-(-rows // 128) * -(-columns // 256) for rows, columns in ((m, n), (n, m)))
    per_tile = -(-k // 32) * _TILE_STEP + _TILE + (_UNALIGNED_TILE if n % 8 else 0)
    product = tiles / _MULTIPROCESSORS * per_tile + _PART * (_MULTIPROCESSORS // max(tiles, 1))
    split = 10 * batch * k * (m + n) / _SPLIT_RATE
    return _CALL + split + product < 2 * batch * m * n * k / _CUBLAS_RATE


def unavailable(device: torch.device) -> str | None:
    """Why there is no kernel for this device; None if there is one."""
    reason = native.load().why_not(device)
    if reason is None and torch.cuda.get_device_capability(device) != (9, 0):
        reason = "the fp32 matmul needs a GPU of compute capability 9.0"
    return reason


@dataclasses.dataclass(frozen=True)
class Product:
    """``alpha * a @ b + beta * d`` as the graph has it."""

    a: fx.Node
    b: fx.Node
    d: fx.Node | None = None
    alpha: float = 1.0
    beta: float = 0.0


def read(node: fx.Node) -> Product:
    """The product that an mm, addmm, bmm or baddbmm node computes."""
    named = g.arguments(node)
    if node.target is aten.mm.default:
        return Product(named["self"], named["mat2"])
    if node.target is aten.bmm.default:
        return Product(named["self"], named["mat2"])
    a, b = ("mat1", "mat2") if node.target is aten.addmm.default else ("batch1", "batch2")
    return Product(named[a], named[b], named["self"], named["alpha"], named["beta"])


def accept(node: fx.Node) -> Product | Reject | None:
    """The guard chain of one node; None for what is no fp32 product on a GPU."""
    product = read(node)
    tensors = [g.value(n) for n in (product.a, product.b, product.d) if n is not None]
    if any(t.dtype != torch.float32 for t in tensors) or tensors[0].device.type != "cuda":
        return None
    if not asks_for_fp32():
        return Reject(f"the precision setting is {torch.backends.cuda.matmul.fp32_precision!r}, not true fp32", node)
    if not isinstance(product.alpha, (int, float)) or not isinstance(product.beta, (int, float)):
        return Reject("alpha or beta is not a number but computed", node)
    if product.alpha == 0:
        return Reject("alpha is 0: cuBLAS does not look at the operands, where infinities may be", node)
    sizes = g.hints((*tensors[0].shape[-2:], tensors[1].shape[-1], tensors[0].shape[0] if tensors[0].dim() == 3 else 1))
    if sizes is None:
        return Reject("a size depends on data, so it is not known whether it pays", node)
    m, k, n, batch = sizes
    if not pays(m, n, k, batch):
        shape = "x".join(map(str, ([batch] if batch > 1 else []) + [m, n, k]))
        return Reject(f"cuBLAS is as fast or faster at {shape} (m, n, k): too small, too thin or too shallow", node)
    reason = unavailable(tensors[0].device)
    return Reject(reason, node) if reason else product


PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """The matrix that ``node`` is the transpose of, if it is one, and whether it is."""
    if node.op == "call_function" and node.target is aten.permute.default:
        if list(node.args[1]) in ([1, 0], [0, 2, 1]):
            return node.args[0], True
    return node, False


def shared_planes(emitter: Emitter, anchor: fx.Node, operand: fx.Node) -> tuple[fx.Node | None, int]:
    """The planes of an operand that other products use as well, and the operand's dimension that they have innermost.

    The first product to be replaced makes them, before itself; later ones find them there.
    """
    source, transposed = untransposed(operand)
    strides = g.hints(g.value(source).stride())
    inner = -2 if strides and strides[-2] == 1 and strides[-1] != 1 else -1
    inner_of_operand = -3 - inner if transposed else inner
    for user in source.users:
        if user.target is torch.ops.fusebackend.matmul_planes.default and user.args[1] == inner and user < anchor:
            if g.mutation_between(user, anchor) is None:
                return user, inner_of_operand
    views = [source, *(u for u in source.users if untransposed(u) == (source, True))]
    products = {u for view in views for u in view.users if u.target in PRODUCTS and isinstance(accept(u), Product)}
    uses = [p for p in products if source in (untransposed(read(p).a)[0], untransposed(read(p).b)[0])]
    if len(uses) < 2:
        return None, -1
    return emitter.call(torch.ops.fusebackend.matmul_planes.default, source, inner), inner_of_operand


class Fp32Matmul(Pattern):
    """``addmm(bias, a, b)`` -> ``fusebackend.matmul(a, b, bias, 1.0, 1.0)``, and likewise mm, bmm and baddbmm."""

    name = "fp32_matmul"
    anchors = PRODUCTS

    def match(self, node: fx.Node) -> Match | Reject | None:
        product = accept(node)
        if not isinstance(product, Product):
            return product

        def emit(emitter: Emitter) -> fx.Node:
            a_planes, a_inner = shared_planes(emitter, node, product.a)
            b_planes, b_inner = shared_planes(emitter, node, product.b)
            return emitter.call(
                torch.ops.fusebackend.matmul.default,
                product.a,
                product.b,
                product.d if product.beta else None,
                float(product.alpha),
                float(product.beta),
                a_planes,
                a_inner,
                b_planes,
                b_inner,
            )

        return Match((node,), emit, note="in bf16 planes on tensor cores, to fp32 accuracy")


register(Fp32Matmul())
