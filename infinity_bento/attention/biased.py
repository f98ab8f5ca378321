"""Packed attention with an additive bias of its own (relative positions, ALiBi), in blocks of query rows.

Called by the model families whose scores carry a bias; SDPA on the grouped view as in ``sdpa``, with the bias as mask.
The bias of a whole sequence is never built: memory is linear in the length, not quadratic.

Shape suffixes: T packed tokens, N heads, n sequences of a group, L their length, Q query rows of a block, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infinity_bento.batching.packing import LengthGroup, PackedBatch

# Elements of one block of scores, over sequences and heads: 16 MiB in float32.
BLOCK_ELEMENTS = 1 << 22
MIN_ROWS = 16
# Laid-out biases of one batch that wait for the next layer.
KEPT_BYTES = 1 << 24


class Block(NamedTuple):
    """Query rows ``[first_row, last_row)`` of the sequences ``[first, last)`` of one length group."""

    group: LengthGroup
    first: int
    last: int
    first_row: int
    last_row: int


# Bias of a block, broadcastable to ``[last - first, N, last_row - first_row, L]``, in the dtype of the queries.
BlockBias = Callable[[Block], Tensor]


def run(
    query_NTH: Tensor, key_NTH: Tensor, value_NTH: Tensor, packed: PackedBatch, scale: float, bias: BlockBias
) -> Tensor:
    """Bidirectional attention within each sequence, with ``bias`` added to the scaled scores.

    Args:
        query_NTH: ``[N, T, H]``, any strides.
        key_NTH: ``[N, T, H]``.
        value_NTH: ``[N, T, H]``.
        packed: The batch whose ``groups`` cut the T axis.
        scale: Factor on the scores, before the bias is added.
        bias: Makes the bias of one block.

    Returns:
        ``[T, N * H]``, contiguous.
    """
    heads, tokens, size = query_NTH.shape
    out = query_NTH.new_empty((tokens, heads, size))
    for block in blocks(packed, heads):
        q, k, v = (sequences(x, block) for x in (query_NTH, key_NTH, value_NTH))
        q = q[:, :, block.first_row : block.last_row]
        mask = bias(block)
        keys = packed.key_mask(block.group)
        if keys is not None:
            mask = torch.where(keys[block.first : block.last], mask, float("-inf"))
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        rows = out[token_range(block)].view(block.last - block.first, block.group.length, heads, size)
        rows[:, block.first_row : block.last_row] = context.transpose(1, 2)
    return out.flatten(1)


def blocks(packed: PackedBatch, heads: int) -> Iterator[Block]:
    """Cut a batch into blocks of at most ``BLOCK_ELEMENTS`` scores (but at least ``MIN_ROWS`` rows)."""
    for group in packed.groups:
        row = heads * group.length
        together = max(1, BLOCK_ELEMENTS // (row * group.length))
        rows = group.length if together > 1 else max(MIN_ROWS, BLOCK_ELEMENTS // row)
        for first in range(0, group.size, together):
            last = min(first + together, group.size)
            for first_row in range(0, group.length, rows):
                yield Block(group, first, last, first_row, min(first_row + rows, group.length))


def token_range(block: Block) -> slice:
    """The packed tokens of a block's sequences."""
    start = block.group.start + block.first * block.group.length
    return slice(start, start + (block.last - block.first) * block.group.length)


def sequences(x_NTH: Tensor, block: Block) -> Tensor:
    """``[N, T, H]`` -> the block's sequences as a view ``[n, N, L, H]``."""
    heads, _, size = x_NTH.shape
    tokens = x_NTH[:, token_range(block)]
    return tokens.view(heads, block.last - block.first, block.group.length, size).transpose(0, 1)


class ByDistance:
    """A table over the distance ``i - j``, laid out as rows i and columns j of a block.

    Lives as long as one batch; several layers share it. What fits ``KEPT_BYTES`` in all is kept for the next layer.

    Args:
        table: ``[..., 2 * max_seqlen - 1]``; entry ``d + max_seqlen - 1`` is for distance ``d = i - j``.
    """

    def __init__(self, table: Tensor) -> None:
        self._flipped = table.flip(-1)  # descending in i - j, so ascending in j
        self._middle = (table.shape[-1] - 1) // 2
        self._kept: dict[tuple[int, int, int], Tensor] = {}
        self._room = KEPT_BYTES

    def __call__(self, block: Block) -> Tensor:
        """``[..., Q, L]``; entry ``[i - first_row, j]`` is the table's for ``i - j``."""
        key = (block.first_row, block.last_row, block.group.length)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        first_row, last_row, length = key
        start = self._middle - (last_row - 1)
        rows = self._flipped[..., start : start + last_row - first_row + length - 1].unfold(-1, length, 1).flip(-2)
        if rows.nbytes <= self._room:
            self._room -= rows.nbytes
            self._kept[key] = rows
        return rows


def distances(packed: PackedBatch) -> Tensor:
    """All distances ``i - j`` of the longest sequence, ascending: ``[2 * max_seqlen - 1]`` int64."""
    return torch.arange(1 - packed.max_seqlen, packed.max_seqlen, device=packed.device)
