"""The routes that find the task themselves: POST / and /invocations (SageMaker), and /vertex with many such bodies.

Rows of ``table`` point here. The Hugging Face client posts to the bare URL, hence to ``/``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from infinity_bento.api import fields, tei, tei_scores
from infinity_bento.api.body import read_object
from infinity_bento.api.choosing import any_model, is_late_interaction
from infinity_bento.api.envelopes import moved
from infinity_bento.api.exchange import Call, Reply
from infinity_bento.api.fields import Body
from infinity_bento.api.inputs import check_batch_size
from infinity_bento.api.schemas import MODEL, array, record, ref
from infinity_bento.api.tei_answer import Answer, Answerer
from infinity_bento.core import ModelInfo, Task
from infinity_bento.errors import InfinityError, InvalidInput

TASKS = (Task.EMBED, Task.EMBED_ALL, Task.EMBED_SPARSE, Task.RERANK, Task.CLASSIFY, Task.CLASSIFY_TOKENS)


async def answer(call: Call, body: Body) -> Answer:
    """The answer of the route that the body is meant for: by its shape, else by the kind of the (default) model.

    Raises:
        InfinityError: As that route does.
    """
    if "query" in body:
        return await tei_scores.rerank(call, body)
    if type(body.get("inputs")) is dict:
        return await tei.similarity(call, body)
    info = any_model(call.engine, fields.string(body, "model"), or_default=True)
    return await _answerer_for(info)(call, {**body, "model": info.name})


async def vertex(call: Call) -> Reply:
    """The answers to a list of bodies, each as ``answer`` gives it; one bad body fails the request.

    Raises:
        InfinityError: As ``answer``; the text names the instance.
    """
    body = await read_object(call)
    instances = body.get("instances")
    if type(instances) is not list:
        fields.refuse("instances", instances, "an array of request bodies")
    for index, instance in enumerate(instances):
        if type(instance) is not dict:
            fields.refuse(f"instances[{index}]", instance, "an object with the fields of a route")
    if not instances:
        return call.reply({"predictions": []})
    check_batch_size(len(instances), any_model(call.engine, None, or_default=True), "instances")
    made = await asyncio.gather(*(answer(call, instance) for instance in instances), return_exceptions=True)
    predictions: list[Any] = []
    for index, one in enumerate(made):
        if isinstance(one, InfinityError):
            raise moved(one, f"instances[{index}]") from one
        if isinstance(one, BaseException):
            raise one
        predictions.append(one.value)
    return call.reply({"predictions": predictions})


def _answerer_for(info: ModelInfo) -> Answerer:
    """What TEI's default route does for a model of this kind, given ``inputs``."""
    if {Task.CLASSIFY, Task.RERANK, Task.CLASSIFY_TOKENS} & set(info.tasks):
        return tei_scores.predict
    if Task.EMBED in info.tasks:
        return tei.embed
    if is_late_interaction(info):
        return tei.embed_all
    if Task.EMBED_SPARSE in info.tasks:
        return tei.embed_sparse
    tasks = ", ".join(task.value for task in info.tasks) or "nothing"
    raise InvalidInput(f"`model` {info.name!r} can {tasks}, which this route does not serve; name another.")


_REQUESTS = ("RerankRequest", "SimilarityRequest", "EmbedRequest", "PredictRequest")
_RESPONSES = ("RerankResponse", "SimilarityResponse", "EmbedResponse", "EmbedAllResponse", "EmbedSparseResponse")

SCHEMAS: dict[str, dict[str, Any]] = {
    "AnyRequest": {
        "description": "A body of /rerank, /similarity, or of the route that fits the model's kind.",
        "anyOf": [ref(name) for name in _REQUESTS],
        **record({}, {"model": MODEL}),
    },
    "AnyResponse": {"anyOf": [*(ref(name) for name in _RESPONSES), ref("PredictResponse")]},
    "VertexRequest": record({"instances": array({"type": "object"})}),
    "VertexResponse": record({"predictions": array({})}),
}
