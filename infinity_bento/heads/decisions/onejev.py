"""OneJev: letters as options in the checkpoint's own chat template, read from the language model's output rows.

The prompt is ``qev-labels-v2`` of the published runtime; Elephant and Mammoth ask with it under a mask of blocks. Up
to 26 options have letters; more have pairs of letters where the tokenizer has each of them as one token.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from typing import Any

from infinity_bento.decisions import Json, Question, QuestionKind
from infinity_bento.heads.decisions.readout import Prompt
from infinity_bento.inputs.chat import surroundings, template_marks

SYSTEM = (
    "Apply the question to the state. Choose exactly one of the listed options. Respond with only its uppercase "
    "letter, with no explanation or reasoning."
)
DEFAULT_INSTRUCTIONS = {
    QuestionKind.NOUL: "Is the statement true, or is the answer to the question yes?",
    QuestionKind.CHOICE: "Which option applies to the state?",
    QuestionKind.SCORE: "Which level describes the state?",
}
NOUL_NAMES = {"true": "yes", "false": "no"}
NOUL_TEXTS = {"true": "the statement is true / the answer is yes", "false": "the statement is false / the answer is no"}
# Pairs of letters that are no token of Qwen's, by first letter.
_SECOND = {"B": "QZ", "C": "JQZ", "D": "QZ", "E": "JY", "F": "JQVZ", "G": "JKQZ", "H": "J", "I": "Y", "J": "FGHJLNQ"}
_PAIRS_APART = frozenset(first + second for first, seconds in _SECOND.items() for second in seconds)
_LETTERS = string.ascii_uppercase
PAIRS = tuple(pair for pair in (a + b for a in _LETTERS for b in _LETTERS) if pair not in _PAIRS_APART)
MOST_LABELS = 256


def labels(backend: Any) -> tuple[str, ...]:
    """The labels that are one token each: the letters, and all pairs or none."""

    def single(label: str) -> bool:
        return len(backend.encode(label, add_special_tokens=False).ids) == 1

    pairs = PAIRS[: MOST_LABELS - len(_LETTERS)]
    return (*_LETTERS, *(pairs if all(map(single, pairs)) else ()))


def prompt(tokenizer: Any, *, blocks: bool = False) -> Prompt:
    """The prompt in a tokenizer's chat template; with ``blocks`` the state is a block of its own."""
    around = surroundings(tokenizer, SYSTEM, "OneJev")
    return Prompt(
        around.before,
        around.after,
        body,
        true_first=True,
        guarded=template_marks(tokenizer),
        state_block=state_block if blocks else None,
    )


def body(state: Json, question: Question, codes: Sequence[str]) -> str:
    """The user's turn."""
    asked = _entry(question.instructions) or DEFAULT_INSTRUCTIONS[question.kind]
    used = codes[: len(question.options)]
    lines = "\n".join(f"{code}. {text}" for code, text in zip(used, _options(question), strict=True))
    header = "Rate the state:" if question.kind is QuestionKind.SCORE else "Question:"
    kind = "letter" if len(used) <= len(_LETTERS) else "label"
    return f"{state_block(state)}{header} {asked}\n\nOptions:\n{lines}\n\nAnswer with one {kind}: {', '.join(used)}."


def state_block(state: Json) -> str:
    """How the user's turn begins, whatever is asked. Tokens end where it ends, as no word goes on there."""
    shown = state if isinstance(state, str) else json.dumps(state, ensure_ascii=False, indent=2)
    return f"<state>\n{shown}\n</state>\n\n"


def _options(question: Question) -> list[str]:
    texts = []
    for index, option in enumerate(question.options):
        described = _entry(option.description)
        name = option.name
        if question.kind is QuestionKind.NOUL:
            described = described if option.description is not None else NOUL_TEXTS[name]
            name = NOUL_NAMES[name]
        elif question.kind is QuestionKind.SCORE:
            name = f"level {index}"
        texts.append(f"{name}: {described}" if described else name)
    return texts


def _entry(value: Json) -> str:
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
