"""fp32 matmuls on bf16 tensor cores, with no larger error than cuBLAS fp32's and at more than twice its rate.

``mm``, ``addmm``, ``bmm`` and ``baddbmm`` in fp32 become ``fusebackend::matmul`` where the user's precision setting
asks for true fp32. Each operand is split into three bf16 planes; six of the nine plane products are summed on tensor
cores, smallest first, and every 32 of K added to an fp32 result. Tensor cores add with truncation; the smallest planes
hold half a unit in the last place more, which makes it rounding. What that costs: six products at bf16's rate, one pass
over the operands before, and 1.5 times the operands' bytes of temporary memory, at most 1 GiB: what would need more is
computed in pieces. An operand of several products (the gradient of a linear layer's output; the input of q, k and v) is
split once, if its planes stay below that bound.

On an H200, microseconds with the splits (cuBLAS fp32 in brackets):

    m, n, k
    2048, 2048, 2048         155 (342)
    4096, 4096, 4096        1095 (2684)
    8192, 8192, 8192        8976 (21702)
    8192, 50257, 768        5335 (12481)

Of the 90 products of GPT-2 small, Swin-B and wav2vec2-BERT in training 76 are taken, at 2.0 times cuBLAS's rate (geometric
mean; the least is 1.05 times).

There are three kernels (``csrc/matmul``): ``wgmma`` for compute capability 9.0, ``mma`` for 8.0, and ``ffma``, the
textbook's, which runs anywhere and is slower than cuBLAS: nothing is rewritten for its sake. ``COSTS`` has the table.

A constant factor behind a product is absorbed. What else stands behind it is a kernel of Inductor's that reads the
result, as with cuBLAS: activations in the kernel's epilogue were tried and cost more than that, 208 us for 8192 x 3072
outputs where a kernel that does only them takes 53. Autotuned templates, which could fuse more, gain at most a pass over
the result; the kernel gains more than that wherever it is taken.

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

from .. import graph as g
from .. import native, ops
from ..bench import Case
from ..pattern import Emitter, Match, Pattern, Reject
from ..registry import register

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
    truncation becomes rounding (csrc/matmul/planes.h). ``pitch`` is the inner size rounded up to 64; the rest of a row
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
    """What the choice between a kernel and cuBLAS is made by; microseconds, and bytes or operations a microsecond.

    Attributes:
        kernel: the kernel that ``fusebackend::matmul`` takes on such a GPU.
        measured: where the figures come from.
        tile: rows and columns of the result that a thread block computes; the sides may be swapped where ``swaps``.
        call: a call, before it does anything.
        tile_step: a tile, for each 32 of K.
        tile_ends, unaligned_tile: a tile to begin and finish; more, where rows of the result don't begin at 32-byte
            boundaries.
        part: a part of a tile, where tiles are so few that they are split along K; None if the kernel does not.
        split: the rate at which operands are split: bytes read and written.
        cublas: the best rate that cuBLAS reaches in fp32.
        multiprocessors: of the GPU.
        margin: how much faster than cuBLAS at its best the estimate must be.
    """

    kernel: str
    measured: str
    tile: tuple[int, int]
    swaps: bool
    call: float
    tile_step: float
    tile_ends: float
    unaligned_tile: float
    part: float | None
    split: float
    cublas: float
    multiprocessors: int
    margin: float = 1.0


#: Compute capabilities for which there is a kernel that beats cuBLAS. On 8.6 and 8.9 tensor cores do bf16 at only two to
#: four times the rate of fp32 arithmetic, so six products can't pay; 7.5 and older have none. There the op runs the FFMA
#: kernel, which is about as fast as cuBLAS, so nothing is rewritten.
COSTS: dict[tuple[int, int], Costs] = {
    (9, 0): Costs("wgmma", "on an H200", (128, 256), True, 8.0, 1.9, 5.5, 7.0, 2.0, 3.5e6, 51e6, 132),
    (8, 0): Costs(
        "mma",
        "kernel on an H200, scaled to an A100's clock and rates from its data sheet; not run on an A100",
        (128, 128), False, 12.0, 3.3, 8.0, 4.0, None, 1.3e6, 19e6, 108, margin=1.2,
    ),
}  # fmt: skip
LEAST_K = 256  # at 32 <= k <= 128 the normwise error was 1.06 to 1.20 times cuBLAS's on log-normal inputs, from 512 on below it
PLANES_LIMIT = 2**30  # bytes; of what would need more the op splits pieces as it goes, and nothing is shared


def pays(m: int, k: int, n: int, batch: int = 1, costs: Costs = COSTS[9, 0]) -> bool:
    """Whether the kernels beat cuBLAS even at its best. Thin, small and shallow products stay with cuBLAS.

    On an H200 square products pay from 1024 on.
    """
    shapes = ((m, n), (n, m)) if costs.swaps else ((m, n),)
    tiles = batch * min(-(-rows // costs.tile[0]) * -(-columns // costs.tile[1]) for rows, columns in shapes)
    per_tile = -(-k // 32) * costs.tile_step + costs.tile_ends + (costs.unaligned_tile if n % 8 else 0)
    if costs.part is None:
        product = -(-tiles // costs.multiprocessors) * per_tile
    else:
        product = tiles / costs.multiprocessors * per_tile + costs.part * (costs.multiprocessors // max(tiles, 1))
    split = 10 * batch * k * (m + n) / costs.split
    return costs.margin * (costs.call + split + product) < 2 * batch * m * n * k / costs.cublas


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def unavailable(device: torch.device) -> str | None:
    """Why there is no kernel for this device; None if there is one."""
    return native.load().why_not(device, matmul, matmul_planes)


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
        known = ", ".join(f"{major}.{minor}" for major, minor in COSTS)
        here = ".".join(map(str, capability(device)))
        return Reject(f"no kernel beats cuBLAS's fp32 on compute capability {here}; on {known} one does", node)
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


def bench_cases() -> list[Case]:
    """The sizes of the docstring. The floor is cuBLAS in fp32, to be beaten: goals are below 1."""

    def case(m: int, n: int, k: int, goal: float, order: str = "rr", bias: bool = False) -> Case:
        def matrix(rows: int, columns: int, order: str, device: torch.device) -> torch.Tensor:
            x = torch.randn(rows, columns, device=device) / k**0.5
            return x if order == "r" else x.mT.contiguous().mT

        def inputs(device: torch.device) -> tuple:
            if not asks_for_fp32():
                raise ValueError(f"fp32_precision is {torch.backends.cuda.matmul.fp32_precision!r}: cuBLAS would not compute in fp32")
            operands = matrix(m, k, order[0], device), matrix(k, n, order[1], device) * k**0.5
            return (*operands, torch.randn(n, device=device)) if bias else operands

        fn = (lambda a, b, d: torch.addmm(d, a, b)) if bias else torch.mm
        return Case(f"{m}x{n}x{k} {order}", fn, inputs, fn, goal)

    if not torch.cuda.is_available():
        return []
    squares = [case(4096, 4096, 4096, 0.5, order) for order in ("rr", "rc", "cr", "cc")]
    squares += [case(8192, 8192, 8192, 0.5), case(2048, 2048, 2048, 0.71), case(1024, 1024, 1024, 1.0)]
    gpt2 = [(8192, 2304, 768), (8192, 768, 768), (8192, 3072, 768), (8192, 768, 3072), (8192, 50257, 768)]
    forward = [case(*shape, 0.63, "rr", bias=shape[1] < 50000) for shape in gpt2]
    backward = [case(8192, 768, 2304, 0.63, "rc"), case(3072, 768, 8192, 0.63, "cr"), case(768, 768, 8192, 0.8, "cr")]
    swin = [case(50176, 1024, 256, 0.63, "rc"), case(12544, 512, 2048, 0.63, "rc")]
    return squares + forward + backward + swin


register(Fp32Matmul())
