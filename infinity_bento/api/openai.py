"""The OpenAI dialect: POST /v1/embeddings and GET /v1/models. Rows of ``table`` point here."""

from __future__ import annotations

import datetime
from typing import Any

from infinity_bento.api import fields
from infinity_bento.api.body import read_object
from infinity_bento.api.choosing import resolve_or_late_interaction
from infinity_bento.api.encoding import Encoding, requested_encoding
from infinity_bento.api.exchange import Call, Reply
from infinity_bento.api.inference import run, truncation_headers, truncation_of, usage_of
from infinity_bento.api.inputs import check_batch_size, texts_or_ids
from infinity_bento.api.schemas import DIMENSIONS, ENCODINGS, MODEL, PROMPTS, TRUNCATION, array, nullable, record, ref
from infinity_bento.core import ModelInfo, Result, Task
from infinity_bento.errors import InvalidInput

_MODALITIES = {"text": None}


async def create_embeddings(call: Call) -> Reply:
    """One unit-length vector per input; of late-interaction models one matrix per input.

    Raises:
        InfinityError: As the readers of the body, ``EngineLike.resolve`` and ``inference.run`` do.
    """
    body = await read_object(call)
    info = resolve_or_late_interaction(call.engine, fields.string(body, "model"), Task.EMBED)
    task = Task.EMBED if Task.EMBED in info.tasks else Task.EMBED_ALL
    inputs = texts_or_ids(body, "input")
    check_batch_size(len(inputs.values), info, "input")
    fields.choice(body, "modality", _MODALITIES, None)
    encoding = requested_encoding(body, unit_length=True)
    template = fields.text_item(body, info, task)
    template.dimensions = fields.dimensions(body, info)
    if task is Task.EMBED:
        template.normalize = True
    elif template.dimensions is not None:
        raise InvalidInput(
            f"`dimensions` is {template.dimensions}; the token vectors of model {info.name!r} cannot be cut, so leave "
            "the field out.",
            param="dimensions",
        )
    results = await run(call, info, inputs.items(template), inputs.path)
    data = [_entry(index, result, encoding) for index, result in enumerate(results)]
    answer = {"object": "list", "data": data, "model": info.name, "usage": usage_of(results)}
    reply = call.reply(answer, truncation_headers(results))
    reply.compressible &= encoding.compressible
    return reply


async def list_models(call: Call) -> Reply:
    """The loaded models; empty while loading. ``data`` is OpenAI's list, ``models`` that of the System One clients."""
    infos = call.models()
    data, models = [_model_entry(info) for info in infos], [_named(info) for info in infos]
    return call.reply({"object": "list", "data": data, "models": models})


def _entry(index: int, result: Result, encoding: Encoding) -> dict[str, Any]:
    entry = {"object": "embedding", "index": index, "embedding": encoding(result.output)}
    if result.usage.truncated_from is not None:
        entry["truncated"] = truncation_of(result)
    return entry


def _named(info: ModelInfo) -> dict[str, str]:
    ready = datetime.datetime.fromtimestamp(info.created, tz=datetime.UTC)
    description = f"{info.model_id}: {', '.join(task.value for task in info.tasks)}"
    return {"name": info.name, "description": description, "release_date": ready.date().isoformat()}


def _model_entry(info: ModelInfo) -> dict[str, Any]:
    """OpenAI's four fields, and what this server knows beyond them under ``x_`` names."""
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "infinity-bento",
        "x_model_id": info.model_id,
        "x_tasks": [task.value for task in info.tasks],
        "x_dimensions": info.dimensions,
        "x_prompts": list(info.prompts),
        "x_limits": {
            "max_input_length": info.max_input_length,
            "max_client_batch_size": info.max_client_batch_size,
            "max_batch_tokens": info.max_batch_tokens,
            "max_concurrent_requests": info.max_concurrent_requests,
            "auto_truncate": info.auto_truncate,
        },
    }


_EMBEDDING = record(
    {
        "object": {"const": "embedding"},
        "index": {"type": "integer"},
        "embedding": {"anyOf": [ref("Vector"), ref("Matrix")]},
    },
    {"truncated": ref("Truncation")},
)
_MODEL = record(
    {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer", "description": "Unix seconds when the model became ready."},
        "owned_by": {"type": "string"},
    },
    {
        "x_model_id": {"type": "string"},
        "x_tasks": array({"type": "string", "enum": [task.value for task in Task]}),
        "x_dimensions": {"type": ["integer", "null"]},
        "x_prompts": array({"type": "string"}),
        "x_limits": {"type": "object"},
    },
)

_NAMED = record({name: {"type": "string"} for name in ("name", "description", "release_date")})

SCHEMAS: dict[str, dict[str, Any]] = {
    "OpenAIEmbeddingsRequest": record(
        {"input": ref("Input")},
        {
            "model": MODEL,
            "dimensions": DIMENSIONS,
            "modality": nullable("string", "Only text is served.", enum=["text", None]),
            "user": {"description": "Ignored."},
            **ENCODINGS,
            **PROMPTS,
            **TRUNCATION,
        },
    ),
    "OpenAIEmbeddingsResponse": record(
        {
            "object": {"const": "list"},
            "data": array(_EMBEDDING),
            "model": {"type": "string"},
            "usage": ref("Usage"),
        }
    ),
    "OpenAIModels": record({"object": {"const": "list"}, "data": array(_MODEL), "models": array(_NAMED)}),
}
