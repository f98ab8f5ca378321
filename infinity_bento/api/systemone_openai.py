"""POST /v1/decisions: System One's body as Perplexity takes it, or OpenAI's form (``input`` and a list of questions).

A row of ``table`` points here. OpenAI's form is read into the same questions; its answers are a list in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from infinity_bento.api.exchange import Call, Reply
from infinity_bento.api.fields import Body
from infinity_bento.api.inference import run
from infinity_bento.api.schemas import INTEGER, NUMBER, array, record, ref
from infinity_bento.api.systemone import decide_body, extra_fields, model_name, resolve, written_tokens
from infinity_bento.api.systemone_body import read_body
from infinity_bento.api.systemone_request import (
    PICTURE_TYPES,
    Path,
    check_levels,
    check_options,
    check_questions,
    check_state,
    check_total,
    plain_json,
    refuse,
)
from infinity_bento.core import Item, ModelInfo, Result, Task
from infinity_bento.decisions import (
    Decision,
    DecisionRequest,
    DecisionRules,
    FieldPath,
    Json,
    Option,
    Question,
    QuestionKind,
    choice_confidence,
    expected_level,
    score_confidence,
    top_option,
)
from infinity_bento.errors import InfinityError

_KINDS = {"predicate": QuestionKind.NOUL, "choice": QuestionKind.CHOICE, "score": QuestionKind.SCORE}
_CRITERIA = {QuestionKind.NOUL: "criteria", QuestionKind.CHOICE: "choices", QuestionKind.SCORE: "levels"}


async def decide_either(call: Call) -> Reply:
    """Answer the questions of a request in either form.

    Raises:
        InfinityError: As the fields deserve; the model is not called then.
    """
    body, parts = await read_body(call)
    if "input" not in body and type(body.get("questions")) is not list:
        return await decide_body(call, body, parts)
    rules = call.context.settings.decisions
    info = resolve(call.engine, model_name(body), rules.aliases)
    request = read_request(body, rules)
    try:
        (result,) = await run(call, info, [Item(Task.DECIDE, decision=request)], None)
    except InfinityError as error:
        error.param = _as_sent(error.param, request)
        raise
    return call.reply(shaped(body["questions"], info, request, result))


# Reading ----------------------------------------------------------------------------------------------------------


def read_request(body: Body, rules: DecisionRules) -> DecisionRequest:
    """Input and questions of a body in OpenAI's form.

    Raises:
        InvalidInput: Of the first field that is wrong; ``param`` is its path.
    """
    state, asked = body.get("input"), body.get("questions")
    if not isinstance(state, str | list) or not state:
        refuse(("input",), state, "a text or an array of messages")
    check_state(("input",), state)
    if type(asked) is not list or not asked:
        refuse(("questions",), asked, "an array of at least one question")
    check_questions(("questions",), len(asked), rules)
    ids = _ids([question.get("name") if type(question) is dict else None for question in asked])
    questions = tuple(
        _question(("questions", index), ids[index], question, rules) for index, question in enumerate(asked)
    )
    check_total(questions, rules)
    return DecisionRequest(state, questions)


def _ids(names: list[Any]) -> list[str]:
    """The names where they are given and differ; elsewhere the number of the question."""
    ids = []
    for number, name in enumerate(names, start=1):
        fallback = f"q{number}"
        while fallback in names:
            fallback += "_"
        ids.append(name if type(name) is str and name and names.count(name) == 1 else fallback)
    return ids


def _question(path: Path, name: str, value: Any, rules: DecisionRules) -> Question:
    if type(value) is not dict:
        refuse(path, value, "an object with `type` and `instructions`")
    given, named = value.get("name"), value.get("type")
    if given is not None and type(given) is not str:
        refuse((*path, "name"), given, "a string, or left out")
    kind = _KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        refuse((*path, "type"), named, "predicate, choice or score")
    instructions = _instructions((*path, "instructions"), value.get("instructions"))
    field = _CRITERIA[kind]
    options = _READERS[kind]((*path, field), value.get(field), rules)
    shown = f"q{int(path[-1]) + 1}" if rules.neutral_ids else None
    return Question(name, kind, options, instructions, shown_as=shown)


def _instructions(path: Path, value: Any) -> Json:
    """A text, or the texts and objects of several parts."""
    if type(value) is str and value:
        return value
    if type(value) is not list or not value:
        refuse(path, value, "a text or an array of parts")
    contents: list[Json] = []
    for index, part in enumerate(value):
        kind = part.get("type") if type(part) is dict else None
        if kind in PICTURE_TYPES:
            refuse((*path, index), part, "text: images are not seen by the models served here")
        content = part.get({"input_text": "text", "input_json": "data"}[kind]) if kind in _PART_TYPES else None
        if not isinstance(content, str if kind == "input_text" else dict | list):
            refuse((*path, index), part, "a part of type input_text with `text`, or input_json with `data`")
        plain_json((*path, index), content)
        contents.append(content)
    return "\n".join(contents) if all(isinstance(content, str) for content in contents) else contents


_PART_TYPES = ("input_text", "input_json")


def _outcomes(path: Path, given: Any, rules: DecisionRules) -> tuple[Option, ...]:
    return Option("false"), Option("true")


def _choices(path: Path, given: Any, rules: DecisionRules) -> tuple[Option, ...]:
    if type(given) is not list or len(given) < 2:
        refuse(path, given, "an array of at least two choices")
    check_options(path, len(given), rules)
    options: list[Option] = []
    seen: set[tuple[type, Any]] = set()
    for index, choice in enumerate(given):
        value = choice.get("value") if type(choice) is dict else None
        if type(value) not in (str, bool):
            refuse((*path, index, "value"), value, "a string, true or false")
        if (type(value), value) in seen:
            refuse((*path, index, "value"), value, "given once: an earlier choice has it already")
        seen.add((type(value), value))
        name = value if isinstance(value, str) else str(value).lower()
        options.append(Option(name, _description((*path, index), choice)))
    return tuple(options)


def _levels(path: Path, given: Any, rules: DecisionRules) -> tuple[Option, ...]:
    if type(given) is not list or not given:
        refuse(path, given, "an array of levels, the lowest first")
    check_levels(path, len(given), rules)
    options: list[Option] = []
    for index, level in enumerate(given):
        label = level.get("label") if type(level) is dict else None
        if type(label) is not str or not label:
            refuse((*path, index, "label"), label, "a string")
        text = _description((*path, index), level)
        options.append(Option(str(index), f"{label}: {text}" if text else label))
    return tuple(options)


def _description(path: Path, entry: Mapping[str, Any]) -> str | None:
    text = entry.get("description")
    if text is not None and type(text) is not str:
        refuse((*path, "description"), text, "a string, or left out")
    return text


_READERS: Mapping[QuestionKind, Callable[[Path, Any, DecisionRules], tuple[Option, ...]]] = {
    QuestionKind.NOUL: _outcomes,
    QuestionKind.CHOICE: _choices,
    QuestionKind.SCORE: _levels,
}


def _as_sent(param: str | None, request: DecisionRequest) -> str | None:
    """The path of a protocol's error in this form: questions by index, options by the name they have here."""
    if not isinstance(param, FieldPath):
        return "input" if param == "state" else param
    root, *rest = param.parts
    if root != "questions" or not rest:
        return param
    index = next(index for index, question in enumerate(request.questions) if question.id == rest[0])
    fields = [_CRITERIA[request.questions[index].kind] if part == "criteria" else part for part in rest[1:]]
    return FieldPath("questions", index, *fields)


# Answering --------------------------------------------------------------------------------------------------------


def shaped(asked: list[dict[str, Any]], info: ModelInfo, request: DecisionRequest, result: Result) -> dict[str, Any]:
    """The answer to a request as the wire has it.

    Args:
        asked: The questions as sent.
        info: The model that answered.
        request: The same, as read.
        result: A decision for each.
    """
    tokens, written = result.usage.tokens, written_tokens(info, request)
    rows = zip(asked, request.questions, result.output, strict=True)
    return {
        "model": info.name,
        "answers": [_answer(sent, question, decision) for sent, question, decision in rows],
        "usage": {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens + written,
        },
        "x_family": info.decision_protocol,
    }


def _answer(sent: Mapping[str, Any], question: Question, decision: Decision) -> dict[str, Any]:
    p = decision.probabilities
    answer: dict[str, Any] = {"type": sent["type"], "name": sent.get("name")}
    if question.kind is QuestionKind.NOUL:
        answer["probability"] = p[1]
    elif question.kind is QuestionKind.CHOICE:
        values = [choice["value"] for choice in sent["choices"]]
        shares = [{"value": value, "probability": share} for value, share in zip(values, p, strict=True)]
        answer |= {"choice": values[top_option(p)], "confidence": choice_confidence(p), "probabilities": shares}
    else:
        labels = [level["label"] for level in sent["levels"]]
        levels = [
            {"value": value, "label": label, "probability": share}
            for value, (label, share) in enumerate(zip(labels, p, strict=True))
        ]
        answer |= {"score": expected_level(p), "confidence": score_confidence(p), "probabilities": levels}
    return answer | extra_fields(decision)


_TEXT = {"type": "string"}
_CHOICE = record({"value": {"type": ["string", "boolean"]}}, {"description": _TEXT})
_QUESTION = record(
    {
        "type": {"type": "string", "enum": list(_KINDS)},
        "instructions": {"type": ["string", "array"], "description": "A text, or parts of text and JSON."},
    },
    {
        "name": {"type": ["string", "null"]},
        "choices": array(_CHOICE, minItems=2),
        "levels": array(record({"label": _TEXT}, {"description": _TEXT}), minItems=1),
    },
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "OpenAIDecisionsRequest": record(
        {
            "model": _TEXT,
            "input": {"type": ["string", "array"], "description": "What the questions are about: a text, or messages."},
            "questions": array(_QUESTION, minItems=1),
        }
    ),
    "OpenAIDecisionsResponse": record(
        {
            "model": _TEXT,
            "answers": array(
                record({"type": _TEXT, "name": {"type": ["string", "null"]}}, {"probability": NUMBER}),
                description="In the order of the questions.",
            ),
            "usage": record(
                {
                    "input_tokens": INTEGER,
                    "input_tokens_details": {"type": "object"},
                    "output_tokens": INTEGER,
                    "output_tokens_details": {"type": "object"},
                    "total_tokens": INTEGER,
                }
            ),
        },
        {"x_family": {"type": ["string", "null"]}},
    ),
    "DecisionsRequest": {"anyOf": [ref("SystemOneRequest"), ref("OpenAIDecisionsRequest")]},
    "DecisionsResponse": {"anyOf": [ref("SystemOneResponse"), ref("OpenAIDecisionsResponse")]},
}
