"""A layered layout of a small directed graph: coordinates of its boxes and of the bends of its edges.

The method is that of Sugiyama, Tagawa and Toda (1981): assign layers by longest path, split long edges by dummy nodes,
order each layer by the mean position of the neighbours, then move neighbours together without changing the order.

It is written here because no small, maintained, pure-Python library does it: grandalf has had no release since January 2023,
and the libraries in wide use wrap Graphviz, JavaScript or Rust.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

Point = tuple[float, float]
# A box is named by a string, a dummy node by (source, user, layer).
_Node = Hashable

_GAP = 18.0  # between the boxes of a layer, pixels
_DUMMY_WIDTH = 8.0
_SWEEPS = 8


@dataclasses.dataclass(frozen=True)
class Layout:
    """Coordinates in pixels: the centre of every box, the points of every edge from source to user, and the total size."""

    centre: dict[str, Point]
    edges: dict[tuple[str, str], list[Point]]
    width: float
    height: float


def layered(widths: Mapping[str, float], inputs: Mapping[str, Sequence[str]], *, box_height: float, layer_height: float) -> Layout:
    """Lays out boxes, sources at the top.

    Args:
        widths: the width of every box, in topological order.
        inputs: the sources of every box; those without a width are ignored.
        box_height: the height of every box.
        layer_height: the distance between the tops of adjacent layers.
    """
    if not widths:
        return Layout({}, {}, 0.0, 0.0)
    sources = {n: [i for i in inputs.get(n, ()) if i in widths] for n in widths}
    layer_of = _layers(sources)
    size: dict[_Node, float] = {n: width for n, width in widths.items()}
    above: dict[_Node, list[_Node]] = {n: [] for n in widths}
    chains: dict[tuple[str, str], list[_Node]] = {}
    layers: list[list[_Node]] = [[] for _ in range(max(layer_of.values()) + 1)]
    for name in widths:
        layers[layer_of[name]].append(name)
    for user in widths:
        for source in sources[user]:
            chain: list[_Node] = [source]
            for layer in range(layer_of[source] + 1, layer_of[user]):
                dummy = (source, user, layer)
                size[dummy], above[dummy] = _DUMMY_WIDTH, [chain[-1]]
                layers[layer].append(dummy)
                chain.append(dummy)
            above[user].append(chain[-1])
            chains[source, user] = [*chain, user]
    below: dict[_Node, list[_Node]] = {n: [] for n in above}
    for node, upper in above.items():
        for n in upper:
            below[n].append(node)

    _order(layers, above, below)
    x = _coordinates(layers, above, below, size)
    left = min(x[n] - size[n] / 2 for n in x)
    right = max(x[n] + size[n] / 2 for n in x)
    centre = {n: (x[n] - left, i * layer_height + box_height / 2) for i, members in enumerate(layers) for n in members}
    edges = {}
    for ends, chain in chains.items():
        points = [centre[n] for n in chain]
        points[0] = (points[0][0], points[0][1] + box_height / 2)
        points[-1] = (points[-1][0], points[-1][1] - box_height / 2)
        edges[ends] = points
    return Layout({n: centre[n] for n in widths}, edges, right - left, (len(layers) - 1) * layer_height + box_height)


def _layers(sources: dict[str, list[str]]) -> dict[str, int]:
    layer: dict[str, int] = {}
    users: dict[str, list[str]] = {n: [] for n in sources}
    for name, inputs in sources.items():
        layer[name] = max((layer[s] + 1 for s in inputs), default=0)
        for source in inputs:
            users[source].append(name)
    for name in sources:  # a node without inputs goes just above its first user, not to the top of the drawing
        if not sources[name] and users[name]:
            layer[name] = min(layer[u] for u in users[name]) - 1
    return layer


def _order(layers: list[list[_Node]], above: dict, below: dict) -> None:
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for members in layers if down else reversed(layers):
            if len(members) < 2:
                continue
            position = {n: i / max(len(layer) - 1, 1) for layer in layers for i, n in enumerate(layer)}

            def mean_position(node, position=position, neighbours=neighbours):
                near = neighbours[node]
                return sum(position[n] for n in near) / len(near) if near else position[node]

            members.sort(key=mean_position)


def _coordinates(layers: list[list[_Node]], above: dict, below: dict, size: dict) -> dict[_Node, float]:
    x: dict[_Node, float] = {}
    for members in layers:
        _place(members, [0.0] * len(members), size, x)
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        for members in layers if down else reversed(layers):
            wanted = []
            for node in members:
                near = (above if down else below)[node] or [*above[node], *below[node]]
                wanted.append(sum(x[n] for n in near) / len(near) if near else x[node])
            _place(members, wanted, size, x)
    return x


def _place(members: list[_Node], wanted: list[float], size: dict, x: dict[_Node, float]) -> None:
    """Sets ``x`` as close to ``wanted`` as the order and the gaps of a layer allow.

    This is isotonic regression (least squares by pooling adjacent violators) on the positions less their minimum offsets.
    """
    blocks: list[list[float]] = []  # sum of the wanted positions of the first member, number of members, distance to the previous block
    offsets: list[float] = []  # of each member from the first of its block
    for i, node in enumerate(members):
        distance = 0.0 if i == 0 else (size[members[i - 1]] + size[node]) / 2 + _GAP
        blocks.append([wanted[i], 1, distance])
        offsets.append(0.0)
        # A block that would overlap the previous one is merged with it.
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
