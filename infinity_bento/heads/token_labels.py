"""From label probabilities of tokens to labels of tokens, words and entities, as transformers' pipeline groups them.

Called by the token classification head, one input at a time. Plain numpy.

Shape suffixes: T tokens of one input, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from infinity_bento.core import Aggregation, FloatArray, TokenLabel, TokenSpans

Join = Callable[[Sequence[str]], str]


@dataclass(slots=True)
class Unit:
    """A token, or a word of several, with its place."""

    scores: FloatArray  # [L]
    tokens: list[str]
    start: int | None
    end: int | None
    word: str = ""
    label: str = ""
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Labeller:
    """Groups the tokens of one model.

    Args:
        id2label: Label names. A prefix ``B-`` begins an entity, ``I-`` continues one.
        join: Tokens as text.
    """

    id2label: Mapping[int, str]
    join: Join

    def label(
        self, scores_TL: FloatArray, spans: TokenSpans, aggregation: Aggregation, ignored: Sequence[str]
    ) -> list[TokenLabel]:
        """The labels of one input in the order of its text.

        Args:
            scores_TL: For every token, special ones included, float32 ``[T, L]``.
            spans: Of the same tokens.
            aggregation: What becomes one label.
            ignored: Labels left out of the answer.
        """
        units = [self._decided(unit, unit.scores) for unit in _tokens(scores_TL, spans)]
        if aggregation in WORD_RULES:
            continues = [flag for flag, special in zip(spans.continues_word, spans.special, strict=True) if not special]
            units = [self._word(word, aggregation) for word in _runs(units, lambda index: continues[index])]
        if aggregation is not Aggregation.NONE:
            goes_on = [_goes_on(before, unit) for before, unit in pairwise(units)]
            units = [self._entity(group) for group in _runs(units, lambda index: goes_on[index - 1])]
        return [
            TokenLabel(unit.label, unit.score, unit.start, unit.end, unit.word)
            for unit in units
            if unit.label not in ignored
        ]

    def _decided(self, unit: Unit, scores: FloatArray) -> Unit:
        best = int(scores.argmax())
        unit.label, unit.score = self.id2label[best], float(scores[best])
        return unit

    def _word(self, units: Sequence[Unit], aggregation: Aggregation) -> Unit:
        tokens = [token for unit in units for token in unit.tokens]
        word = Unit(units[0].scores, tokens, units[0].start, units[-1].end, self.join(tokens))
        return self._decided(word, WORD_RULES[aggregation](units))

    def _entity(self, units: Sequence[Unit]) -> Unit:
        first = units[0]
        label = first.label.split("-", 1)[-1]
        score = float(np.mean([unit.score for unit in units]))
        word = self.join([unit.word for unit in units])
        return Unit(first.scores, [], first.start, units[-1].end, word, label, score)


def _first(units: Sequence[Unit]) -> FloatArray:
    return units[0].scores


def _average(units: Sequence[Unit]) -> FloatArray:
    means: FloatArray = np.mean([unit.scores for unit in units], axis=0, dtype=np.float32)
    return means


def _most_certain(units: Sequence[Unit]) -> FloatArray:
    return max(units, key=lambda unit: unit.score).scores


WORD_RULES: Mapping[Aggregation, Callable[[Sequence[Unit]], FloatArray]] = {
    Aggregation.FIRST: _first,
    Aggregation.AVERAGE: _average,
    Aggregation.MAX: _most_certain,
}


def _tokens(scores_TL: FloatArray, spans: TokenSpans) -> list[Unit]:
    """One unit for each token that is not special."""
    units = []
    for index, special in enumerate(spans.special):
        if not special:
            start, end = spans.offsets[index] if spans.offsets is not None else (None, None)
            token = spans.tokens[index]
            units.append(Unit(scores_TL[index], [token], start, end, token))
    return units


def _runs(units: Sequence[Unit], joins_previous: Callable[[int], bool]) -> list[list[Unit]]:
    """Neighbours in groups; ``joins_previous(index)`` says whether a unit belongs to the group before it."""
    groups: list[list[Unit]] = []
    for index, unit in enumerate(units):
        if groups and joins_previous(index):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


def _goes_on(before: Unit, unit: Unit) -> bool:
    """Whether a unit continues the entity of the one before it."""
    return not unit.label.startswith("B-") and _kind(unit.label) == _kind(before.label)


def _kind(label: str) -> str:
    """A label without ``B-`` or ``I-``."""
    return label[2:] if label.startswith(("B-", "I-")) else label
