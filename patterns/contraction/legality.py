"""Which sums of products may be replaced."""

from __future__ import annotations

import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.contraction.chunks import has_more_terms, in_chunks, most_in_sequence
from fusebackend.patterns.contraction.factors import Folded, number_of
from fusebackend.patterns.contraction.sites import SUMS, Site, read
from fusebackend.rewriting.pattern import Reject
from fusebackend.rewriting.view_dims import FOLLOWED

aten = torch.ops.aten

#: Of a factor: one of 2**-116 keeps all its digits.
LEAST_SCALE = 2.0**-10


def accept(node: fx.Node) -> Site | Reject | None:
    """The contraction at ``node``, one of ``SUMS``, if a matrix product may replace it; why it may not; or None if it is none."""
    site = read(node)
    if not isinstance(site, Site):
        return site
    reason = why_less_exact(site.dtype, site.device)
    if reason:
        return Reject(reason, node)
    if not all(isinstance(g.value(site.product).shape[d], int) for d in site.repeated):
        return Reject("both factors are broadcast along a dim of symbolic size", node)
    if site.is_mean and not all(isinstance(n, int) and n > 0 for n in g.value(site.product).shape):
        return Reject("the mean over dims of symbolic or no size", node)
    if site.is_mean and site.dtype == torch.float16:
        return Reject("the mean of fp16 products: their sum, before it is divided, may be out of fp16's range", node, "illegal")
    most = most_in_sequence(site)
    if site.sizes is None and site.dtype.itemsize > 2:
        return Reject(f"a sum of unknown many terms in {site.dtype}: up to {most} are added one after another", node)
    if has_more_terms(site, most):
        site = in_chunks(site)
    is_reordered = any(isinstance(f, Folded) and not f.is_exact for f in (site.x, site.y))
    if site.dtype == torch.float16 and is_reordered:
        return Reject("fp16 products of three factors: in another order they may overflow, or vanish", node, "illegal")
    return _why_not_scaled(site) or site


def _why_not_scaled(site: Site) -> Reject | None:
    """A number that enlarges scales the result: what overflows then overflows in the graph too. One that is a little smaller than 1
    scales a factor, so that no sum overflows; of a much smaller one a factor might vanish."""
    numbers = [abs(number_of(s)) for s in site.scalings]
    if all(1 <= n < math.inf for n in numbers):
        return None
    if all(n <= 1 for n in numbers) and math.prod(numbers) >= LEAST_SCALE and site.dtype != torch.float16:
        return None
    scaled = next(s for s, n in zip(site.scalings, numbers) if n != 1)
    return Reject(f"{g.describe(scaled)} scales products: in another order they may overflow, or vanish", scaled, "illegal")


def why_less_exact(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a matrix product could be less exact than the loop, which multiplies in fp32; None if it is not.

    The setting of matrix products is the user's, but the user wrote none here.
    """
    if dtype != torch.float32:
        return None
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = backend.matmul.fp32_precision  # type: ignore[attr-defined]
    if precision in ("none", "ieee"):
        return None
    return f"the precision of fp32 matrix products is set to {precision!r}, and this loop computes in fp32"


def goes_away(user: fx.Node) -> bool:
    """Whether ``user`` of a product needs it no more once contractions are matrix products."""
    if user.target in SUMS:
        return isinstance(accept(user), Site)
    followed = user.target is aten.mul.Tensor or user.target in FOLLOWED
    return followed and bool(user.users) and all(map(goes_away, user.users))
