"""Cohere's and Jina's routes: POST /v1/rerank, /v2/rerank and /v2/embed. Rows of ``table`` point here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infinity_bento.api import fields
from infinity_bento.api.body import read_object
from infinity_bento.api.encoding import FORMATS, NUMBERS, OUTPUT_DTYPES, Encoding, as_floats
from infinity_bento.api.envelopes import inside
from infinity_bento.api.exchange import Call, Handler, Reply
from infinity_bento.api.fields import Body
from infinity_bento.api.inference import run, truncated_count, truncation_headers, truncation_of, usage_of
from infinity_bento.api.inputs import Inputs, check_batch_size, required_text, texts
from infinity_bento.api.ranking import rank
from infinity_bento.api.schemas import (
    INTEGER,
    MODEL,
    NUMBER,
    RERANK_OPTIONS,
    TEXT,
    array,
    nullable,
    one_of,
    record,
    ref,
)
from infinity_bento.core import InputType, Item, ModelInfo, Result, Task
from infinity_bento.errors import EmptyInput, InvalidInput

_EMBEDDING_TYPES: Mapping[str, Encoding] = {
    "float": NUMBERS,
    "base64": Encoding(as_floats, FORMATS["base64"]),
    **{name: Encoding(OUTPUT_DTYPES[name], NUMBERS.form) for name in ("int8", "uint8", "binary", "ubinary")},
}
# Which prompt each of Cohere's input types stands for; the last two have one only if the checkpoint names it so.
_SIDES = {"search_query": InputType.QUERY, "search_document": InputType.DOCUMENT}
_PURPOSES = ("classification", "clustering")
_INPUT_TYPES = {name: name for name in (*_SIDES, *_PURPOSES)}
_TRUNCATE: Mapping[str, tuple[bool, str]] = {"NONE": (False, "right"), "START": (True, "left"), "END": (True, "right")}


def rerank_handler(api_version: str) -> Handler:
    """The handler of /v1/rerank or /v2/rerank; the answers differ in the version they name."""

    async def handle(call: Call) -> Reply:
        ranking = await rank(call, await read_object(call))
        results: list[dict[str, Any]] = []
        for index in ranking.order:
            entry: dict[str, Any] = {"index": index, "relevance_score": ranking.scores[index]}
            if ranking.with_text:
                entry["document"] = {"text": ranking.documents.values[index]}
            if ranking.by_document[index].usage.truncated_from is not None:
                entry["truncated"] = truncation_of(ranking.by_document[index])
            results.append(entry)
        answer = {
            "id": call.state.request_id,
            "object": "rerank",
            "model": ranking.info.name,
            "results": results,
            "usage": usage_of(ranking.results),
            "meta": _meta(api_version, ranking.results, {"search_units": 1}),
        }
        return call.reply(answer, truncation_headers(ranking.results))

    return handle


async def embed(call: Call) -> Reply:
    """One vector per text, in each of the asked-for types.

    Raises:
        InfinityError: As the readers of the body, ``EngineLike.resolve`` and ``inference.run`` do.
    """
    body = await read_object(call)
    info = call.engine.resolve(fields.string(body, "model"), Task.EMBED)
    inputs = _texts(body)
    check_batch_size(len(inputs.values), info, inputs.field)
    types = _embedding_types(body)
    results = await run(call, info, inputs.items(_template(body, info)), inputs.path)
    answer = {
        "id": call.state.request_id,
        "response_type": "embeddings_by_type",
        "embeddings": {name: [encode(result.output) for result in results] for name, encode in types.items()},
        "texts": inputs.values,
        "meta": _meta("2", results, {"input_tokens": sum(result.usage.tokens for result in results)}),
    }
    return call.reply(answer, truncation_headers(results))


def _template(body: Body, info: ModelInfo) -> Item:
    """The options that all items share."""
    input_type = fields.choice(body, "input_type", _INPUT_TYPES, None)
    truncate, direction = fields.choice(body, "truncate", _TRUNCATE, (None, "right"))
    return Item(
        Task.EMBED,
        prompt_name=input_type if input_type in _PURPOSES and input_type in info.prompts else None,
        input_type=_SIDES.get(input_type or ""),
        truncate=truncate,
        truncation_direction="left" if direction == "left" else "right",
        normalize=True,
        dimensions=fields.dimensions(body, info, "output_dimension"),
    )


def _texts(body: Body) -> Inputs:
    """The ``texts``, or the texts inside Cohere's ``inputs``."""
    if body.get("images") is not None:
        raise InvalidInput("`images` are not served by this route; send `texts`.", param="images")
    given = body.get("inputs")
    if given is None:
        found = texts(body, "texts")
        if found.single:
            fields.refuse("texts", body["texts"], "an array of strings")
        return found
    if body.get("texts") is not None:
        raise InvalidInput("`texts` and `inputs` are both given; send one of them.", param="inputs")
    if type(given) is not list:
        fields.refuse("inputs", given, "an array of objects with a content")
    if not given:
        raise EmptyInput("`inputs` is an empty array; send at least one input.", param="inputs")
    return Inputs("inputs", [_content_text(element, f"inputs[{index}]") for index, element in enumerate(given)], False)


def _content_text(element: Any, path: str) -> str:
    """The text of one input, whose content must be a single text part."""
    content = element.get("content") if type(element) is dict else None
    if type(content) is not list or len(content) != 1 or type(content[0]) is not dict:
        fields.refuse(
            path, element, 'an object whose content is one part: {"content": [{"type": "text", "text": ...}]}'
        )
    with inside(f"{path}.content[0]"):
        if content[0].get("type") != "text":
            fields.refuse("type", content[0].get("type"), '"text"')
        return required_text(content[0], "text")


def _embedding_types(body: Body) -> dict[str, Encoding]:
    given = body.get("embedding_types")
    if given is None:
        return {"float": NUMBERS}
    if type(given) is not list or not given:
        fields.refuse("embedding_types", given, f"an array of {', '.join(_EMBEDDING_TYPES)}")
    for index, name in enumerate(given):
        if type(name) is not str or name not in _EMBEDDING_TYPES:
            fields.refuse(f"embedding_types[{index}]", name, " or ".join(f'"{key}"' for key in _EMBEDDING_TYPES))
    return {name: _EMBEDDING_TYPES[name] for name in given}


def _meta(api_version: str, results: Sequence[Result], billed: dict[str, int]) -> dict[str, Any]:
    meta: dict[str, Any] = {"api_version": {"version": api_version}, "billed_units": billed}
    truncated = truncated_count(results)
    if truncated:
        meta["warnings"] = [f"{truncated} of {len(results)} inputs were cut to the model's length limit"]
    return meta


_IGNORED = {"description": "Ignored: inputs are cut to the model's own limit."}
_META = record(
    {"api_version": record({"version": {"type": "string"}}), "billed_units": {"type": "object"}},
    {"warnings": array({"type": "string"})},
)
_RESULT = record(
    {"index": INTEGER, "relevance_score": NUMBER},
    {"document": record({"text": {"type": "string"}}), "truncated": ref("Truncation")},
)
_CONTENT = array(record({"type": {"const": "text"}, "text": TEXT}), minItems=1, maxItems=1)

SCHEMAS: dict[str, dict[str, Any]] = {
    "CohereRerankRequest": record(
        {"query": TEXT, "documents": ref("Documents")},
        {**RERANK_OPTIONS, "max_tokens_per_doc": _IGNORED, "max_chunks_per_doc": _IGNORED, "rank_fields": _IGNORED},
    ),
    "CohereRerankResponse": record(
        {
            "id": {"type": "string"},
            "model": {"type": "string"},
            "results": array(_RESULT),
            "usage": ref("Usage"),
            "meta": _META,
        }
    ),
    "CohereEmbedRequest": record(
        {},
        {
            "texts": array(TEXT, minItems=1),
            "inputs": array(record({"content": _CONTENT}), minItems=1),
            "model": MODEL,
            "input_type": one_of(_INPUT_TYPES, "Picks the checkpoint's prompt."),
            "embedding_types": {"type": ["array", "null"], "minItems": 1, "items": {"enum": [*_EMBEDDING_TYPES]}},
            "output_dimension": nullable("integer", "Keep the first n values.", minimum=1),
            "truncate": one_of(_TRUNCATE, "The side that is cut off; NONE refuses long inputs."),
            "max_tokens": _IGNORED,
        },
        oneOf=[{"required": ["texts"]}, {"required": ["inputs"]}],
    ),
    "CohereEmbedResponse": record(
        {
            "id": {"type": "string"},
            "embeddings": {"type": "object", "additionalProperties": array(ref("Vector"))},
            "texts": array({"type": "string"}),
            "meta": _META,
        }
    ),
}
