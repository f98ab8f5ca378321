"""Perplexity Decider v1.2: one sequence holds the state and all questions; each is answered at its own marker.

Attention looks both ways over the whole sequence, so a request is never split and its questions see each other, by
design. The prompt text is not public and comes from files: see ``checkpoints/pplx_joint``.

Shape suffixes: T packed tokens, Q questions, C codes, K most options, D hidden size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.checkpoints.json_files import relative_path
from infinity_bento.checkpoints.pplx_joint import OWN_FILE, PROTOCOL_FILE, JointSpec
from infinity_bento.checkpoints.temperatures import Temperatures
from infinity_bento.checkpoints.tensor_files import read_file
from infinity_bento.core import Encoded, Item
from infinity_bento.decisions import Decision, DecisionRequest, FieldPath, Json, Question, QuestionKind
from infinity_bento.errors import InfinityError, InputTooLong, InvalidInput, LoadError, WeightMismatch
from infinity_bento.heads.decisions.answers import answer
from infinity_bento.heads.rows import not_finite
from infinity_bento.inputs.plain_text import Envelope, PlainText

DEFAULT_INSTRUCTIONS = "Choose the best matching option."
GUARDED = ("<think>", "</think>")
# Stands for the caller's text while the chat template is asked what goes around it.
_CONTENT = "infinity-bento-content"


@dataclass(frozen=True, slots=True)
class JointReadout:
    """Where the questions of a sequence are read, and how many codes each has."""

    markers: tuple[int, ...]
    counts: tuple[int, ...]


class JointRows(NamedTuple):
    """What ``run`` gives."""

    logits_QK: Tensor  # float32, on the device; columns beyond a question's options mean nothing
    starts: list[int]  # first row of each sequence


class JointWriter:
    """Writes a request as one sequence.

    Args:
        tokenizer: The checkpoint's transformers tokenizer, with a chat template.
        spec: Texts and codes.
        max_length: Tokens of a sequence.
    """

    def __init__(self, tokenizer: Any, spec: JointSpec, max_length: int) -> None:
        backend = tokenizer.backend_tokenizer
        messages = [
            {"role": "system", "content": spec.template.system},
            {"role": "user", "content": _CONTENT},
        ]
        written: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        before, _, after = written.partition(_CONTENT)
        self._envelope = Envelope(backend, PlainText(backend, (*GUARDED, spec.marker)), before, after)
        self._marker: int = backend.token_to_id(spec.marker)
        self._spec = spec
        self._max_length = max_length

    def write(self, request: DecisionRequest) -> Encoded:
        """The sequence of a request.

        Raises:
            InvalidInput: A question has more options than there are codes.
            InputTooLong: The sequence exceeds the length limit; nothing is cut.
        """
        template = self._spec.template
        pieces = [filled(template.state, {"state": self._json(request.state)})]
        for number, question in enumerate(request.questions, start=1):
            before, after = self._question(number, question)
            pieces[-1] += template.separator + before
            pieces.append(after)
        pieces[-1] += template.close
        ids: list[int] = []
        markers = []
        for index, piece in enumerate(self._envelope.encode(pieces)):
            if index:
                markers.append(len(ids))
                ids.append(self._marker)
            ids += piece
        if len(ids) > self._max_length:
            raise InputTooLong(
                f"State and questions have {len(ids)} tokens together, more than the limit of {self._max_length}; this "
                "model reads them as one and nothing is cut: shorten the state, or ask fewer questions at once.",
                param="state",
            )
        counts = tuple(len(question.options) for question in request.questions)
        return Encoded(ids, characters=sum(map(len, pieces)), readout=JointReadout(tuple(markers), counts))

    def _question(self, number: int, question: Question) -> tuple[str, str]:
        """What stands before and behind the marker of a question."""
        spec = self._spec
        if len(question.options) > len(spec.codes):
            raise InvalidInput(
                f"Question {question.id!r} has {len(question.options)} options, but this model has codes for "
                f"{len(spec.codes)}: ask with fewer.",
                param=FieldPath("questions", question.id, "criteria"),
            )
        asked = question.instructions
        if asked is None or asked == "":
            asked = spec.template.default_instructions.get(question.kind, DEFAULT_INSTRUCTIONS)
        texts = self._texts(question)
        options = "\n".join(
            filled(spec.template.option, {"code": code, "text": text})
            for code, text in zip(spec.codes, texts, strict=False)
        )
        values = {"n": str(number), "instructions": self._json(asked), "options": options}
        before, _, after = spec.template.question.partition("{marker}")
        return filled(before, values), filled(after, values)

    def _texts(self, question: Question) -> list[str]:
        """What the options of a question read like, in the order of the prompt."""
        texts = []
        for index, option in enumerate(question.options):
            described = None if option.description is None else self._json(option.description)
            if question.kind is QuestionKind.CHOICE:
                texts.append(option.name if described is None else f"{option.name}: {described}")
            elif question.kind is QuestionKind.NOUL:
                texts.append(self._spec.template.noul[index] if described is None else described)
            else:
                texts.append(described or "")
        reverse = question.kind is QuestionKind.NOUL and self._spec.true_first
        return texts[::-1] if reverse else texts

    def _json(self, value: Json) -> str:
        if isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False, indent=self._spec.state_indent)


def filled(template: str, values: Mapping[str, str]) -> str:
    """A template with its places filled; what fills them is not looked at again."""
    place: Callable[[re.Match[str]], str] = lambda found: values[found[1]]  # noqa: E731
    return re.sub("{(" + "|".join(values) + ")}", place, template)


class JointProtocol:
    """Perplexity Decider v1.2 as a decision protocol.

    Args:
        writer: Writes the sequences.
        rows_CD: A readout row for each code, float32, on the backbone's device.
        true_first: Order of a noul's options in the prompt.
        temperatures: In force.
    """

    name = "pplx-joint"

    def __init__(self, writer: JointWriter, rows_CD: Tensor, true_first: bool, temperatures: Temperatures) -> None:
        self.writer = writer
        self.rows_CD = rows_CD
        self.temperatures = temperatures
        self._true_first = true_first

    def encode(self, request: DecisionRequest) -> Encoded:
        """See ``DecisionProtocol``."""
        return self.writer.write(request)

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> JointRows:
        """See ``DecisionProtocol``."""
        assert batch.readouts is not None
        readouts: list[JointReadout] = batch.readouts
        starts = accumulate(batch.lengths[:-1], initial=0)
        tokens = [start + marker for start, readout in zip(starts, readouts, strict=True) for marker in readout.markers]
        most = max(count for readout in readouts for count in readout.counts)
        hidden_QD = hidden_TD[torch.tensor(tokens, device=hidden_TD.device)].float()
        sizes = [len(readout.markers) for readout in readouts]
        return JointRows(hidden_QD @ self.rows_CD[:most].T, list(accumulate(sizes[:-1], initial=0)))

    def collect(
        self, rows: JointRows, positions: Sequence[Sequence[int]], items: Sequence[Item]
    ) -> list[list[Decision] | InfinityError]:
        """See ``DecisionProtocol``."""
        logits = rows.logits_QK.cpu().numpy()
        outputs: list[list[Decision] | InfinityError] = []
        for (place,), item in zip(positions, items, strict=True):
            assert item.decision is not None
            asked = item.decision.questions
            own = [logits[rows.starts[place] + index, : len(q.options)] for index, q in enumerate(asked)]
            finite = all(np.isfinite(row).all() for row in own)
            outputs.append(
                [self._decision(question, row.tolist()) for question, row in zip(asked, own, strict=True)]
                if finite
                else not_finite(item)
            )
        return outputs

    def _decision(self, question: Question, logits: list[float]) -> Decision:
        if question.kind is QuestionKind.NOUL and self._true_first:
            logits.reverse()
        decision = answer(question, logits, self.temperatures)
        return replace(decision, native_confidence=max(decision.probabilities))


def load_joint(
    folder: Path,
    spec: JointSpec,
    tokenizer: Any,
    temperatures: Temperatures,
    *,
    width: int,
    max_length: int,
    device: torch.device | str = "cpu",
) -> JointProtocol:
    """The protocol of a checkpoint.

    Args:
        folder: The checkpoint.
        spec: What its files say.
        tokenizer: Its transformers tokenizer.
        temperatures: In force.
        width: Of the backbone's hidden states.
        max_length: Tokens of a sequence.
        device: Of the backbone.

    Raises:
        LoadError: The tokenizer does not fit: no chat template, marker or code is missing or several tokens.
        WeightMismatch: The readout is missing or has a wrong shape.
    """
    check_tokens(folder, spec, tokenizer)
    file = folder / relative_path(spec.readout_file, folder / OWN_FILE, "'file' of 'readout'")
    tensors = read_file(file)
    rows = tensors.get(spec.readout_tensor)
    wanted = [len(spec.codes), width]
    if rows is None or list(rows.shape) != wanted:
        found = "is missing" if rows is None else f"has shape {list(rows.shape)}"
        raise WeightMismatch(
            f"{file}: tensor {spec.readout_tensor!r} {found}; it must have a row for each code and a column for each "
            f"hidden value, {wanted}."
        )
    writer = JointWriter(tokenizer, spec, max_length)
    return JointProtocol(writer, rows.to(device, torch.float32), spec.true_first, temperatures)


def check_tokens(folder: Path, spec: JointSpec, tokenizer: Any) -> None:
    """Codes and marker must be single tokens, and the ids those that the checkpoint was trained with."""
    backend = tokenizer.backend_tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise LoadError(
            f"{folder} has no chat template, in which this model's prompt is written; add the original one."
        )
    if backend.token_to_id(spec.marker) is None:
        raise LoadError(
            f"{folder / PROTOCOL_FILE}: 'marker' is {spec.marker!r}, which is no token of the tokenizer; use the "
            "tokenizer that belongs to this checkpoint."
        )
    expected = spec.token_ids or (None,) * len(spec.codes)
    for code, wanted in zip(spec.codes, expected, strict=True):
        ids = backend.encode(code, add_special_tokens=False).ids
        if len(ids) != 1 or wanted not in (None, ids[0]):
            told = "" if wanted is None else f", not the one token {wanted} of 'token_ids'"
            raise LoadError(
                f"{folder}: code {code!r} of 'codes' is {len(ids)} tokens ({', '.join(map(str, ids))}){told}; use the "
                "tokenizer that belongs to this checkpoint."
            )
