"""fp32 matmuls on bf16 tensor cores, with no larger error than cuBLAS fp32's and at more than twice its rate.

``mm``, ``addmm``, ``bmm`` and ``baddbmm`` in fp32 become ``fusebackend::matmul`` where the user's precision setting asks for true fp32:

    mm:  f32[8192, 3072] = aten.mm(x, w)           matmul = fusebackend.matmul(x, w, None, 0.125, 0.0, planes, -1)
    mul: f32[8192, 3072] = aten.mul(mm, 0.125)  ->

A constant factor behind a product without an addend is absorbed. Activations stay kernels of Inductor, as behind cuBLAS. An operand that
several products use (the gradient of a linear layer's output; the input of q, k and v) is split into planes once, by
``fusebackend::matmul_planes``, if its planes fit the limit for temporary memory.
"""

from __future__ import annotations

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.fp32_matmul import estimate
from fusebackend.patterns.fp32_matmul.ops import constant, matmul, matmul_planes
from fusebackend.patterns.fp32_matmul.products import TARGETS, Product, bytes_of_planes, scaled, untransposed
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

#: Products of smaller K are left to cuBLAS: with log-normal operands the normwise error of 3072 x 4096 at k = 256 is 1.1 times cuBLAS's.
LEAST_K = 512


def asks_for_fp32() -> bool:
    """Whether the user's setting is true fp32 for matmuls, whichever of torch's two interfaces it was made through."""
    return torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")


def unavailable(device: torch.device) -> str | None:
    """Why there is no kernel for this device; None if there is one."""
    return loader.load().why_not(device, matmul, matmul_planes)


def accept(node: fx.Node) -> Product | Reject | None:
    """The product at ``node`` if the operator may replace it; None if it is no fp32 product on a GPU or CPU."""
    product = Product.read(node)
    if any(t.dtype != torch.float32 for t in product.operands) or product.device.type not in ("cuda", "cpu"):
        return None
    depth = g.hint(product.operands[0].shape[-1])
    too_shallow = depth is not None and depth < LEAST_K
    if product.device.type == "cpu":
        return None if too_shallow else Reject("on a CPU the vendor library's fp32 matmul is left as it is", node, "no_kernel")
    if not asks_for_fp32():
        return Reject(f"the precision setting is {torch.backends.cuda.matmul.fp32_precision!r}, not true fp32", node)
    if not isinstance(product.alpha, (int, float)) or not isinstance(product.beta, (int, float)):
        return Reject("alpha or beta is not a number but computed", node)
    if product.alpha == 0:
        return Reject("alpha is 0: cuBLAS does not look at the operands, where infinities may be", node, "illegal")
    if too_shallow:
        return Reject(f"k = {depth}: in so shallow a product the error may be up to 1.2 times cuBLAS's", node)
    reason = unavailable(product.device)
    return Reject(reason, node, "no_kernel") if reason else product


def planes_before(anchor: fx.Node, source: fx.Node, inner: int) -> fx.Node | None:
    """The planes of ``source`` that an earlier substitution made, and that ``anchor`` may use."""
    for user in source.users:
        if user.target is matmul_planes and user.args[1] == inner and user < anchor:
            if g.mutation_between(user, anchor) is None:
                return user
    return None


def innermost(source: fx.Node) -> int:
    """The dimension of a matrix that its planes have innermost: the contiguous one."""
    strides = g.hints(g.value(source).stride())
    return -2 if strides and strides[-2] == 1 and strides[-1] != 1 else -1


def products_of(source: fx.Node) -> int:
    """How many products that may be replaced have ``source``, or its transpose, as an operand whose planes they would share."""
    if (bytes_of_planes(source, innermost(source)) or 0) > constant("planes_limit"):
        return 1
    views = [source, *(u for u in source.users if untransposed(u) == (source, True))]
    nodes = {u for view in views for u in view.users if u.target in TARGETS}
    products = [p for p in map(accept, nodes) if isinstance(p, Product) and source in (untransposed(p.a)[0], untransposed(p.b)[0])]
    return max(len(products), 1)


def share_of_split(anchor: fx.Node, operand: fx.Node) -> float:
    """Which share of the work of splitting an operand falls to the product at ``anchor``."""
    source, _ = untransposed(operand)
    return 0.0 if planes_before(anchor, source, innermost(source)) is not None else 1 / products_of(source)


def shared_planes(emitter: Emitter, anchor: fx.Node, operand: fx.Node) -> tuple[fx.Node | None, int]:
    """The planes of an operand that other products use as well, and the operand's dimension that they have innermost.

    The first product to be replaced makes them, before itself; later ones find them there. That they pay is not asked: if the others
    stay as they are, one launch was made in vain.
    """
    source, transposed = untransposed(operand)
    inner = innermost(source)
    inner_of_operand = -3 - inner if transposed else inner
    planes = planes_before(anchor, source, inner)
    if planes is not None:
        return planes, inner_of_operand
    if products_of(source) < 2:
        return None, -1
    return emitter.call(matmul_planes, source, inner), inner_of_operand


class Fp32Matmul(Pattern):
    """``addmm(bias, a, b)`` -> ``fusebackend.matmul(a, b, bias, 1.0, 1.0)``, and likewise mm, bmm and baddbmm."""

    name = "fp32_matmul"
    anchors = TARGETS

    def match(self, node: fx.Node) -> Match | Reject | None:
        product = accept(node)
        if not isinstance(product, Product):
            return product
        factor = scaled(product)
        output, alpha = factor or (node, float(product.alpha))

        def emit(emitter: Emitter) -> fx.Node:
            planes = (*shared_planes(emitter, output, product.a), *shared_planes(emitter, output, product.b))
            d, beta = (product.d, product.beta) if product.beta else (None, 0.0)
            return emitter.call(matmul, product.a, product.b, d, alpha, float(beta), *planes)

        needed = min(sum(bytes_of_planes(x) or 0 for x in (product.a, product.b)), constant("planes_limit")) / 2**20
        note = f"in bf16 planes on tensor cores, to fp32 accuracy; at most {needed:.0f} MiB of temporary planes"
        note = f"absorbs a factor; {note}" if factor else note
        return Match((output,), emit, (node,) if factor else (), note=note, site=product)

    def estimate(self, match: Match) -> Estimate | Workload:
        product, output = match.site, match.outputs[0]
        splits = [share_of_split(output, operand) for operand in (product.a, product.b)]
        return estimate.estimate(product, None if output is product.node else output, splits)
