"""Reads what the complex values of a joint graph are, as far as they are made of Fourier transforms of real rows.

A gradient is spelled by the same transforms, which autograd writes in other words: the gradient of ``irfft`` doubles all bins but the first
and the last, that of ``rfft`` is the real part of an inverse transform of half of the bins. Every step is linear in each operand, so each
value is a sum of products, which is kept as an einsum is written: with a label for each dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.nodes import is_number, size_of
from fusebackend.patterns.causal_conv1d.padded_rows import is_zeros, padded_rows, real_rows
from fusebackend.patterns.causal_conv1d.spectrum import TIME, Bins, Factor, Spectrum, Term, Unreadable, broadcast, size_of_label

aten = torch.ops.aten

INVERSES = (aten._fft_c2r.default, aten._fft_c2c.default)


class SpectrumReader:
    """Reads complex nodes of one graph, each once, while the graph does not change."""

    def __init__(self) -> None:
        self._read: dict[fx.Node, Spectrum | Unreadable] = {}

    def read(self, node: fx.Node) -> Spectrum:
        """Raises:
        Unreadable: the node is something else.
        """
        if node not in self._read:
            try:
                self._read[node] = self._of(node)
            except Unreadable as found:
                self._read[node] = found
        found = self._read[node]
        if isinstance(found, Unreadable):
            raise found
        return found

    def inverse(self, node: fx.Node) -> Spectrum:
        """What an inverse transform to real rows makes (``aten._fft_c2r``): ``bins`` is None."""
        source, dims, norm, n = node.args
        spectrum = self.read(source)
        if len(dims) != 1 or spectrum.labels[dims[0] % len(spectrum.labels)] != TIME:
            raise Unreadable("the inverse FFT is along another dimension", node, spectrum.is_product)
        if spectrum.bins is not Bins.HALF or not g.same_size(size_of(n), spectrum.n):
            raise Unreadable("the inverse FFT has another length than the FFTs", node, spectrum.is_product)
        return _inverted(spectrum, norm)

    def _of(self, node: fx.Node) -> Spectrum:
        if node.op != "call_function" or not g.is_tensor(node) or not g.value(node).is_complex():
            raise Unreadable(f"{g.describe(node)} is not the FFT of real rows", node)
        read = _READERS.get(node.target)
        if read is None:
            near = any(self._is_product(i) for i in node.all_input_nodes)
            raise Unreadable(f"{g.describe(node)} of an FFT is not supported", node, near)
        return read(self, node)

    def _is_product(self, node: fx.Node) -> bool:
        try:
            return self.read(node).is_product
        except Unreadable as found:
            return found.near

    # ---- transforms ----

    def _r2c(self, node: fx.Node) -> Spectrum:
        source, dims, norm, onesided = node.args
        return _transform(node, source, dims, norm, Bins.HALF if onesided else Bins.ALL)

    def _c2c(self, node: fx.Node) -> Spectrum:
        source, dims, norm, forward = node.args
        if forward:
            return _transform(node, source, dims, norm, Bins.ALL)
        spectrum = self.read(source)
        if len(dims) != 1 or spectrum.labels[dims[0] % len(spectrum.labels)] != TIME or spectrum.bins not in (Bins.ALL, Bins.ONE_SIDED):
            raise Unreadable("an inverse FFT of bins that are not those of real rows", node, spectrum.is_product)
        return _inverted(spectrum, norm)

    # ---- pointwise ----

    def _mul(self, node: fx.Node) -> Spectrum:
        first, second = node.args
        if not isinstance(first, fx.Node) or not g.is_tensor(first):
            first, second = second, first
        if not isinstance(second, fx.Node) or not g.is_tensor(second):
            return self._scaled(node, first, second, 1)
        try:
            a, b = self.read(first), self.read(second)
        except Unreadable as found:
            either = self._is_spectrum(first) or self._is_spectrum(second)
            raise Unreadable(f"an FFT is multiplied by what is not one: {found.reason}", found.node, found.near or either) from found
        bins = _bins_of_product(a.bins, b.bins)
        if bins is None or not g.same_size(a.n, b.n):
            raise Unreadable("FFTs of different lengths, or different bins, are multiplied", node, True)
        b = b.relabeled(_unified(node, a, b))
        labels = broadcast(a.labels, b.labels)
        if len({x for x in labels if x is not None}) < sum(x is not None for x in labels):
            raise Unreadable("the FFT of the same rows along two dimensions", node, True)
        terms = []
        for x in a.terms:
            for y in b.terms:
                if len(x.factors) + len(y.factors) > 2:
                    raise Unreadable("the product of more than two FFTs", node, True)
                terms.append(Term((*x.factors, *y.factors), x.scale * y.scale, x.power + y.power))
        return Spectrum(tuple(terms), labels, a.n, bins)

    def _is_spectrum(self, node: fx.Node) -> bool:
        try:
            self.read(node)
        except Unreadable:
            return False
        return True

    def _div(self, node: fx.Node) -> Spectrum:
        return self._scaled(node, node.args[0], node.args[1], -1)

    def _scaled(self, node: fx.Node, spectrum: Any, by: Any, power: int) -> Spectrum:
        found = self.read(spectrum)
        value = by if isinstance(by, (int, float)) else size_of(by) if isinstance(by, fx.Node) and not g.is_tensor(by) else None
        if isinstance(value, torch.SymInt) and g.same_size(value, found.n):
            return found.mapped(lambda t: t.scaled(1.0, Fraction(power)))
        if not isinstance(value, (int, float)) or isinstance(value, bool) or (power < 0 and value == 0):
            raise Unreadable(f"an FFT is scaled by {by}, which is not a number", node, found.is_product)
        return found.mapped(lambda t: t.scaled(float(value) ** power))

    def _add(self, node: fx.Node) -> Spectrum:
        first, second = node.args
        if not node.kwargs and is_number(second, 0):
            return self.read(first)
        if node.kwargs or not g.is_tensor(first) or not g.is_tensor(second):
            raise Unreadable("what is added to an FFT is not one", node, any(map(self._is_product, node.all_input_nodes)))
        return self._sum_of(node, first, second)

    def _sub(self, node: fx.Node) -> Spectrum:
        if node.kwargs or not all(map(g.is_tensor, node.args)):
            raise Unreadable("what is taken from an FFT is not one", node, any(map(self._is_product, node.all_input_nodes)))
        return self._sum_of(node, *node.args, scale=-1.0)

    def _pairs(self, node: fx.Node) -> Spectrum:
        """A sum as Inductor writes it: of pairs of real numbers."""
        operands = summed_pairs(node)
        if operands is None:
            raise Unreadable("complex values that are made of real ones", node)
        return self._sum_of(node, *operands)

    def _sum_of(self, node: fx.Node, first: fx.Node, second: fx.Node, scale: float = 1.0) -> Spectrum:
        a, b = self.read(first), self.read(second).mapped(lambda t: t.scaled(scale))
        if a.bins is not b.bins or not g.same_size(a.n, b.n) or len(a.labels) != len(b.labels):
            raise Unreadable("FFTs of different lengths, or different bins, are added", node, True)
        b = b.relabeled(_unified(node, a, b))
        if a.labels != b.labels:
            raise Unreadable("FFTs of different shapes are added", node, True)
        return dataclasses.replace(a, terms=(*a.terms, *b.terms))

    def _conj(self, node: fx.Node) -> Spectrum:
        def conjugated(term: Term) -> Term:
            factors = tuple(dataclasses.replace(f, conjugated=not f.conjugated) for f in term.factors)
            return dataclasses.replace(term, factors=factors)

        if not g.is_tensor(node.args[0]):
            raise Unreadable("the conjugate of a number", node)
        found = self.read(node.args[0])
        if found.bins is None:
            raise Unreadable("the conjugate of an inverse FFT", node, found.is_product)
        return found.mapped(conjugated)

    def _same(self, node: fx.Node) -> Spectrum:
        return self.read(node.args[0])

    def _copy(self, node: fx.Node) -> Spectrum:
        found, copied, source = self.read(node.args[1]), g.value(node), g.value(node.args[1])
        if copied.dtype != source.dtype or not g.same_sizes(copied.shape, source.shape):  # a dim of size 1 may have become a longer one
            raise Unreadable("an FFT is copied into a tensor of another shape or dtype", node, found.is_product)
        return found

    # ---- bins ----

    def _slice(self, node: fx.Node) -> Spectrum:
        args = g.arguments(node)
        found, dim = self.read(args["self"]), args["dim"] % g.value(node).dim()
        bins = g.value(node).shape[dim]
        half = found.bins is Bins.ALL and args["start"] in (0, None) and args["step"] == 1 and g.same_size(bins, found.n // 2 + 1)
        if found.labels[dim] != TIME or not half:
            raise Unreadable("a part of an FFT is taken", node, found.is_product)
        return dataclasses.replace(found, bins=Bins.HALF)

    def _slice_scatter(self, node: fx.Node) -> Spectrum:
        args = g.arguments(node)
        whole, part, dim = args["self"], args["src"], args["dim"] % g.value(node).dim()
        if args["step"] != 1:
            raise Unreadable("bins of an FFT are overwritten", node)
        if is_zeros(whole):
            found = self.read(part)
            if found.labels[dim] != TIME or found.bins is not Bins.DOUBLED or args["start"] not in (0, None):
                raise Unreadable("bins of an FFT are put among zeros", node, found.is_product)
            if not g.same_size(g.value(node).shape[dim], found.n):
                raise Unreadable("an FFT is extended to another length", node, found.is_product)
            return dataclasses.replace(found, bins=Bins.ONE_SIDED)
        found = self.read(whole)
        inner = _doubled(part)
        if inner is None or inner.target is not aten.slice.Tensor or found.bins is not Bins.HALF or found.labels[dim] != TIME:
            raise Unreadable("bins of an FFT are overwritten", node, found.is_product)
        cut = g.arguments(inner)
        same = cut["self"] is whole and cut["dim"] % len(found.labels) == dim and cut["step"] == 1 and cut["start"] == args["start"] == 1
        half, doubled = g.value(node).shape[dim], g.value(part).shape[dim]
        if not same or not g.same_size(doubled, found.n - half):
            raise Unreadable("other bins of an FFT are doubled than those of its gradient", node, found.is_product)
        return dataclasses.replace(found, bins=Bins.DOUBLED)

    # ---- dims ----

    def _permute(self, node: fx.Node) -> Spectrum:
        found = self.read(node.args[0])
        return dataclasses.replace(found, labels=tuple(found.labels[d] for d in node.args[1]))

    def _unsqueeze(self, node: fx.Node) -> Spectrum:
        found = self.read(node.args[0])
        dim = node.args[1] % (len(found.labels) + 1)
        return dataclasses.replace(found, labels=(*found.labels[:dim], None, *found.labels[dim:]))

    def _squeeze(self, node: fx.Node) -> Spectrum:
        found = self.read(node.args[0])
        dims = {d % len(found.labels) for d in (node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]])}
        return dataclasses.replace(found, labels=tuple(x for d, x in enumerate(found.labels) if d not in dims or x is not None))

    def _view(self, node: fx.Node) -> Spectrum:
        """A view that adds or takes away dims of size 1."""
        found = self.read(node.args[0])
        left = [(x, s) for x, s in zip(found.labels, g.value(node.args[0]).shape) if x is not None]
        labels: list[Any] = []
        for size in g.value(node).shape:
            if left and g.same_size(size, left[0][1]):
                labels.append(left.pop(0)[0])
            elif g.same_size(size, 1):
                labels.append(None)
            else:
                raise Unreadable("dims of an FFT are merged or split", node, found.is_product)
        if left:
            raise Unreadable("dims of an FFT are merged or split", node, found.is_product)
        return dataclasses.replace(found, labels=tuple(labels))

    def _sum(self, node: fx.Node) -> Spectrum:
        args = g.arguments(node)
        found = self.read(args["self"])
        dims = {d % len(found.labels) for d in args["dim"] or ()}
        if not dims or any(found.labels[d] == TIME for d in dims):
            raise Unreadable("the sum of all bins of an FFT", node, found.is_product)
        if any(len(t.factors) < 2 for t in found.terms) and any(found.labels[d] is not None for d in dims):
            raise Unreadable("a sum of FFTs that are not multiplied yet", node)
        kept = [None if d in dims else x for d, x in enumerate(found.labels)]
        return dataclasses.replace(found, labels=tuple(x for d, x in enumerate(kept) if d not in dims or args["keepdim"]))


_READERS: dict[Any, Callable[[SpectrumReader, fx.Node], Spectrum]] = {
    aten._fft_r2c.default: SpectrumReader._r2c,
    aten._fft_c2c.default: SpectrumReader._c2c,
    aten.mul.Tensor: SpectrumReader._mul,
    aten.mul.Scalar: SpectrumReader._mul,
    aten.div.Tensor: SpectrumReader._div,
    aten.div.Scalar: SpectrumReader._div,
    aten.add.Tensor: SpectrumReader._add,
    aten.sub.Tensor: SpectrumReader._sub,
    aten.view.dtype: SpectrumReader._pairs,
    aten._conj.default: SpectrumReader._conj,
    aten._conj_physical.default: SpectrumReader._conj,
    aten.clone.default: SpectrumReader._same,
    aten.alias.default: SpectrumReader._same,
    aten.detach.default: SpectrumReader._same,
    aten.resolve_conj.default: SpectrumReader._same,
    aten.copy.default: SpectrumReader._copy,
    aten.slice.Tensor: SpectrumReader._slice,
    aten.slice_scatter.default: SpectrumReader._slice_scatter,
    aten.permute.default: SpectrumReader._permute,
    aten.unsqueeze.default: SpectrumReader._unsqueeze,
    aten.squeeze.dim: SpectrumReader._squeeze,
    aten.squeeze.dims: SpectrumReader._squeeze,
    aten.view.default: SpectrumReader._view,
    aten.sum.dim_IntList: SpectrumReader._sum,
}


def summed_pairs(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """(a, b) if the complex ``node`` is a + b, which Inductor writes as a sum of views of real numbers."""
    if node.target is not aten.view.dtype or not g.value(node).is_complex():
        return None
    added = node.args[0].args[0] if node.args[0].target is aten.view.default else None
    if added is None or added.target is not aten.add.Tensor or added.kwargs:
        return None
    found = []
    for pairs in added.args:
        reals = pairs.args[0] if isinstance(pairs, fx.Node) and pairs.target is aten.view.default else None
        if not isinstance(reals, fx.Node) or reals.target is not aten.view.dtype or not g.value(reals.args[0]).is_complex():
            return None
        found.append(reals.args[0])
    shapes = [g.value(n).shape for n in (node, *found)]
    same = all(g.same_sizes(s, shapes[0]) for s in shapes)
    return (found[0], found[1]) if same and g.same_size(g.value(added).shape[-1], 2) else None


def _transform(node: fx.Node, source: fx.Node, dims: Any, norm: int, bins: Bins) -> Spectrum:
    if len(dims) != 1:
        raise Unreadable("an FFT along several dimensions", node)
    value = g.value(source)
    axis = dims[0] % value.dim()
    rows = padded_rows(source, axis)
    if value.is_complex():
        inner = padded_rows(real_rows(rows.node), axis)
        rows = dataclasses.replace(inner, offset=rows.offset + inner.offset)
    labels = tuple(TIME if d == axis else None if g.same_size(s, 1) else (rows.node, d) for d, s in enumerate(g.value(rows.node).shape))
    scale, power = _normalization(norm, value.shape[axis])
    return Spectrum((Term((Factor(rows, labels),), scale, power),), labels, value.shape[axis], bins)


def _doubled(node: Any) -> fx.Node | None:
    """What ``node`` is two times."""
    if isinstance(node, fx.Node) and node.target in (aten.mul.Scalar, aten.mul.Tensor) and is_number(node.args[1], 2):
        return node.args[0]
    return None


def _inverted(spectrum: Spectrum, norm: int) -> Spectrum:
    scale, power = _normalization(norm, spectrum.n)
    if isinstance(spectrum.n, int):
        inverse = spectrum.mapped(lambda t: t.scaled(scale * spectrum.n, power))
    else:
        inverse = spectrum.mapped(lambda t: t.scaled(scale, power + 1))  # an unnormalized inverse is n times the rows
    return dataclasses.replace(inverse, bins=None)


def _normalization(norm: int, n: Any) -> tuple[float, Fraction]:
    """(scale, power of n) of a transform: PyTorch's fft_norm_mode is none, by root n, by n."""
    power = (Fraction(0), Fraction(-1, 2), Fraction(-1))[norm]
    return (float(n) ** float(power), Fraction(0)) if isinstance(n, int) and n > 0 else (1.0, power)


def _bins_of_product(a: Bins | None, b: Bins | None) -> Bins | None:
    if a is b and a in (Bins.HALF, Bins.ALL):
        return a
    return Bins.DOUBLED if {a, b} == {Bins.HALF, Bins.DOUBLED} else None


def _unified(node: fx.Node, of: Spectrum, other: Spectrum) -> dict[Any, Any]:
    """New names for the labels of ``other`` so that dims which meet in a pointwise operator are called as ``of`` calls them."""
    taken = {x for t in other.terms for f in t.factors for x in f.labels}
    new: dict[Any, Any] = {}
    for x, y in zip(reversed(of.labels), reversed(other.labels)):
        if (x == TIME) != (y == TIME):
            raise Unreadable("FFTs along different dimensions are combined", node, True)
        if x is not None and y is not None and x != y:
            if not g.same_size(size_of_label(x), size_of_label(y)) or x in taken:
                raise Unreadable("FFTs of shapes that are not known to be equal are combined", node, True)
            new[y] = x
    return new


def real_part(node: fx.Node) -> fx.Node | None:
    """The node that takes the real part of ``node``, if nothing else is made of it."""
    for target in (aten.view_as_real.default, aten.select.int):
        if len(node.users) != 1:
            return None
        node = next(iter(node.users))
        if node.target is not target:
            return None
    dim, index = node.args[1:]
    return node if index == 0 and dim % (g.value(node).dim() + 1) == g.value(node).dim() else None
