"""An attention in a graph: what it reads, and what the replacement has to compute."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.dims import Dim, Dims, after, all_leaves, fresh, holds, is_cast, is_empty, is_view, leaves
from fusebackend.patterns.attention.dropout import Dropout, Dropped, dims_of_dropped, dropout_of, read_dropped
from fusebackend.patterns.attention.numbers import same_number, scaling
from fusebackend.patterns.attention.operands import Operand, factors, read_operand, split_product
from fusebackend.patterns.attention.scores import Mask, Scores, read_scores
from fusebackend.patterns.attention.softmax import Softmax, holders, read_softmax
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten

DTYPES = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Result:
    """A node that the replacement computes.

    Attributes:
        node: is ``factor`` times what the operator returns.
        dims: of ``node``.
        passed: the nodes from the product to ``node``, without it.
        further: what follows ``node`` alone and holds the same numbers; those of its dtype may be computed in its place.
    """

    node: fx.Node
    dims: Dims
    factor: float
    passed: tuple[fx.Node, ...] = ()
    further: tuple[tuple[fx.Node, Dims], ...] = ()


@dataclasses.dataclass(frozen=True)
class Forward:
    """The forward of an attention.

    Attributes:
        queries, keys, values: the operands of the two products.
        dims: (batch, queries, keys, the elements of a query, those of a value), as they were before the graph split them.
        out: the result.
        held: the nodes that hold the probabilities.
        dropout: what they are multiplied by before they are multiplied by the values; None if by nothing.
        multiplied: the nodes that hold what is multiplied by the values.
        others: (holder, user) for each user of either that is no part of the forward.
        needed: the nodes that must go: nobody else may use them.
    """

    scores: Scores
    softmax: Softmax
    queries: Operand
    keys: Operand
    values: Operand
    dims: tuple[Dim, Dim, Dim, Dim, Dim]
    product: fx.Node
    out: Result
    dtype: torch.dtype
    held: dict[fx.Node, Dims]
    dropout: Dropout | None
    multiplied: dict[fx.Node, Dims]
    others: tuple[tuple[fx.Node, fx.Node], ...]
    needed: tuple[fx.Node, ...]

    @property
    def batch(self) -> Dim:
        """The axes that all share, in the order of the product of queries and keys."""
        return leaves(self.dims[0])

    @property
    def rows(self) -> Dim:
        return leaves(self.dims[1])

    @property
    def columns(self) -> Dim:
        return leaves(self.dims[2])

    @property
    def depth(self) -> Dim:
        return leaves(self.dims[3])

    @property
    def width(self) -> Dim:
        return leaves(self.dims[4])

    @property
    def masks(self) -> tuple[Mask, ...]:
        return tuple(t for t in self.scores.terms if isinstance(t, Mask))


def read_forward(anchor: fx.Node, dtypes: Sequence[torch.dtype] = DTYPES) -> Forward | Reject | None:
    """The attention whose softmax has its exponential at ``anchor``, with operands of one of ``dtypes``."""
    softmax = read_softmax(anchor)
    if softmax is None:
        return None
    held, others = holders(softmax.result)
    dropped = read_dropped(held)
    users = [*others, *((p, u) for p in dropped for u in p.users if u not in dropped)]
    products = [(p, u) for p, u in users if factors(u) is not None or u.target is aten.baddbmm.default]
    if not products:
        return _why_no_product(softmax, others)
    scores = read_scores(softmax.scores)
    if not isinstance(scores, Scores):
        return scores
    if is_empty(g.value(softmax.scores).shape):
        return Reject("a size is 0, or not known to be larger", softmax.scores)
    columns = scores.dims[softmax.dim]
    batch, left, right = scores.batch, scores.left_dims[-2], scores.right_dims[-1]
    if leaves(columns) == leaves(right):
        rows, swapped = left, False
    elif leaves(columns) == leaves(left):
        rows, swapped = right, True
    else:
        return Reject("the softmax does not run along all keys, or all queries, of the product", softmax.result)
    if scores.gain is not None and set(leaves(columns)) & set(all_leaves(scores.gain.dims)):
        return Reject("a tensor that differs between keys multiplies the scores", scores.gain.tensor)
    operands = read_operand(scores.left, scores.left_dims), read_operand(scores.right, scores.right_dims)
    queries, keys = reversed(operands) if swapped else operands
    of_probabilities = _dims_of_holders(softmax, scores.dims, held)
    known = {**of_probabilities, **dims_of_dropped(of_probabilities, dropped)}
    forward_products = [(p, u) for p, u in products if p in known and _contracts(known[p], u, p, leaves(columns))]
    if len(forward_products) != 1:
        return Reject(f"{len(forward_products)} products of the probabilities and values: one is supported", softmax.result)
    p, product = forward_products[0]
    dropout = dropout_of(p, dropped, known) if p in dropped else None
    if p in dropped and dropout is None:
        return _why_no_product(softmax, others) or Reject("the probabilities are scaled", p)
    if product.target is aten.baddbmm.default:
        return Reject("baddbmm adds to the product of probabilities and values", product)
    probabilities_first = product.args[0] is p
    other = product.args[1] if probabilities_first else product.args[0]
    assert isinstance(other, fx.Node)
    p_batch, p_rows, p_columns = split_product(known[p])
    wanted = [leaves(rows), leaves(columns)]
    if set(p_batch) != set(leaves(batch)) or [p_rows, p_columns] != (wanted if probabilities_first else wanted[::-1]):
        return Reject("the products of queries and keys and of probabilities and values do not have the same batch dims", product)
    shape = g.value(other).shape
    width_dim = fresh(shape)[-1 if probabilities_first else -2]
    batch_dim = known[p][:-2]
    value_dims = (*batch_dim, columns, width_dim) if probabilities_first else (*batch_dim, width_dim, columns)
    out_dims = (*batch_dim, rows, width_dim) if probabilities_first else (*batch_dim, width_dim, rows)
    values = read_operand(other, value_dims)
    dtype = next((g.value(k.node).dtype for k in queries.links if g.value(k.node).dtype in dtypes), None)
    if dtype is None:
        supported = " and ".join(str(d).removeprefix("torch.") for d in dtypes)
        return Reject(f"{g.value(scores.left).dtype} queries: {supported} are supported", scores.product)
    if scores.gain is not None and g.value(scores.product).dtype.itemsize > 2:
        return Reject("a tensor multiplies scores that are not rounded to 16 bits: the queries would be, once more", scores.gain.of)
    out = end_of(product, out_dims, 1.0, dtype)
    if isinstance(out, Reject):
        return out
    needed = (*scores.nodes, *softmax.nodes, *(dropout.nodes if dropout is not None else ()))
    multiplied = of_probabilities if dropout is None else _that_hold(p, dropped, known)
    passed = {product, *(dropout.nodes if dropout is not None else ()), *multiplied}
    users = others if dropout is None else [*others, *((h, u) for h in multiplied for u in h.users)]
    rest = tuple((h, u) for h, u in users if u not in passed)
    dims = (batch, rows, columns, scores.left_dims[-1], width_dim)
    return Forward(scores, softmax, queries, keys, values, dims, product, out, dtype, of_probabilities, dropout, multiplied, rest, needed)


def _that_hold(p: fx.Node, dropped: Mapping[fx.Node, Dropped], dims: Mapping[fx.Node, Dims]) -> dict[fx.Node, Dims]:
    """The nodes among ``dropped`` that hold what ``p`` does."""
    wanted = dropped[p]
    return {n: dims[n] for n, d in dropped.items() if n in dims and d.mask is wanted.mask and same_number(d.factor, wanted.factor)}


def _why_no_product(softmax: Softmax, others: list[tuple[fx.Node, fx.Node]]) -> Reject | None:
    """A reason where the probabilities are dropped out, or scaled, before they are multiplied by the values."""
    if not isinstance(read_scores(softmax.scores), Scores):
        return None
    for _, user in others:
        reached = [user]
        for node in reached:
            if factors(node) is not None:
                what = "dropout" if _is_random(user) else g.describe(user)
                return Reject(f"{what} between the softmax and the product with the values is not supported", user)
            if len(reached) < 16:
                reached += [u for u in node.users if u.op == "call_function"]
    return None


def _is_random(node: fx.Node) -> bool:
    reached = [node]
    for each in reached:
        if torch.Tag.nondeterministic_seeded in getattr(each.target, "tags", ()):
            return True
        if len(reached) < 16:
            reached += each.all_input_nodes
    return False


def _dims_of_holders(softmax: Softmax, dims: Dims, held: list[fx.Node]) -> dict[fx.Node, Dims]:
    known = {softmax.result: dims}
    for node in held[1:]:
        source = node.args[0]
        found = after(node, known[source]) if source in known else None  # type: ignore[index]
        if found is not None:
            known[node] = found
    return known


def _contracts(dims: Dims, product: fx.Node, operand: fx.Node, axes: Dim) -> bool:
    """Whether ``product`` sums along ``axes`` of ``operand``."""
    first, second = factors(product) or product.args[1:3]
    if first is operand and leaves(dims[-1]) == axes and second is not operand:
        return True
    return second is operand and leaves(dims[-2]) == axes and first is not operand


def end_of(start: fx.Node, dims: Dims, factor: float, dtype: torch.dtype) -> Result | Reject:
    """The first node behind ``start``, by views, casts and scalings, that is ``factor`` times ``start`` and has that dtype.

    Where the last is ``factor`` times it but for a power of two, which no binary type rounds, it is returned too; and so is what is summed
    up in fp32 before it is rounded to that dtype, as the gradients of keys that a group of queries shares are.
    """
    node, passed, missing = start, list[fx.Node](), factor
    while not (same_number(missing, 1.0) and g.value(node).dtype == dtype):
        step = _only_step(node)
        if step is None:
            if g.value(node).dtype == dtype and math.frexp(missing)[0] == 0.5:
                return Result(node, dims, 1 / missing, tuple(passed), _further(node, dims))
            if g.value(node).dtype == torch.float32 and _is_summed_and_rounded(node, dtype):
                return Result(node, dims, 1 / missing, tuple(passed))
            return Reject(f"{g.describe(start)} is not scaled and converted as its counterpart in the forward is", start)
        user, scale = step
        found = after(user, dims)
        if found is None:
            return Reject(f"{g.describe(user)} arranges a result in a way that is not followed", user)
        missing /= scale
        passed.append(node)
        node, dims = user, found
    return Result(node, dims, 1.0, tuple(passed), _further(node, dims))


def _only_step(node: fx.Node) -> tuple[fx.Node, float] | None:
    """(the only user of ``node``, by what it scales), if that is a view, a cast or a scaling."""
    user = g.only_user(node)
    if user is None:
        return None
    scaled = scaling(user)
    if scaled is not None:
        return user, scaled[1]
    return (user, 1.0) if is_view(user) or is_cast(user) else None


def _is_summed_and_rounded(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether ``node`` is used by a sum alone, of which nothing is used but what is rounded to ``dtype``."""
    total = g.only_user(node, aten.sum.dim_IntList)
    step = (total, 1.0) if total is not None else None
    while step is not None and g.value(step[0]).dtype == torch.float32:
        step = _only_step(step[0])
    return step is not None and g.value(step[0]).dtype == dtype


def _further(node: fx.Node, dims: Dims) -> tuple[tuple[fx.Node, Dims], ...]:
    """What follows ``node`` alone and holds the same numbers: views, copies, and conversions to a wider type and back."""
    dtype, found = g.value(node).dtype, list[tuple[fx.Node, Dims]]()
    for _ in range(12):
        step = _only_step(node)
        known = None if step is None or step[1] != 1.0 or not holds(g.value(step[0]).dtype, dtype) else after(step[0], dims)
        if known is None:
            break
        assert step is not None
        node, dims = step[0], known
        found.append((node, dims))
    return tuple(found)
