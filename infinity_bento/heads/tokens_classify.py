"""Token classification: labels of tokens, words or entities with their places in the text. Called by the runner.

Shape suffixes: T packed tokens, D width, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.core import FloatArray, Item, TokenLabel, TokenSpans
from infinity_bento.errors import InferenceError, InfinityError
from infinity_bento.heads.classify import softmax
from infinity_bento.heads.rows import not_finite
from infinity_bento.heads.token_labels import Labeller


class Reader(Protocol):
    """What is needed of the tokenizer (``inputs.tokenization.TextTokenizer``)."""

    def join(self, tokens: Sequence[str]) -> str:
        """Tokens as text."""


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """Logits of a batch, with the host's knowledge of where each sequence lies."""

    logits_TL: Tensor
    lengths: list[int]  # in packed order
    spans: list[TokenSpans] | None  # in packed order; None: the made-up inputs of a warm-up


class TokenClassifierHead:
    """Labels within each sequence.

    Args:
        network: Hidden states ``[T, D]`` -> logits ``[T, L]`` (``classifiers.Classifier``).
        id2label: Label names.
        reader: Writes tokens as text.
    """

    def __init__(
        self, network: Callable[[Tensor, PackedBatch], Tensor], id2label: Mapping[int, str], reader: Reader
    ) -> None:
        self.network = network
        self._labeller = Labeller(id2label, reader.join)

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> TokenLogits:
        """``[T, D]`` hidden states -> ``[T, L]`` float32 logits in packed order."""
        return TokenLogits(self.network(hidden_TD, batch), batch.lengths, batch.readouts)

    def collect(
        self, rows: TokenLogits, positions: Sequence[int], items: Sequence[Item]
    ) -> list[list[TokenLabel] | InfinityError]:
        """Device logits -> each item's labels.

        Args:
            rows: What ``run`` gave.
            positions: Packed index of each item.
            items: In the order of ``positions``.

        Errors: ``InferenceError`` for NaN or infinity.
        """
        logits_TL: FloatArray = rows.logits_TL.float().cpu().numpy()
        bounds = np.concatenate(([0], np.cumsum(rows.lengths)))
        own = [logits_TL[bounds[position] : bounds[position + 1]] for position in positions]
        spans = [None if rows.spans is None else rows.spans[position] for position in positions]
        return [self._labels(*each) for each in zip(own, items, spans, strict=True)]

    def _labels(self, logits_TL: FloatArray, item: Item, spans: TokenSpans | None) -> list[TokenLabel] | InfinityError:
        if not np.isfinite(logits_TL).all():
            return not_finite(item)
        if spans is None:
            return InferenceError("The input came without the places of its tokens, so labels have none.")
        scores = logits_TL if item.raw_scores else softmax(logits_TL)
        return self._labeller.label(scores, spans, item.aggregation, item.ignore_labels)
