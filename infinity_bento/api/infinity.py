"""Infinity's routes: POST /classify, and the shape that /rerank has for ``documents``. Rows of ``table`` point here."""

from __future__ import annotations

import time
from typing import Any

from infinity_bento.api import fields
from infinity_bento.api.body import read_object
from infinity_bento.api.choosing import resolve_any
from infinity_bento.api.exchange import Call, Reply
from infinity_bento.api.inference import run, truncation_headers, truncation_of, usage_of
from infinity_bento.api.inputs import check_batch_size, texts
from infinity_bento.api.labels import entities, labelled
from infinity_bento.api.ranking import Ranking
from infinity_bento.api.schemas import (
    INTEGER,
    MODEL,
    NUMBER,
    RAW_SCORES,
    TRUNCATION,
    array,
    nullable,
    one_of,
    record,
    ref,
)
from infinity_bento.core import Aggregation, Task

_AGGREGATIONS = {value.value: value for value in Aggregation}


async def classify(call: Call) -> Reply:
    """All labels of each text, best first; of token classifiers the labelled spans of each text.

    Raises:
        InfinityError: As the readers of the body, ``EngineLike.resolve`` and ``inference.run`` do.
    """
    body = await read_object(call)
    inputs = texts(body, "input")
    info, task = resolve_any(call.engine, fields.string(body, "model"), Task.CLASSIFY, Task.CLASSIFY_TOKENS)
    check_batch_size(len(inputs.values), info, "input")
    most = fields.positive_integer(body, "top_k")
    template = fields.pair_item(body, task)
    template.aggregation = fields.choice(body, "aggregation_strategy", _AGGREGATIONS, Aggregation.SIMPLE)
    results = await run(call, info, inputs.items(template), inputs.path)
    if task is Task.CLASSIFY:
        data = [labelled(info, result.output, most) for result in results]
    else:
        data = [entities(result.output) for result in results]
    answer = {"object": "classify", "data": data, "model": info.name, "usage": usage_of(results)}
    return call.reply(_stamped(call, answer), truncation_headers(results))


def ranked(call: Call, ranking: Ranking) -> dict[str, Any]:
    """The answer to a rerank request with ``documents``."""
    results: list[dict[str, Any]] = []
    for index in ranking.order:
        document = ranking.documents.values[index] if ranking.with_text else None
        entry = {"relevance_score": ranking.scores[index], "index": index, "document": document}
        if ranking.by_document[index].usage.truncated_from is not None:
            entry["truncated"] = truncation_of(ranking.by_document[index])
        results.append(entry)
    answer = {"object": "rerank", "results": results, "model": ranking.info.name, "usage": usage_of(ranking.results)}
    return _stamped(call, answer)


def _stamped(call: Call, answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "id": f"infinity-{call.state.request_id}", "created": int(time.time())}


_STAMP = {"model": {"type": "string"}, "usage": ref("Usage"), "id": {"type": "string"}, "created": INTEGER}

SCHEMAS: dict[str, dict[str, Any]] = {
    "ClassifyRequest": record(
        {"input": ref("Texts")},
        {
            "model": MODEL,
            "raw_scores": RAW_SCORES,
            "top_k": nullable("integer", "Give only the k best labels.", minimum=1),
            "aggregation_strategy": one_of(_AGGREGATIONS, "Of token classifiers.", default="simple"),
            **TRUNCATION,
        },
    ),
    "ClassifyResponse": record(
        {
            "object": {"const": "classify"},
            "data": array(array({"anyOf": [ref("TokenLabel"), ref("LabelScore")]})),
            **_STAMP,
        }
    ),
    "InfinityRerankResponse": record(
        {
            "object": {"const": "rerank"},
            "results": array(
                record(
                    {"relevance_score": NUMBER, "index": INTEGER, "document": {"type": ["string", "null"]}},
                    {"truncated": ref("Truncation")},
                )
            ),
            **_STAMP,
        }
    ),
}
