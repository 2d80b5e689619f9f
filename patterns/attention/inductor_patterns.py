"""Asks Inductor's own patterns of attention, which call PyTorch's kernels, whether they are at a site too."""

from __future__ import annotations

from torch import fx
from torch._inductor import config as inductor_config

from fusebackend.log import log
from fusebackend.rewriting.pattern import Match


def is_taken_by_inductor(match: Match) -> bool:
    """Whether one of Inductor's own patterns of attention is at this site: its passes come behind ours."""
    if not inductor_config.pattern_matcher:
        return False
    nodes = {*match.nodes, *(user for output in match.outputs for user in output.users)}
    try:
        return any(_is_attention_of_inductor(node) for node in sorted(nodes))
    except Exception as error:  # how it looks for them is its own affair
        log.debug("Inductor's patterns of attention can't be asked: %s", error)
        return False


def _is_attention_of_inductor(node: fx.Node) -> bool:
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.pattern_matcher import is_match

    for entry in joint_graph.patterns.patterns.get((node.op, node.target), ()):
        found = entry.pattern.match(node)
        if is_match(found) and {"query", "key", "value"} <= found.kwargs.keys() and entry.extra_check(found):
            return True
    return False
