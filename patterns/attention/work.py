"""What the kernels make a GPU do for an attention: asks C++ (csrc/attention/work.h), also where there is no GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from fusebackend.native import ops
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import log2

_facts = ops.define_facts(
    "attention_work(int[] sizes, int[] biases, bool causal, bool drops, bool backward, int multiprocessors, int capability_major) -> str"
)


@dataclasses.dataclass(frozen=True)
class BiasFacts:
    """A bias as the operators take it.

    Attributes:
        sizes: five, of batch, inner batch, heads, queries and keys: 1, or those of the scores.
        itemsize: bytes of an element.
        aligned: whether its rows are contiguous and begin at multiples of 16 bytes, all of them; others are copied for long sequences.
        gradient_itemsize: bytes of an element of its gradient; 0 if that is not wanted.
    """

    sizes: tuple[int, int, int, int, int]
    itemsize: int
    aligned: bool = True
    gradient_itemsize: int = 0


@dataclasses.dataclass(frozen=True)
class Attended:
    """An attention as the operators take it.

    Attributes:
        sizes: batch, inner batch (1 if there is none), heads, queries, keys, D of queries and keys, D of values.
        itemsize: bytes of an element of q.
        dynamic: whether a size is symbolic.
        drops: whether probabilities are dropped, by a mask of bits.
    """

    sizes: tuple[int, int, int, int, int, int, int]
    biases: Sequence[BiasFacts]
    causal: bool
    device: torch.device
    itemsize: int = 2
    dynamic: bool = False
    drops: bool = False

    @property
    def scores(self) -> int:
        return self.heads * self.sizes[3] * self.sizes[4]

    @property
    def heads(self) -> int:
        return math.prod(self.sizes[:3])


def work(site: Attended, backward: bool) -> Work:
    """The work of ``fusebackend::attention``, or of ``attention_backward``."""
    _, _, _, queries, keys, dim, value_dim = site.sizes
    facts = kernel_facts(site, backward)
    q, k, v, out = (site.heads * site.itemsize * n for n in (queries * dim, keys * dim, keys * value_dim, queries * value_dim))
    biases = sum(math.prod(b.sizes) * (b.itemsize + (b.gradient_itemsize if backward else 0)) for b in site.biases)
    tensors = q + k + v + out
    if backward:
        tensors += q + k + v + (0 if facts["window"] else out)  # their gradients; for windows the gradient of out takes its place
    quantities = {
        "bytes": float(tensors + biases + 8 * site.heads * queries + (site.scores // 8 if site.drops else 0)),
        **{name: facts[key] for name, key in _QUANTITIES.items()},
    }
    multiprocessors = device_facts(site.device).multiprocessors
    shape = {
        "window": facts["window"],
        "pipelined": facts["pipelined"],
        "stored": facts["stored"],
        "log2 queries": log2(queries),
        "log2 keys": log2(keys),
        "log2 dim": log2(max(dim, value_dim)),
        "biases": float(len(site.biases)),
        "wide biases": float(sum(b.itemsize == 4 for b in site.biases)),
        "bias gradients": float(sum(b.gradient_itemsize > 0 for b in site.biases)) if backward else 0.0,
        "causal": float(site.causal),
        "log2 used": log2(facts["blocks"] / multiprocessors),
        "log2 padded": log2(facts["scores"] * multiprocessors / (site.heads * queries * keys)),
        "dynamic": float(site.dynamic),
    }
    return Work("attention backward" if backward else "attention", quantities, shape)


#: Quantities, and what csrc/attention/work.h calls them.
_QUANTITIES = {
    "flops": "flops",
    "scores": "scores",
    "steps": "steps",
    "biases": "biases",
    "staged bytes": "staged_bytes",
    "scratch bytes": "scratch_bytes",
    "launches": "kernels",
}


def kernel_facts(site: Attended, backward: bool) -> Mapping[str, float]:
    """The facts that csrc/attention/work.h names; none for an empty attention."""
    biases: list[int] = []
    for bias in site.biases:
        biases += [bias.itemsize, int(bias.gradient_itemsize > 0), int(bias.aligned), *bias.sizes]
    device = device_facts(site.device)
    return _facts(list(site.sizes), biases, site.causal, site.drops, backward, device.multiprocessors, device.capability[0])
