"""Shared-prefix folding (RadixMLP): the sequences of a batch as a radix tree, every distinct prefix computed once.

Called by ``packing.pack`` for models whose tokens see only what stands before them. There a token's state depends on
its prefix alone, so folding is exact: one row per node of the tree runs through the model, attention reads the keys on
the node's path, and ``scatter`` copies the nodes' states back to the packed tokens.

Shape suffixes: T packed tokens, U nodes (distinct tokens in their context).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Folding pays from this ratio of tokens to nodes on; below it the index costs more than it saves.
LEAST_GAIN = 1.05

Ids = NDArray[np.int64]


class Edge(NamedTuple):
    """A run of nodes without a branch inside. Its nodes lie side by side."""

    start: int  # first node
    length: int
    parent: int  # index of the edge before it; -1: none
    depth: int  # tokens on the path before it

    @property
    def end(self) -> int:
        """Behind the last node."""
        return self.start + self.length


@dataclass(slots=True)
class Fold:
    """A batch as a tree; parents stand before their children."""

    edges: list[Edge]
    index: Tensor  # [U] int64: a packed token that each node stands for
    scatter: Tensor  # [T] int64: the node of each packed token
    causal: bool  # within an edge; False: its nodes see each other both ways (block masks)
    # Set by attention and DeltaNet: whatever depends only on the tree and is shared by all layers.
    cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """Distinct tokens, U."""
        return int(self.index.shape[0])

    def path(self, edge: int) -> list[Edge]:
        """The edges before an edge, from the root on."""
        found: list[Edge] = []
        parent = self.edges[edge].parent
        while parent >= 0:
            found.append(self.edges[parent])
            parent = self.edges[parent].parent
        return found[::-1]

    def families(self) -> list[list[int]]:
        """Edges of one parent and one length together: they run through attention side by side."""
        if "families" not in self.cache:
            groups: dict[tuple[int, int], list[int]] = {}
            for number, edge in enumerate(self.edges):
                groups.setdefault((edge.parent, edge.length), []).append(number)
            self.cache["families"] = list(groups.values())
        found: list[list[int]] = self.cache["families"]
        return found

    def generations(self) -> list[list[int]]:
        """Edges by their number of ancestors, for layers that need the state that an edge ends in."""
        if "generations" not in self.cache:
            level: list[int] = []
            found: list[list[int]] = []
            for number, edge in enumerate(self.edges):
                level.append(0 if edge.parent < 0 else level[edge.parent] + 1)
                if level[number] == len(found):
                    found.append([])
                found[level[number]].append(number)
            self.cache["generations"] = found
        generations: list[list[int]] = self.cache["generations"]
        return generations


def fold(
    sequences: Sequence[Sequence[int]],
    *,
    shared: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    least_gain: float = LEAST_GAIN,
) -> Fold | None:
    """The tree of a batch.

    Args:
        sequences: Token ids in packed order, each with positions 0, 1, 2 ...
        shared: Of block masks: the length of each sequence's block 0, which sees only itself; two sequences then share
            all of it or nothing. None: causal, any common prefix is shared.
        device: Where the tensors go.
        least_gain: Smallest ratio of tokens to nodes that is worth it.

    Returns:
        None where folding would not pay.
    """
    rows = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    order, common = _common_prefixes(rows, shared)
    total = sum(map(len, rows))
    nodes = total - sum(common)
    if total < least_gain * nodes:
        return None
    firsts = np.concatenate(([0], np.cumsum([len(row) for row in rows])))  # in packed tokens
    scatter = np.empty(total, dtype=np.int64)
    index = np.empty(nodes, dtype=np.int64)
    edges, at, before = _edges(order, common, rows, shared), 0, np.empty(0, dtype=np.int64)
    for sequence, lcp in zip(order, common, strict=True):
        own = len(rows[sequence]) - lcp
        first = int(firsts[sequence])
        path = scatter[first : first + len(rows[sequence])]
        path[:lcp] = before[:lcp]
        path[lcp:] = np.arange(at, at + own)
        index[at : at + own] = np.arange(first + lcp, first + lcp + own)
        at, before = at + own, path
    return Fold(
        edges,
        torch.from_numpy(index).to(device, non_blocking=True),
        torch.from_numpy(scatter).to(device, non_blocking=True),
        causal=shared is None,
    )


def _common_prefixes(rows: Sequence[Ids], shared: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Sequences in an order in which those with a common prefix are neighbours, and what each shares with the last."""
    if shared is None:
        order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">i8").tobytes())
        common = [0] + [_common(rows[left], rows[right]) for left, right in pairwise(order)]
        return order, common
    keys = [rows[i][: shared[i]].tobytes() for i in range(len(rows))]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    same = [keys[left] == keys[right] for left, right in pairwise(order)]
    return order, [0] + [shared[i] if equal else 0 for i, equal in zip(order[1:], same, strict=True)]


def _common(left: Ids, right: Ids) -> int:
    """Length of the common prefix."""
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter


def _edges(
    order: Sequence[int], common: Sequence[int], rows: Sequence[Ids], shared: Sequence[int] | None
) -> list[Edge]:
    """The edges, parents first. A sequence owns what it does not share; later ones cut that where they leave."""
    cuts: list[set[int]] = []  # by owner: depths at which its own tokens are cut
    leaves: list[int] = []  # by owner: whose token stands before its first own one; -1: nobody's
    path: list[tuple[int, int]] = []  # of the last sequence: (owner, depth of its first own token)
    for owner, (sequence, lcp) in enumerate(zip(order, common, strict=True)):
        while path and path[-1][1] >= lcp:
            path.pop()
        leaves.append(path[-1][0] if path and lcp else -1)
        if leaves[-1] >= 0:
            cuts[leaves[-1]].add(lcp)
        cuts.append(set())
        if shared is not None and not lcp:
            cuts[-1].add(shared[sequence])
        if len(rows[sequence]) > lcp:
            path.append((owner, lcp))
    edges: list[Edge] = []
    ending: list[dict[int, int]] = []  # by owner: the edge that ends at a depth
    start = 0
    for owner, (sequence, lcp) in enumerate(zip(order, common, strict=True)):
        ending.append({})
        parent = ending[leaves[owner]][lcp] if leaves[owner] >= 0 else -1
        bounds = sorted({lcp, *(cut for cut in cuts[owner] if lcp < cut < len(rows[sequence])), len(rows[sequence])})
        for low, high in pairwise(bounds):
            edges.append(Edge(start, high - low, parent, low))
            parent = len(edges) - 1
            ending[owner][high] = parent
            start += high - low
    return edges
