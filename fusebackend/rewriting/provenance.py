"""Where the nodes of a graph come from in the user's program, as reports name it: module paths, names of inputs, graph breaks."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from fusebackend.rewriting.outcome import GraphBreak, Source

# Dynamo writes places as Python: L['self']._modules['layers']._modules['3'], or L['self'].layers.3; the compiled function's own
# variables are in L, globals in G.
_REGISTERED = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_VARIABLE = re.compile(r"^[LG]\['([^']*)'\]")
_CALLED_AGAIN = re.compile(r"@\d+$")
_KINDS = {
    "generic_jump": "control flow depends on the value of a tensor",
    "step_unsupported": "Dynamo can't trace this line",
}


def module_of(node: fx.Node) -> str:
    """The path of the module whose ``forward`` made the node, e.g. ``layers.3.mixer.conv1d``, from the compiled module on; of a node that
    autograd made, that of its forward node. Empty where it is the compiled module or function itself, or nothing is known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not isinstance(stack, dict) or not stack:
        return ""
    innermost = next(reversed(stack.values()))
    path = innermost[0] if isinstance(innermost, tuple) else innermost
    return readable_path(_CALLED_AGAIN.sub("", path)) if isinstance(path, str) else ""


def modules_of(gm: fx.GraphModule) -> set[str]:
    """The paths of all modules that the nodes of a graph come from."""
    return {module_of(node) for m in gm.modules() if isinstance(m, fx.GraphModule) for node in m.graph.nodes}


def readable_path(place: str) -> str:
    """``layers.3.weight`` for ``L['self']._modules['layers']._modules['3']._parameters['weight']``; other variables keep their name."""
    path = _REGISTERED.sub(r".\1", place)
    variable = _VARIABLE.match(path)
    if variable is None:
        return path
    rest = path[variable.end() :]
    return rest.removeprefix(".") if variable[1] == "self" else variable[1] + rest


def input_names(gm: fx.GraphModule) -> tuple[str, ...]:
    """What the placeholders of Dynamo's graph are called in the user's program, in order; empty where that is not known."""
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name: Any = getattr(source, "name", "")
        try:
            name = name() if callable(name) else name
        except NotImplementedError:  # a source that has no place in the program
            name = ""
        names.append(readable_path(name) if isinstance(name, str) else "")
    return tuple(names)


def input_name(node: fx.Node, names: tuple[str, ...]) -> str:
    """The user's name of a placeholder in one of AOTAutograd's graphs, which says which input of Dynamo's graph it is."""
    described = node.meta.get("desc")
    index, target = getattr(described, "idx", None), getattr(described, "target", None)
    if type(index) is int and 0 <= index < len(names):
        return names[index]
    return target if isinstance(target, str) else ""


def graph_break(gm: fx.GraphModule) -> GraphBreak | None:
    """Why Dynamo's graph ends where it does; None if it ends where the function returns."""
    found = getattr(gm, "compile_subgraph_reason", None)
    if not getattr(found, "graph_break", False):
        return None
    lines = [line.strip() for line in str(getattr(found, "reason", "")).splitlines() if line.strip()]
    reason = lines[0] if lines else "unknown"
    reason = _KINDS.get(reason.split(" ", 1)[0], reason)
    explanation = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), "")
    frames = list(getattr(found, "user_stack", ()))
    source = Source()
    if frames:
        frame = frames[-1]
        source = Source(frame.filename, frame.lineno or 0, frame.name, (frame.line or "").strip())
    return GraphBreak(f"{reason}: {explanation}" if explanation else reason, source)
