"""Typed decisions: POST /v1/systemone and POST /v1/decisions in Perplexity's form. Rows of ``table`` point here.

The contract is that of the typesafe SDK, which repeats every answer of 5xx and some of 4xx: a bad request never gets
one of those. ``x_`` fields are ours.
"""

from __future__ import annotations

import binascii
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NoReturn

from starlette.datastructures import Headers as StarletteHeaders
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from infinity_bento.api.body import parse_json, read_object, read_plain
from infinity_bento.api.exchange import Call, Reply, header
from infinity_bento.api.fields import Body, describe
from infinity_bento.api.inference import run
from infinity_bento.api.protocol import EngineLike
from infinity_bento.api.schemas import record
from infinity_bento.core import Item, ModelInfo, Result, Task
from infinity_bento.decisions import (
    Decision,
    DecisionRequest,
    Json,
    Option,
    Question,
    QuestionKind,
    choice_confidence,
    expected_level,
    score_confidence,
    top_option,
)
from infinity_bento.errors import InvalidInput, MalformedBody

MOST_QUESTIONS = 64
MOST_OPTIONS = 255  # of a choice
MOST_LEVELS = 10  # of a score
MOST_OPTIONS_IN_ALL = 512
MOST_ASSETS = 4
# Names that clients send when they mean whatever decision model there is.
ALIASES = frozenset({"jev-latest", "jev-preview"})
_KINDS = {kind.value: kind for kind in QuestionKind}
_FORMATS = {"png": b"\x89PNG\r\n\x1a\n", "jpg": b"\xff\xd8\xff", "jpeg": b"\xff\xd8\xff"}


async def decide(call: Call) -> Reply:
    """Answer all questions of a request about one state.

    Raises:
        InfinityError: As the fields deserve; the model is not called then.
    """
    body, parts = await _read(call)
    info = resolve(call.engine, _model(body))
    request = read_request(body)
    _refuse_assets(body, parts, info)
    (result,) = await run(call, info, [Item(Task.DECIDE, decision=request)], None)
    reply = call.reply(shaped(info, request, result))
    reply.headers.append((b"x-typesafe-request-id", call.state.request_id.encode("ascii")))
    return reply


def resolve(engine: EngineLike, name: str | None) -> ModelInfo:
    """The decision model of this name; an alias, or no name, means the only one."""
    if name in ALIASES and name not in {info.name for info in engine.infos()}:
        return engine.resolve(None, Task.DECIDE)
    return engine.resolve(name, Task.DECIDE)


# Reading ----------------------------------------------------------------------------------------------------------


async def _read(call: Call) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The request object, and the files of a multipart form by name."""
    content_type = header(call.scope, b"content-type") or b""
    if not content_type.lower().startswith(b"multipart/"):
        return await read_object(call), {}
    raw = await read_plain(call)

    async def stream() -> AsyncGenerator[bytes, None]:
        yield raw
        yield b""

    headers = StarletteHeaders({"content-type": content_type.decode("latin-1")})
    try:
        form = await MultiPartParser(headers, stream(), max_files=MOST_ASSETS + 1, max_fields=MOST_ASSETS + 1).parse()
    except (MultiPartException, KeyError) as error:
        raise MalformedBody(f"The multipart form cannot be read ({error}); send a first part `request`.") from None
    files: dict[str, bytes] = {}
    try:
        for name, value in form.multi_items():
            if name in files:
                raise InvalidInput(f"The form has two parts {name!r}; give each its own name.", param=name)
            files[name] = await value.read() if isinstance(value, UploadFile) else value.encode()
    finally:
        await form.close()
    if "request" not in files:
        raise InvalidInput("The form has no part `request`; send the request object in it.", param="request")
    body = parse_json(files.pop("request"))
    if type(body) is not dict:
        raise InvalidInput(f"The part `request` is {describe(body)}; send one object.", param="request")
    return body, files


def _model(body: Body) -> str:
    name = body.get("model")
    if type(name) is not str or not name:
        refuse(("model",), name, "the name of a decision model")
    return name


def read_request(body: Body) -> DecisionRequest:
    """State and questions of a body.

    Raises:
        InvalidInput: Of the first field that is wrong; ``param`` is its path.
    """
    state = body.get("state")
    if not isinstance(state, str | dict | list):
        refuse(("state",), state, "a string, an object or an array")
    asked = body.get("questions")
    if type(asked) is not dict or not asked:
        refuse(("questions",), asked, "an object with at least one question by its id")
    if len(asked) > MOST_QUESTIONS:
        refuse(("questions",), asked, f"at most {MOST_QUESTIONS} questions, and there are {len(asked)}: split them")
    questions = tuple(_question(name, question) for name, question in asked.items())
    total = sum(len(question.options) for question in questions)
    if total > MOST_OPTIONS_IN_ALL:
        refuse(("questions",), asked, f"at most {MOST_OPTIONS_IN_ALL} options in all, and there are {total}")
    return DecisionRequest(state, questions)


def _question(name: str, value: Any) -> Question:
    path = ("questions", name)
    if not name:
        refuse(path, name, "an id of at least one character")
    if type(value) is not dict:
        refuse(path, value, "an object with `type`, `instructions` and `criteria`")
    named = value.get("type")
    kind = _KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        boxes = ": boxes need a vision model, which is not served here" if named == "box" else ""
        refuse((*path, "type"), named, f"noul, choice or score{boxes}")
    instructions, criteria = value.get("instructions"), value.get("criteria")
    if instructions is not None and not isinstance(instructions, str | dict | list):
        refuse((*path, "instructions"), instructions, "a string, an object, an array or null")
    options = _READERS[kind]((*path, "criteria"), criteria)
    if kind is QuestionKind.NOUL and not instructions and all(option.description is None for option in options):
        refuse((*path, "instructions"), instructions, "given, unless `criteria` describes an outcome")
    return Question(name, kind, options, instructions)


def _outcomes(path: tuple[str, ...], criteria: Any) -> tuple[Option, ...]:
    criteria = {} if criteria is None else criteria
    if type(criteria) is not dict or set(criteria) - {"true", "false"}:
        refuse(path, criteria, "absent, or an object with `true` and `false`")
    return tuple(Option(name, _described((*path, name), criteria.get(name))) for name in ("false", "true"))


def _labels(path: tuple[str, ...], criteria: Any) -> tuple[Option, ...]:
    if type(criteria) is not dict or not criteria:
        refuse(path, criteria, "an object with at least one label")
    if len(criteria) > MOST_OPTIONS:
        refuse(path, criteria, f"at most {MOST_OPTIONS} labels, and there are {len(criteria)}")
    return tuple(Option(name, _described((*path, name), text)) for name, text in criteria.items())


def _levels(path: tuple[str, ...], criteria: Any) -> tuple[Option, ...]:
    if type(criteria) is not list or not criteria:
        refuse(path, criteria, "an array of levels, the lowest first")
    if len(criteria) > MOST_LEVELS:
        refuse(path, criteria, f"at most {MOST_LEVELS} levels, and there are {len(criteria)}")
    for index, level in enumerate(criteria):
        if level is None:
            refuse((*path, str(index)), None, "a string, an object or an array: a level must be described")
    return tuple(Option(str(i), _described((*path, str(i)), level)) for i, level in enumerate(criteria))


_READERS: Mapping[QuestionKind, Callable[[tuple[str, ...], Any], tuple[Option, ...]]] = {
    QuestionKind.NOUL: _outcomes,
    QuestionKind.CHOICE: _labels,
    QuestionKind.SCORE: _levels,
}


def _described(path: tuple[str, ...], value: Any) -> Json:
    if value is not None and not isinstance(value, str | dict | list):
        refuse(path, value, "a string, an object, an array or null")
    return value


def _refuse_assets(body: Body, parts: Mapping[str, bytes], info: ModelInfo) -> None:
    """Check the images of a request, then say that no served model can see them."""
    assets = body.get("assets")
    if assets is None and not parts:
        return
    if type(assets) is not dict or not assets:
        refuse(("assets",), assets, "absent, or an object with at least one image")
    if len(assets) > MOST_ASSETS:
        refuse(("assets",), assets, f"at most {MOST_ASSETS} images, and there are {len(assets)}")
    text, claimed = str([body.get("state"), body.get("questions")]), set()
    for name, asset in assets.items():
        path = ("assets", name)
        if type(asset) is not dict or asset.get("type", "image") != "image":
            refuse(path, asset, 'an object with `type` "image"')
        if name not in text:
            refuse(path, name, "a placeholder that occurs in the state or in a question")
        part = asset.get("part")
        if part is not None:
            if part not in parts or part in claimed:
                refuse((*path, "part"), part, "the name of a part of this form that no other asset claims")
            claimed.add(part)
            content = parts[part]
        else:
            content = _decoded((*path, "data_base64"), asset.get("data_base64"))
        if not content.startswith(tuple(_FORMATS.values())):
            refuse(path, name, "a PNG or JPEG image")
    unclaimed = next((name for name in parts if name not in claimed), None)
    if unclaimed is not None:
        refuse(("assets",), unclaimed, "complete: this part of the form is claimed by no asset")
    raise InvalidInput(
        f"`assets`: model {info.name!r} is served without its vision tower, so it cannot see images yet; leave the "
        "assets out.",
        param="assets",
    )


def _decoded(path: tuple[str, ...], value: Any) -> bytes:
    if type(value) is not str:
        refuse(path, value, "the image in base64")
    try:
        return binascii.a2b_base64(value, strict_mode=True)
    except (binascii.Error, ValueError):
        refuse(path, value, "the image in base64")


def refuse(path: tuple[str, ...], value: Any, allowed: str) -> NoReturn:
    """Refuse a field.

    Raises:
        InvalidInput: Always; ``param`` is the path.
    """
    shown = ".".join(path)
    raise InvalidInput(f"`{shown}` is {describe(value)}; it must be {allowed}.", param=shown)


# Answering --------------------------------------------------------------------------------------------------------


def shaped(info: ModelInfo, request: DecisionRequest, result: Result) -> dict[str, Any]:
    """The answer to a request as the wire has it."""
    written = len(request.questions) if info.decision_protocol == "rune" else 0
    usage = {"input_tokens": result.usage.tokens, "output_tokens": written}
    return {"model": info.name, "answers": answers(request, result), "usage": usage, "x_family": info.decision_protocol}


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
    extras = {"native_confidence": decision.native_confidence, "label_mass": decision.label_mass, **decision.extras}
    return answer | {f"x_{name}": value for name, value in extras.items() if value is not None}


_QUESTION = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": sorted(_KINDS)},
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
                "maxProperties": MOST_QUESTIONS,
                "additionalProperties": _QUESTION,
            },
        },
        {"assets": {"type": ["object", "null"], "description": "Images by placeholder; refused with a 422 so far."}},
    ),
    "SystemOneResponse": record(
        {
            "model": {"type": "string"},
            "answers": {"type": "object", "description": "By the ids of the questions."},
            "usage": record({"input_tokens": {"type": "integer"}, "output_tokens": {"type": "integer"}}),
        },
        {"x_family": {"type": ["string", "null"]}},
    ),
}
