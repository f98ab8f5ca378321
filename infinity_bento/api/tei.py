"""TEI's embedding routes: POST /embed, /embed_all, /embed_sparse and /similarity. Rows of ``table`` point here."""

from __future__ import annotations

from typing import Any

import numpy as np

from infinity_bento.api import fields
from infinity_bento.api.encoding import as_tensor, requested_encoding
from infinity_bento.api.envelopes import inside
from infinity_bento.api.exchange import Call
from infinity_bento.api.fields import Body
from infinity_bento.api.inference import run
from infinity_bento.api.inputs import check_batch_size, required_text, texts, texts_or_ids
from infinity_bento.api.schemas import (
    DIMENSIONS,
    ENCODINGS,
    MODEL,
    NUMBER,
    PROMPTS,
    TEXT,
    TRUNCATION,
    array,
    nullable,
    one_of,
    record,
    ref,
)
from infinity_bento.api.tei_answer import Answer
from infinity_bento.core import SparseRow, Task


async def embed(call: Call, body: Body) -> Answer:
    """A list with one vector per input, also for a single input.

    Raises:
        InfinityError: As the readers of the body, ``EngineLike.resolve`` and ``inference.run`` do.
    """
    info = call.engine.resolve(fields.string(body, "model"), Task.EMBED)
    inputs = texts_or_ids(body, "inputs")
    check_batch_size(len(inputs.values), info, "inputs")
    template = fields.text_item(body, info, Task.EMBED)
    template.normalize = fields.boolean(body, "normalize", True)
    template.dimensions = fields.dimensions(body, info)
    encoding = requested_encoding(body, unit_length=template.normalize)
    results = await run(call, info, inputs.items(template), inputs.path)
    return Answer([encoding(result.output) for result in results], info, results, encoding.compressible)


async def embed_all(call: Call, body: Body) -> Answer:
    """A list with one matrix per input, a row per token.

    Raises:
        InfinityError: As ``embed``.
    """
    info = call.engine.resolve(fields.string(body, "model"), Task.EMBED_ALL)
    inputs = texts_or_ids(body, "inputs")
    check_batch_size(len(inputs.values), info, "inputs")
    encoding = requested_encoding(body, unit_length=False)
    results = await run(call, info, inputs.items(fields.text_item(body, info, Task.EMBED_ALL)), inputs.path)
    return Answer([encoding(result.output) for result in results], info, results, encoding.compressible)


async def embed_sparse(call: Call, body: Body) -> Answer:
    """A list with one sparse vector per input: pairs of vocabulary id and weight, ascending ids.

    Raises:
        InfinityError: As ``embed``.
    """
    info = call.engine.resolve(fields.string(body, "model"), Task.EMBED_SPARSE)
    inputs = texts_or_ids(body, "inputs")
    check_batch_size(len(inputs.values), info, "inputs")
    form = fields.choice(body, "encoding_format", _SPARSE_FORMATS, _as_pairs)
    results = await run(call, info, inputs.items(fields.text_item(body, info, Task.EMBED_SPARSE)), inputs.path)
    return Answer([form(result.output) for result in results], info, results, form is _as_pairs)


async def similarity(call: Call, body: Body) -> Answer:
    """The cosine of one sentence with each of several, in their order.

    Raises:
        InfinityError: As ``embed``; a late-interaction model has no single vectors to compare.
    """
    info = call.engine.resolve(fields.string(body, "model"), Task.EMBED)
    if type(body.get("inputs")) is not dict:
        fields.refuse("inputs", body.get("inputs"), "an object with source_sentence and sentences")
    with inside("inputs"):
        source = required_text(body["inputs"], "source_sentence")
        sentences = texts(body["inputs"], "sentences")
        if sentences.single:
            fields.refuse("sentences", body["inputs"]["sentences"], "an array of strings")
        check_batch_size(len(sentences.values) + 1, info, "sentences")
    parameters = fields.nested(body, "parameters")
    with inside("parameters"):
        template = fields.text_item(parameters, info, Task.EMBED)
    template.normalize = True
    items = sentences._replace(values=[source, *sentences.values]).items(template)
    results = await run(call, info, items, _similarity_path)
    vectors = np.stack([result.output for result in results])
    return Answer(np.clip(vectors[1:] @ vectors[0], -1.0, 1.0), info, results)


def _similarity_path(index: int) -> str:
    return "inputs.source_sentence" if index == 0 else f"inputs.sentences[{index - 1}]"


def _as_pairs(row: SparseRow) -> list[dict[str, Any]]:
    return [{"index": index, "value": value} for index, value in zip(row.indices.tolist(), row.values, strict=True)]


def _as_tensors(row: SparseRow) -> dict[str, Any]:
    return {"indices": as_tensor(row.indices), "values": as_tensor(row.values)}


_SPARSE_FORMATS = {"float": _as_pairs, "tensor": _as_tensors}

_COMMON = {"model": MODEL, **TRUNCATION, **PROMPTS}
_PAIRS = array(record({"index": {"type": "integer"}, "value": NUMBER}))

SCHEMAS: dict[str, dict[str, Any]] = {
    "EmbedRequest": record(
        {"inputs": ref("Input")},
        {
            "normalize": nullable("boolean", "Scale to unit length.", default=True),
            "dimensions": DIMENSIONS,
            **_COMMON,
            **ENCODINGS,
        },
    ),
    "EmbedResponse": array(ref("Vector")),
    "EmbedAllRequest": record({"inputs": ref("Input")}, {**_COMMON, **ENCODINGS}),
    "EmbedAllResponse": array(ref("Matrix")),
    "EmbedSparseRequest": record(
        {"inputs": ref("Input")},
        {**_COMMON, "encoding_format": one_of(_SPARSE_FORMATS, "Pairs, or two packed tensors.", default="float")},
    ),
    "EmbedSparseResponse": array(
        {"anyOf": [_PAIRS, record({"indices": ref("Tensor"), "values": ref("Tensor")})]},
    ),
    "SimilarityRequest": record(
        {"inputs": record({"source_sentence": TEXT, "sentences": array(TEXT, minItems=1)})},
        {
            "model": MODEL,
            "parameters": record({}, {**TRUNCATION, **PROMPTS}) | {"type": ["object", "null"]},
        },
    ),
    "SimilarityResponse": array(NUMBER),
}
