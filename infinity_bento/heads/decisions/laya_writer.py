"""How Laya writes a question as a sequence: budgets, markers, and the parallel layout. Called by ``laya``.

``[CLS] question [SEP] ([MASK] option) ... [SEP] state [SEP]``; each option is read at its own ``[MASK]``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from infinity_bento.checkpoints.laya import KINDS, LayaSpec
from infinity_bento.core import BlockMask, Encoded
from infinity_bento.decisions import DecisionRequest, FieldPath, Json, Question, QuestionKind
from infinity_bento.errors import InputTooLong, InvalidInput
from infinity_bento.inputs.plain_text import PlainText

OPTION_TOKENS = 48  # of one option's text
LEAST_SPARE = 16  # tokens for the question; where the options leave less, each is cut
LEAST_OPTION, LEAST_QUESTION = 4, 8  # tokens that a cut leaves at least
NOUL_TEXTS = ("no, the statement does not hold", "yes, the statement holds")


@dataclass(frozen=True, slots=True)
class LayaReadout:
    """Where the options of a sequence are read."""

    kind: int  # row of the type embedding
    markers: tuple[int, ...]  # position of each option's ``[MASK]``
    extras: dict[str, float] = field(default_factory=dict)  # what was cut


class LayaWriter:
    """Writes questions about a state.

    Args:
        backend: The checkpoint's ``tokenizers.Tokenizer``.
        special: Ids of its ``[CLS]``, ``[SEP]`` and ``[MASK]``.
        spec: Budgets and layout.
        max_length: Tokens of a sequence.
    """

    def __init__(self, backend: Any, special: tuple[int, int, int], spec: LayaSpec, max_length: int) -> None:
        self._plain = PlainText(backend)
        self._cls, self._sep, self._mask = special
        self._mask_text = str(backend.id_to_token(self._mask))
        self._spec = spec
        self._max_length = max_length

    def write(self, request: DecisionRequest) -> Encoded:
        """One part per question, in their order.

        Raises:
            InvalidInput: A question without instructions.
            InputTooLong: The options of a question alone exceed the length limit.
        """
        texts = [_json(request.state)]
        for question in request.questions:
            texts.append(f"{question.kind.value} question: {_instructions(question)}")
            texts += [f" {text}" for text in option_texts(question)]
        # The reference does the same; other special tokens are kept apart by the plain encoder.
        ids = self._plain.encode([text.replace(self._mask_text, " ") for text in texts])
        parts, start = [], 1
        for question in request.questions:
            end = start + 1 + len(question.options)
            parts.append(self._sequence(request, question, ids[0], ids[start], ids[start + 1 : end]))
            start = end
        before = sum(part.truncated_from or len(part) for part in parts)
        return Encoded(
            [],
            parts=parts,
            truncated_from=before if any(part.truncated_from for part in parts) else None,
            characters=sum(map(len, texts)),
        )

    def _sequence(
        self,
        request: DecisionRequest,
        question: Question,
        state: list[int],
        asked: list[int],
        options: list[list[int]],
    ) -> Encoded:
        head, markers, whole = self._head(asked, options)
        extras = {"question_tokens_dropped": float(whole - len(head))} if whole > len(head) else {}
        if markers[-1] >= self._max_length:
            fit = sum(marker < self._max_length for marker in markers)
            raise InputTooLong(
                f"Only {fit} of the {len(markers)} options of question {question.id!r} fit into the {self._max_length} "
                "tokens of this model: ask with fewer options.",
                param=FieldPath("questions", question.id, "criteria"),
            )
        room = max(0, self._max_length - len(head) - 1)
        # The end of a conversation is its newest part.
        kept = state[max(0, len(state) - room) :] if isinstance(request.state, list) else state[:room]
        if len(kept) < len(state):
            extras["state_tokens_dropped"] = float(len(state) - len(kept))
        ids = [*head, *kept, self._sep]
        total = whole + len(state) + 1
        sequence = Encoded(
            ids[: self._max_length],
            truncated_from=total if total > min(len(ids), self._max_length) else None,
            readout=LayaReadout(KINDS.index(question.kind), tuple(markers), extras),
        )
        if self._spec.parallel:
            lay_side_by_side(sequence, markers, len(head))
        return sequence

    def _head(self, asked: list[int], options: list[list[int]]) -> tuple[list[int], list[int], int]:
        """Everything before the state, where its markers are, and its length if nothing had been cut."""
        whole = len(asked) + sum(len(option) + 1 for option in options) + 3
        pieces = [[self._mask, *option[:OPTION_TOKENS]] for option in options]
        spare = self._spec.head_length - sum(map(len, pieces))
        if spare < LEAST_SPARE:
            each = max(LEAST_OPTION, (self._spec.head_length - LEAST_SPARE) // len(pieces))
            pieces = [piece[:each] for piece in pieces]
            spare = self._spec.head_length - sum(map(len, pieces))
        start = [self._cls, *asked[: max(LEAST_QUESTION, spare)], self._sep]
        markers = list(accumulate(map(len, pieces[:-1]), initial=len(start)))
        return [*start, *(token for piece in pieces for token in piece), self._sep], markers, whole


def lay_side_by_side(sequence: Encoded, markers: list[int], head_length: int) -> None:
    """The parallel layout: options share their positions and do not see each other, so their order does not count."""
    length, start = len(sequence), markers[0]
    positions, blocks = list(range(start)), [0] * start
    longest = 0
    for block, (first, end) in enumerate(pairwise((*markers, head_length - 1)), start=1):
        positions += range(start, start + end - first)
        blocks += [block] * (end - first)
        longest = max(longest, end - first)
    rest = max(0, length - len(positions))
    positions += range(start + longest, start + longest + rest)
    sequence.position_ids = positions[:length]
    sequence.blocks = np.array((blocks + [0] * rest)[:length], dtype=np.int32)
    sequence.block_mask = BlockMask.SHARED_SEES_ALL


def option_texts(question: Question) -> list[str]:
    """What the options of a question read like, in their order."""
    if question.kind is QuestionKind.SCORE:
        return [f"level {level}: {_json(option.description)}" for level, option in enumerate(question.options)]
    texts = []
    for index, option in enumerate(question.options):
        description = option.description
        if description in (None, "") and question.kind is QuestionKind.NOUL:
            description = NOUL_TEXTS[index]
        texts.append(option.name if description in (None, "") else f"{option.name}: {_json(description)}")
    return texts


def _instructions(question: Question) -> str:
    given = question.instructions
    if given is None or given in ([], {}) or (isinstance(given, str) and not given.strip()):
        raise InvalidInput(
            f"Question {question.id!r} has no instructions, which this model needs: say what it shall decide.",
            param=FieldPath("questions", question.id, "instructions"),
        )
    return _json(given)


def _json(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
