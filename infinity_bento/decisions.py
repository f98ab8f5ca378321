"""The vocabulary of typed decisions: questions in, calibrated probabilities out. No torch, no server.

``api/systemone`` makes a ``DecisionRequest``; a protocol of ``heads/decisions`` turns it into sequences and gives a
``Decision`` per question; the wire layer shapes answers from it with the functions below.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Any  # a JSON value: str, number, bool, None, list, dict


class QuestionKind(enum.StrEnum):
    """The published question types; the values are those of the wire."""

    NOUL = "noul"  # a yes/no statement; the answer is P(true)
    CHOICE = "choice"
    SCORE = "score"


@dataclass(frozen=True, slots=True)
class Option:
    """One possible answer.

    ``name`` is what the answer carries: the label of a choice, ``true`` / ``false`` of a noul, ``0``, ``1`` ... of a
    score.
    """

    name: str
    description: Json = None  # as sent; None: undescribed


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a request.

    ``options`` are in the order sent for choice and score; false, then true for noul, whatever a family's prompt does.
    """

    id: str
    kind: QuestionKind
    options: tuple[Option, ...]
    instructions: Json = None  # as sent; None: absent
    shown_as: str | None = None  # the id in prompts that show one; None: ``id`` itself

    @property
    def shown_id(self) -> str:
        """The id as families write it that show the model the ids."""
        return self.id if self.shown_as is None else self.shown_as


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """All questions about one state. At least one question; ids are unique."""

    state: Json  # a string, object or list, as sent; never None
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to one question, before the wire shapes it."""

    probabilities: tuple[float, ...]  # in the order of ``Question.options``; they sum to 1
    native_confidence: float | None = None  # the family's own figure, where it has one
    label_mass: float | None = None  # probability of the options among all tokens, where the family reads a vocabulary
    extras: Mapping[str, float] = field(default_factory=dict)  # other published figures, by name without ``x_``
    temperature: float = 1.0  # what the logits were divided by


@dataclass(frozen=True, slots=True)
class DecisionRules:
    """What a server allows in a request and what it calls its models. Set from the options ``decision-*``."""

    questions: int = 64
    options: int = 255  # labels of a choice
    levels: int = 10  # of a score
    total_options: int = 512  # of all questions of a request
    images: int = 4
    neutral_ids: bool = False  # prompts show q1, q2 ... instead of the ids
    aliases: Mapping[str, str] = field(default_factory=dict)  # name in requests -> served model


class FieldPath(str):
    """A field of a request such as ``questions.a.criteria.0``, which remembers its parts: ids may hold dots.

    Args:
        parts: Keys of objects and indices of arrays, the outermost first.
    """

    parts: tuple[str | int, ...]

    def __new__(cls, *parts: str | int) -> FieldPath:
        made = super().__new__(cls, ".".join(map(str, parts)))
        made.parts = parts
        return made

    def __getnewargs__(self) -> tuple[str | int, ...]:  # type: ignore[override]  # pickled by its parts
        return self.parts


def top_option(probabilities: Sequence[float]) -> int:
    """Index of the likeliest option; the first on a tie."""
    return max(range(len(probabilities)), key=lambda index: (probabilities[index], -index))


def choice_confidence(probabilities: Sequence[float]) -> float:
    """Jev's confidence of a choice: 0 for uniform, 1 for certain; 1 where there is one option."""
    count = len(probabilities)
    if count == 1:
        return 1.0
    return (max(probabilities) - 1 / count) / (1 - 1 / count)


def score_confidence(probabilities: Sequence[float]) -> float:
    """Jev's confidence of a score: how close the mass lies to the mode, against a uniform answer; from 0 to 1."""
    count = len(probabilities)
    if count == 1:
        return 1.0
    mode = top_option(probabilities)
    spread = sum(p * abs(level - mode) for level, p in enumerate(probabilities))
    uniform = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - spread / uniform)


def expected_level(probabilities: Sequence[float]) -> float:
    """The mean level of a score."""
    return sum(level * p for level, p in enumerate(probabilities))
