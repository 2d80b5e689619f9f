"""fp32 matmuls on bf16 tensor cores, with no larger error than cuBLAS fp32's and at more than twice its rate.

``mm``, ``addmm``, ``bmm`` and ``baddbmm`` in fp32 become ``fusebackend::matmul`` where the user's precision setting
asks for true fp32. Each operand is split into three bf16 planes; six of the nine plane products are summed on tensor
cores, smallest first, and every 64 of K added to an fp32 result. What that addition loses to
rounding is where the tensor cores' next sum begins, so the result is rounded once, however deep the product. Tensor cores
add with truncation; the smallest planes hold half a unit in the last place more, which makes it rounding. What all that
costs: six products at bf16's rate, one pass over the operands before, and 1.5 times the operands' bytes of temporary
memory, at most 1 GiB: what would need more is computed in pieces. An operand of several products (the gradient of a linear
layer's output; the input of q, k and v) is split once, if its planes stay below that bound.

On an H200, microseconds with the splits (cuBLAS fp32 in brackets):

    m, n, k
    2048, 2048, 2048         183 (343)
    4096, 4096, 4096        1169 (2700)
    8192, 8192, 8192        9200 (21770)
    8192, 50257, 768        5890 (14076)

That is 115 to 121 TFLOP/s at 4096^3 and 8192^3 in all four majornesses. Of 84 products of GPT-2 small, Swin-B and
wav2vec2-BERT in training 64 are taken, at 1.9 times cuBLAS's rate (geometric mean; the least is 1.15 times); over all 84, those
that stay with cuBLAS counted as 1, it is 1.64.

There are three kernels (``csrc/fp32_matmul``): ``wgmma`` for compute capability 9.0; ``mma`` for 8.0 and later; ``ffma``, the
textbook's, which runs anywhere and is slower than cuBLAS. Only the first is used in graphs: what was not measured to win stays
with cuBLAS (``COSTS``, ``NOT_MEASURED``). The others were run on an H200 and are there for the op's callers.

A constant factor behind a product is absorbed. What else stands behind it is a kernel of Inductor's that reads the
result, as with cuBLAS: activations in the kernel's epilogue were tried and cost more than that, 208 us for 8192 x 3072
outputs where a kernel that does only them takes 53. Autotuned templates, which could fuse more, gain at most a pass over
the result; the kernel gains more than that wherever it is taken.

The error to fp64 is at most half of cuBLAS's on normal, uniform and cancelling inputs, normwise and componentwise (0.49 of it on
uniform ones at k = 1024, 0.03 to 0.15 at 65,536). Where one element is most of the norm (log-normal inputs, sigma = 4), cuBLAS's
error is little more than one rounding. There ours is 0.05 to 0.6 times it componentwise; normwise, by 400 products of 768 x 1024
at each k, 0.92 to 0.96 for 512 <= k <= 704, 0.83 to 0.92 from 768 to 4096, 0.4 at 65,536 (0.97 to 0.99 for 256 and 384, which
cuBLAS keeps nonetheless). The larger the result, the more that one element is a single product, which we round twice, in the
tensor cores and at the end: for 3072 x 4096 it is 1.02 at k = 512 (standard error 0.02) and 0.96 from 768 on; for 8192 x 6144
1.1 at 512 and 1.05 at 768 (standard error 0.05). Adding plainly, without what rounding took, it was 1.02 to 1.25 but for k
from 4096 to 8192, and the kernel was 4 to 9 % faster.

What it gives at the edges: infinities, NaNs and overflow as fp32 does; an operand's elements below 2^-109 (1.5e-33)
lose low bits, by at most 2^-134 each, so only matrices that are tiny throughout notice. Products of integers of up to
16 bits are exact as long as fp32 holds the sums. On a CPU the vendor library is left as it is; the op's CPU
implementation, which is its reference, is for tests.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader, ops
from fusebackend.rewriting.pattern import Emitter, Match, Pattern, Reject

aten = torch.ops.aten


def reference(a, b, d, alpha, beta, a_planes=None, a_inner=-1, b_planes=None, b_inner=-1, kernel="auto") -> torch.Tensor:
    """What ``fusebackend::matmul`` computes: ``alpha * a @ b + beta * d``, contiguous.

    Args:
        a, b: two fp32 matrices or two equally long batches of them, of any strides.
        d: broadcasts to the result; not read if ``beta`` is 0.
        a_planes, b_planes: what ``matmul_planes`` made of the operand or of its transpose; saves splitting it again.
        a_inner, b_inner: the dimension of a (b) that its planes have innermost: -1 or -2.
        kernel: "wgmma", "mma" or "ffma", on a GPU; "auto" takes the one that suits it.
    """
    product = torch.matmul(a, b) * alpha
    return (product if d is None or beta == 0 else product + beta * d).contiguous()


_HALF_ULP = 1.5 * 2.0**-26


def reference_planes(x: torch.Tensor, inner: int) -> torch.Tensor:
    """What ``fusebackend::matmul_planes`` computes: bf16 ``(batch, 3, outer, pitch)``, dimension ``inner`` innermost.

    The planes of finite x of at least 2^-109 sum to x within 2^-24 of it: the last is raised so that the tensor cores'
    truncation becomes rounding (csrc/fp32_matmul/planes.h). ``pitch`` is the inner size rounded up to 64; the rest of a row
    is zeros.
    """
    rows = x if inner == -1 else x.mT
    hi = rows.bfloat16()
    hi = torch.where(hi.isinf(), (rows.view(torch.int32) & -65536).view(torch.float32).bfloat16(), hi)
    rest = rows - hi.float()
    mid = rest.bfloat16()
    lo = rest - mid.float()
    lo = torch.where(lo == 0, lo, lo + _HALF_ULP * hi.float())
    planes = torch.stack([hi, mid, lo.bfloat16()], dim=-3)
    planes = planes if x.dim() == 3 else planes.unsqueeze(0)
    return torch.nn.functional.pad(planes, (0, -rows.shape[-1] % 64)).contiguous()


def _fake(a, b, *rest):
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _fake_planes(x, inner):
    batch = x.shape[0] if x.dim() == 3 else 1
    return x.new_empty((batch, 3, x.shape[-3 - inner], (x.shape[inner] + 63) // 64 * 64), dtype=torch.bfloat16)


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


def asks_for_fp32() -> bool:
    """Whether the user's setting is true fp32 for matmuls, whichever of torch's two interfaces it was made through."""
    return torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the choice between our kernel and cuBLAS is made by; microseconds, and bytes or operations a microsecond.

    Attributes:
        measured: on what.
        tile: rows and columns of the result that a thread block computes; the sides may be swapped.
        call: a call, before it does anything.
        tile_step, shallow_step: a tile, for each 32 of K; the same below ``SHALLOW``.
        tile_ends, unaligned_tile: a tile to begin and finish; more, where rows of the result don't begin at 32-byte
            boundaries.
        part: a part of a tile, where tiles are so few that they are split along K.
        split: the rate at which operands are split: bytes read and written.
        cublas: the best rate that cuBLAS reaches in fp32.
        multiprocessors: of the GPU.
    """

    measured: str
    tile: tuple[int, int]
    call: float
    tile_step: float
    shallow_step: float
    tile_ends: float
    unaligned_tile: float
    part: float
    split: float
    cublas: float
    multiprocessors: int


#: The compute capabilities on which a kernel was measured to beat cuBLAS. Everywhere else cuBLAS stays, see ``NOT_MEASURED``.
COSTS: dict[tuple[int, int], Costs] = {
    (9, 0): Costs("NVIDIA H200", (128, 192), 8.0, 1.7, 2.1, 4.5, 5.5, 2.0, 3.5e6, 51e6, 132),
}
#: Why nothing is rewritten on others. These are reasons from data sheets: nothing was measured on any of them.
NOT_MEASURED = {
    (8, 0): 'the kernel for it, "mma", has not been measured there (bf16 at 16 times the rate of fp32 arithmetic: it may well win)',
    (8, 6): "bf16 at two to four times the rate of fp32 arithmetic, so six products can't pay; not measured",
    (8, 7): "bf16 at two to four times the rate of fp32 arithmetic, so six products can't pay; not measured",
    (8, 9): "bf16 at two to four times the rate of fp32 arithmetic, so six products can't pay; not measured",
}
SHALLOW = 768  # below this k the kernel's additions are exact, which takes twice the operations (kShallow in csrc/fp32_matmul/gemm_sm90.cu)
#: Shallower products stay with cuBLAS: on log-normal inputs the normwise error of a 3072 x 4096 one is 1.1 times its at k = 256.
LEAST_K = 512
PLANES_LIMIT = 2**30  # bytes; of what would need more the op splits pieces as it goes, and nothing is shared


def pays(m: int, k: int, n: int, batch: int = 1, costs: Costs = COSTS[9, 0]) -> bool:
    """Whether the kernel beats cuBLAS even at its best. Thin, small and shallow products stay with cuBLAS.

    On an H200 square products pay from 1024 on.
    """
    rows, columns = costs.tile
    tiles = batch * min(-(-m // rows) * -(-n // columns), -(-n // rows) * -(-m // columns))
    step = costs.tile_step if k >= SHALLOW else costs.shallow_step
    per_tile = -(-k // 32) * step + costs.tile_ends + (costs.unaligned_tile if n % 8 else 0)
    product = tiles / costs.multiprocessors * per_tile + costs.part * (costs.multiprocessors // max(tiles, 1))
    split = 10 * batch * k * (m + n) / costs.split
    return costs.call + split + product < 2 * batch * m * n * k / costs.cublas


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def unavailable(device: torch.device) -> str | None:
    """Why there is no kernel for this device; None if there is one."""
    return loader.load().why_not(device, matmul, matmul_planes)


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
    if any(t.dtype != torch.float32 for t in tensors) or tensors[0].device.type not in ("cuda", "cpu"):
        return None
    sizes = g.hints((*tensors[0].shape[-2:], tensors[1].shape[-1], tensors[0].shape[0] if tensors[0].dim() == 3 else 1))
    device = tensors[0].device
    if device.type == "cpu":
        large = sizes is not None and pays(*sizes, COSTS[9, 0])
        return Reject("on a CPU the vendor library's fp32 matmul is left as it is", node) if large else None
    if not asks_for_fp32():
        return Reject(f"the precision setting is {torch.backends.cuda.matmul.fp32_precision!r}, not true fp32", node)
    if not isinstance(product.alpha, (int, float)) or not isinstance(product.beta, (int, float)):
        return Reject("alpha or beta is not a number but computed", node)
    if product.alpha == 0:
        return Reject("alpha is 0: cuBLAS does not look at the operands, where infinities may be", node)
    if sizes is None:
        return Reject("a size depends on data, so it is not known whether it pays", node)
    costs = COSTS.get(capability(device))
    if costs is None:
        here = ".".join(map(str, capability(device)))
        why = NOT_MEASURED.get(capability(device), "not measured")
        return Reject(f"cuBLAS stays on compute capability {here}: {why}", node)
    if not pays(*sizes, costs):
        m, k, n, batch = sizes
        shape = "x".join(map(str, ([batch] if batch > 1 else []) + [m, n, k]))
        return Reject(f"cuBLAS is as fast or faster at {shape} (m, n, k): too small, too thin or too shallow", node)
    if sizes[1] < LEAST_K:
        return Reject(f"k = {sizes[1]}: in so shallow a product the error may be up to 1.2 times cuBLAS's", node)
    reason = unavailable(device)
    return Reject(reason, node) if reason else product


PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """The matrix that ``node`` is the transpose of, if it is one, and whether it is."""
    if node.op == "call_function" and node.target is aten.permute.default:
        if list(node.args[1]) in ([1, 0], [0, 2, 1]):
            return node.args[0], True
    return node, False


def bytes_of_planes(operand: fx.Node, inner: int = -1) -> int | None:
    """What the planes of an operand take, by the sizes that it had when traced."""
    sizes = g.hints(g.value(operand).shape)
    return sizes and 6 * math.prod(sizes) // max(sizes[inner], 1) * (-(-sizes[inner] // 64) * 64)


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
    if len(uses) < 2 or (bytes_of_planes(source, inner) or 0) > PLANES_LIMIT:
        return None, -1
    return emitter.call(torch.ops.fusebackend.matmul_planes.default, source, inner), inner_of_operand


def factor(node: fx.Node) -> tuple[fx.Node, float] | None:
    """A multiplication by a number that is all that is done with a product: its node, and the number."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not aten.mul.Tensor or g.value(users[0]).dtype != torch.float32:
        return None
    number = next((a for a in users[0].args if isinstance(a, (int, float))), None)
    return None if number is None else (users[0], float(number))


class Fp32Matmul(Pattern):
    """``addmm(bias, a, b)`` -> ``fusebackend.matmul(a, b, bias, 1.0, 1.0)``, and likewise mm, bmm and baddbmm."""

    name = "fp32_matmul"
    anchors = PRODUCTS

    def match(self, node: fx.Node) -> Match | Reject | None:
        product = accept(node)
        if not isinstance(product, Product):
            return product
        scaled = factor(node)
        output, scale = scaled or (node, 1.0)

        def emit(emitter: Emitter) -> fx.Node:
            planes = (*shared_planes(emitter, output, product.a), *shared_planes(emitter, output, product.b))
            alpha, beta = product.alpha * scale, product.beta * scale
            return emitter.call(matmul, product.a, product.b, product.d if beta else None, float(alpha), float(beta), *planes)

        needed = min(sum(bytes_of_planes(x) or 0 for x in (product.a, product.b)), PLANES_LIMIT) / 2**20
        note = f"in bf16 planes on tensor cores, to fp32 accuracy; at most {needed:.0f} MiB of temporary planes"
        return Match((output,), emit, (node,) if scaled else (), note=f"absorbs a factor; {note}" if scaled else note)
