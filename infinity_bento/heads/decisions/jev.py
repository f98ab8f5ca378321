"""JEV: a few lines of plain text behind which a small head scores the options. Read by ``readout``.

The prompt is ``bare-v1`` of the published layout. No chat template is used; Gemma reads its ``<bos>`` first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinity_bento.decisions import Json, Option, Question, QuestionKind
from infinity_bento.errors import InvalidInput
from infinity_bento.heads.decisions.pplx import written
from infinity_bento.heads.decisions.readout import Prompt


def body(state: Json, question: Question, codes: Sequence[str]) -> str:
    """The whole text; only a choice shows its options' codes and descriptions."""
    asked = "" if question.instructions is None else written(question.instructions)
    options = "\n".join(
        _labelled(code, option) if question.kind is QuestionKind.CHOICE else option.name
        for code, option in zip(codes, question.options, strict=False)
    )
    return (
        f"[kind] {question.kind.value}\n[state] {_state(state)}\n[question] {asked}\n[options]\n{options}\n[decision]:"
    )


def _labelled(code: str, option: Option) -> str:
    described = option.description
    return f"{code}) {option.name}" + (f": {written(described)}" if described not in (None, "") else "")


def _state(state: Json) -> str:
    """The parts of a list are joined, without their types where they are texts of a message."""
    return "".join(map(_part, state)) if isinstance(state, list) else written(state)


def _part(part: Json) -> str:
    if isinstance(part, Mapping):
        if "image" in part or part.get("type") == "image_url":
            raise InvalidInput(
                "The state holds an image, and this model (jev) reads text alone: describe it in words.", param="state"
            )
        if part.get("type") == "text":
            return str(part.get("text", ""))
    return written(part)


PLAIN = Prompt("", "", body)
GEMMA = Prompt("<bos>", "", body)
