"""Attention over a radix tree: each edge's nodes ask once, and see the keys on their path. Called by ``interface``.

On the CPU in two parts that are merged; with windows and soft caps, and elsewhere, edges of one parent and one length
run side by side in one dense call under a mask.

Shape suffixes: U nodes, N heads, H head size, P tokens on the path before an edge, L length of an edge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from infinity_bento.attention.sdpa import softcapped
from infinity_bento.batching.radix import Edge, Fold

if TYPE_CHECKING:
    from infinity_bento.attention.interface import AttentionSpec

# Each edge of a call has a copy of its path's keys and values: this many rows of them at most, or one edge.
MOST_KEYS = 1 << 15


def run(query: Tensor, key: Tensor, value: Tensor, tree: Fold, spec: AttentionSpec) -> Tensor:
    """Attention of each node to its path, itself included.

    Args:
        query: ``[1, N, U, H]``.
        key: ``[1, N_kv, U, H]``, ``N`` a multiple of ``N_kv``.
        value: ``[1, N_kv, U, H_v]``.
        tree: The nodes' tree.
        spec: Scale, window and softcap; the direction is the tree's.

    Returns:
        ``[1, U, N, H_v]``, contiguous.
    """
    if spec.window is None and spec.softcap is None and query.device.type == "cpu":
        return _in_two_parts(query[0], key[0], value[0], tree, spec.scale).unsqueeze(0)
    heads = query.shape[1]
    out = query.new_empty((query.shape[2], heads, value.shape[-1]))
    for family in tree.families():
        first = tree.edges[family[0]]
        path = tree.path(family[0])
        before = [
            torch.cat([x[0, :, edge.start : edge.end] for edge in path], 1) if path else None for x in (key, value)
        ]
        step = max(1, MOST_KEYS // (first.depth + first.length))
        for begin in range(0, len(family), step):
            edges = [tree.edges[number] for number in family[begin : begin + step]]
            q, k, v = (torch.stack([x[0, :, edge.start : edge.end] for edge in edges]) for x in (query, key, value))
            k, v = (_behind(prefix, own) for prefix, own in zip(before, (k, v), strict=True))
            context = _attend(q, k, v, _mask(first, tree, spec), spec).transpose(1, 2)
            for edge, rows in zip(edges, context, strict=True):
                out[edge.start : edge.end] = rows
    return out.unsqueeze(0)


def _in_two_parts(query: Tensor, key: Tensor, value: Tensor, tree: Fold, scale: float) -> Tensor:
    """The same without copies of a path and without masks: each edge to itself, its siblings together to their path.

    A softmax over both parts is the mean of the two results, weighted by the exponential sums that each reports.

    Args:
        query: ``[N, U, H]``.
        key: ``[N_kv, U, H]``.
        value: ``[N_kv, U, H_v]``.
        tree: The nodes' tree.
        scale: Factor on the scores.

    Returns:
        ``[U, N, H_v]``.
    """
    heads, nodes = query.shape[:2]
    groups = key.shape[0]
    out = query.new_empty((heads, nodes, value.shape[-1]))
    weight = query.new_empty((heads, nodes), dtype=torch.float32)  # logarithm of the sum of exponentials
    for numbers in _by_length(tree):
        rows = _rows(tree, numbers)
        edges, length = len(numbers), tree.edges[numbers[0]].length
        q, k, v = (x[:, rows].view(x.shape[0], edges, length, -1).transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        found, sums = _flash(q, k, v, scale, causal=tree.causal)
        out[:, rows] = found.transpose(0, 1).flatten(1, 2)
        weight[:, rows] = sums.transpose(0, 1).flatten(1, 2)
    for parent, children in _by_parent(tree):
        rows = _rows(tree, children)
        path = [*tree.path(parent), tree.edges[parent]]
        k, v = (torch.cat([x[:, edge.start : edge.end] for edge in path], 1)[None] for x in (key, value))
        # Heads that share keys ask as more rows of one head: nothing is repeated.
        q = query[:, rows].view(1, groups, -1, query.shape[-1])
        found, sums = _flash(q, k, v, scale, causal=False)
        found, sums = found.reshape(heads, len(rows), -1), sums.reshape(heads, len(rows))
        share = torch.sigmoid(sums - weight[:, rows])[..., None].to(found.dtype)
        out[:, rows] = torch.lerp(out[:, rows], found, share)
    return out.transpose(0, 1).contiguous()


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """``[n, N, L, H_v]``, and the logarithms of the sums of exponentials, ``[n, N, L]`` float32."""
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )
    return found


def _by_length(tree: Fold) -> list[list[int]]:
    """Edges of one length together."""
    if "by length" not in tree.cache:
        groups: dict[int, list[int]] = {}
        for number, edge in enumerate(tree.edges):
            groups.setdefault(edge.length, []).append(number)
        tree.cache["by length"] = list(groups.values())
    return tree.cache["by length"]  # type: ignore[no-any-return]


def _by_parent(tree: Fold) -> list[tuple[int, list[int]]]:
    """Each edge that has children, with these."""
    if "by parent" not in tree.cache:
        groups: dict[int, list[int]] = {}
        for number, edge in enumerate(tree.edges):
            if edge.parent >= 0:
                groups.setdefault(edge.parent, []).append(number)
        tree.cache["by parent"] = list(groups.items())
    return tree.cache["by parent"]  # type: ignore[no-any-return]


def _rows(tree: Fold, numbers: list[int]) -> Tensor:
    """The nodes of some edges, in order."""
    key = ("rows", tuple(numbers))
    if key not in tree.cache:
        spans = [torch.arange(tree.edges[number].start, tree.edges[number].end) for number in numbers]
        tree.cache[key] = torch.cat(spans)
    return tree.cache[key]  # type: ignore[no-any-return]


def _behind(prefix: Tensor | None, own: Tensor) -> Tensor:
    """``[n, N_kv, P + L, H]``: the path's rows, then each edge's own."""
    return own if prefix is None else torch.cat([prefix.expand(len(own), -1, -1, -1), own], 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    if spec.softcap is not None:
        return softcapped(q, k, v, mask, False, repeats, spec)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=repeats != 1)


def _mask(edge: Edge, tree: Fold, spec: AttentionSpec) -> Tensor | None:
    """``[L, P + L]`` bool, True where attention is allowed; None where that is everywhere."""
    windowed = spec.window is not None and edge.depth + edge.length > spec.window
    if not windowed and (edge.length == 1 or not tree.causal):
        return None
    key = ("mask", edge.depth, edge.length, spec.window if windowed else None)
    mask: Tensor | None = tree.cache.get(key)
    if mask is None:
        device = tree.scatter.device
        asked = torch.arange(edge.depth + edge.length, device=device)
        distance = asked[edge.depth :, None] - asked[None, :]
        mask = distance >= 0 if tree.causal else torch.ones_like(distance, dtype=torch.bool)
        if windowed and spec.window is not None:
            mask = mask & (distance.abs() < spec.window)
        tree.cache[key] = mask
    return mask
