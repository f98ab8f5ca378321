"""How good the probabilities of a decision model are, and the temperature that makes them better. Numpy only.

Called by ``calibrate`` with answers whose right option is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from infinity_bento.decisions import Decision

Floats = NDArray[np.float64]

BINS = 15  # of the expected calibration error, equally wide
LOWEST, HIGHEST = 0.05, 20.0  # a best temperature beyond is a sign of too few answers


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered question, and which of its options is right."""

    logits: Floats  # up to a constant
    label: int
    temperature: float  # that the server divides by now

    @classmethod
    def of(cls, decision: Decision, label: int) -> Sample:
        """Logits from the probabilities of an answer, whatever its temperature was."""
        p = np.maximum(np.asarray(decision.probabilities, dtype=np.float64), np.finfo(np.float64).tiny)
        return cls(np.log(p) * decision.temperature, label, decision.temperature)


@dataclass(frozen=True, slots=True)
class Figures:
    """Over some answers; all but ``accuracy`` are better when they are smaller."""

    accuracy: float
    log_loss: float  # mean of -ln p(right)
    brier: float  # mean squared distance to the right answer, summed over the options
    ece: float  # how far confidence and accuracy are apart, over bins of confidence

    def as_dict(self) -> dict[str, float]:
        """By name, rounded to what means something."""
        return {name: round(value, 5) for name, value in asdict(self).items()}


def figures(samples: Sequence[Sample], temperature: float | None = None) -> Figures:
    """The figures of answers.

    Args:
        samples: At least one.
        temperature: What all logits are divided by; None: each by its own.
    """
    rows = [softmax(sample.logits / (temperature or sample.temperature)) for sample in samples]
    top = np.array([row.max() for row in rows])
    right = np.array([row.argmax() == sample.label for row, sample in zip(rows, samples, strict=True)])
    hit = np.array([row[sample.label] for row, sample in zip(rows, samples, strict=True)])
    squares = np.array([(row**2).sum() for row in rows])
    return Figures(
        accuracy=float(right.mean()),
        log_loss=float(-np.log(np.maximum(hit, np.finfo(np.float64).tiny)).mean()),
        brier=float((squares - 2 * hit + 1).mean()),
        ece=expected_calibration_error(top, right),
    )


def expected_calibration_error(confidence: Floats, right: Floats) -> float:
    """Mean over ``BINS`` bins of |mean confidence - accuracy|, weighted by their answers.

    Args:
        confidence: The probability of each given answer, ``[n]``.
        right: Whether it was right, ``[n]`` bool.
    """
    bins = np.clip(np.ceil(confidence * BINS) - 1, 0, BINS - 1).astype(int)
    gaps = np.bincount(bins, confidence, BINS) - np.bincount(bins, right.astype(np.float64), BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def best_temperature(samples: Sequence[Sample]) -> float:
    """The temperature with the smallest log loss, between ``LOWEST`` and ``HIGHEST``.

    In 1/T the loss is convex, so its slope is zero in one place at most, and is found by halving.
    """
    widths = {len(sample.logits) for sample in samples}
    blocks = [np.stack([s.logits for s in samples if len(s.logits) == width]) for width in sorted(widths)]
    right = float(sum(sample.logits[sample.label] for sample in samples))

    def slope(inverse: float) -> float:
        """The derivative of the summed loss by 1/T: the logits to expect minus those of the right options."""
        return float(sum((softmax(block * inverse) * block).sum() for block in blocks)) - right

    low, high = 1 / HIGHEST, 1 / LOWEST
    if slope(low) >= 0:
        return HIGHEST
    if slope(high) <= 0:
        return LOWEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 2 / (low + high)


def softmax(logits: Floats) -> Floats:
    """Over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    rows: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return rows
