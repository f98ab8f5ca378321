"""The packed (ragged) layout: sequences end to end in one row, never padded.

Called by the runner; read by attention, backbones and heads.

Shape suffixes: T packed tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity_bento.batching.radix import Fold, fold
from infinity_bento.core import BlockMask, Encoded


class LengthGroup(NamedTuple):
    """Sequences of one length that lie side by side, so that attention is one dense call on a strided view."""

    start: int  # first token
    size: int  # sequences
    length: int  # tokens of each

    @property
    def end(self) -> int:
        """Behind the last token."""
        return self.start + self.size * self.length


@dataclass(slots=True)
class PackedBatch:
    """Some sequences as one row of tokens, sorted by length (stable), on one device.

    Sequences of one length that are attended to in part, or made of blocks, lie behind the others; those for which no
    model runs (static) lie behind all. ``order[i]`` is the caller's index of packed sequence ``i``.
    """

    # Set by pack().
    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restarts at the family's offset for each sequence
    token_type_ids: Tensor | None  # [T] int64; None: all zero
    cu_seqlens: Tensor  # [B + 1] int32, on the device; first 0, last T
    lengths: list[int]  # [B] host copy, ascending but for the static sequences
    order: list[int]  # [B]
    max_seqlen: int
    groups: list[LengthGroup]
    prompt_lengths: list[int] | None = None  # [B] leading tokens left out of pooling; None: none
    key_lengths: list[int] | None = None  # [B] leading tokens that may be attended to; None: all
    kept: NDArray[np.bool_] | None = None  # [T] host; tokens that are part of a token matrix; None: all
    static_count: int = 0  # the last sequences, for which no model runs
    blocks: list[NDArray[np.int32] | None] | None = None  # [B] blocks of a sequence's tokens; None: all one
    block_mask: BlockMask = BlockMask.SHARED_APART  # how ``blocks`` are read
    readouts: list[Any] | None = None  # [B] ``Encoded.readout``; None: nobody has one
    fold: Fold | None = None  # shared prefixes; the model then runs on its nodes
    # Set by the runner.
    item_sizes: list[int] | None = None  # sequences of each of the caller's items; None: one each
    adapters: list[str | None] | None = None  # [B] task adapter; None: the checkpoint has none
    copies: list[int] | None = None  # the packed caller's index that answers each sequence; None: its own
    # Set by the backbone.
    attention_dtype: torch.dtype | None = None  # attention computes in this type; None: that of its inputs
    # Set by attention: whatever depends only on the lengths and is shared by all layers (masks, biases).
    cache: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Packed tokens, T."""
        return int(self.input_ids.shape[0])

    @property
    def rows(self) -> int:
        """Tokens that run through the model: T, or the nodes of the fold."""
        return self.tokens if self.fold is None else self.fold.nodes

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

    def first_of(self, group: LengthGroup) -> int:
        """Packed index of the first sequence of one of ``groups``."""
        return sum(before.size for before in self.groups if before.start < group.start)

    def key_mask(self, group: LengthGroup) -> Tensor | None:
        """Which tokens of the sequences of one of ``groups`` may be attended to.

        Returns:
            ``[size, 1, 1, length]`` bool; None where that is all of them.
        """
        if self.key_lengths is None:
            return None
        key = ("keys", group.start)
        if key not in self.cache:
            first = self.first_of(group)
            counts = self.key_lengths[first : first + group.size]
            mask = None
            if min(counts) < group.length:
                columns = torch.arange(group.length, device=self.device)
                mask = columns < torch.tensor(counts, device=self.device)[:, None, None, None]
            self.cache[key] = mask
        masks: Tensor | None = self.cache[key]
        return masks

    def visible(self, group: LengthGroup) -> Tensor | None:
        """Which tokens see which, where the sequences of one of ``groups`` are made of blocks.

        Returns:
            ``[size, 1, length, length]`` bool; None where every token sees all of its sequence.
        """
        if self.blocks is None:
            return None
        first = self.first_of(group)
        if self.blocks[first] is None:
            return None
        key = ("blocks", group.start)
        if key not in self.cache:
            rows = np.stack([row for row in self.blocks[first : first + group.size] if row is not None])
            block = torch.from_numpy(rows).to(self.device)
            asking, asked = block[:, None, :, None], block[:, None, None, :]
            mask = (asking == asked) | (asked == 0)
            if self.block_mask is BlockMask.SHARED_SEES_ALL:
                mask |= asking == 0
            self.cache[key] = mask
        masks: Tensor = self.cache[key]
        return masks

    def without_static(self) -> PackedBatch:
        """The part of the batch for which a model runs, as views; itself where that is all of it."""
        if not self.static_count:
            return self
        part: PackedBatch | None = self.cache.get("without_static")
        if part is None:
            count = len(self) - self.static_count
            tokens = sum(self.lengths[:count])
            part = replace(
                self,
                input_ids=self.input_ids[:tokens],
                position_ids=self.position_ids[:tokens],
                token_type_ids=None if self.token_type_ids is None else self.token_type_ids[:tokens],
                cu_seqlens=self.cu_seqlens[: count + 1],
                lengths=self.lengths[:count],
                order=self.order[:count],
                max_seqlen=max(self.lengths[:count], default=0),
                groups=[group for group in self.groups if group.start < tokens],
                prompt_lengths=None if self.prompt_lengths is None else self.prompt_lengths[:count],
                key_lengths=None if self.key_lengths is None else self.key_lengths[:count],
                kept=None if self.kept is None else self.kept[:tokens],
                blocks=None if self.blocks is None else self.blocks[:count],
                readouts=None if self.readouts is None else self.readouts[:count],
                static_count=0,
                cache={},
            )
            self.cache["without_static"] = part
        return part

    def places(self) -> list[list[int]]:
        """The packed indices of the sequences of each of the caller's items."""
        packed = dict(zip(self.order, range(len(self)), strict=True))  # caller's index -> packed index
        answering = self.copies if self.copies is not None else range(len(self))
        places = [packed[index] for index in answering]
        if self.item_sizes is None:
            return [[place] for place in places]
        ends = list(accumulate(self.item_sizes))
        return [places[end - size : end] for end, size in zip(ends, self.item_sizes, strict=True)]

    def unsort(self, rows: Sequence[Any]) -> list[Any]:
        """Rows in packed order -> rows in the caller's order."""
        restored: list[Any] = [None] * len(self.order)
        for row, index in zip(rows, self.order, strict=True):
            restored[index] = row
        return restored


def pack(
    encoded: Sequence[Encoded],
    *,
    position_offset: int = 0,
    device: torch.device | str = "cpu",
    causal: bool = False,
) -> PackedBatch:
    """Lay sequences end to end, shortest first.

    Args:
        encoded: At least one sequence, each with at least one token.
        position_offset: First position id of every sequence (``padding_idx + 1`` for RoBERTa's line, else 0).
        device: Where the tensors go.
        causal: No token of the model sees what stands behind it, so that shared prefixes may be folded.

    Returns:
        The packed batch, T = the sum of the lengths.

    Raises:
        ValueError: If there is no sequence, or one is empty. The tokenizer lets neither through: this is a bug.
    """
    if not encoded or any(len(sequence) == 0 for sequence in encoded):
        raise ValueError("pack() needs at least one sequence, each with at least one token. This is a bug.")
    order = sorted(range(len(encoded)), key=lambda index: _place(encoded[index]))
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
    longest = max(lengths)
    arange = np.arange(position_offset, position_offset + longest, dtype=np.int64)
    for start, length, sequence in zip(bounds[:-1].tolist(), lengths, chosen, strict=True):
        ids[start : start + length] = sequence.input_ids
        if sequence.position_ids is None:
            positions[start : start + length] = arange[:length]
        else:
            positions[start : start + length] = sequence.position_ids
            positions[start : start + length] += position_offset
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
        max_seqlen=longest,
        groups=length_groups(lengths, [_place(sequence) for sequence in chosen]),
        prompt_lengths=prompts if any(prompts) else None,
        key_lengths=_key_lengths(chosen),
        kept=_kept(chosen, total),
        static_count=sum(sequence.static for sequence in chosen),
        blocks=[sequence.blocks for sequence in chosen] if any(s.blocks is not None for s in chosen) else None,
        block_mask=next((s.block_mask for s in chosen if s.blocks is not None), BlockMask.SHARED_APART),
        readouts=[sequence.readout for sequence in chosen] if any(s.readout is not None for s in chosen) else None,
        fold=_fold(chosen, device, causal=causal),
    )


def computed_tokens(sequences: Sequence[Encoded], *, causal: bool) -> int:
    """Tokens that run through the model for these sequences in one batch: ``rows`` of what ``pack`` would make."""
    folded = _fold(sequences, "cpu", causal=causal)
    return sum(map(len, sequences)) if folded is None else folded.nodes


def _fold(chosen: Sequence[Encoded], device: torch.device | str, *, causal: bool) -> Fold | None:
    """The tree of a batch, where its sequences have shared prefixes that may be computed once."""
    if len(chosen) < 2 or any(s.position_ids or s.token_type_ids or s.static for s in chosen):
        return None
    if any(s.attended is not None for s in chosen):
        return None
    blocks = [s.blocks for s in chosen if s.blocks is not None]
    if not blocks:
        return fold([s.input_ids for s in chosen], device=device) if causal else None
    if len(blocks) < len(chosen) or any(s.block_mask is not BlockMask.SHARED_APART for s in chosen):
        return None
    shared = [_shared_block(row) for row in blocks]
    if not all(shared):
        return None
    return fold([s.input_ids for s in chosen], shared=shared, device=device)


def _shared_block(blocks: NDArray[np.int32]) -> int:
    """Length of block 0 where one other block follows it, else 0: several would have to be kept from each other."""
    size = int(np.count_nonzero(blocks == 0))
    alike = not blocks[:size].any() and size < len(blocks) and bool((blocks[size:] == blocks[-1]).all())
    return size if alike else 0


def _place(sequence: Encoded) -> tuple[bool, int, bool, bool]:
    """The sort key of a sequence; those of equal keys run through attention together."""
    return sequence.static, len(sequence), sequence.attended is not None, sequence.blocks is not None


def _key_lengths(chosen: Sequence[Encoded]) -> list[int] | None:
    if all(sequence.attended is None for sequence in chosen):
        return None
    return [len(sequence) if sequence.attended is None else sequence.attended for sequence in chosen]


def _kept(chosen: Sequence[Encoded], total: int) -> NDArray[np.bool_] | None:
    if all(sequence.kept is None for sequence in chosen):
        return None
    kept = np.ones(total, dtype=np.bool_)
    start = 0
    for sequence in chosen:
        if sequence.kept is not None:
            kept[start : start + len(sequence)] = sequence.kept
        start += len(sequence)
    return kept


def length_groups(lengths: Sequence[int], keys: Sequence[Any] | None = None) -> list[LengthGroup]:
    """Runs of equal length (and equal key) in the given order, with the token where each starts."""
    groups: list[LengthGroup] = []
    start = 0
    for index, length in enumerate(lengths):
        same = keys is None or index == 0 or keys[index] == keys[index - 1]
        if groups and groups[-1].length == length and same:
            groups[-1] = groups[-1]._replace(size=groups[-1].size + 1)
        else:
            groups.append(LengthGroup(start, 1, length))
        start += length
    return groups
