"""Sums over the same dims of one tensor that one pass computes together, and sums that are made of another one's result.

A norm's backward sums ``g`` and ``g * x``, for the gradients of its bias and its weight; statistics sum ``x`` and ``x * x``. Gradients of
what was broadcast over more and more dims sum ``g`` over ``(0,)`` and over ``(0, 1)``: the second sum is one of the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.ops import PRODUCT_DTYPES
from fusebackend.patterns.column_sum.sites import SUMS, Site, before_casts, lies_as, read, widens

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Together:
    """The sum of ``x * y`` or, without ``y``, of squares, and with it perhaps that of ``x``, computed in one pass.

    Attributes:
        products: the sum of products; its source is the node that multiplies.
        plain: the sum of ``x``, if that is a part.
        x, y: what is multiplied, seen through casts; of one dtype, and both lie in memory as the sum needs it.
        rounded: whether the products are rounded to that dtype.
    """

    products: Site
    plain: Site | None
    x: fx.Node
    y: fx.Node | None
    rounded: bool

    @property
    def sums(self) -> tuple[Site, ...]:
        return (self.products,) if self.plain is None else (self.plain, self.products)

    def alone(self) -> Together:
        """The sum of products by itself."""
        return dataclasses.replace(self, plain=None)

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        return (self.x,) if self.y is None else (self.x, self.y)


@dataclasses.dataclass(frozen=True)
class Nested:
    """Two sums of one tensor, of which ``outer`` is over all dims of ``inner`` and more.

    Attributes:
        begin, end: the dims of the result of ``inner``, without those it sums, that are left to sum.
    """

    inner: Site
    outer: Site
    begin: int
    end: int

    @property
    def sums(self) -> tuple[Site, ...]:
        return self.inner, self.outer


def together(site: Site) -> Together | None:
    """The largest group of sums in one pass that holds ``site``; None if it is a sum by itself."""
    product = _product(site)
    if product is not None:
        plain = _plain(product)
        return plain if plain is not None and _first_product(plain.plain) == plain else product
    return _first_product(site)


def nested(site: Site) -> Nested | None:
    """The two sums of which ``site`` is one and the other is made, or makes it; None if there are none."""
    for other in _other_sums(site):
        if together(other) is not None:
            continue
        for inner, outer in ((site, other), (other, site)):
            found = _nested(inner, outer)
            if found is not None:
                # Another pair may hold one of these two: the first in the graph counts.
                first = next(n for n in map(lambda s: _nested(inner, s), _other_sums(inner)) if n is not None)
                return found if first.outer.node is outer.node else None
    return None


def _nested(inner: Site, outer: Site) -> Nested | None:
    wider = set(outer.summed) > set(inner.summed)
    if not wider or inner.is_mean != outer.is_mean or not can_stand_together((inner, outer), [inner.source]):
        return None
    kept = [d for d in inner.order if d not in inner.summed]
    left = [i for i, d in enumerate(kept) if d in outer.summed]
    if left != list(range(left[0], left[-1] + 1)):
        return None
    return Nested(inner, outer, left[0], left[-1] + 1)


def _other_sums(site: Site) -> list[Site]:
    """The other sums of what ``site`` sums, in the order of the graph."""
    found = [read(n) for n in sorted(_sums(site.source)) if n is not site.node]
    return [s for s in found if isinstance(s, Site) and s.source is site.source]


def _product(site: Site) -> Together | None:
    """``site`` as a sum of products that need not become a tensor."""
    node = site.source
    if node.target is aten.mul.Tensor and len(node.args) == 2 and not node.kwargs:
        factors = node.args
    elif node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        factors = (node.args[0], node.args[0])
    else:
        return None
    if not all(map(g.is_tensor, factors)):
        return None
    x, y = (before_casts(f) for f in factors)  # type: ignore[arg-type]
    product, dtypes = g.value(node), {g.value(n).dtype for n in (x, y)}
    if len(dtypes) > 1 or not {*dtypes, product.dtype, g.value(site.node).dtype} <= PRODUCT_DTYPES:
        return None
    (dtype,) = dtypes
    rounded = product.dtype.itemsize == 2
    if rounded and product.dtype is not dtype:
        return None
    if not all(lies_as(site, g.value(n)) for n in (x, y)):
        return None
    return Together(site, None, x, None if x is y else y, rounded)


def _plain(product: Together) -> Together | None:
    """The group of a sum of products with the sum of one of its factors."""
    for x, y in ((product.x, product.y), (product.y, product.x)):
        for node in sorted(_sums(x)) if x is not None else ():
            site = read(node)
            if not isinstance(site, Site) or site.source is not x or g.value(node).dtype not in PRODUCT_DTYPES:
                continue
            same = (site.order, site.begin, site.end) == (product.products.order, product.products.begin, product.products.end)
            if same and can_stand_together((site, product.products), product.sources):
                return dataclasses.replace(product, plain=site, x=x, y=y if product.y is not None else None)
    return None


def _first_product(site: Site | None) -> Together | None:
    """Of the sums of products that ``site`` may be computed with, the first in the graph."""
    if site is None:
        return None
    multiplied = {n for user in _through_casts(site.source) for n in user.users if n.target in (aten.mul.Tensor, aten.pow.Tensor_Scalar)}
    for node in sorted({s for n in multiplied for s in _sums(n)}):
        summed = read(node)
        product = _product(summed) if isinstance(summed, Site) else None
        group = _plain(product) if product is not None else None
        if group is not None and group.plain is not None and group.plain.node is site.node:
            return group
    return None


def _sums(source: fx.Node) -> set[fx.Node]:
    """The sums over a tensor, seen through casts."""
    return {user for n in _through_casts(source) for user in n.users if user.target in SUMS and user.args[0] is n}


def _through_casts(source: fx.Node) -> Iterator[fx.Node]:
    yield source
    for user in source.users:
        if widens(user):
            yield from _through_casts(user)


def views_behind(node: fx.Node) -> list[fx.Node]:
    """The views of a result through which alone it is read, such as that which drops the dims that ``keepdim`` kept. They can be moved
    along with it."""
    found: list[fx.Node] = []
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in g.VIEWS or user.args[0] is not node:
            break
        found.append(user)
        node = user
    return found


def can_stand_together(sums: Iterable[Site], sources: Iterable[fx.Node]) -> bool:
    """Whether the sums can be computed right behind the last of what they read: so none needs the result of another one."""
    last = max(sources)
    ends = [(site.node, *views_behind(site.node))[-1] for site in sums]
    return all(last < user for end in ends for user in end.users)
