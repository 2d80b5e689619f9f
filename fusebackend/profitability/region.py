"""The part of a graph that a substitution touches, as it was and as it would be.

The part is the match together with the neighbours on both sides that Inductor could fuse with it, since an opaque call costs that
fusion. It is cut out as graphs of their own, with sizes of their own, so that compiling them adds no guards to the graph it is a part of.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config as inductor_config
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fusebackend import cache_keys
from fusebackend import fx_utils as g
from fusebackend.native import ops, user_kernels
from fusebackend.profitability.concatenations import concatenations
from fusebackend.profitability.fresh_inputs import fresh_inputs, symbols_of
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting import known_indices

aten = torch.ops.aten

_MAX_NEIGHBOURS = 12  # on each side; the rest of a longer chain takes the same time in both forms
_MAX_SEARCHED = 200  # nodes looked at to see whether a path leads out of the region and back into it

_PLAIN_COPIES = frozenset({aten.constant_pad_nd.default, aten.clone.default})


@dataclasses.dataclass(frozen=True)
class Region:
    """A match with its neighbours.

    Attributes:
        original, replaced: the nodes of both forms, in order.
        inputs: what the nodes read from outside.
        outputs: the nodes of ``original`` that are read from outside.
        renamed: for each matched output, what replaces it.
        visible: the outputs that the whole graph returns.
        core, emitted: the matched nodes, and those of the replacement.
        orders: of inputs that Inductor lays out otherwise than the graph says (:class:`fusebackend.rewriting.pattern.Workload`).
    """

    original: tuple[fx.Node, ...]
    replaced: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    renamed: dict[fx.Node, fx.Node]
    visible: frozenset[fx.Node]
    core: tuple[fx.Node, ...]
    emitted: tuple[fx.Node, ...]
    orders: Mapping[fx.Node, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def device(self) -> torch.device:
        return device_of(self.outputs)

    @functools.cached_property
    def symbols(self) -> dict[Any, int]:
        return symbols_of(self.inputs)

    @functools.cached_property
    def known(self) -> dict[int, known_indices.Known]:
        """The indices among the inputs that are known before run time, by their positions among the inputs of :meth:`modules`."""
        found = ((i, known_indices.noted(n)) for i, n in enumerate(self.inputs, len(self.symbols)))
        return {i: known for i, known in found if known is not None}

    def key(self, site: str, measured_with: str) -> str:
        """Names the region's measurement (:func:`fusebackend.cache_keys.region`)."""
        outputs = [*self.outputs, *self.renamed.values()]
        both_forms = cache_keys.graph_text(self.inputs, [*self.original, *self.emitted], outputs, self.symbols)
        both_forms += "".join(f"\ninput {i} in order {self.orders[n]}" for i, n in enumerate(self.inputs) if n in self.orders)
        both_forms += "".join(f"\ninput {i} of {known.digest}" for i, known in self.known.items())
        builds = [user_kernels.library_key(n.target) for n in self.emitted if isinstance(n.target, torch._ops.OpOverload)]
        return cache_keys.region(site, measured_with, both_forms, [o in self.visible for o in self.outputs], builds)

    @property
    def is_calls(self) -> bool:
        """Whether Inductor would call libraries for the match too, so that no neighbour is fused in either form: then calling both as
        they are tells which is faster."""
        return are_calls((*self.core, *self.emitted))

    @property
    def is_nearly_calls(self) -> bool:
        """The same but for copies, which Inductor's loops make about as fast as PyTorch's."""
        return are_nearly_calls(self.core) and are_calls(self.emitted)

    def without_neighbours(self) -> Region:
        return dataclasses.replace(_region(self.core, self.emitted, self.renamed, set()), orders=self.orders)

    def modules(self) -> tuple[fx.GraphModule, fx.GraphModule, list[Any]]:
        """The original and the replaced form as graphs of their own, and the fake inputs of both."""
        mode, fakes, substitute = fresh_inputs(self.inputs, self.symbols, self.orders)
        renamed = [self.renamed.get(o, o) for o in self.outputs]
        original = self._module(self.original, {}, self.outputs, len(substitute))
        replaced = self._module(self.replaced, self.renamed, renamed, len(substitute))
        with enable_python_dispatcher():  # decompositions that take symbolic sizes
            for module in (original, replaced):
                FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
        return original, replaced, fakes

    def _module(
        self, nodes: Sequence[fx.Node], renamed: dict[fx.Node, fx.Node], outputs: Sequence[fx.Node], symbols: int
    ) -> fx.GraphModule:
        graph, new = fx.Graph(), {}
        for i in range(symbols):
            graph.placeholder(f"size_{i}")
        for node in self.inputs:
            new[node] = graph.placeholder(node.name)
        for node in nodes:
            new[node] = graph.node_copy(node, lambda n: new[renamed.get(n, n)])
            new[node].meta = {}
        graph.output(tuple(new[o] for o in outputs))
        visible = [i for i, o in enumerate(self.outputs) if o in self.visible]
        next(iter(reversed(graph.nodes))).meta["user_visible_output_idxs"] = visible
        return fx.GraphModule(torch.nn.Module(), graph)


def extract(
    core: Sequence[fx.Node], emitted: Sequence[fx.Node], renamed: dict[fx.Node, fx.Node], orders: Mapping[fx.Node, tuple[int, ...]]
) -> Region:
    """The region around ``core``, beside which its replacement ``emitted`` stands in the graph already.

    Raises:
        Unfit: it can't be cut out.
    """
    return dataclasses.replace(_region(core, emitted, renamed, _neighbours(set(core), set(emitted))), orders=orders)


def cut_out(nodes: Sequence[fx.Node]) -> Region:
    """Nodes without neighbours, and without a replacement.

    Raises:
        Unfit: they can't be cut out.
    """
    return _region(nodes, (), {}, set())


def alone(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node] = (), orders: Mapping[fx.Node, tuple[int, ...]] | None = None
) -> tuple[fx.GraphModule, list[Any], dict[str, int]]:
    """Nodes as a graph of their own, without neighbours; its fake inputs; and the hint of each symbol in these, by name.

    Args:
        outputs: what the graph returns; by default all that other nodes read.
        orders: of inputs that Inductor lays out otherwise than the graph says.

    Raises:
        Unfit: they can't be cut out.
    """
    region = cut_out(nodes)
    if outputs:
        region = dataclasses.replace(region, outputs=tuple(outputs))
    mode, fakes, substitute = fresh_inputs(region.inputs, region.symbols, orders)
    module = region._module(region.original, {}, region.outputs, len(substitute))
    with enable_python_dispatcher():  # decompositions that take symbolic sizes
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
    output = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(region.outputs)))
    return module, fakes, {str(new): region.symbols[old] for old, new in substitute.items()}


def device_of(nodes: Sequence[fx.Node]) -> torch.device:
    """The one device that the nodes' values are on, apart from numbers on the CPU.

    Raises:
        Unfit: there are several, or it is neither a CPU nor a CUDA device.
    """
    devices = {g.value(n).device for n in nodes if g.is_tensor(n)}
    accelerators = devices - {torch.device("cpu")}
    if len(accelerators) > 1 or any(d.type != "cuda" for d in accelerators):
        raise Unfit(f"it is on {', '.join(sorted(map(str, devices)))}; only CPU and CUDA devices are timed")
    return next(iter(accelerators or devices), torch.device("cpu"))


def are_calls(nodes: Sequence[fx.Node]) -> bool:
    """Whether each of the nodes is a view or an operator for which Inductor calls a library."""
    if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
        return False
    return all(isinstance(n.target, torch._ops.OpOverload) and not g.is_fusable(n) for n in nodes if not g.is_view(n))


def library_calls(core: Sequence[fx.Node]) -> list[fx.Node]:
    """The matched nodes for which Inductor calls a library, and the results and views of these."""
    calls = {n for n in core if not g.is_view(n) and n.target not in _PLAIN_COPIES and are_calls([n])}
    return [n for n in core if n in calls or (g.is_view(n) and g.through_views(n) in calls)]


def are_nearly_calls(core: Sequence[fx.Node]) -> bool:
    """Whether matched nodes are calls apart from copies, and some are."""
    calls = [n for n in core if n.target not in _PLAIN_COPIES]
    return are_calls(calls) and any(not g.is_view(n) for n in calls)


def _region(core: Sequence[fx.Node], emitted: Sequence[fx.Node], renamed: dict[fx.Node, fx.Node], neighbours: set[fx.Node]) -> Region:
    original, replaced = {*core, *neighbours}, {*emitted, *neighbours}
    # What is not a tensor, and what random numbers can't stand for, can't be an input: the region computes it itself, in both forms.
    stack = [i for n in original | replaced for i in n.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in original or node in replaced or _can_be_input(node):
            continue
        if node.op != "call_function" or g.is_mutating(node):
            raise Unfit(f"{g.describe(node)} gives a {type(g.value(node)).__name__}, which can't be cut off")
        original.add(node)
        replaced.add(node)
        stack += node.all_input_nodes
    everything = original | replaced
    inputs = g.inputs_of(everything)
    read = [n for n in sorted(original) if g.is_tensor(n) and any(u not in everything for u in n.users)]
    outputs = read or list(renamed)
    visible = frozenset(o for o in outputs if any(u.op == "output" for u in o.users))
    return Region(
        tuple(sorted(original)), tuple(sorted(replaced)), tuple(inputs), tuple(outputs), renamed, visible, tuple(core), tuple(emitted)
    )


def _can_be_input(node: fx.Node) -> bool:
    value = g.value(node)
    if node.op == "get_attr":  # a number that the program made a tensor of may be another; a table of indices may not
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 0
    if not isinstance(value, (torch.Tensor, torch.SymInt, int)):
        return False
    if not isinstance(value, torch.Tensor):
        return True
    if g.is_view(node) and not (value.is_floating_point() or value.is_complex()):
        return False  # one form may read an index, the other a view of it: they must be the same numbers
    owner = g.through_views(node)
    return not (isinstance(owner.target, torch._ops.OpOverload) and ops.is_structured(owner.target, value))


def _neighbours(core: set[fx.Node], emitted: set[fx.Node]) -> set[fx.Node]:
    """The nodes that Inductor could fuse with the match, transitively, with the views in between, and concatenations of what it reads."""
    region = set(core)
    for step in (_producers, _consumers):
        queue, count = sorted(core | emitted), 0
        while queue and count < _MAX_NEIGHBOURS:
            for chain in step(queue.pop(0)):
                neighbour = chain[-1]
                if neighbour not in region and neighbour not in emitted and count < _MAX_NEIGHBOURS and _joins(chain, region | emitted):
                    region.update(chain)
                    queue.append(neighbour)
                    count += 1
    for concatenation in concatenations(core):
        if _joins([concatenation], region | emitted):
            region.add(concatenation)
    return region - core


def _producers(node: fx.Node) -> Iterator[list[fx.Node]]:
    """For each operand of ``node`` the views that it is seen through, then the node that writes it."""
    for operand in node.all_input_nodes:
        chain = [operand]
        while g.is_view(chain[-1]) and isinstance(chain[-1].args[0], fx.Node):
            chain.append(chain[-1].args[0])
        yield chain


def _consumers(node: fx.Node, views: tuple[fx.Node, ...] = ()) -> Iterator[list[fx.Node]]:
    for user in node.users:
        if g.is_view(user):
            yield from _consumers(user, (*views, user))
        else:
            yield [*views, user]


def _joins(chain: list[fx.Node], region: set[fx.Node]) -> bool:
    node = chain[-1]
    if not g.is_fusable(node) or not isinstance(g.value(node), torch.Tensor) or g.is_random(node):
        return False
    if g.is_mutating(node) and node.target is not aten.copy_.default:
        return False
    # Where a path leads out of the region and back into it, the two ends could not be one kernel.
    return not _reenters(region.union(chain))


def _reenters(region: set[fx.Node]) -> bool:
    last = max(region)
    stack = [u for n in region for u in n.users if u not in region and u < last]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in region:
            return True
        if node not in seen:
            seen.add(node)
            if len(seen) > _MAX_SEARCHED:
                return True
            stack += [u for u in node.users if u < last or u is last]
    return False
