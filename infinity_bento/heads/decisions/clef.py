"""Clef: one sequence holds the state and all questions, and a joint head lets the questions look at each other.

A request is never split, and its answers depend on all of its questions and on their ids, by design.

Shape suffixes: T packed tokens, R requests, O options, D hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.checkpoints.temperatures import Temperatures
from infinity_bento.checkpoints.tensor_files import read_file
from infinity_bento.core import Encoded, Item
from infinity_bento.decisions import Decision, DecisionRequest, FieldPath, Json, Question, QuestionKind
from infinity_bento.errors import InfinityError, InputTooLong, InvalidInput
from infinity_bento.heads.decisions.answers import answer
from infinity_bento.heads.decisions.clef_head import Fields, HeadShape, JointHead, Span, span_means
from infinity_bento.heads.decisions.weights import fill
from infinity_bento.heads.rows import not_finite
from infinity_bento.inputs.plain_text import PlainText

CONFIG_FILE = "joint_head_config.json"
WEIGHTS_FILE = "joint_head.safetensors"
MAX_LENGTH = 16_384  # tokens of a request in the reference
KINDS = (QuestionKind.NOUL, QuestionKind.CHOICE, QuestionKind.SCORE)  # the order of the type embedding

PREFIX = (
    "<|im_start|>system\nRead the complete state and schema. Decide every field jointly. Each answer must be exactly "
    "one of that field's allowed options.<|im_end|>\n<|im_start|>user\nSTATE:\n"
)
SUFFIX = "\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nJOINT SCHEMA DECISIONS:"
GUARDED = ("<think>", "</think>")
SCHEMA, OPTIONS, END_OPTION, END_FIELD = "\n\nSCHEMA FIELDS:\n", "\nALLOWED OPTIONS:\n", "\n", "END FIELD\n"
NOUL_TEXTS = ("The proposition is false or the answer is no.", "The proposition is true or the answer is yes.")


@dataclass(frozen=True, slots=True)
class ClefReadout:
    """How the sequence of a request is read."""

    fields: Fields
    orders: tuple[tuple[int, ...], ...]  # of each question: the options, by index, in the order of the prompt


class ClefRows(NamedTuple):
    """What ``run`` gives."""

    logits_O: Tensor  # float32, on the device
    readouts: list[ClefReadout]
    starts: list[int]  # of each request's options


# Sequence -----------------------------------------------------------------------------------------------------------


class ClefWriter:
    """Writes a request as one sequence; every piece is tokenised on its own.

    Args:
        backend: The checkpoint's ``tokenizers.Tokenizer``.
        max_length: Tokens of a sequence.
    """

    def __init__(self, backend: Any, max_length: int) -> None:
        self._plain = PlainText(backend, GUARDED)
        self._prefix, self._suffix = (backend.encode(text, add_special_tokens=False).ids for text in (PREFIX, SUFFIX))
        self._max_length = max_length

    def write(self, request: DecisionRequest) -> Encoded:
        """The sequence of a request.

        Raises:
            InvalidInput: A question's text has no tokens.
            InputTooLong: The sequence exceeds the length limit; nothing is cut.
        """
        texts = [compact(request.state), SCHEMA]
        orders = tuple(prompt_order(question) for question in request.questions)
        for number, (question, order) in enumerate(zip(request.questions, orders, strict=True), start=1):
            texts += field_texts(number, question, order)
        pieces = iter(self._plain.encode(texts))
        ids = [*self._prefix, *next(pieces), *next(pieces)]
        questions: list[Span] = []
        options: list[tuple[Span, ...]] = []

        def add(index: int) -> Span:
            """Append the next piece; an empty one cannot be read."""
            first = len(ids)
            ids.extend(next(pieces))
            if len(ids) == first:
                asked = request.questions[index]
                raise InvalidInput(
                    f"Question {asked.id!r} has a text without any token for this model: write it in other words.",
                    param=FieldPath("questions", asked.id),
                )
            return first, len(ids)

        for index, order in enumerate(orders):
            ids.extend(next(pieces))
            questions.append(add(index))
            ids.extend(next(pieces))
            spans = []
            for _ in order:
                ids.extend(next(pieces))
                spans.append(add(index))
                ids.extend(next(pieces))
            options.append(tuple(spans))
            ids.extend(next(pieces))
        ids += self._suffix
        if len(ids) > self._max_length:
            raise InputTooLong(
                f"State and questions have {len(ids)} tokens together, more than the limit of {self._max_length}; this "
                "model reads them as one and nothing is cut: shorten the state, or ask fewer questions at once.",
                param="state",
            )
        kinds = tuple(KINDS.index(question.kind) for question in request.questions)
        fields = Fields(kinds, tuple(questions), tuple(options))
        return Encoded(ids, characters=sum(map(len, texts)), readout=ClefReadout(fields, orders))


def field_texts(number: int, question: Question, order: Sequence[int]) -> list[str]:
    """The pieces of one question."""
    asked = question.instructions
    texts = [
        f"\nFIELD {number}\nID: {question.shown_id}\nTYPE: {question.kind.value}\nINSTRUCTION: ",
        compact(question.shown_id if asked is None or asked == "" else asked),
        OPTIONS,
    ]
    for place, index in enumerate(order, start=1):
        option = question.options[index]
        described: dict[str, Json] = {"option_id": option.name}
        if option.description is not None:
            described["description"] = option.description
        elif question.kind is QuestionKind.NOUL:
            described["description"] = NOUL_TEXTS[index]
        texts += [f"OPTION {place}: ", compact(described), END_OPTION]
    return [*texts, END_FIELD]


def prompt_order(question: Question) -> tuple[int, ...]:
    """The options of a question in the order of the prompt: choices by name, true before false, levels upwards."""
    count = range(len(question.options))
    if question.kind is QuestionKind.CHOICE:
        return tuple(sorted(count, key=lambda index: question.options[index].name))
    return tuple(reversed(count)) if question.kind is QuestionKind.NOUL else tuple(count)


def compact(value: Json) -> str:
    """A text as it is, anything else as JSON without blanks and with sorted keys."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


# Protocol -----------------------------------------------------------------------------------------------------------


class ClefProtocol:
    """Clef as a decision protocol.

    Args:
        writer: Writes the sequences.
        head: On the backbone's device.
        output_VD: The output rows of the language model, in any dtype; only those of option tokens are read.
        temperatures: In force; the family has none of its own.
    """

    name = "clef"

    def __init__(self, writer: ClefWriter, head: JointHead, output_VD: Tensor, temperatures: Temperatures) -> None:
        self.writer = writer
        self.head = head
        self.output_VD = output_VD
        self.temperatures = temperatures

    def encode(self, request: DecisionRequest) -> Encoded:
        """See ``DecisionProtocol``."""
        return self.writer.write(request)

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> ClefRows:
        """See ``DecisionProtocol``."""
        assert batch.readouts is not None
        readouts: list[ClefReadout] = batch.readouts
        logits = self.head(hidden_TD, self._lexical(batch, readouts), batch.lengths, [r.fields for r in readouts])
        counts = [readout.fields.option_count for readout in readouts]
        return ClefRows(logits, readouts, list(accumulate(counts[:-1], initial=0)))

    def _lexical(self, batch: PackedBatch, readouts: Sequence[ClefReadout]) -> Tensor:
        """The mean output row over the tokens of each option, ``[O, D]`` float32."""
        starts = accumulate(batch.lengths[:-1], initial=0)
        spans = [
            (start + first, start + end)
            for start, readout in zip(starts, readouts, strict=True)
            for group in readout.fields.options
            for first, end in group
        ]
        tokens = torch.tensor([row for first, end in spans for row in range(first, end)], device=batch.device)
        rows = self.output_VD[batch.input_ids[tokens]].float()
        bounds = list(accumulate((end - first for first, end in spans), initial=0))
        return span_means(rows, list(pairwise(bounds)))

    def collect(
        self, rows: ClefRows, positions: Sequence[Sequence[int]], items: Sequence[Item]
    ) -> list[list[Decision] | InfinityError]:
        """See ``DecisionProtocol``."""
        logits = rows.logits_O.cpu().numpy()
        outputs: list[list[Decision] | InfinityError] = []
        for (place,), item in zip(positions, items, strict=True):
            assert item.decision is not None
            readout, start = rows.readouts[place], rows.starts[place]
            own = logits[start : start + readout.fields.option_count]
            finite = bool(np.isfinite(own).all())
            outputs.append(self._decisions(item.decision, readout, own.tolist()) if finite else not_finite(item))
        return outputs

    def _decisions(self, request: DecisionRequest, readout: ClefReadout, logits: list[float]) -> list[Decision]:
        decisions = []
        start = 0
        for question, order in zip(request.questions, readout.orders, strict=True):
            as_sent = [0.0] * len(order)
            for index, logit in zip(order, logits[start : start + len(order)], strict=True):
                as_sent[index] = logit
            start += len(order)
            decision = answer(question, as_sent, self.temperatures)
            decisions.append(replace(decision, native_confidence=max(decision.probabilities)))
        return decisions


def read_head_shape(folder: Path) -> HeadShape:
    """``joint_head_config.json``.

    Raises:
        LoadError: It is missing, malformed, lacks a key or has one too many.
    """
    config = JsonObject.read(folder / CONFIG_FILE)
    names = HeadShape.__dataclass_fields__
    unknown = sorted(set(config.data) - {*names, "dropout"})
    if unknown:
        raise config.wrong(unknown[0], f"absent: the head has {', '.join(names)}")
    shape = HeadShape(**{name: config.integer(name, minimum=0 if name.endswith("layers") else 1) for name in names})
    if shape.width % shape.heads:
        raise config.wrong("heads", f"a divisor of the width, {shape.width}")
    return shape


def load_clef(
    folder: Path,
    tokenizer: Any,
    output_VD: Tensor,
    temperatures: Temperatures,
    *,
    max_length: int,
    device: torch.device | str = "cpu",
) -> ClefProtocol:
    """The protocol of a Clef checkpoint.

    Args:
        folder: The checkpoint.
        tokenizer: Its transformers tokenizer.
        output_VD: The output rows of the language model, on the device.
        temperatures: In force.
        max_length: Tokens of a sequence; at most ``MAX_LENGTH`` count.
        device: Of the backbone.

    Raises:
        LoadError: The config of the head is malformed, or does not fit the language model.
        WeightMismatch: A tensor of the head is missing, left over or of a wrong shape.
    """
    shape = read_head_shape(folder)
    if shape.hidden_size != output_VD.shape[-1]:
        config = JsonObject(folder / CONFIG_FILE, {"hidden_size": shape.hidden_size})
        raise config.wrong("hidden_size", f"that of the language model, {output_VD.shape[-1]}")
    head = fill(lambda: JointHead(shape), read_file(folder / WEIGHTS_FILE), folder / WEIGHTS_FILE, device)
    writer = ClefWriter(tokenizer.backend_tokenizer, min(max_length, MAX_LENGTH))
    return ClefProtocol(writer, head, output_VD, temperatures)
