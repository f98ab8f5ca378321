"""Any chat model: the generic prompt as a user message, read from the output rows of the labels it may answer with.

The prompt, and its labels where the checkpoint has none of its own, are those of transformers' decision pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinity_bento.checkpoints.chat_decisions import LETTERS, YES_NO, ChatSpec
from infinity_bento.decisions import Json, Option, Question, QuestionKind
from infinity_bento.heads.decisions.pplx import written
from infinity_bento.heads.decisions.readout import Prompt
from infinity_bento.inputs.chat import surroundings, template_marks

NAME = "a chat model that decides"


def prompt(tokenizer: Any, spec: ChatSpec) -> Prompt:
    """The prompt in a tokenizer's chat template."""
    around = surroundings(tokenizer, None, NAME)
    return Prompt(
        around.before,
        around.after,
        stripped_body if around.strips else body,
        true_first=spec.true_first,
        guarded=template_marks(tokenizer),
    )


def body(state: Json, question: Question, codes: Sequence[str]) -> str:
    """The user's turn."""
    used = tuple(codes[: len(question.options)])
    lines = [_text(question.instructions)]
    lines += [_line(question.kind, code, option, used) for code, option in zip(used, question.options, strict=True)]
    asked = "\n".join(line for line in lines if line)
    return f"{_text(state)}\n\n{asked}\n{_close(question.kind, used)}"


def stripped_body(state: Json, question: Question, codes: Sequence[str]) -> str:
    """The user's turn, for chat templates that strip it."""
    return body(state, question, codes).lstrip()


def _line(kind: QuestionKind, code: str, option: Option, used: tuple[str, ...]) -> str:
    described = _text(option.description)
    if kind is QuestionKind.NOUL:
        described = described or ("" if used == YES_NO else option.name)
        return f"{code}: {described}" if described else ""
    if kind is QuestionKind.CHOICE:
        described = f"{option.name}: {described}" if described else option.name
    return f"{code}. {described}"


def _close(kind: QuestionKind, used: tuple[str, ...]) -> str:
    if kind is QuestionKind.NOUL:
        return f"Answer {used[0]} or {used[1]} only."
    label = "letter" if used == LETTERS[: len(used)] else "label"
    thing = "option" if kind is QuestionKind.CHOICE else "level"
    return f"Answer with the {label} of the {thing} that fits best ({used[0]} to {used[-1]}) only."


def _text(value: Json) -> str:
    return "" if value is None else written(value)
