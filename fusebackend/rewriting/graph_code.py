"""A graph as readable code, for reports.

The lines are those of ``GraphModule.print_readable`` with strides and devices, in a third of its time, which was up to two fifths of what
we add to a compile: these need not run. Graphs that hold others, as those of control flow do, are left to it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.describe import source_of
from fusebackend.rewriting.outcome import Source


def graph_code(graph: fx.Graph) -> str:
    """The graph as code with shapes, strides and devices, and with the lines of the program that its nodes come from."""
    module = graph.owning_module
    assert module is not None
    if any(isinstance(child, fx.GraphModule) for child in module.children()):
        return module.print_readable(print_output=False, include_stride=True, include_device=True)
    inputs = ", ".join(f"{n.name}{_annotation(n)}" for n in graph.find_nodes(op="placeholder"))
    lines = [f"class {type(module).__name__}(torch.nn.Module):", f"    def forward(self, {inputs}):"]
    unused = _unused_after(graph)
    shown = Source()
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        source = source_of(node)
        if source.file and source != shown:
            backward = "Backward of forward node: " if node.meta.get("autograd_backward") else ""
            comment = f"        # {backward}File: {source.file}:{source.line} in {source.function}, code: {source.code}"
            lines += [comment] if shown == Source() else ["", comment]
            shown = source
        lines.append(f"        {_statement(node)}{_freed(unused.get(node, []))}")
    return "\n".join(lines) + "\n"


def _statement(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]!r}"
    return f"{node.name}{_annotation(node)} = {_expression(node)}"


def _expression(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        return "{!r}[{!r}]".format(*node.args)
    arguments = ", ".join([*map(repr, node.args), *(f"{name} = {value!r}" for name, value in node.kwargs.items())])
    return f"{_callee(node)}({arguments})"


def _callee(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}"
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{g.describe(node)}"
    if node.op != "call_function":
        return f"self.{node.target}"
    module: str | None = getattr(node.target, "__module__", None)
    return f"{module.removeprefix('_')}.{g.describe(node)}" if module else g.describe(node)  # operator's are of _operator


def _annotation(node: fx.Node) -> str:
    value = g.value(node)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f': "Sym({value})"'
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return ""
    return f': "{g.spec(value)}[{", ".join(map(str, value.stride()))}]{value.device}"'


def _unused_after(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that are read for the last time by each node, and those that nothing reads."""
    found: dict[fx.Node, list[fx.Node]] = {}
    read = set()
    for node in reversed(graph.nodes):
        last = [i for i in node.all_input_nodes if i not in read]
        read.update(last)
        if node.op != "output":
            found[node] = last if node.users else [*last, node]
    return found


def _freed(nodes: list[fx.Node]) -> str:
    return f";  {' = '.join(n.name for n in nodes)} = None" if nodes else ""
