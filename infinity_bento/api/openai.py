"""The OpenAI dialect: POST /v1/embeddings and GET /v1/models. Rows of the table in ``app.py`` point here."""

from __future__ import annotations

from typing import Any

from infinity_bento.api import fields
from infinity_bento.api.body import read_json
from infinity_bento.api.encoding import ENCODERS, as_floats
from infinity_bento.api.exchange import Call, Reply
from infinity_bento.api.inference import embed_items, run, truncated_count, truncation_header
from infinity_bento.core import Item, ModelInfo, Task

_ENCODER_CHOICES = dict(ENCODERS)


async def create_embeddings(call: Call) -> Reply:
    """One vector per input, unit length, as numbers or as base64 of little-endian float32.

    Raises:
        InfinityError: As ``read_json``, ``fields``, ``EngineLike.resolve`` and ``inference.run`` do.
    """
    body = await read_json(call)
    info = call.engine.resolve(fields.string(body, "model"), Task.EMBED)
    inputs = fields.inputs(body, "input")
    fields.check_batch_size(len(inputs.values), info, "input")
    encode = fields.choice(body, "encoding_format", _ENCODER_CHOICES, as_floats)
    template = Item(task=Task.EMBED, normalize=True, dimensions=fields.dimensions(body, info))
    results = await run(call, info, embed_items(inputs, template), "input", single=inputs.single)
    data = [
        {"object": "embedding", "index": index, "embedding": encode(result.output)}
        for index, result in enumerate(results)
    ]
    tokens = sum(result.usage.tokens for result in results)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    truncated = truncated_count(results)
    if truncated:
        usage["truncated"] = truncated
    answer = {"object": "list", "data": data, "model": info.name, "usage": usage}
    return Reply.of_json(answer, headers=truncation_header(truncated))


async def list_models(call: Call) -> Reply:
    """The loaded models; empty while loading."""
    return Reply.of_json({"object": "list", "data": [_model_entry(info) for info in call.models()]})


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


_INPUT_SCHEMA: dict[str, Any] = {
    "description": "One text, several texts, one list of token ids, or several such lists; ids are used as given.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                ]
            },
        },
    ],
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "Input": _INPUT_SCHEMA,
    "OpenAIEmbeddingsRequest": {
        "type": "object",
        "required": ["input"],
        "properties": {
            "input": {"$ref": "#/components/schemas/Input"},
            "model": {"type": ["string", "null"], "description": "A served name; null if only one model can answer."},
            "encoding_format": {"type": ["string", "null"], "enum": [*ENCODERS, None], "default": "float"},
            "dimensions": {"type": ["integer", "null"], "minimum": 1, "description": "Keep the first n values."},
            "user": {"type": ["string", "null"], "description": "Ignored."},
        },
    },
    "OpenAIEmbeddingsResponse": {
        "type": "object",
        "required": ["object", "data", "model", "usage"],
        "properties": {
            "object": {"const": "list"},
            "data": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["object", "index", "embedding"],
                    "properties": {
                        "object": {"const": "embedding"},
                        "index": {"type": "integer"},
                        "embedding": {
                            "anyOf": [
                                {"type": "array", "items": {"type": "number"}},
                                {"type": "string", "description": "Base64 of little-endian float32."},
                            ]
                        },
                    },
                },
            },
            "model": {"type": "string"},
            "usage": {
                "type": "object",
                "required": ["prompt_tokens", "total_tokens"],
                "properties": {
                    "prompt_tokens": {"type": "integer", "description": "With prompt and special tokens, after cuts."},
                    "total_tokens": {"type": "integer"},
                    "truncated": {"type": "integer", "description": "Inputs that were cut; absent if none was."},
                },
            },
        },
    },
    "OpenAIModels": {
        "type": "object",
        "required": ["object", "data"],
        "properties": {
            "object": {"const": "list"},
            "data": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["id", "object", "created", "owned_by"],
                    "properties": {
                        "id": {"type": "string"},
                        "object": {"const": "model"},
                        "created": {"type": "integer", "description": "Unix seconds when the model became ready."},
                        "owned_by": {"type": "string"},
                        "x_model_id": {"type": "string"},
                        "x_tasks": {
                            "type": "array",
                            "items": {"type": "string", "enum": [task.value for task in Task]},
                        },
                        "x_dimensions": {"type": ["integer", "null"]},
                        "x_prompts": {"type": "array", "items": {"type": "string"}},
                        "x_limits": {"type": "object"},
                    },
                },
            },
        },
    },
}
