"""From the logits of a question's options to its ``Decision``. Called by every protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from infinity_bento.checkpoints.temperatures import Temperatures
from infinity_bento.decisions import Decision, Question


def softmax(logits: Sequence[float], temperature: float) -> tuple[float, ...]:
    """``softmax(logits / temperature)`` in double precision."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    powers = np.exp(scaled - scaled.max())
    return tuple((powers / powers.sum()).tolist())


def answer(
    question: Question,
    logits: Sequence[float],
    temperatures: Temperatures,
    *,
    label_mass: float | None = None,
    extras: Mapping[str, float] | None = None,
) -> Decision:
    """The answer to a question.

    Args:
        question: What was asked.
        logits: Of its options, finite, in their order.
        temperatures: In force.
        label_mass: As in ``Decision``.
        extras: As in ``Decision``.
    """
    temperature = temperatures.of(question.kind, len(question.options))
    return Decision(
        softmax(logits, temperature), label_mass=label_mass, extras=dict(extras or {}), temperature=temperature
    )
