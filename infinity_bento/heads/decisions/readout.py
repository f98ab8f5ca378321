"""Decisions read at the last token: one sequence per question, the logits of its options' codes.

The families differ in their prompt (a file each) and in where the rows of the codes come from: a readout
of their own, or rows of the language model's output. Only these rows are multiplied, never the vocabulary.

Shape suffixes: T packed tokens, D width, B sequences, C codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.checkpoints.temperatures import Temperatures
from infinity_bento.core import Encoded, Item
from infinity_bento.decisions import Decision, DecisionRequest, FieldPath, Json, Question, QuestionKind
from infinity_bento.errors import InfinityError, InputTooLong, InvalidInput
from infinity_bento.heads.decisions.answers import answer
from infinity_bento.heads.rows import not_finite
from infinity_bento.inputs.plain_text import Envelope, PlainText

# Tokens of chat templates that some tokenizers do not call special.
GUARDED = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|turn>", "<turn|>", "<|channel>", "<channel|>")


@dataclass(frozen=True, slots=True)
class Prompt:
    """How a family asks."""

    before: str  # trusted, up to and with the last special token before the caller's text
    after: str
    body: Callable[[Json, Question, Sequence[str]], str]  # state, question with options in prompt order, codes
    true_first: bool = False  # order of a noul's options
    guarded: tuple[str, ...] = ()  # more tokens that the prompt is made of
    # Of block masks: how the body begins for a state. That beginning, and what stands before it, see only themselves;
    # the question sees everything, both ways.
    state_block: Callable[[Json], str] | None = None


@dataclass(frozen=True, slots=True)
class Slots:
    """What the options of a kind of question are called, and where the rows of these codes begin."""

    codes: tuple[str, ...]
    first: int = 0  # row of the first code; the others follow


def same_for_all(codes: Sequence[str]) -> dict[QuestionKind, Slots]:
    """One table of codes for every kind of question."""
    return dict.fromkeys(QuestionKind, Slots(tuple(codes)))


def slots_of(slots: Mapping[QuestionKind, Slots], question: Question) -> Slots:
    """Those of a question's kind.

    Raises:
        InvalidInput: It has more options than there are codes.
    """
    found = slots[question.kind]
    if len(question.options) > len(found.codes):
        of_kind = "" if len(set(slots.values())) == 1 else f" of a {question.kind}"
        raise InvalidInput(
            f"Question {question.id!r} has {len(question.options)} options, but this model has codes for "
            f"{len(found.codes)}{of_kind}: ask with fewer.",
            param=FieldPath("questions", question.id, "criteria"),
        )
    return found


def checked_length(tokens: int, limit: int, question: str) -> None:
    """Nothing is cut.

    Raises:
        InputTooLong: A sequence exceeds the limit.
    """
    if tokens > limit:
        raise InputTooLong(
            f"The state and question {question!r} have {tokens} tokens, more than the limit of {limit}; nothing is "
            "cut: shorten the state.",
            param="state",
        )


class Writer(Protocol):
    """What writes the sequences of a request."""

    slots: dict[QuestionKind, Slots]  # codes of the options, in order, by kind of question
    true_first: bool  # order of a noul's options

    def write(self, request: DecisionRequest) -> Encoded:
        """The sequences of a request, in the order of its questions."""


class ReadoutWriter:
    """Writes each question of a request as a sequence of its own.

    Args:
        backend: The checkpoint's ``tokenizers.Tokenizer``.
        prompt: Of the family.
        slots: Codes of the options, in order, by kind of question.
        max_length: Tokens of a sequence.
    """

    def __init__(self, backend: Any, prompt: Prompt, slots: Mapping[QuestionKind, Slots], max_length: int) -> None:
        self.prompt = prompt
        self.true_first = prompt.true_first
        self.slots = dict(slots)
        self._envelope = Envelope(backend, PlainText(backend, (*GUARDED, *prompt.guarded)), prompt.before, prompt.after)
        self._max_length = max_length

    def write(self, request: DecisionRequest) -> Encoded:
        """The sequences of a request, in the order of its questions.

        Raises:
            InvalidInput: A question has more options than there are codes.
            InputTooLong: A sequence exceeds the length limit; nothing is cut.
        """
        parts = [self._part(request.state, question) for question in request.questions]
        return Encoded([], parts=parts, characters=sum(part.characters for part in parts))

    def _part(self, state: Json, question: Question) -> Encoded:
        slots = slots_of(self.slots, question)
        asked = question
        if question.kind is QuestionKind.NOUL and self.prompt.true_first:
            asked = replace(question, options=question.options[::-1])
        body = self.prompt.body(state, asked, slots.codes)
        first = "" if self.prompt.state_block is None else self.prompt.state_block(state)
        assert body.startswith(first)
        pieces = self._envelope.encode([first, body[len(first) :]] if first else [body])
        ids = [token for piece in pieces for token in piece]
        checked_length(len(ids), self._max_length, question.id)
        blocks = np.repeat(np.arange(2, dtype=np.int32), [len(piece) for piece in pieces]) if first else None
        return Encoded(ids, characters=len(body), readout=slots.first + len(question.options), blocks=blocks)


class ReadoutProtocol:
    """A protocol that reads the last token.

    Args:
        name: Public name.
        writer: Writes the sequences.
        rows_CD: Of the codes, float32 on the backbone's device.
        temperatures: In force.
        bias_C: Added to the logits, as ``rows_CD``; None: nothing is.
        softcap: Logits become ``softcap * tanh(logits / softcap)``; None: they stay.
    """

    def __init__(
        self,
        name: str,
        writer: Writer,
        rows_CD: Tensor,
        temperatures: Temperatures,
        *,
        bias_C: Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        self.name = name
        self.writer = writer
        self.rows_CD = rows_CD
        self.bias_C = bias_C
        self.temperatures = temperatures
        self.softcap = softcap

    def encode(self, request: DecisionRequest) -> Encoded:
        """See ``DecisionProtocol``."""
        return self.writer.write(request)

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """See ``DecisionProtocol``: ``[B, C]`` float32, of as many rows as the questions of the batch need."""
        needed = max((rows for rows in batch.readouts or () if rows is not None), default=1)
        logits = hidden_TD[batch.ends()].float() @ self.rows_CD[:needed].T
        if self.bias_C is not None:
            logits += self.bias_C[:needed]
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def collect(
        self, rows: Tensor, positions: Sequence[Sequence[int]], items: Sequence[Item]
    ) -> list[list[Decision] | InfinityError]:
        """See ``DecisionProtocol``."""
        logits = rows.cpu().numpy()
        outputs: list[list[Decision] | InfinityError] = []
        for places, item in zip(positions, items, strict=True):
            assert item.decision is not None
            asked = item.decision.questions
            firsts = [self.writer.slots[question.kind].first for question in asked]
            own = [
                logits[place, first : first + len(question.options)]
                for place, first, question in zip(places, firsts, asked, strict=True)
            ]
            finite = all(np.isfinite(row).all() for row in own)
            outputs.append(
                [self._decision(question, row.tolist()) for question, row in zip(asked, own, strict=True)]
                if finite
                else not_finite(item)
            )
        return outputs

    def _decision(self, question: Question, logits: list[float]) -> Decision:
        if question.kind is QuestionKind.NOUL and self.writer.true_first:
            logits.reverse()
        decision = answer(question, logits, self.temperatures)
        return replace(decision, native_confidence=max(decision.probabilities))
