"""Reads convolutions that are written by FFT out of a joint graph: those that share a transform, each with the slice that follows.

    irfft(rfft(u, n) * rfft(k, n), n)[..., start:start + length]

is sample ``start`` and the following of the convolution of ``u`` with ``k``, if none of them wraps around: if the samples that would follow
the result after ``n`` are zero. With one factor conjugated it is a correlation, which is what gradients are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.nodes import is_number, size_of
from fusebackend.patterns.causal_conv1d.padded_rows import is_zeros
from fusebackend.patterns.causal_conv1d.spectra import INVERSES, SpectrumReader, real_part, summed_pairs
from fusebackend.patterns.causal_conv1d.spectrum import TIME, Factor, Labels, Spectrum, Term, Unreadable
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten

#: What is convolved, and the complex dtype that ``torch.fft`` makes of it.
_DTYPES = {torch.complex64: torch.float32, torch.complex128: torch.float64}

#: The largest factor, and one by the smallest. It scales the taps, which may overflow, or vanish, where the spectra that the graph scales
#: do not. A transform itself makes numbers as many times larger as it has points.
MOST_SCALE = 2.0**20


@dataclasses.dataclass(frozen=True)
class Output:
    """Samples ``start`` to ``stop`` of an inverse FFT of ``n`` along dim ``axis`` of ``node``, whose dims have these ``labels``.

    Attributes:
        inverse: the node of the inverse FFT.
        rows: the node of all ``n`` samples.
        nodes: all nodes from ``inverse`` to ``node``.
    """

    node: fx.Node
    inverse: fx.Node
    rows: fx.Node
    labels: Labels
    start: int
    stop: Any
    n: Any
    nodes: tuple[fx.Node, ...]

    @property
    def axis(self) -> int:
        return self.labels.index(TIME)

    @property
    def length(self) -> Any:
        return g.value(self.node).shape[self.axis]


@dataclasses.dataclass(frozen=True)
class Product:
    """A term of an output: ``scale`` times the convolution of the rows ``x`` with those of ``k``, or their correlation, ``k`` being moved
    along ``x``.

    Attributes:
        correlates: whether it is the correlation.
        scale: a number.
        summed: the labels that are summed over.
    """

    x: Factor
    k: Factor
    correlates: bool
    scale: float
    summed: frozenset

    @property
    def shift(self) -> int:
        """At which sample of the inverse FFT the first samples of both meet."""
        return self.x.rows.offset - self.k.rows.offset if self.correlates else self.x.rows.offset + self.k.rows.offset


@dataclasses.dataclass(frozen=True)
class Site:
    """An inverse FFT: its output is the sum of the products."""

    output: Output
    products: tuple[Product, ...]
    is_backward: bool


@dataclasses.dataclass(frozen=True)
class Group:
    """All sites that share transforms with one another.

    Attributes:
        sites: in the order of the graph.
        spectra: the complex nodes that they are made of, the padded rows before them included.
    """

    sites: tuple[Site, ...]
    spectra: frozenset[fx.Node]


def read_group(node: fx.Node) -> Group | Reject | None:
    """The group of the inverse FFT ``node``; None if that is no product of transforms. What differs is said at the first of a group that
    belongs to the same direction."""
    reader = SpectrumReader()
    try:
        if not _inverse(reader, node).is_product:
            return None
    except Unreadable as error:
        if not error.near:
            return None
    spectra, inverses, outsider = _connected(node)
    if any(i < node and g.needs_gradients(i) == g.needs_gradients(node) for i in inverses):
        return None
    if outsider is not None:
        used, by = outsider
        return Reject(f"{g.describe(used)} is also used by {g.describe(by)}, which needs the complex values", used, "illegal")
    sites = []
    for inverse in sorted(inverses):
        try:
            site = _site(reader, inverse)
        except Unreadable as error:
            return Reject(error.reason, error.node)
        if isinstance(site, Reject):
            return site
        sites.append(site)
    return Group(tuple(sites), frozenset(spectra))


def _inverse(reader: SpectrumReader, node: fx.Node) -> Spectrum:
    return reader.inverse(node) if node.target is aten._fft_c2r.default else reader.read(node)


def _connected(start: fx.Node) -> tuple[set[fx.Node], set[fx.Node], tuple[fx.Node, fx.Node] | None]:
    """(the complex nodes that are connected with the inverse FFT ``start``, its like among them, and what else uses one of them)."""
    spectra, inverses, outsider = set[fx.Node](), {start}, None
    stack = _spectra_before(start)
    while stack:
        node = stack.pop()
        if node in spectra or is_zeros(node):
            continue
        spectra.add(node)
        stack += _spectra_before(node)
        for user in [u for n in node.users for u in _sums_of_pairs(n)]:
            if _is_inverse(user):
                inverses.add(user)
                stack += _spectra_before(user)
            elif user.op == "call_function" and g.is_tensor(user) and g.value(user).is_complex():
                stack.append(user)
            elif user.target is not aten.sym_size.int:
                outsider = outsider or (node, user)
    return spectra, inverses, outsider


def _sums_of_pairs(user: fx.Node) -> list[fx.Node]:
    """The complex sums that a view of real numbers is used for; ``user`` itself if it is something else."""
    if user.target is not aten.view.dtype or g.value(user).is_complex():
        return [user]
    ends = [user]
    for target in (aten.view.default, aten.add.Tensor, aten.view.default, aten.view.dtype):
        ends = [u for end in ends for u in end.users]
        if any(end.target is not target for end in ends):
            return [user]
    return ends if all(summed_pairs(end) for end in ends) else [user]


def _spectra_before(node: fx.Node) -> list[fx.Node]:
    return [n for n in summed_pairs(node) or node.all_input_nodes if g.is_tensor(n) and g.value(n).is_complex()]


def _is_inverse(node: fx.Node) -> bool:
    return node.target in INVERSES and (node.target is aten._fft_c2r.default or not node.args[3])


def _site(reader: SpectrumReader, inverse: fx.Node) -> Site | Reject:
    found = _inverse(reader, inverse)
    value = g.value(_spectra_before(inverse)[0])
    dtype = _DTYPES.get(value.dtype)
    if dtype is None or (dtype == torch.float64 and value.device.type != "cpu"):
        return Reject(f"FFTs in {value.dtype} on {value.device.type}: complex64 is supported", inverse)
    output = _output(inverse, found)
    if isinstance(output, Reject):
        return output
    products = []
    for term in found.terms:
        product = _product(term, output)
        if isinstance(product, Reject):
            return product
        products.append(product)
    return Site(output, tuple(products), g.needs_gradients(inverse))


def _output(inverse: fx.Node, found: Spectrum) -> Output | Reject:
    rows: fx.Node | None = inverse
    if inverse.target is aten._fft_c2c.default:
        rows = real_part(inverse)
        if rows is None:
            return Reject("more than the real part of the inverse FFT is used", inverse)
    assert rows is not None
    between: list[fx.Node] = []
    node = inverse
    while node is not rows:
        between.append(node)
        node = next(iter(node.users))
    axis, start, stop, last = found.labels.index(TIME), 0, found.n, rows
    cut = next(iter(rows.users)) if len(rows.users) == 1 else rows
    kept = _kept(cut, axis)
    if kept is not None:
        last, start = cut, kept
        stop = start + g.value(cut).shape[axis]
    nodes = (*between, rows) if last is rows else (*between, rows, last)
    return Output(last, inverse, rows, found.labels, start, stop, found.n, nodes)


def _kept(cut: fx.Node, axis: int) -> int | None:
    """The first sample that ``cut`` keeps, if it cuts samples off along ``axis`` alone, and keeps some."""
    if cut.op != "call_function" or not g.is_tensor(cut) or g.hint(g.value(cut).shape[axis]) == 0:
        return None
    if cut.target is aten.slice.Tensor:
        args = g.arguments(cut)
        start = args["start"] or 0
        if args["dim"] % g.value(cut).dim() == axis and args["step"] == 1 and isinstance(start, int):
            if start >= 0:
                return start
            whole = g.value(args["self"]).shape[axis]
            return max(whole + start, 0) if isinstance(whole, int) else None
    if cut.target is aten.constant_pad_nd.default:
        pad = list(cut.args[1])
        last = 2 * (g.value(cut).dim() - 1 - axis)
        if last >= len(pad) or not all(is_number(p, 0) for i, p in enumerate(pad) if i not in (last, last + 1)):
            return None
        before, after = pad[last], size_of(pad[last + 1])
        if isinstance(before, int) and before <= 0 and statically_known_true(after <= 0):
            return -before
    return None


def _product(term: Term, output: Output) -> Product | Reject:
    node = output.inverse
    if len(term.factors) != 2:
        return Reject("an FFT is added to a product of FFTs", node)
    if term.power != 0 or not abs(term.scale) < float("inf"):
        return Reject("the result is scaled by a power of a symbolic length", node)
    if not 1 / MOST_SCALE <= abs(term.scale) <= MOST_SCALE:
        return Reject(f"the result is scaled by {term.scale:.3g}: taps that are scaled may overflow, or vanish", node, "illegal")
    first, second = term.factors
    if first.conjugated and second.conjugated:
        return Reject("both FFTs are conjugated: the result is reversed in time", node)
    correlates = first.conjugated or second.conjugated
    if first.conjugated:
        first, second = second, first
    labels = {x for f in term.factors for x in f.labels if x not in (None, TIME)}
    summed = frozenset(labels - set(output.labels))
    for label in summed:
        if not all(label in f.labels for f in term.factors):
            return Reject("a sum over a dimension that only one of the FFTs has", node)
    if summed and not correlates:
        return Reject("a sum of convolutions over channels is not depthwise", node)
    unknown = {x for x in output.labels if x not in (None, TIME)} - labels
    if unknown:
        return Reject("a product of FFTs is broadcast", node)
    scale = 1.0 if abs(term.scale - 1) < 1e-14 else term.scale
    product = Product(first, second, correlates, scale, summed)
    return _wrap(product, output) or product


def _wrap(product: Product, output: Output) -> Reject | None:
    """Why samples of the result may wrap around the end of the transform, if they may."""
    x, k, n = product.x.rows, product.k.rows, output.n
    if product.correlates:  # sample m is the sum over j of k[j] x[m - shift + j]; n more or n fewer must lie outside
        checks = [(n + output.start, product.shift + x.length), (n + product.shift, output.stop + k.length - 1)]
    else:  # sample m is the sum over j of k[j] x[m - shift - j]
        checks = [(n + output.start, product.shift + x.length + k.length - 1)]
    for has, needs in checks:
        if isinstance(has, int) and isinstance(needs, int):
            if has < needs:
                lengths = f"rows of {x.length} and {k.length} samples"
                return Reject(f"it wraps around: an FFT of {n} points for {lengths}, which takes {n + needs - has}", output.inverse)
        elif not statically_known_true(has >= needs):
            return Reject("it is not known of these symbolic lengths whether the convolution wraps around", output.inverse)
    return None
