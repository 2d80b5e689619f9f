"""Many casts by one kernel: of weights to 16 bits, and of their gradients back, as autocast asks for.

a_half: bf16[768, 768] = prims.convert_element_type(a, bf16); b_half = ...; ...
->  cast = fusebackend.foreach_cast([a, b, ...], bf16); a_half = cast[0]; b_half = cast[1]; ...
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx
from torch._inductor import config as inductor_config

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.foreach_cast.groups import CAST, Group, group_of
from fusebackend.patterns.foreach_cast.ops import foreach_cast
from fusebackend.rewriting.pattern import Emitter, Match, Pattern, Reject, Workload
from fusebackend.rewriting.workload import streamed


class ForeachCast(Pattern):
    """``prims.convert_element_type`` of inputs that libraries read, or of what they leave -> ``foreach_cast``."""

    name = "foreach_cast"
    anchors = (CAST,)
    devices = ("cuda",)
    last = True  # others read through casts, and make some needless

    def match(self, node: fx.Node) -> Match | Reject | None:
        group = group_of(node)
        if group is None:
            return None
        if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
            return Reject("Inductor may cast inside of the products that it tunes (max_autotune)", node, "fused_neighbour")
        unavailable = loader.load().why_not(g.value(node).device, foreach_cast)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")
        note = f"{len(group.casts)} casts in one kernel"
        return Match(group.casts, lambda emitter: _emit(emitter, group), note=note, site=group)

    def estimate(self, match: Match) -> Workload:
        """A kernel that casts is one that moves what is read and written, in Inductor's code and here."""
        casts = [(g.value(n), float(g.value(n).nbytes + g.value(s).nbytes)) for n, s in zip(match.site.casts, match.site.sources)]
        whole = streamed(sum(moved for _, moved in casts), casts[0][0])
        return Workload((whole,), tuple(streamed(moved, value) for value, moved in casts))

    def examples(self) -> list[tuple[Callable, tuple]]:
        def products(x, v, w):
            return x @ v.bfloat16(), x @ w.bfloat16()

        x = torch.randn(5, 8, dtype=torch.bfloat16)
        return [(products, (x, torch.randn(8, 6), torch.randn(8, 9)))]


def _emit(emitter: Emitter, group: Group) -> list[fx.Node]:
    if group.kind == "inputs":  # which are all there at once: not before the first is needed
        emitter = emitter.before(group.casts[0])
    cast = emitter.call(foreach_cast, group.sources, group.dtype)
    return [emitter.call(operator.getitem, cast, i) for i in range(len(group.casts))]
