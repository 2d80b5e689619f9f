"""Questions about FX graphs: arguments, sizes without guards, memory order, aliasing, mutation, what Inductor fuses."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

#: Operators whose result aliases their input. ``reshape`` is among them: Inductor's graphs have it where it needs no copy.
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.as_strided.default,
        aten.detach.default,
        aten.diagonal.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unfold.default,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)

_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)

# Lowered by Inductor to a library call or a template, with which it fuses no pointwise code by default.
_LIBRARY = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten._scaled_mm.default,
        aten._int_mm.default,
    }
)

# Inductor has loops for these on GPUs alone (``BackendFeature.BUCKETIZE``).
_LIBRARY_ON_CPU = frozenset({aten.bucketize.Tensor, aten.searchsorted.Tensor})


def value(node: fx.Node) -> Any:
    """The node's fake value: a FakeTensor, a SymInt, a tuple of them."""
    return node.meta.get("val")


def has_value(node: fx.Node) -> bool:
    """Whether a shape and a dtype are known; a pass may have made the node without them."""
    return node.op != "call_function" or "val" in node.meta


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of an ATen call by its schema name, in the schema's order, defaults filled in.

    Raises:
        ValueError: an argument that the schema does not have. So a matcher that reads arguments by name can not overlook one.
    """
    target: Any = node.target
    schema = target._schema.arguments
    if len(node.args) > len(schema):
        raise ValueError(f"{node.target}: {len(node.args)} arguments for {len(schema)} parameters")
    found = {p.name: a for p, a in zip(schema, node.args)}
    for name, argument in node.kwargs.items():
        if name in found or name not in {p.name for p in schema}:
            raise ValueError(f"{node.target}: unexpected argument {name!r}")
        found[name] = argument
    return {p.name: found.get(p.name, p.default_value) for p in schema}


def hint(size: int | torch.SymInt) -> int | None:
    """The value that a size had when it was traced, without a guard; None for unbacked sizes, and for those of nested tensors, which are
    no numbers."""
    if isinstance(size, int):
        return size
    try:
        found = size.node.hint
        return int(found) if found is not None else None
    except Exception:  # asking raises there, with types that differ between versions
        return None


def hints(sizes: Any) -> list[int] | None:
    """Hints of all the sizes, or None if one has none."""
    found = [hint(s) for s in sizes]
    known = [h for h in found if h is not None]
    return known if len(known) == len(found) else None


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal for every input, without adding a guard."""
    return statically_known_true(a == b)


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """The same of all sizes, or strides, of two tensors, and that they have as many."""
    return len(a) == len(b) and all(map(same_size, a, b))


def difference(old: Any, new: Any) -> str | None:
    """How two fake tensors differ (dtype, device, layout, shape, stride, storage offset), in words; None if they do not."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return None if type(old) is type(new) else f"{type(old).__name__} became {type(new).__name__}"
    for what in ("dtype", "device", "layout"):
        if getattr(old, what) != getattr(new, what):
            return f"{what} {getattr(old, what)} became {getattr(new, what)}"
    pairs = [("shape", old.shape, new.shape), ("stride", old.stride(), new.stride())]
    for what, before, after in pairs:
        if len(before) != len(after) or not all(map(same_size, before, after)):
            return f"{what} {tuple(before)} became {tuple(after)}"
    if not same_size(old.storage_offset(), new.storage_offset()):
        return f"storage offset {old.storage_offset()} became {new.storage_offset()}"
    return None


def memory_of(value: Any) -> int | None:
    """A number for the memory that a strided tensor lies in, as long as one in it lives; None for other values. Fake tensors of views know
    whose memory they see."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def share_storage(a: Any, b: Any) -> bool:
    """Whether two values are tensors in the same memory."""
    return memory_of(a) == memory_of(b) is not None


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The dims from outermost to innermost in memory (by stride hints); None if a size or stride has no hint."""
    strides, sizes = hints(tensor.stride()), hints(tensor.shape)
    if strides is None or sizes is None:
        return None
    return sorted(range(tensor.dim()), key=lambda d: (-strides[d], -sizes[d], d))


def is_view(node: fx.Node) -> bool:
    """Whether the value of ``node`` aliases its first argument: a view, or one of several results."""
    return node.op == "call_function" and (node.target in VIEWS or node.target is operator.getitem)


def through_views(node: fx.Node) -> fx.Node:
    """The node that owns the memory of ``node``, seen through views and getitem."""
    while is_view(node):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def inputs_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """What a part of a graph reads of the rest, in the order in which it is first read."""
    inside = set(nodes)
    return list(dict.fromkeys(i for n in sorted(inside) for i in n.all_input_nodes if i not in inside))


def consumers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that compute with the memory of ``node``, seen through views and getitem."""
    for user in node.users:
        if is_view(user):
            yield from consumers(user)
        else:
            yield user


def only_user(node: fx.Node, target: object = None) -> fx.Node | None:
    """The only user of ``node``, if it has one, and that calls ``target``, if one is given."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if user is not None and target in (None, user.target) else None


def is_fusable(node: fx.Node) -> bool:
    """Whether Inductor generates a loop for this node, which it could fuse with a neighbour's."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not _has_loop(node.target):
        return False
    if isinstance(value(node), _NUMBERS):  # sizes are read on the host
        return False
    return not (node.target in _LIBRARY_ON_CPU and is_tensor(node) and value(node).device.type == "cpu")


@functools.cache  # asked tens of thousands of times for a large graph, and an operator's hash is computed in Python
def _has_loop(target: torch._ops.OpOverload) -> bool:
    if target.namespace not in ("aten", "prims", "inductor") or target in _LIBRARY or target in VIEWS:
        return False
    from torch._inductor import lowering

    if target in lowering.fallbacks or target not in lowering.lowerings:
        return target in (aten.copy_.default, aten.copy.default)
    return True


def is_read_by_loops(node: fx.Node) -> bool:
    """Whether kernels that Inductor generates, and nothing else, read the value: they can read it in any order, and compute more."""
    users = list(consumers(node))
    return bool(users) and all(map(is_fusable, users))


def _behind_boundary(start: fx.Node, stop: fx.Node) -> set[fx.Node]:
    """The nodes before ``stop`` that depend on ``start`` through a node that is not fusable. Their users can't be fused with ``start``."""
    reached, behind = {start}, set[fx.Node]()
    node = start.next
    while node is not stop and node.op != "root":
        inputs = node.all_input_nodes
        if not behind.isdisjoint(inputs):
            behind.add(node)
            reached.add(node)
        elif not reached.isdisjoint(inputs):
            reached.add(node)
            if not is_view(node) and not is_fusable(node):
                behind.add(node)
        node = node.next
    return behind


def fused_neighbours(node: fx.Node) -> list[fx.Node]:
    """The neighbours of ``node`` with which Inductor would fuse it: one of those that read it, and those that compute its operands.

    An opaque call prevents that fusion, and adds its memory traffic. A neighbour that also depends on ``node`` through, say, a matmul can't
    be fused: the fused kernel would need its own result.
    """
    found: list[fx.Node] = []
    wanted = [c for c in consumers(node) if is_fusable(c)]
    if wanted:
        behind = _behind_boundary(node, stop=max(wanted))
        found += [c for c in wanted if not any(i in behind for i in c.all_input_nodes)][:1]
    for operand in node.all_input_nodes:
        producer = through_views(operand)
        if is_fusable(producer):
            behind = _behind_boundary(producer, stop=node)
            if not any(i in behind for i in node.all_input_nodes):
                found.append(producer)
    return list(dict.fromkeys(found))


def fused_neighbour(node: fx.Node) -> fx.Node | None:
    """The first of :func:`fused_neighbours`, or None."""
    return next(iter(fused_neighbours(node)), None)


def is_mutating(node: fx.Node) -> bool:
    """Whether ``node`` may write to memory that another node reads."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return "functional" not in node.target.name()
    return False


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers, or seeds of such."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in operator.tags or operator._schema.name.startswith("prims::inductor_")


def may_be_called_early(node: fx.Node) -> bool:
    """Whether an operator may be called while compiling, once more than the program calls it: one of PyTorch's own that computes a tensor,
    without effects and without chance, and fills it. A program's own operators, and collectives, may do anything."""
    operator = node.target
    own = isinstance(operator, torch._ops.OpOverload) and operator.namespace in ("aten", "prims") and "empty" not in operator._schema.name
    return own and is_tensor(node) and not is_mutating(node) and not is_random(node)


def is_mutated_input(node: fx.Node) -> bool:
    """Whether ``node`` aliases an input of a joint graph that the program mutates.

    A backward that reads the input itself, and not the copy that the program made, would read the new values.
    """
    source = through_views(node)
    while source.target is aten.clone.default:  # inserted by AOTAutograd, removed by Inductor
        copied = source.args[0]
        assert isinstance(copied, fx.Node)
        source = through_views(copied)
    if source.op != "placeholder":
        return False
    if any(u.target is aten.copy_.default and u.args[0] is source for u in source.users):
        return True
    # AOTAutograd writes the new value back after the forward graph, which only returns it.
    returned = source.graph.output_node().meta.get("desc") or ()
    mutated = [d.mutated_input for d in returned if hasattr(d, "mutated_input")]
    return "desc" in source.meta and source.meta["desc"] in mutated


def is_joint(graph: fx.Graph) -> bool:
    """Whether the graph holds a backward: with its forward, or alone."""
    return any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder"))


def is_inference(graph: fx.Graph) -> bool | None:
    """Whether a graph is a forward that no backward follows: none of its results is saved for one. None where AOTAutograd does not say."""
    if is_joint(graph):
        return False
    returned = graph.output_node().meta.get("desc")
    return None if returned is None else not any(type(d).__name__.startswith("SavedForBackwards") for d in returned)


def needs_gradients(node: fx.Node) -> bool:
    """Whether ``node`` of a joint graph is computed of gradients: AOTAutograd notes that for its partitioner."""
    tag = node.meta.get("partitioner_tag")
    if tag is not None:
        return tag == "is_backward"
    seen, stack = {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source.op == "placeholder" and source.name.startswith("tangents"):
                return True
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def mutation_between(first: fx.Node, last: fx.Node) -> fx.Node | None:
    """A node from ``first`` up to ``last`` that mutates something; moving a computation across it would be wrong."""
    node = first
    while node is not last and node.op != "root":
        if is_mutating(node):
            return node
        node = node.next
    return None


def describe(node: fx.Node) -> str:
    """``aten.relu.default``, as reasons name it."""
    if node.op != "call_function":
        return f"{node.op} {node.name}"
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", str(node.target))


def spec(tensor: Any) -> str:
    """A tensor's dtype and shape, e.g. ``bf16[24300, 11520]``; other values by ``str``."""
    if not isinstance(tensor, torch.Tensor):
        return str(tensor)
    letters = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "b"}
    name = str(tensor.dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789")
    short = letters.get(kind, kind) + name[len(kind) :] if kind in letters else name
    return f"{short}[{', '.join(map(str, tensor.shape))}]"


def run_length(sizes: list[int], order: list[int], other: list[int]) -> int:
    """The number of elements along the innermost dims of memory order ``order`` that are also contiguous to one another in ``other``.

    Args:
        sizes: of a tensor's dims.
        order, other: dims from outermost to innermost, as :func:`memory_order` gives them.
    """
    length = sizes[order[-1]]
    for outer, inner in zip(reversed(order[:-1]), reversed(order[1:])):
        if other.index(inner) != other.index(outer) + 1:
            break
        length *= sizes[outer]
    return length


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """A block in which operators compute on real tensors, or on those of the device ``meta``.

    AOTAutograd compiles under a fake tensor mode and the Python dispatcher. Under these an operator on a few numbers, which is all that a
    compiler computes, takes several times as long.
    """
    with _disable_current_modes(), no_python_dispatcher():
        yield
