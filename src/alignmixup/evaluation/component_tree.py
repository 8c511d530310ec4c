"""The components of a map at all of its levels at once, as a tree of local maxima.

Each pixel climbs to a local maximum. Where the basins of two maxima meet, the highest pass between
them is the level up to which the two are one component. A component of one level is then a node of
this tree, and its extremes and its area are running minima and sums over levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_LEVELS = 256
Ints = NDArray[np.int64]
Neighbors = tuple[tuple[int, int], ...]

# Neighbors in the order of rows, the pixel itself among them.
EIGHT = tuple((dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1))
FOUR = ((-1, 0), (0, -1), (0, 0), (0, 1), (1, 0))


@dataclass(slots=True)
class Tree:
    """Local maxima and where they become one: node n is a component at merge < level <= peak.

    At its merge level and below, it is part of ``parent``; the root merges at level 0. The tables
    have the measures of each node at each level, including those of the nodes merged into it.
    """

    node_of: Ints  # [h * w]
    parent: Ints  # [n]
    merge: Ints  # [n]
    peak: Ints  # [n]
    merged: list[int]  # all nodes but the root, in the order of their merging
    extremes: Ints  # [n, 4, 256], filled by measure
    area: Ints  # [n, 256], filled by measure

    def node_at(self, pixels: Ints, levels: Ints) -> Ints:
        """Return the component that each of these pixels is part of at that level."""
        nodes = self.node_of[pixels]
        while True:
            is_merged = self.merge[nodes] >= levels
            if not is_merged.any():
                return nodes
            nodes = np.where(is_merged, self.parent[nodes], nodes)


def grow(levels: Ints, order: NDArray[Any], neighbors: Neighbors) -> Tree:
    """Find the maxima and join them over their passes, highest pass first."""
    top = _climb(_steepest(order, neighbors))
    peaks = np.flatnonzero(top == np.arange(top.size))
    number = np.empty_like(top)
    number[peaks] = np.arange(len(peaks))
    node_of = number[top].reshape(levels.shape)
    peak = levels.reshape(-1)[peaks]
    num_nodes = len(peaks)
    parent, merge = np.arange(num_nodes), np.zeros(num_nodes, np.int64)
    leader = list(range(num_nodes))  # of the union so far, with shortened paths
    merged = []
    for level, a, b in _passes(levels, node_of, neighbors):
        a, b = _leader(leader, a), _leader(leader, b)
        if a == b:
            continue
        if peak[a] < peak[b]:
            a, b = b, a
        leader[b] = parent[b] = a
        merge[b] = level
        merged.append(b)
    empty = np.zeros((0, 0), np.int64)
    return Tree(node_of.reshape(-1), parent, merge, peak, merged, extremes=empty, area=empty)


def _steepest(order: NDArray[Any], neighbors: Neighbors) -> Ints:
    """Return for each pixel the highest of its neighborhood; of equals the first.

    Ties lead to an earlier pixel, so that no two pixels point at each other.
    """
    h, w = order.shape
    padded = np.pad(order, 1, constant_values=-np.inf)
    index = np.arange(h * w).reshape(h, w)
    highest = np.full((h, w), -np.inf, order.dtype)
    target = index.copy()
    for dy, dx in neighbors:
        there = padded[1 + dy : 1 + dy + h, 1 + dx : 1 + dx + w]
        np.copyto(target, index + (dy * w + dx), where=there > highest)
        np.maximum(highest, there, out=highest)
    return target.reshape(-1)


def _climb(target: Ints) -> Ints:
    """Follow the pointers to their end, doubling the stride each time."""
    while True:
        further = target[target]
        if np.array_equal(further, target):
            return target
        target = further


def _passes(levels: Ints, node_of: Ints, neighbors: Neighbors) -> Iterator[tuple[int, int, int]]:
    """Yield (level, node, node) of the highest pass of each two basins, in descending order."""
    h, w = levels.shape
    num_nodes = int(node_of.max()) + 1
    heights, pairs = [], []
    for dy, dx in neighbors:
        if (dy, dx) <= (0, 0):
            continue  # each two neighbors once
        here = np.s_[: h - dy, max(0, -dx) : w - max(0, dx)]
        there = np.s_[dy:, max(0, dx) : w + min(0, dx)]
        a, b = node_of[here], node_of[there]
        is_border = a != b
        a, b = a[is_border], b[is_border]
        heights.append(np.minimum(levels[here][is_border], levels[there][is_border]))
        pairs.append(np.minimum(a, b) * num_nodes + np.maximum(a, b))
    height, pair = np.concatenate(heights), np.concatenate(pairs)
    by_height = np.argsort(-height, kind="stable")
    _, first = np.unique(pair[by_height], return_index=True)
    for i in by_height[np.sort(first)].tolist():
        yield (int(height[i]), *divmod(int(pair[i]), num_nodes))


def _leader(leader: list[int], node: int) -> int:
    while leader[node] != node:
        leader[node] = leader[leader[node]]
        node = leader[node]
    return node


def measure(tree: Tree, levels: Ints, area: Ints) -> None:
    """Fill the tables: the measures of each basin by level, then those of the merged ones.

    The extremes are four minima: the leftmost pixel as x * h + y, the topmost as y * w + x, and
    the negated last column and row. ``area`` counts what each node gains at each level.
    """
    h, w = levels.shape
    num_nodes = len(tree.peak)
    y, x = np.divmod(np.arange(h * w), w)
    place = tree.node_of * NUM_LEVELS + levels.reshape(-1)
    extremes = np.full((4, num_nodes * NUM_LEVELS), h * w, np.int64)
    for table, value in zip(extremes, (x * h + y, y * w + x, -x, -y), strict=True):
        np.minimum.at(table, place, value)
    extremes = extremes.reshape(4, num_nodes, NUM_LEVELS).transpose(1, 0, 2)[..., ::-1]
    tree.extremes = np.minimum.accumulate(extremes, axis=-1)[..., ::-1]
    tree.area = area.reshape(num_nodes, NUM_LEVELS)[:, ::-1].cumsum(axis=1)[:, ::-1]
    # In the order of merging, so that a child has all its own parts when it becomes one.
    for child in tree.merged:
        parent, upto = int(tree.parent[child]), int(tree.merge[child]) + 1
        mine = tree.extremes[parent, :, :upto]
        np.minimum(mine, tree.extremes[child, :, :upto], out=mine)
        tree.area[parent, :upto] += tree.area[child, :upto]
