"""Pooling on packed tokens: one vector per sequence, always summed in float32.

Called by the embedding head. A row depends only on its own tokens: sums run over each sequence alone.

Shape suffixes: T packed tokens, B sequences, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.core import Pooling


def pool(hidden_TD: Tensor, batch: PackedBatch, modes: Sequence[Pooling], *, include_prompt: bool = True) -> Tensor:
    """Turn token vectors into one vector per sequence.

    Args:
        hidden_TD: Last hidden state, ``[T, D]``, any float dtype.
        batch: The packed batch it belongs to.
        modes: At least one; several are concatenated in the order given.
        include_prompt: False leaves out each sequence's first ``batch.prompt_lengths`` tokens, where that leaves any.

    Returns:
        ``[B, len(modes) * D]`` float32 in packed order, not normalized.
    """
    spans = _Spans(hidden_TD, batch, include_prompt)
    pooled = [POOLERS[mode](spans) for mode in modes]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


class _Spans:
    """The tokens of each sequence that count: ``[first, last]`` indices, and sums over them."""

    def __init__(self, hidden_TD: Tensor, batch: PackedBatch, include_prompt: bool) -> None:
        self.hidden = hidden_TD
        self.batch = batch
        self.first = batch.starts()
        self.last = batch.ends()
        self.skips_prompt = not include_prompt and batch.prompt_lengths is not None
        if self.skips_prompt:
            assert batch.prompt_lengths is not None
            # A sequence that is nothing but its prompt keeps all its tokens: a mean over none is not a vector.
            skipped = [
                prompt if prompt < length else 0
                for prompt, length in zip(batch.prompt_lengths, batch.lengths, strict=True)
            ]
            self.first = self.first + torch.tensor(skipped, device=self.first.device)
        self.count = (self.last - self.first + 1).unsqueeze(1)  # [B, 1]

    def rows(self) -> Tensor:
        """Token vectors in float32 with those that do not count set to zero, ``[T, D]``."""
        hidden = self.hidden.float()
        if self.skips_prompt:
            hidden = hidden * self.counts().unsqueeze(1)
        return hidden

    def counts(self) -> Tensor:
        """True for tokens that count, ``[T]`` bool."""
        token = torch.arange(self.hidden.shape[0], device=self.hidden.device)
        return token >= self.first[self.batch.sequence_ids()]

    def positions(self) -> Tensor:
        """1-based place of each token in its sequence, ``[T]``; the prompt keeps its places."""
        token = torch.arange(self.hidden.shape[0], device=self.hidden.device)
        return token - self.batch.starts()[self.batch.sequence_ids()] + 1


def _sum(rows_TD: Tensor, batch: PackedBatch) -> Tensor:
    """Sum of each sequence's rows, ``[B, D]``; one reduction per distinct length, each over its own tokens only."""
    sums = [rows_TD[group.start : group.end].view(group.size, group.length, -1).sum(1) for group in batch.groups]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _cls(spans: _Spans) -> Tensor:
    return spans.hidden[spans.first].float()


def _last(spans: _Spans) -> Tensor:
    return spans.hidden[spans.last].float()


def _mean(spans: _Spans) -> Tensor:
    return _sum(spans.rows(), spans.batch) / spans.count


def _mean_sqrt(spans: _Spans) -> Tensor:
    return _sum(spans.rows(), spans.batch) / spans.count.float().sqrt()


def _weighted_mean(spans: _Spans) -> Tensor:
    weights = spans.positions().float().unsqueeze(1)
    if spans.skips_prompt:
        weights = weights * spans.counts().unsqueeze(1)
    return _sum(spans.hidden.float() * weights, spans.batch) / _sum(weights, spans.batch)


def _max(spans: _Spans) -> Tensor:
    hidden = spans.hidden.float()
    if spans.skips_prompt:
        hidden = hidden.masked_fill(~spans.counts().unsqueeze(1), float("-inf"))
    tops = [hidden[group.start : group.end].view(group.size, group.length, -1).amax(1) for group in spans.batch.groups]
    return torch.cat(tops)


POOLERS: dict[Pooling, Callable[[_Spans], Tensor]] = {
    Pooling.CLS: _cls,
    Pooling.MAX: _max,
    Pooling.MEAN: _mean,
    Pooling.MEAN_SQRT: _mean_sqrt,
    Pooling.WEIGHTED_MEAN: _weighted_mean,
    Pooling.LAST_TOKEN: _last,
}
