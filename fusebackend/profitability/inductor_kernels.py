"""Asks Inductor which Triton kernels it would generate for some nodes, without compiling them.

The tiles, the number of dimensions that a kernel indexes, and the order in which it walks over memory are Inductor's decisions, and change
with its versions. So its own code generator makes them here, which takes 0.1 to 0.4 s of the host for some nodes.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import sympy
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._inductor.compile_fx import record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.sizevars import SizeVarAllocator, join_dimensions
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from fusebackend import fx_utils as g
from fusebackend.profitability.region import alone
from fusebackend.profitability.unfit import Unfit

_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"^\s*(\w+)\.run\((.*)\)\s*$", re.MULTILINE)
_LIBRARY_CALL = re.compile(r"^\s*(\w+ = )?(extern_kernels|torch\.ops)\.[\w.]+\(", re.MULTILINE)
_ASSIGNMENT = re.compile(r"^\s*(\w+) = ([\w\s+*/()-]+)$", re.MULTILINE)
_HEURISTICS = re.compile(r"@triton_heuristics\.(\w+)\(")
_SIGNATURE = re.compile(r"'signature': (\{.*?\})")


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """A generated kernel and how it is called.

    Attributes:
        source: its Triton source, with the decorator that names its heuristics.
        sizes: the values of its arguments that are sizes: ``xnumel``, ``ynumel``, ``r0_numel``, symbolic sizes.
        types: the type of each argument as in Triton's signature, e.g. ``"*fp32"``.
        is_reduction: whether it sums along a dimension of its own.
        numbers: the names of its arguments that are numbers to compute with: tensors of no dims on the CPU, and floats. No address and no
            loop depends on them.
    """

    source: str
    sizes: Mapping[str, int]
    types: Mapping[str, str]
    is_reduction: bool = False
    numbers: frozenset[str] = frozenset()


def generated_kernels(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node] = (), orders: Mapping[fx.Node, tuple[int, ...]] | None = None
) -> list[TritonKernel]:
    """The kernels that Inductor generates for ``nodes`` by themselves, to compute ``outputs`` (by default all that other nodes read).
    ``orders``: of inputs that it lays out otherwise than the graph says.

    Raises:
        Unfit: the nodes can't be cut out, or Inductor makes something else of them than Triton kernels.
    """
    module, fakes, hints = alone(nodes, outputs, orders)
    code = _generated_code(module, fakes)
    sources = dict(_KERNEL.findall(code))
    hints = dict(hints)
    for name, text in _ASSIGNMENT.findall(code):  # sizes that the wrapper computes
        with contextlib.suppress(Unfit):
            hints.setdefault(name, _value(text, hints))
    kernels = []
    for name, arguments in _CALL.findall(code):
        if name in sources:
            kernels.append(_kernel(sources[name], arguments, hints))
    if not kernels:
        raise Unfit("Inductor generates no Triton kernel for it")
    if _LIBRARY_CALL.search(code):
        raise Unfit("Inductor calls a library for it")
    return kernels


def _generated_code(module: fx.GraphModule, fakes: list[Any]) -> str:
    # Of what is computed: nodes that only make tensors, such as a causal mask, have no inputs.
    mode: Any = next(g.value(n) for n in module.graph.nodes if g.is_tensor(n)).fake_mode
    settings = {
        "fx_graph_cache": False,
        "cpp_wrapper": False,
        "triton.cudagraphs": False,
        "benchmark_kernel": False,
        "trace.enabled": False,
        "graph_partition": False,  # of the wrapper, which nothing runs
        "compile_threads": 1,  # otherwise each kernel is given to the workers that compile, as soon as its code is there
    }
    record_original_output_strides(module)
    with (
        _metrics_kept(),
        tracing(TracingContext(mode)),
        inductor_config.patch(settings),
        V.set_fake_mode(mode),
        mock.patch.dict("os.environ", TORCH_COMPILE_DEBUG=""),
    ):
        graph = GraphLowering(module, example_inputs=fakes, shape_env=mode.shape_env, is_inference=True)
        graph.sizevars = _SizeVarAllocator(mode.shape_env)
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]), DebugContext():
            graph.run(*fakes)
            code: Any = graph.codegen()[0]
    return code if isinstance(code, str) else code.value


class _SizeVarAllocator(SizeVarAllocator):
    """Inductor's, which compares the variables of all loops with their bounds for each index, also where it has no division that this could
    simplify: up to a fifth of a question's time."""

    def _simplify_with_ranges(self, expr: sympy.Expr, var_ranges: dict[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
        plain = join_dimensions(self.simplify(expr))
        if plain.has(ModularIndexing, FloorDiv):
            return super()._simplify_with_ranges(expr, var_ranges)
        return plain  # ranges only tell of divisions what can be dropped


@contextlib.contextmanager
def _metrics_kept() -> Iterator[None]:
    """Inductor counts what it generates; this is not a part of the program."""
    kept = {name: value for name, value in vars(metrics).items() if type(value) is int}
    try:
        yield
    finally:
        vars(metrics).update(kept)


def _kernel(source: str, arguments: str, hints: Mapping[str, int]) -> TritonKernel:
    heuristics = _HEURISTICS.search(source)
    if heuristics is None or heuristics[1] not in ("pointwise", "reduction", "persistent_reduction"):
        raise Unfit(f"Inductor generates a {'kernel' if heuristics is None else heuristics[1]} of another kind for it")
    signature = _SIGNATURE.search(source)
    if signature is None:
        raise Unfit("a generated kernel has no signature that is known")
    types = ast.literal_eval(signature[1])
    given = [a.strip() for a in re.sub(r",\s*stream=.*", "", arguments).split(",")]
    names = [n for n in types if not n.endswith("BLOCK")]
    numbers = frozenset(n for n in names if _is_number(n, types[n]))
    sizes = {n: _value(text, hints) for n, text in zip(names, given) if not types[n].startswith("*") and n not in numbers}
    return TritonKernel(source, sizes, types, heuristics[1] != "pointwise", numbers)


def _is_number(name: str, type_: str) -> bool:
    """Inductor names what a kernel computes with like a buffer (``in_ptr1``), also where it is passed as a number."""
    return not type_.startswith("*") and (type_.startswith("fp") or "_ptr" in name)


def _value(text: str, hints: Mapping[str, int]) -> int:
    """The value of an integer expression of Inductor's wrapper code, e.g. ``s77*s27`` or ``(s0 + 1) // 2``."""
    try:
        return int(eval(text, {"__builtins__": {}}, dict(hints)))
    except Exception as error:
        raise Unfit(f"the size {text} of a generated kernel is not known") from error
