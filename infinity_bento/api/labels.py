"""Scores of a classifier to labelled scores, best first. Used by the routes and native methods that classify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from infinity_bento.core import FloatArray, ModelInfo, TokenLabel


def labelled(info: ModelInfo, scores: FloatArray, most: int | None = None) -> list[dict[str, Any]]:
    """``{"label", "score"}`` of the ``most`` best labels, descending; equal scores in the order of the labels.

    Args:
        info: Names the labels.
        scores: ``[labels]`` float32.
        most: None for all.
    """
    names = info.id2label or {}
    best_first = np.argsort(-scores, kind="stable")[:most].tolist()
    return [{"label": names.get(index, f"LABEL_{index}"), "score": scores[index]} for index in best_first]


def entities(labels: Sequence[TokenLabel], label_key: str = "label") -> list[dict[str, Any]]:
    """Labelled tokens or spans in the order of the text, with character offsets."""
    return [
        {
            label_key: label.label,
            "score": np.float32(label.score),
            "start": label.start,
            "end": label.end,
            "word": label.word,
        }
        for label in labels
    ]


def softmax(logits: FloatArray) -> FloatArray:
    """Probabilities of exclusive labels."""
    powers: FloatArray = np.exp(logits - logits.max())
    probabilities: FloatArray = powers / powers.sum()
    return probabilities


def sigmoid(logits: FloatArray) -> FloatArray:
    """Probabilities of independent labels."""
    with np.errstate(over="ignore"):
        probabilities: FloatArray = np.float32(1) / (np.float32(1) + np.exp(-logits))
    return probabilities
