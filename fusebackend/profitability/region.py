"""Cuts the part of a graph that a substitution touches out of it, as it was and as it would be.

The part is the match together with the neighbours on both sides that Inductor could fuse with it, since an opaque call
costs that fusion. It gets sizes of its own with the hints of the graph's, so that compiling it adds no guards there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.triton_bundler import TritonBundler
from torch._inductor.utils import BoxedBool
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fusebackend import fx_utils as g
from fusebackend.native import user_kernels
from fusebackend.profitability.random_inputs import Unfit

aten = torch.ops.aten

_NEIGHBOURS = 12  # on each side; a longer chain of cheap operations adds its own time to both alike
_SEARCHED = 200  # nodes looked at to see that a region is not entered again from outside

_PLAIN_COPIES = frozenset({aten.constant_pad_nd.default, aten.clone.default})


@dataclasses.dataclass(frozen=True)
class Region:
    """The nodes of both forms, in order; what they read from outside; what is read of them from outside.

    ``outputs`` are nodes of ``original``; ``renamed`` leads from the matched outputs to what replaces them, ``visible``
    are those that the graph returns.
    """

    original: tuple[fx.Node, ...]
    replaced: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    renamed: dict[fx.Node, fx.Node]
    visible: frozenset[fx.Node]
    core: tuple[fx.Node, ...]
    emitted: tuple[fx.Node, ...]

    @functools.cached_property
    def device(self) -> torch.device:
        return device_of(self.outputs)

    @functools.cached_property
    def symbols(self) -> dict[Any, int]:
        return symbols_of(self.inputs)

    def key(self, salt: str) -> str:
        """Names the region by operators, shapes, strides, dtypes and hints, and by ``salt``."""
        text = describe(self.inputs, [*self.original, *self.emitted], [*self.outputs, *self.renamed.values()], self.symbols)
        visible = [o in self.visible for o in self.outputs]
        builds = [user_kernels.library_key(n.target) for n in self.emitted if isinstance(n.target, torch._ops.OpOverload)]
        return hashlib.sha256(f"{salt}\0{visible}{builds}\0{text}".encode()).hexdigest()[:32]

    @property
    def is_calls(self) -> bool:
        """Whether Inductor would call libraries for the match too, so that no neighbour is fused either way: calling both as
        they are tells which is faster."""
        if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
            return False
        nodes = [n for n in (*self.core, *self.emitted) if not g.is_view(n)]
        return all(isinstance(n.target, torch._ops.OpOverload) and not g.is_fusable(n) for n in nodes)

    @property
    def is_nearly_calls(self) -> bool:
        """The same but for copies, which Inductor's loops make about as fast as PyTorch's."""
        core = tuple(n for n in self.core if n.target not in _PLAIN_COPIES)
        return dataclasses.replace(self, core=core).is_calls and any(not g.is_view(n) for n in core)

    def without_neighbours(self) -> Region:
        return _region(self.core, self.emitted, self.renamed, set())

    def modules(self) -> tuple[fx.GraphModule, fx.GraphModule, list[Any]]:
        """The original and the replaced form as graphs of their own, and the fake inputs of both."""
        mode, fakes, substitute = fresh_inputs(self.inputs, self.symbols)
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


def extract(core: Sequence[fx.Node], emitted: Sequence[fx.Node], renamed: dict[fx.Node, fx.Node]) -> Region:
    """The region around ``core``, beside which its replacement ``emitted`` stands in the graph already.

    Raises:
        Unfit: it can't be cut out.
    """
    return _region(core, emitted, renamed, _neighbours(set(core), set(emitted)))


def _region(core: Sequence[fx.Node], emitted: Sequence[fx.Node], renamed: dict[fx.Node, fx.Node], neighbours: set[fx.Node]) -> Region:
    original, replaced = {*core, *neighbours}, {*emitted, *neighbours}
    # What is no tensor can't be an input: it is computed within.
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
    inputs = dict.fromkeys(i for n in sorted(everything) for i in n.all_input_nodes if i not in everything)
    read = [n for n in sorted(original) if g.is_tensor(n) and any(u not in everything for u in n.users)]
    outputs = read or list(renamed)
    visible = frozenset(o for o in outputs if any(u.op == "output" for u in o.users))
    return Region(
        tuple(sorted(original)), tuple(sorted(replaced)), tuple(inputs), tuple(outputs), renamed, visible, tuple(core), tuple(emitted)
    )


def _can_be_input(node: fx.Node) -> bool:
    return node.op != "get_attr" and isinstance(g.value(node), (torch.Tensor, torch.SymInt, int))


def _neighbours(core: set[fx.Node], emitted: set[fx.Node]) -> set[fx.Node]:
    """What Inductor could fuse with the match, transitively, with the views in between."""
    region = set(core)
    for step in (_producers, _consumers):
        queue, count = sorted(core | emitted), 0
        while queue and count < _NEIGHBOURS:
            for chain in step(queue.pop(0)):
                neighbour = chain[-1]
                if neighbour not in region and neighbour not in emitted and count < _NEIGHBOURS and _joins(chain, region | emitted):
                    region.update(chain)
                    queue.append(neighbour)
                    count += 1
    return region - core


def _producers(node: fx.Node) -> Iterator[list[fx.Node]]:
    """The views that ``node`` sees each operand through, and what writes it."""
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
    if not g.is_fusable(node) or not isinstance(g.value(node), torch.Tensor) or _is_random(node):
        return False
    if g.is_mutating(node) and node.target is not aten.copy_.default:
        return False
    # A way from the region out and back into it: the two ends could not be one kernel.
    return not _reenters(region.union(chain))


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.name.startswith("prims::inductor_")


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
            if len(seen) > _SEARCHED:
                return True
            stack += [u for u in node.users if u < last or u is last]
    return False


# ---- graphs as text and as modules of their own; a race's whole graphs use these too ----


def device_of(nodes: Sequence[fx.Node]) -> torch.device:
    """The one device, but for numbers on the CPU, that the nodes' values are on."""
    devices = {g.value(n).device for n in nodes if g.is_tensor(n)}
    accelerators = devices - {torch.device("cpu")}
    if len(accelerators) > 1 or any(d.type != "cuda" for d in accelerators):
        raise Unfit(f"it is on {', '.join(sorted(map(str, devices)))}; only CPU and CUDA devices are timed")
    return next(iter(accelerators or devices), torch.device("cpu"))


def symbols_of(nodes: Sequence[fx.Node]) -> dict[Any, int]:
    """Every symbol in the sizes of the nodes' values, in the order of occurrence, with its hint."""
    found: dict[Any, int] = {}
    for node in nodes:
        value = g.value(node)
        sizes = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                if g.hint(size) is None:
                    raise Unfit(f"the size {size} is not known before run time")
                expression = size.node.expr
                for symbol in sorted(expression.free_symbols, key=str):
                    if symbol not in found:
                        found[symbol] = _hint_of(symbol, size.node.shape_env)
    return found


def _hint_of(symbol: Any, shape_env: Any) -> int:
    hint = g.hint(shape_env.create_symintnode(symbol, hint=None))
    if hint is None:
        raise Unfit(f"the size {symbol} is not known before run time")
    return hint


def describe(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], symbols: dict[Any, int]) -> str:
    """A graph as text that is the same for graphs that differ only in names."""
    import sympy

    renamed = {s: sympy.Symbol(f"d{i}", integer=True, positive=True) for i, s in enumerate(symbols)}

    def size(value: Any) -> str:
        return str(value.node.expr.xreplace(renamed)) if isinstance(value, torch.SymInt) else str(value)

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{number[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k}: {text(v)}' for k, v in value.items())}}}"
        return value.type if isinstance(value, torch.device) else size(value)

    number: dict[fx.Node, int] = {}
    lines = [f"{size} = {hint}" for size, hint in zip(renamed.values(), symbols.values())]
    for node in inputs:
        value = g.value(node)
        number[node] = len(number)
        if isinstance(value, torch.Tensor):
            shape, strides = (",".join(map(size, s)) for s in (value.shape, value.stride()))
            lines.append(f"{value.dtype} {value.device.type} ({shape}) ({strides})")
        else:
            lines.append(size(value))
    for node in nodes:
        if node.op == "get_attr" and g.is_tensor(node):
            number[node] = len(number)
            lines.append(f"%{number[node]} constant {g.spec(g.value(node))} {g.value(node).stride()}")
            continue
        if node.op != "call_function":
            raise Unfit(f"it holds {node.op} {node.name}")
        number.setdefault(node, len(number))
        lines.append(f"%{number[node]} {g.describe(node)} {text(node.args)} {text(node.kwargs)}")
    lines.append(text(list(outputs)))
    return "\n".join(lines)


def fresh_inputs(inputs: Sequence[fx.Node], symbols: dict[Any, int]) -> tuple[FakeTensorMode, list[Any], dict[Any, Any]]:
    """Fake values like those of ``inputs`` in a fake mode of their own, after one size for each of the symbols."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    substitute, fakes = {}, []
    for i, (symbol, hint) in enumerate(symbols.items()):
        source = ConstantSource(f"size_{i}")
        substitute[symbol] = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        fakes.append(env.create_symintnode(substitute[symbol], hint=hint, source=source))

    def size(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr.xreplace(substitute)
        return int(expression) if expression.is_number else env.create_symintnode(expression, hint=g.hint(value))

    for node in inputs:
        value = g.value(node)
        if not isinstance(value, torch.Tensor):
            fakes.append(size(value))
            continue
        if value.layout is not torch.strided:
            raise Unfit(f"{node.name} is a {value.layout} tensor")
        with mode:
            strides = [*map(size, value.stride())]
            fakes.append(torch.empty_strided([*map(size, value.shape)], strides, dtype=value.dtype, device=value.device))
    return mode, fakes, substitute


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Another compile within one that is going on: what Inductor keeps for the one is out of the other's way."""
    names = [n for n in ("_entries", "_static_autotuners", "_winners") if hasattr(TritonBundler, n)]
    kept = {n: getattr(TritonBundler, n) for n in names}
    for n in names:
        setattr(TritonBundler, n, None)
    try:
        yield
    finally:
        for n, value in kept.items():
            setattr(TritonBundler, n, value)


def compile_apart(module: fx.GraphModule, fakes: list[Any], patches: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """Compiles a graph of its own with Inductor under ``patches``, in the midst of another compile."""
    settings = {**patches, "fx_graph_cache": False, "fx_graph_remote_cache": False, "triton.cudagraphs": False, "cpp_wrapper": False}
    mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None)
    with (
        apart(),
        tracing(TracingContext(mode)),
        inductor_config.patch(settings),
        functorch_config.patch(bundled_autograd_cache=False),
    ):
        return inductor.compile_fx_inner(module, fakes, cudagraphs=BoxedBool(False))
