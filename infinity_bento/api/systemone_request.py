"""State and questions of a System One request, with the limits of this server.

Called by ``systemone``, the BentoML method ``decide`` and ``calibrate``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from infinity_bento.api.fields import Body, describe
from infinity_bento.decisions import (
    DecisionRequest,
    DecisionRules,
    FieldPath,
    Json,
    Option,
    Question,
    QuestionKind,
)
from infinity_bento.errors import InvalidInput

Path = tuple[str | int, ...]

DEEPEST = 100  # containers in containers; writers of JSON give up not far beyond
KINDS = {kind.value: kind for kind in QuestionKind}
PICTURE_TYPES = ("image", "image_url", "input_image")
PART_FIELDS = ("content", "output")  # of a message, and of what a tool answered


def read_request(body: Body, rules: DecisionRules | None = None) -> DecisionRequest:
    """State and questions of a body.

    Args:
        body: The request object.
        rules: Limits; None: the usual ones.

    Raises:
        InvalidInput: Of the first field that is wrong; ``param`` is its path.
    """
    rules = rules or DecisionRules()
    state, asked = body.get("state"), body.get("questions")
    check_state(("state",), state)
    if type(asked) is not dict or not asked:
        refuse(("questions",), asked, "an object with at least one question by its id")
    check_questions(("questions",), len(asked), rules)
    questions = tuple(
        _question(number, name, question, rules) for number, (name, question) in enumerate(asked.items(), start=1)
    )
    check_total(questions, rules)
    return DecisionRequest(state, questions)


def check_state(path: Path, state: Any) -> None:
    """Refuse what is no state, or one with images as chat clients send them."""
    if not isinstance(state, str | dict | list):
        refuse(path, state, "a string, an object or an array")
    plain_json(path, state)
    messages = state.get("messages") if type(state) is dict and len(state) == 1 else state
    inside = (*path, "messages") if messages is not state else path
    for index, message in enumerate(messages if type(messages) is list else ()):
        for field in PART_FIELDS if type(message) is dict else ():
            parts = message.get(field)
            for place, part in enumerate(parts if type(parts) is list else ()):
                if type(part) is dict and part.get("type") in PICTURE_TYPES:
                    refuse((*inside, index, field, place), part, "text: images are not seen by the models served here")


def check_count(path: Path, count: int, most: int, what: str) -> None:
    """Refuse a field that holds more than the limit; ``what`` names what it holds, and the option."""
    if count > most:
        shown = FieldPath(*path)
        raise InvalidInput(f"`{shown}` has {count}; it must have at most {most} {what}.", param=shown)


def check_questions(path: Path, count: int, rules: DecisionRules) -> None:
    """Refuse too many questions."""
    check_count(path, count, rules.questions, "questions (decision_max_questions)")


def check_options(path: Path, count: int, rules: DecisionRules) -> None:
    """Refuse too many labels of a choice."""
    check_count(path, count, rules.options, "labels (decision_max_options)")


def check_levels(path: Path, count: int, rules: DecisionRules) -> None:
    """Refuse too many levels of a score."""
    check_count(path, count, rules.levels, "levels (decision_max_levels)")


def check_total(questions: Sequence[Question], rules: DecisionRules) -> None:
    """Refuse too many options over all questions."""
    total = sum(len(question.options) for question in questions)
    check_count(("questions",), total, rules.total_options, "options in all (decision_max_total_options)")


def _question(number: int, name: str, value: Any, rules: DecisionRules) -> Question:
    path: Path = ("questions", name)
    if not name:
        refuse(path, name, "an id of at least one character")
    if type(value) is not dict:
        refuse(path, value, "an object with `type`, `instructions` and `criteria`")
    named = value.get("type")
    kind = KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        boxes = ": boxes need a vision model, which is not served here" if named == "box" else ""
        refuse((*path, "type"), named, f"noul, choice or score{boxes}")
    instructions, criteria = value.get("instructions"), value.get("criteria")
    described((*path, "instructions"), instructions)
    options = _READERS[kind]((*path, "criteria"), criteria, rules)
    if kind is QuestionKind.NOUL and not instructions and all(option.description is None for option in options):
        refuse((*path, "instructions"), instructions, "given, unless `criteria` describes an outcome")
    return Question(name, kind, options, instructions, shown_as=f"q{number}" if rules.neutral_ids else None)


def _outcomes(path: Path, criteria: Any, rules: DecisionRules) -> tuple[Option, ...]:
    criteria = {} if criteria is None else criteria
    if type(criteria) is not dict:
        refuse(path, criteria, "absent, or an object with `true` and `false`")
    other = next((name for name in criteria if name not in ("true", "false")), None)
    if other is not None:
        refuse((*path, other), criteria[other], "left out: a noul has the outcomes `true` and `false`")
    return tuple(Option(name, described((*path, name), criteria.get(name))) for name in ("false", "true"))


def _labels(path: Path, criteria: Any, rules: DecisionRules) -> tuple[Option, ...]:
    if type(criteria) is not dict or not criteria:
        refuse(path, criteria, "an object with at least one label")
    check_options(path, len(criteria), rules)
    return tuple(Option(name, described((*path, name), text)) for name, text in criteria.items())


def _levels(path: Path, criteria: Any, rules: DecisionRules) -> tuple[Option, ...]:
    if type(criteria) is not list or not criteria:
        refuse(path, criteria, "an array of levels, the lowest first")
    check_levels(path, len(criteria), rules)
    for index, level in enumerate(criteria):
        if level is None:
            refuse((*path, index), None, "a string, an object or an array: a level must be described")
    return tuple(Option(str(index), described((*path, index), level)) for index, level in enumerate(criteria))


_READERS: Mapping[QuestionKind, Callable[[Path, Any, DecisionRules], tuple[Option, ...]]] = {
    QuestionKind.NOUL: _outcomes,
    QuestionKind.CHOICE: _labels,
    QuestionKind.SCORE: _levels,
}


def described(path: Path, value: Any) -> Json:
    """A text that may be structured, or null."""
    if value is not None and not isinstance(value, str | dict | list):
        refuse(path, value, "a string, an object, an array or null")
    plain_json(path, value)
    return value


def plain_json(path: Path, value: Any) -> None:
    """Refuse what JSON has no place for (MessagePack can bring it), and what is nested too deeply to be written."""
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for one in level:
            if type(one) is dict:
                if not all(type(key) is str for key in one):
                    refuse(path, value, "JSON, where the keys of objects are strings")
                inner += one.values()
            elif type(one) is list:
                inner += one
            elif not (one is None or isinstance(one, str | int) or (type(one) is float and math.isfinite(one))):
                refuse(path, one, "JSON: finite numbers, strings, true, false, null, arrays and objects")
        level, depth = inner, depth + 1
        if depth > DEEPEST:
            refuse(path, value, f"at most {DEEPEST} levels deep")


def refuse(path: Path, value: Any, allowed: str) -> NoReturn:
    """Refuse a field.

    Raises:
        InvalidInput: Always; ``param`` is the path.
    """
    shown = FieldPath(*path)
    raise InvalidInput(f"`{shown}` is {describe(value)}; it must be {allowed}.", param=shown)
