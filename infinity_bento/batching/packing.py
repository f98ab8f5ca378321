"""The packed (ragged) layout: sequences end to end in one row, never padded.

Called by the runner; read by attention, backbones and heads.

Shape suffixes: T packed tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinity_bento.core import Encoded


class LengthGroup(NamedTuple):
    """Sequences of one length that lie side by side, so that attention is one dense call on a strided view."""

    start: int  # first token
    count: int  # sequences
    length: int  # tokens of each


@dataclass(slots=True)
class PackedBatch:
    """Some sequences as one row of tokens, sorted by length (stable), on one device.

    ``order[i]`` is the caller's index of packed sequence ``i``.
    """

    # Set by pack().
    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restarts at the family's offset for each sequence
    token_type_ids: Tensor | None  # [T] int64; None: all zero
    cu_seqlens: Tensor  # [B + 1] int32, on the device; first 0, last T
    lengths: list[int]  # [B] host copy, ascending
    order: list[int]  # [B]
    max_seqlen: int
    groups: list[LengthGroup]
    prompt_lengths: list[int] | None = None  # [B] leading tokens left out of pooling; None: none
    # Set by attention: whatever depends only on the lengths and is shared by all layers (masks, biases).
    cache: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Packed tokens, T."""
        return int(self.input_ids.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.input_ids.device

    def starts(self) -> Tensor:
        """Index of each sequence's first token, ``[B]`` int64."""
        return self.cu_seqlens[:-1].long()

    def ends(self) -> Tensor:
        """Index of each sequence's last token, ``[B]`` int64."""
        return self.cu_seqlens[1:].long() - 1

    def sequence_ids(self) -> Tensor:
        """The packed index of the sequence each token belongs to, ``[T]`` int64."""
        cached = self.cache.get("sequence_ids")
        if cached is None:
            counts = self.cu_seqlens.diff().long()
            cached = torch.repeat_interleave(
                torch.arange(len(self), device=self.device), counts, output_size=self.tokens
            )
            self.cache["sequence_ids"] = cached
        return cached

    def unsort(self, rows: Sequence[Any]) -> list[Any]:
        """Rows in packed order -> rows in the caller's order."""
        restored: list[Any] = [None] * len(self.order)
        for row, index in zip(rows, self.order, strict=True):
            restored[index] = row
        return restored


def pack(encoded: Sequence[Encoded], *, position_offset: int = 0, device: torch.device | str = "cpu") -> PackedBatch:
    """Lay sequences end to end, shortest first.

    Args:
        encoded: At least one sequence, each with at least one token.
        position_offset: First position id of every sequence (``padding_idx + 1`` for RoBERTa's line, else 0).
        device: Where the tensors go.

    Returns:
        The packed batch, T = the sum of the lengths.

    Raises:
        ValueError: If there is no sequence, or one is empty. The tokenizer lets neither through: this is a bug.
    """
    if not encoded or any(len(sequence) == 0 for sequence in encoded):
        raise ValueError("pack() needs at least one sequence, each with at least one token. This is a bug.")
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    chosen = [encoded[index] for index in order]
    lengths = [len(sequence) for sequence in chosen]
    bounds = np.zeros(len(chosen) + 1, dtype=np.int32)
    np.cumsum(lengths, out=bounds[1:])
    total = int(bounds[-1])
    ids = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    types = None
    if any(sequence.token_type_ids is not None for sequence in chosen):
        types = np.zeros(total, dtype=np.int64)
    arange = np.arange(position_offset, position_offset + lengths[-1], dtype=np.int64)
    for start, length, sequence in zip(bounds[:-1].tolist(), lengths, chosen, strict=True):
        ids[start : start + length] = sequence.input_ids
        positions[start : start + length] = arange[:length]
        if types is not None and sequence.token_type_ids is not None:
            types[start : start + length] = sequence.token_type_ids

    def to_device(array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    prompts = [sequence.prompt_length for sequence in chosen]
    return PackedBatch(
        input_ids=to_device(ids),
        position_ids=to_device(positions),
        token_type_ids=None if types is None else to_device(types),
        cu_seqlens=to_device(bounds),
        lengths=lengths,
        order=order,
        max_seqlen=lengths[-1],
        groups=length_groups(lengths),
        prompt_lengths=prompts if any(prompts) else None,
    )


def length_groups(lengths: Sequence[int]) -> list[LengthGroup]:
    """Runs of equal length in the given order, with the token where each starts."""
    groups: list[LengthGroup] = []
    start = 0
    for length in lengths:
        if groups and groups[-1].length == length:
            groups[-1] = groups[-1]._replace(count=groups[-1].count + 1)
        else:
            groups.append(LengthGroup(start, 1, length))
        start += length
    return groups
