"""Typed decisions: POST /v1/systemone, and the same body at POST /v1/decisions. Rows of ``table`` point here.

The contract is that of the typesafe SDK, which repeats every answer of 5xx and some of 4xx: a bad request never gets
one of those. ``x_`` fields are ours. The request is read by ``systemone_body``, ``systemone_request`` and
``systemone_assets``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity_bento.api.exchange import Call, Reply
from infinity_bento.api.fields import Body
from infinity_bento.api.inference import run
from infinity_bento.api.protocol import EngineLike
from infinity_bento.api.schemas import INTEGER, record
from infinity_bento.api.systemone_assets import refuse_assets
from infinity_bento.api.systemone_body import Parts, read_body
from infinity_bento.api.systemone_request import KINDS, read_request, refuse
from infinity_bento.core import Item, ModelInfo, Result, Task
from infinity_bento.decisions import (
    Decision,
    DecisionRequest,
    Question,
    QuestionKind,
    choice_confidence,
    expected_level,
    score_confidence,
    top_option,
)

# Names that clients send when they mean whatever decision model there is.
ALIASES = frozenset({"jev-latest", "jev-preview"})


async def decide(call: Call) -> Reply:
    """Answer all questions of a request about one state.

    Raises:
        InfinityError: As the fields deserve; the model is not called then.
    """
    return await decide_body(call, *await read_body(call))


async def decide_body(call: Call, body: Body, parts: Parts) -> Reply:
    """``decide`` for a body that has been read."""
    rules = call.context.settings.decisions
    info = resolve(call.engine, model_name(body), rules.aliases)
    request = read_request(body, rules)
    refuse_assets(body.get("assets"), parts, request, info, rules)
    (result,) = await run(call, info, [Item(Task.DECIDE, decision=request)], None)
    return call.reply(shaped(info, request, result))


def model_name(body: Body) -> str:
    """The field ``model``, which these contracts require."""
    name = body.get("model")
    if type(name) is not str or not name:
        refuse(("model",), name, "the name of a decision model")
    return name


def resolve(engine: EngineLike, name: str | None, aliases: Mapping[str, str]) -> ModelInfo:
    """The decision model of this name, which may be an alias; no name means the only one. Raises as the engine does.

    Args:
        engine: Has the models.
        name: As in the request.
        aliases: From the options; they win over ours, which mean the only one.
    """
    if name is not None and name in aliases:
        return engine.resolve(aliases[name], Task.DECIDE)
    if name in ALIASES and name not in {info.name for info in engine.infos()}:
        return engine.resolve(None, Task.DECIDE)
    return engine.resolve(name, Task.DECIDE)


# Answering --------------------------------------------------------------------------------------------------------


def shaped(info: ModelInfo, request: DecisionRequest, result: Result) -> dict[str, Any]:
    """The answer to a request as the wire has it."""
    usage = {"input_tokens": result.usage.tokens, "output_tokens": written_tokens(info, request)}
    return {"model": info.name, "answers": answers(request, result), "usage": usage, "x_family": info.decision_protocol}


def written_tokens(info: ModelInfo, request: DecisionRequest) -> int:
    """Output tokens as published: only Rune counts the letter of each answer."""
    return len(request.questions) if info.decision_protocol == "rune" else 0


def answers(request: DecisionRequest, result: Result) -> dict[str, Any]:
    """The answers by the ids of the questions."""
    return {
        question.id: answer_of(question, decision)
        for question, decision in zip(request.questions, result.output, strict=True)
    }


def answer_of(question: Question, decision: Decision) -> dict[str, Any]:
    """One answer; ``confidence`` is always Jev's, the family's own figure is ``x_native_confidence``."""
    p = decision.probabilities
    by_name = dict(zip((option.name for option in question.options), p, strict=True))
    answer: dict[str, Any] = {"type": question.kind.value}
    if question.kind is QuestionKind.NOUL:
        answer["noul"] = by_name["true"]
    elif question.kind is QuestionKind.CHOICE:
        answer |= {
            "choice": question.options[top_option(p)].name,
            "confidence": choice_confidence(p),
            "probabilities": by_name,
        }
    else:
        answer |= {
            "score": expected_level(p),
            "confidence": score_confidence(p),
            "legend": {option.name: option.description for option in question.options},
            "probabilities": by_name,
        }
    return answer | extra_fields(decision)


def extra_fields(decision: Decision) -> dict[str, float]:
    """The figures that only some families have, under ``x_`` names."""
    extras = {"native_confidence": decision.native_confidence, "label_mass": decision.label_mass, **decision.extras}
    return {f"x_{name}": value for name, value in extras.items() if value is not None}


_QUESTION = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": sorted(KINDS)},
        "instructions": {"description": "What is asked: a string, an object, an array or null."},
        "criteria": {
            "description": "noul: `true` and `false` described; choice: label to description; score: levels in order."
        },
    },
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "SystemOneRequest": record(
        {
            "model": {"type": "string", "description": "A decision model; jev-latest means the only one."},
            "state": {"description": "What the questions are about: a string, an object or an array."},
            "questions": {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": _QUESTION,
            },
        },
        {"assets": {"type": ["object", "null"], "description": "Images by placeholder; refused with a 422 so far."}},
    ),
    "SystemOneResponse": record(
        {
            "model": {"type": "string"},
            "answers": {"type": "object", "description": "By the ids of the questions."},
            "usage": record({"input_tokens": INTEGER, "output_tokens": INTEGER}),
        },
        {"x_family": {"type": ["string", "null"]}},
    ),
}
