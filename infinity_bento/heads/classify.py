"""Scores of texts and pairs: sequence classification, reranking, rewards. Called by the runner.

One object serves CLASSIFY and RERANK. Yes/no rerankers are classifiers with one row, see ``verdict.py``.

Shape suffixes: T packed tokens, B sequences, D width, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.checkpoints.purpose import Activation
from infinity_bento.core import FloatArray, Item, Task
from infinity_bento.errors import InfinityError
from infinity_bento.heads.rows import not_finite


class ClassifierHead:
    """Labels of each sequence.

    Args:
        network: Hidden states ``[T, D]`` -> logits ``[B, L]`` (``classifiers.Classifier``).
        activation: From logits to the scores of items that do not ask for raw ones.
        contrast: For RERANK the score is the logit of the first label minus that of the second; None: the only label's.
    """

    def __init__(
        self,
        network: Callable[[Tensor, PackedBatch], Tensor],
        activation: Activation,
        contrast: tuple[int, int] | None = None,
    ) -> None:
        self.network = network
        self.activation = activation
        self.contrast = contrast

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """``[T, D]`` hidden states -> ``[B, L]`` float32 logits in packed order."""
        return self.network(hidden_TD, batch)

    def collect(
        self, rows: Tensor, positions: Sequence[int], items: Sequence[Item]
    ) -> list[FloatArray | InfinityError]:
        """Device logits ``[B, L]`` -> each item's scores, float32 ``[L]``, or ``[1]`` for RERANK.

        Args:
            rows: What ``run`` gave.
            positions: Packed index of each item.
            items: In the order of ``positions``.

        Errors: ``InferenceError`` for NaN or infinity.
        """
        logits: FloatArray = rows.float().cpu().numpy()[list(positions)]
        finite = np.asarray(np.isfinite(logits).all(axis=1))
        scores = activate(np.where(finite[:, None], logits, np.float32(0)), self.activation)
        return [
            self._answer(item, raw, score) if good else not_finite(item)
            for item, raw, score, good in zip(items, logits, scores, finite, strict=True)
        ]

    def _answer(self, item: Item, logits: FloatArray, scores: FloatArray) -> FloatArray:
        if self.contrast is None or item.task is not Task.RERANK:
            return logits if item.raw_scores else scores
        first, second = self.contrast
        difference = logits[first : first + 1] - logits[second : second + 1]
        return difference if item.raw_scores else activate(difference[None], Activation.SIGMOID)[0]


def activate(logits: FloatArray, activation: Activation) -> FloatArray:
    """Logits ``[B, L]`` -> scores ``[B, L]`` in float32, without overflow for large logits."""
    return ACTIVATIONS[activation](logits)


def sigmoid(logits: FloatArray) -> FloatArray:
    """Logistic function."""
    small = np.exp(-np.abs(logits))
    scores: FloatArray = (np.where(logits >= 0, np.float32(1), small) / (1 + small)).astype(np.float32)
    return scores


def softmax(logits: FloatArray) -> FloatArray:
    """Over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores: FloatArray = (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)
    return scores


ACTIVATIONS: dict[Activation, Callable[[FloatArray], FloatArray]] = {
    Activation.IDENTITY: lambda logits: logits,
    Activation.SIGMOID: sigmoid,
    Activation.SOFTMAX: softmax,
    Activation.TANH: lambda logits: np.tanh(logits),
}
