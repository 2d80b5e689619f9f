"""A layered drawing of a small directed graph: who stands where, and how the edges run.

After Sugiyama, Tagawa and Toda (1981): layers by longest path, long edges cut up by dummies, order within a layer by the
mean position of the neighbours, then coordinates that pull neighbours together without changing the order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

Point = tuple[float, float]

_GAP = 18.0  # between boxes of a layer, pixels
_DUMMY = 8.0  # width that a passing edge takes
_SWEEPS = 8


@dataclasses.dataclass(frozen=True)
class Layout:
    """Coordinates in pixels: the centre of every box, the points of every edge from source to user, and the size."""

    centre: dict[str, Point]
    edges: dict[tuple[str, str], list[Point]]
    width: float
    height: float


def layered(widths: Mapping[str, float], inputs: Mapping[str, Sequence[str]], *, height: float, row: float) -> Layout:
    """Lays out boxes of the given ``widths``, all ``height`` high and ``row`` apart, sources at the top.

    Args:
        widths: every box, in topological order.
        inputs: the boxes that each reads; those without a width are left out.
    """
    if not widths:
        return Layout({}, {}, 0.0, 0.0)
    reads = {n: [i for i in inputs.get(n, ()) if i in widths] for n in widths}
    layer = _layers(reads)
    size: dict[object, float] = dict(widths)
    above: dict[object, list[object]] = {n: [] for n in widths}
    chains: dict[tuple[str, str], list[object]] = {}
    rows: list[list[object]] = [[] for _ in range(max(layer.values()) + 1)]
    for name in widths:
        rows[layer[name]].append(name)
    for user, sources in reads.items():
        for source in sources:
            chain: list[object] = [source]
            for level in range(layer[source] + 1, layer[user]):
                dummy = (source, user, level)
                size[dummy], above[dummy] = _DUMMY, [chain[-1]]
                rows[level].append(dummy)
                chain.append(dummy)
            above[user].append(chain[-1])
            chains[source, user] = [*chain, user]
    below: dict[object, list[object]] = {n: [] for n in above}
    for node, sources in above.items():
        for source in sources:
            below[source].append(node)

    _order(rows, above, below)
    x = _coordinates(rows, above, below, size)
    left = min(x[n] - size[n] / 2 for n in x)
    y = {n: level * row + height / 2 for level, members in enumerate(rows) for n in members}
    place = {n: (x[n] - left, y[n]) for n in x}
    edges = {}
    for ends, chain in chains.items():
        points = [place[n] for n in chain]
        points[0] = (points[0][0], points[0][1] + height / 2)
        points[-1] = (points[-1][0], points[-1][1] - height / 2)
        edges[ends] = points
    right = max(x[n] + size[n] / 2 for n in x)
    return Layout({n: place[n] for n in widths}, edges, right - left, (len(rows) - 1) * row + height)


def _layers(reads: dict[str, list[str]]) -> dict[str, int]:
    layer: dict[str, int] = {}
    users: dict[str, list[str]] = {n: [] for n in reads}
    for name, sources in reads.items():
        layer[name] = max((layer[s] + 1 for s in sources), default=0)
        for source in sources:
            users[source].append(name)
    for name in reads:  # an input stands just above its first user, not at the top of everything
        if not reads[name] and users[name]:
            layer[name] = min(layer[u] for u in users[name]) - 1
    return layer


def _order(rows: list[list[object]], above: dict, below: dict) -> None:
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for members in rows if down else reversed(rows):
            position = {n: i / max(len(r) - 1, 1) for r in rows for i, n in enumerate(r)} if len(members) > 1 else {}
            neighbours = above if down else below

            def mean(node, position=position, neighbours=neighbours):
                near = neighbours[node]
                return sum(position[n] for n in near) / len(near) if near else position[node]

            if position:
                members.sort(key=mean)


def _coordinates(rows: list[list[object]], above: dict, below: dict, size: dict) -> dict[object, float]:
    x: dict[object, float] = {}
    for members in rows:
        _pack(members, [0.0] * len(members), size, x)
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        for members in rows if down else reversed(rows):
            wanted = []
            for node in members:
                near = (above if down else below)[node] or [*above[node], *below[node]]
                wanted.append(sum(x[n] for n in near) / len(near) if near else x[node])
            _pack(members, wanted, size, x)
    return x


def _pack(members: list[object], wanted: list[float], size: dict, x: dict[object, float]) -> None:
    """Gives each member the place that it wants, as near as order and gaps allow (least squares, pooling neighbours)."""
    blocks: list[list[float]] = []  # each: sum of wanted positions of its first member, number of members, extent
    offsets: list[float] = []
    for i, node in enumerate(members):
        step = 0.0 if i == 0 else (size[members[i - 1]] + size[node]) / 2 + _GAP
        blocks.append([wanted[i], 1, step])
        offsets.append(0.0)
        # A block that would begin before the previous one ends joins it; both give way equally.
        while len(blocks) > 1:
            first, second = blocks[-2], blocks[-1]
            start = i + 1 - int(second[1])
            shift = offsets[start - 1] + second[2]
            if second[0] / second[1] >= first[0] / first[1] + shift:
                break
            for k in range(start, i + 1):
                offsets[k] += shift
            first[0] += second[0] - second[1] * shift
            first[1] += second[1]
            blocks.pop()
    i = 0
    for total, count, _ in blocks:
        for _ in range(int(count)):
            x[members[i]] = total / count + offsets[i]
            i += 1
