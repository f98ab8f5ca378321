"""TEI's scoring routes: POST /rerank and /predict. Rows of ``table`` point here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from infinity_bento.api import fields, infinity
from infinity_bento.api.choosing import resolve_any
from infinity_bento.api.envelopes import inside
from infinity_bento.api.exchange import Call
from infinity_bento.api.fields import Body
from infinity_bento.api.inference import run
from infinity_bento.api.inputs import check_batch_size, pairs
from infinity_bento.api.labels import entities, labelled, sigmoid, softmax
from infinity_bento.api.ranking import Ranking, rank
from infinity_bento.api.schemas import (
    INSTRUCTION,
    MODEL,
    NUMBER,
    RAW_SCORES,
    RERANK_OPTIONS,
    TEXT,
    TRUNCATION,
    array,
    nullable,
    one_of,
    record,
    ref,
)
from infinity_bento.api.tei_answer import Answer
from infinity_bento.core import Aggregation, FloatArray, Item, Result, Task
from infinity_bento.errors import InvalidInput

_AGGREGATIONS = {value.value: value for value in Aggregation}
# transformers' ``function_to_apply``, applied to logits.
_FUNCTIONS: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "sigmoid": sigmoid,
    "softmax": softmax,
    "none": lambda logits: logits,
}


async def rerank(call: Call, body: Body) -> Answer:
    """Documents ranked against a query: TEI's list for ``texts``, Infinity's object for ``documents``.

    Raises:
        InfinityError: As ``ranking.rank`` does.
    """
    ranking = await rank(call, body)
    made = _tei_ranks(ranking) if ranking.documents.field == "texts" else infinity.ranked(call, ranking)
    return Answer(made, ranking.info, ranking.results)


async def predict(call: Call, body: Body) -> Answer:
    """Labels of texts or of pairs of texts, best first: a list for one, a list of lists for a batch.

    The Hugging Face client sends ``parameters``, and expects a list of lists for a single text as well. Token
    classifiers answer with spans in the order of the text.

    Raises:
        InfinityError: As the readers of the body, ``EngineLike.resolve`` and ``inference.run`` do.
    """
    given = pairs(body)
    info, task = resolve_any(
        call.engine, fields.string(body, "model"), Task.CLASSIFY, Task.RERANK, Task.CLASSIFY_TOKENS
    )
    check_batch_size(len(given.values), info, "inputs")
    template = fields.pair_item(body, task)
    parameters = fields.nested(body, "parameters")
    with inside("parameters"):
        function = fields.choice(parameters, "function_to_apply", _FUNCTIONS, None)
        most = fields.positive_integer(parameters, "top_k")
        template.aggregation = fields.choice(parameters, "aggregation_strategy", _AGGREGATIONS, Aggregation.SIMPLE)
    template.raw_scores = template.raw_scores or function is not None
    items = [_classify_item(text, pair, template) for text, pair in given.values]
    if task is Task.CLASSIFY_TOKENS and any(item.text_pair is not None for item in items):
        raise InvalidInput(f"`inputs` has a pair; model {info.name!r} labels tokens of single texts.", param="inputs")
    results = await run(call, info, items, given.path)

    def row(result: Result) -> list[dict[str, Any]]:
        if task is Task.CLASSIFY_TOKENS:
            return entities(result.output, "entity" if template.aggregation is Aggregation.NONE else "entity_group")
        return labelled(info, result.output if function is None else function(result.output), most)

    rows = [row(result) for result in results]
    flat = given.single and (task is Task.CLASSIFY_TOKENS or "parameters" not in body)
    return Answer(rows[0] if flat else rows, info, results)


def _tei_ranks(ranking: Ranking) -> list[dict[str, Any]]:
    texts = ranking.documents.values
    if ranking.with_text:
        return [{"index": i, "text": texts[i], "score": ranking.scores[i]} for i in ranking.order]
    return [{"index": i, "score": ranking.scores[i]} for i in ranking.order]


def _classify_item(text: str, pair: str | None, template: Item) -> Item:
    return Item(
        template.task,
        text=text,
        text_pair=pair,
        truncate=template.truncate,
        truncation_direction=template.truncation_direction,
        instruction=template.instruction,
        raw_scores=template.raw_scores,
        aggregation=template.aggregation,
    )


_RANKS = array(record({"index": {"type": "integer"}, "score": NUMBER}, {"text": {"type": "string"}}))
_LABELS = array({"anyOf": [ref("LabelScore"), ref("Entity")]})

SCHEMAS: dict[str, dict[str, Any]] = {
    "RerankRequest": record(
        {"query": TEXT},
        {
            "texts": array({"type": "string"}, minItems=1, description="Answered in TEI's shape."),
            "documents": ref("Documents"),
            "return_text": nullable("boolean", "Repeat the texts in the answer.", default=False),
            **RERANK_OPTIONS,
        },
        oneOf=[{"required": ["texts"]}, {"required": ["documents"]}],
    ),
    "RerankResponse": {"anyOf": [_RANKS, ref("InfinityRerankResponse")]},
    "PredictRequest": record(
        {
            "inputs": {
                "description": "A text, [text], [text, text] for a pair, or an array of such arrays for a batch.",
                "anyOf": [TEXT, ref("TextOrPair"), array(ref("TextOrPair"), minItems=1)],
            }
        },
        {
            "model": MODEL,
            "raw_scores": RAW_SCORES,
            "instruction": INSTRUCTION,
            **TRUNCATION,
            "parameters": record(
                {},
                {
                    "function_to_apply": one_of(_FUNCTIONS, "Applied to the logits instead of the model's own."),
                    "top_k": nullable("integer", "Give only the k best labels.", minimum=1),
                    "aggregation_strategy": one_of(_AGGREGATIONS, "Of token classifiers.", default="simple"),
                },
            )
            | {"type": ["object", "null"]},
        },
    ),
    "TextOrPair": array({"type": "string"}, minItems=1, maxItems=2),
    "Entity": record(
        {"score": NUMBER, "word": {"type": "string"}},
        {
            "entity": {"type": "string"},
            "entity_group": {"type": "string"},
            "start": {"type": ["integer", "null"]},
            "end": {"type": ["integer", "null"]},
        },
    ),
    "PredictResponse": {"anyOf": [_LABELS, array(_LABELS)]},
}
