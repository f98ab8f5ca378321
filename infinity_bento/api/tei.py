"""The dialect of Text Embeddings Inference: POST /embed and GET /info. Rows of the table in ``app.py`` point here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from infinity_bento.api import fields
from infinity_bento.api.body import read_json
from infinity_bento.api.encoding import as_floats
from infinity_bento.api.exchange import Call, Headers, Reply
from infinity_bento.api.inference import embed_items, run, truncated_count, truncation_header
from infinity_bento.api.probes import current_status, not_ready
from infinity_bento.core import Item, ModelInfo, Result, Task, TruncationDirection

DIRECTIONS: Mapping[str, TruncationDirection] = {"right": "right", "left": "left", "Right": "right", "Left": "left"}

_POOLING_NAMES = {"lasttoken": "last_token"}  # ours are sentence-transformers' names
_MILLISECONDS = 1000.0


async def embed(call: Call) -> Reply:
    """A list with one vector per input, also for a single input.

    Raises:
        InfinityError: As ``read_json``, ``fields``, ``EngineLike.resolve`` and ``inference.run`` do.
    """
    body = await read_json(call)
    info = call.engine.resolve(fields.string(body, "model"), Task.EMBED)
    inputs = fields.inputs(body, "inputs")
    fields.check_batch_size(len(inputs.values), info, "inputs")
    template = Item(
        task=Task.EMBED,
        prompt_name=fields.prompt_name(body, info),
        truncate=fields.boolean(body, "truncate", None),
        truncation_direction=fields.choice(body, "truncation_direction", DIRECTIONS, "right"),
        normalize=fields.boolean(body, "normalize", True),
        dimensions=fields.dimensions(body, info),
    )
    results = await run(call, info, embed_items(inputs, template), "inputs", single=inputs.single)
    reply = Reply.of_json([as_floats(result.output) for result in results])
    reply.headers = compute_headers(call, info, results)
    return reply


async def info(call: Call) -> Reply:
    """TEI's description of the default model, and ``models`` with everything known of each one.

    Raises:
        NotReady: Models are still loading, or loading failed; the text names the stage.
    """
    status, models = current_status(call.engine), call.models()
    if not status.ready or not models:
        raise not_ready(status)
    settings = call.context.settings
    first = models[0]
    return Reply.of_json(
        {
            "model_id": first.model_id,
            "model_sha": first.revision,
            "model_dtype": first.dtype,
            "served_model_name": first.name,
            "model_type": _model_type(first),
            "max_concurrent_requests": first.max_concurrent_requests,
            "max_input_length": first.max_input_length,
            "max_batch_tokens": first.max_batch_tokens,
            "max_batch_requests": first.max_batch_requests,
            "max_client_batch_size": first.max_client_batch_size,
            "auto_truncate": first.auto_truncate,
            "tokenization_workers": first.tokenization_workers,
            "version": settings.version,
            "sha": settings.revision,
            "docker_label": settings.docker_label,
            "models": [orjson.Fragment(orjson.dumps(model, option=orjson.OPT_NON_STR_KEYS)) for model in models],
        }
    )


def compute_headers(call: Call, model: ModelInfo, results: Sequence[Result]) -> Headers:
    """TEI's response headers: what was computed, and whole milliseconds per stage (mean over the inputs)."""
    total = b"%d" % (call.state.elapsed_seconds() * _MILLISECONDS)
    headers: Headers = [
        (b"x-compute-type", b"gpu" if model.device.startswith("cuda") else b"cpu"),
        (b"x-compute-time", total),
        (b"x-compute-characters", b"%d" % sum(result.usage.characters for result in results)),
        (b"x-compute-tokens", b"%d" % sum(result.usage.tokens for result in results)),
        (b"x-total-time", total),
        *truncation_header(truncated_count(results)),
    ]
    timing = call.state.timing
    if timing is not None:
        headers += [
            (b"x-tokenization-time", b"%d" % (timing.tokenize_seconds * _MILLISECONDS)),
            (b"x-queue-time", b"%d" % (timing.queue_seconds * _MILLISECONDS)),
            (b"x-inference-time", b"%d" % (timing.inference_seconds * _MILLISECONDS)),
        ]
    return headers


def _model_type(model: ModelInfo) -> dict[str, Any]:
    """TEI's tagged union: embedding with its pooling, or reranker / classifier with its labels."""
    if Task.EMBED in model.tasks or Task.EMBED_ALL in model.tasks:
        pooling = model.pooling or ""
        return {"embedding": {"pooling": _POOLING_NAMES.get(pooling, pooling)}}
    if Task.EMBED_SPARSE in model.tasks:
        return {"embedding": {"pooling": "splade"}}
    labels = {str(index): label for index, label in (model.id2label or {}).items()}
    kind = "reranker" if Task.RERANK in model.tasks else "classifier"
    return {kind: {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}}


_MODEL_TYPE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": 1,
    "properties": {
        "embedding": {"type": "object", "properties": {"pooling": {"type": "string"}}},
        "reranker": {"type": "object"},
        "classifier": {"type": "object"},
    },
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "EmbedRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "inputs": {"$ref": "#/components/schemas/Input"},
            "model": {"type": ["string", "null"], "description": "A served name; null if only one model can answer."},
            "truncate": {"type": ["boolean", "null"], "description": "Cut long inputs; null: as the server is set."},
            "truncation_direction": {
                "type": ["string", "null"],
                "enum": [*DIRECTIONS, None],
                "default": "right",
                "description": "The side that is cut off.",
            },
            "prompt_name": {"type": ["string", "null"], "description": "A key of the checkpoint's prompts."},
            "normalize": {"type": ["boolean", "null"], "default": True, "description": "Scale to unit length."},
            "dimensions": {"type": ["integer", "null"], "minimum": 1, "description": "Keep the first n values."},
        },
    },
    "EmbedResponse": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    "Info": {
        "type": "object",
        "required": ["model_id", "model_dtype", "served_model_name", "model_type", "models"],
        "properties": {
            "model_id": {"type": "string"},
            "model_sha": {"type": ["string", "null"]},
            "model_dtype": {"type": "string"},
            "served_model_name": {"type": "string"},
            "model_type": _MODEL_TYPE_SCHEMA,
            "max_concurrent_requests": {"type": "integer"},
            "max_input_length": {"type": "integer"},
            "max_batch_tokens": {"type": "integer"},
            "max_batch_requests": {"type": ["integer", "null"]},
            "max_client_batch_size": {"type": "integer"},
            "auto_truncate": {"type": "boolean"},
            "tokenization_workers": {"type": "integer"},
            "version": {"type": "string"},
            "sha": {"type": ["string", "null"]},
            "docker_label": {"type": ["string", "null"]},
            "models": {"type": "array", "items": {"type": "object"}, "description": "All facts of each model."},
        },
    },
}
