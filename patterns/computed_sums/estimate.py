"""What computed rows and sums make a device do: in the kernels, and in Inductor's, which it is asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.producers import Tensors, behind
from fusebackend.patterns.column_sum.work import is_dynamic, shape_of
from fusebackend.patterns.computed_sums import expression
from fusebackend.patterns.computed_sums.program import parse
from fusebackend.patterns.computed_sums.reading import Reading
from fusebackend.patterns.computed_sums.row_sites import Rows
from fusebackend.patterns.computed_sums.sites import Site
from fusebackend.rewriting.pattern import Estimate, Generated, Work, Workload
from fusebackend.rewriting.workload import log2, stream, streamed

_NO_KERNEL = "on CPUs there is no kernel but the reference"

#: A thread block sums up an image, or a part of it: of fewer rows it is set up for little.
_LEAST_ROWS = 16


def of_sums(site: Site) -> Estimate | Workload:
    value = g.value(site.sums[0].source)
    if 0 in site.sizes:
        return Estimate(False, "an empty tensor: nothing to gain")
    if value.device.type == "cpu":
        return Estimate(False, _NO_KERNEL)
    is_of_images = site.reading.batch > 1
    if is_of_images and site.reading.rows < _LEAST_ROWS:
        return Estimate(False, f"images of {site.reading.rows} rows: too few for a thread block each")
    written = _written(site)
    kernel = _kernel(site.reading, site.expression.program, len(site.sums))
    quantities = {**kernel.quantities, "written": written, "launches": 1.0 + (kernel.quantities["partial"] > 0)}
    shape = {**kernel.shape, **_shape(value, site.sizes, site.begin, site.end), "sums": float(len(site.sums))}
    ours = [Work("computed sums of images" if is_of_images else kernel.kind, quantities, shape)]
    nodes = [s.node for s in site.sums]
    reader = next((n for node in nodes for n in g.consumers(node) if g.is_fusable(n)), None)
    if reader is not None:  # Inductor computes it at the end of the kernel that finishes the sums: it becomes a kernel of its own
        ours.append(streamed(2.0 * written, value))
    beside = _beside(site)
    if beside is not None:
        ours.append(stream(beside))
    made = _made_first(site)
    if made is not None:
        ours.append(made)
    generated = _generated({*nodes, *site.nodes, *site.producer.nodes}, nodes, _inductor_sums(site, kernel.quantities["read"]))
    return Workload(tuple(ours), (generated,), reader or beside or max(site.producer.nodes, default=None))


def _made_first(site: Site) -> Work | None:
    """The loops that write what the program reads, where Inductor would compute that inside of its sums."""
    made = {leaf.node for leaf in site.expression.leaves} & {*site.producer.nodes}
    written = sum(math.prod(_sizes(n)) * g.value(n).itemsize for n in made)
    value = g.value(site.sums[0].source)
    return dataclasses.replace(streamed(site.producer.read + written, value), around=True) if made else None


def _beside(site: Site) -> fx.Node | None:
    """Of the loops over all elements, and the other reductions of each image, that read what sums of each image read, or what is computed
    for these, one that does not need their results: Inductor would compute it along. Sums over all rows it divides among kernels."""
    if site.reading.batch == 1:
        return None
    elements, results = math.prod(site.sizes), math.prod(_sizes(site.sums[0].node))
    sums = {s.node for s in site.sums}
    pending = [*site.nodes, *(leaf.node for leaf in site.expression.leaves if expression.is_full(_sizes(leaf.node), elements))]
    seen, found = {*sums, *site.nodes}, set[fx.Node]()
    while pending:
        for user in pending.pop().users:
            if user in seen or not g.is_tensor(user):
                continue
            seen.add(user)
            is_full = expression.is_full(_sizes(user), elements)
            if g.is_view(user) or (is_full and not expression.is_tensor_anyway(user)):
                pending.append(user)
            elif g.is_fusable(user) and (is_full or math.prod(_sizes(user)) == results):
                found.add(user)
    return min(found - behind(sums, found), default=None)


def _sizes(node: fx.Node) -> list[int]:
    return g.hints(g.value(node).shape) or [0]


def of_rows(rows: Rows) -> Estimate | Workload:
    value = g.value(rows.node)
    if 0 in rows.sizes:
        return Estimate(False, "an empty tensor: nothing to gain")
    if value.device.type == "cpu":
        return Estimate(False, _NO_KERNEL)
    summed = _sum_of_rows(rows)
    if summed is not None:
        return Estimate(False, f"Inductor computes it in the kernel of {g.describe(summed)}, which has each row at hand")
    end = len(rows.sizes) - 1
    kernel = _kernel(rows.reading, rows.expression.program, 1, [value.dtype])
    quantities = {**kernel.quantities, "written": float(math.prod(rows.sizes) * value.itemsize), "launches": 1.0}
    shape = {**kernel.shape, **_shape(value, rows.sizes, 0, end), "stored": log2(value.itemsize)}
    ours = [dataclasses.replace(kernel, quantities=quantities, shape=shape)]
    inside = {rows.node, *rows.expression.nodes}
    neighbour = _fused_neighbour(rows.node, inside)
    if neighbour is not None:
        ours.append(stream(neighbour))
    at_hand = _bytes_at_hand(rows)
    if at_hand:
        ours.append(dataclasses.replace(streamed(at_hand, value), around=True))
    described = streamed(quantities["read"] + quantities["written"], value)
    read = [leaf.node for leaf in rows.expression.leaves] if rows.is_relaid else []
    orders = {n: rows.order for n in read if g.value(n).shape == value.shape}
    generated = dataclasses.replace(_generated(inside, [rows.node], described), orders=orders)
    return Workload(tuple(ours), (generated,), neighbour, orders=orders)


def _fused_neighbour(node: fx.Node, inside: Collection[fx.Node]) -> fx.Node | None:
    """Of the loops that Inductor computes beside ``node``, one that would be fused with it: what reads it too."""
    return next((n for n in g.fused_neighbours(node) if n > node and n not in inside), None)


def _sum_of_rows(rows: Rows) -> fx.Node | None:
    """A reduction of each row of a tensor of the same size that is read, as in a layer norm: Inductor computes both in one kernel."""
    elements, columns = math.prod(rows.sizes), rows.sizes[-1]
    for leaf in rows.expression.leaves:
        made, count = g.through_views(leaf.node), math.prod(_sizes(leaf.node))
        if count * columns == elements and g.is_fusable(made) and not expression.is_pointwise(made):
            if any(g.is_tensor(x) and math.prod(_sizes(x)) == elements for x in made.all_input_nodes):
                return made
    return None


def _bytes_at_hand(rows: Rows) -> float:
    """Bytes of the tensors read in full that Inductor's own loops compute: these would compute the result along, and not read them."""
    full = {leaf.node for leaf in rows.expression.leaves if math.prod(_sizes(leaf.node)) == math.prod(rows.sizes)}
    return float(sum(math.prod(rows.sizes) * g.value(n).itemsize for n in full if g.is_fusable(g.through_views(n))))


#: Functions for which the hardware has an instruction of its own, and those that take many.
_FUNCTIONS = frozenset({"exp", "exp2", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "div"})
_LONG_FUNCTIONS = frozenset({"log1p", "expm1", "tanh", "erf", "sin", "cos", "pow"})


def _kernel(reading: Reading, program: str, outs: int, stored: Sequence[torch.dtype] = ()) -> Work:
    """The work of the kernel of sums, or of rows, without what it writes. ``outs``, ``stored``: as for :meth:`Reading.plan`."""
    facts, counts = reading.plan(outs, stored), _operations(program, reading.kinds, outs)
    elements = float(reading.batch) * reading.rows * reading.columns
    quantities = {
        "read": reading.read,
        "loads": elements * sum(kind in "rg" for kind in reading.kinds) / facts["vector"],
        "blocks": facts["blocks"],
        "partial": 8.0 * facts["partials"],  # written and read
        "operations": elements * counts[0],
        "functions": elements * counts[1],
        "long functions": elements * counts[2],
    }
    names = ("vector", "lanes", "threads", "splits", "tile_vectors")
    shape = {name.replace("_", " "): log2(facts[name]) for name in names}
    shape |= {"rows at once": facts["rows_at_once"], "blocks at once": facts["blocks_at_once"]}
    shape |= {"tensors": float(reading.kinds.count("r")), "rest": log2(1 + reading.rest)}
    shape |= {"operations": float(counts[0]), "functions": float(counts[1]), "long functions": float(counts[2])}
    return Work("computed rows" if stored else "computed sums", quantities, shape)


def _operations(program: str, kinds: str, outs: int) -> tuple[int, int, int]:
    """How many simple operations, functions and long functions are computed of each element: what depends on columns alone is computed
    once."""
    varies = {f"i{k}": kind not in "cs" for k, kind in enumerate(kinds)}
    simple = functions = long_ones = results = 0
    for statement in parse(program, len(kinds), outs):
        is_varied = any(varies.get(a, False) for a in statement.arguments)
        if statement.name != "out":
            varies[f"t{results}"] = is_varied
            results += 1
        simple += is_varied and statement.name not in _FUNCTIONS | _LONG_FUNCTIONS
        functions += is_varied and statement.name in _FUNCTIONS
        long_ones += is_varied and statement.name in _LONG_FUNCTIONS
    return simple, functions, long_ones


def _shape(value: torch.Tensor, sizes: list[int], begin: int, end: int) -> dict[str, float]:
    return shape_of(sizes, begin, end, value.dtype, is_dynamic(value))


def _written(site: Site) -> float:
    """Bytes of the sums."""
    return float(math.prod((*site.sizes[: site.begin], *site.sizes[site.end :])) * sum(g.value(s.node).itemsize for s in site.sums))


def _generated(nodes: Collection[fx.Node], results: Sequence[fx.Node], otherwise: Work) -> Generated:
    """Inductor's kernels for ``results`` alone. What it makes a tensor of, and others read too, is there without them."""
    tensors = Tensors()
    kept, pending = set[fx.Node](), [*results]
    while pending:
        node = pending.pop()
        if node in kept or node not in nodes:
            continue
        is_there = node not in results and not {*node.users} <= {*nodes} and tensors.is_one(g.through_views(node))
        if not is_there:
            kept.add(node)
            pending += node.all_input_nodes
    return Generated(tuple(sorted(kept)), tuple(results), otherwise, "computed_sums")


def _inductor_sums(site: Site, read: float) -> Work:
    """By what they read and compute, where Inductor can't be asked."""
    value = g.value(site.sums[0].source)
    elements, nodes = float(math.prod(site.sizes)), float(site.expression.statements)
    quantities = {
        "written": _written(site),
        "read": read,
        "gathered": 0.0,
        "computed": elements * nodes,
        "launches": 1.0,
    }
    shape = _shape(value, site.sizes, site.begin, site.end) | {"nodes": log2(1 + nodes), "gathers": 0.0}
    return Work("inductor column sum", quantities, shape)
