"""TEI's GET /info. A row of ``table`` points here."""

from __future__ import annotations

from typing import Any

import orjson

from infinity_bento.api.choosing import is_late_interaction
from infinity_bento.api.exchange import Call, Reply
from infinity_bento.api.probes import current_status, not_ready
from infinity_bento.core import ModelInfo, Task

_POOLING_NAMES = {"lasttoken": "last_token"}  # ours are sentence-transformers' names


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
            "model_type": model_type(first),
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


def model_type(model: ModelInfo) -> dict[str, Any]:
    """TEI's tagged union: embedding with its pooling, or reranker / classifier with its labels."""
    if Task.EMBED in model.tasks or is_late_interaction(model):
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
