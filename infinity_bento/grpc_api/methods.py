"""What each method of tei.v1 answers: the table from which ``server`` makes handlers.

A message becomes the body that the HTTP route reads, the route's own function answers it, and the answer becomes a
message again: same models, same checks, same numbers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from google.protobuf.message import Message

from infinity_bento.api import fields, tei, tei_scores, tei_tokens
from infinity_bento.api.choosing import any_model, resolve_any
from infinity_bento.api.exchange import Call, Headers
from infinity_bento.api.tei_answer import Answer, Answerer, compute_headers
from infinity_bento.api.tei_info import model_type
from infinity_bento.core import Task
from infinity_bento.grpc_api import messages, tei_pb2


class Made(NamedTuple):
    """The answer to one message."""

    response: Any
    answer: Answer | None = None  # what was computed for it; None: nothing

    def headers(self, call: Call) -> Headers:
        """TEI's response headers."""
        return [] if self.answer is None else compute_headers(call, self.answer)


# Call, message, and the model that the metadata names -> answer; raises ``InfinityError``.
Method = Callable[[Call, Any, str | None], Awaitable[Made]]


async def info(call: Call, request: tei_pb2.InfoRequest, model: str | None) -> Made:
    """The named model, or the default one."""
    found, settings = any_model(call.engine, model, or_default=True), call.context.settings
    (kind,) = model_type(found)
    return Made(messages.server_info(found, kind, settings.version, settings.revision, settings.docker_label))


async def predict(call: Call, request: tei_pb2.PredictRequest, model: str | None) -> Made:
    """The labels of a text, best first."""
    return await _labels(call, messages.body_of(request, model))


async def predict_pair(call: Call, request: tei_pb2.PredictPairRequest, model: str | None) -> Made:
    """The labels of a pair of texts, best first."""
    body = messages.body_of(request, model)
    if len(body["inputs"]) != 2:
        fields.refuse("inputs", body["inputs"], "two strings, the texts of the pair")
    return await _labels(call, body)


async def _labels(call: Call, body: dict[str, Any]) -> Made:
    # Models that label tokens answer with spans, for which the contract has no place.
    found, _ = resolve_any(call.engine, body["model"], Task.CLASSIFY, Task.RERANK)
    answer = await tei_scores.predict(call, {**body, "model": found.name})
    predictions = [tei_pb2.Prediction(score=row["score"], label=row["label"]) for row in answer.value]
    return Made(
        tei_pb2.PredictResponse(predictions=predictions, metadata=messages.metadata(call, answer.results)), answer
    )


async def rerank(call: Call, request: tei_pb2.RerankRequest, model: str | None) -> Made:
    """The texts in the order of their scores."""
    answer = await tei_scores.rerank(call, messages.body_of(request, model))
    return ranked(call, answer)


def ranked(call: Call, answer: Answer) -> Made:
    """A ranking in TEI's HTTP form, as a message."""
    ranks = [tei_pb2.Rank(index=row["index"], text=row.get("text"), score=row["score"]) for row in answer.value]
    return Made(tei_pb2.RerankResponse(ranks=ranks, metadata=messages.metadata(call, answer.results)), answer)


async def tokenize(call: Call, request: tei_pb2.EncodeRequest, model: str | None) -> Made:
    """The tokens of a text, nothing cut."""
    (row,) = await tei_tokens.tokens_of(call, messages.body_of(request, model))
    tokens = [
        tei_pb2.SimpleToken(id=token, text=text, special=special, start=start, stop=stop)
        for token, text, special, start, stop in row
    ]
    return Made(tei_pb2.EncodeResponse(tokens=tokens))


async def decode(call: Call, request: tei_pb2.DecodeRequest, model: str | None) -> Made:
    """The text of token ids."""
    (text,) = await tei_tokens.texts_of(call, messages.body_of(request, model))
    return Made(tei_pb2.DecodeResponse(text=text))


def _vectors(answerer: Answerer, to_message: Callable[[Any], Any]) -> Method:
    """A method that embeds one text as an HTTP route does."""

    async def embed(call: Call, request: Message, model: str | None) -> Made:
        answer = await answerer(call, messages.body_of(request, model))
        response = to_message(answer.value[0])
        response.metadata.CopyFrom(messages.metadata(call, answer.results))
        return Made(response, answer)

    return embed


class Row(NamedTuple):
    """What a service does, and with which models."""

    methods: Mapping[str, Method]  # those with one message in and one out; ``NAMEStream`` is many of these
    tasks: frozenset[Task]  # one of them a model must be able to do; empty: any model will do
    late_interaction: bool = False  # a late-interaction model will do as well


# ``Rerank`` waits for its turn like a stream, as in TEI; ``RerankStream`` is no stream of rankings: see ``rpc``.
SERVICES: Mapping[str, Row] = {
    "Info": Row({"Info": info}, frozenset()),
    "Embed": Row(
        {
            "Embed": _vectors(tei.embed, messages.embedding),
            "EmbedSparse": _vectors(tei.embed_sparse, messages.sparse),
            "EmbedAll": _vectors(tei.embed_all, messages.matrix),
        },
        frozenset({Task.EMBED, Task.EMBED_SPARSE, Task.EMBED_ALL}),
    ),
    "Predict": Row({"Predict": predict, "PredictPair": predict_pair}, frozenset({Task.CLASSIFY, Task.RERANK})),
    "Rerank": Row({"Rerank": rerank}, frozenset({Task.RERANK}), late_interaction=True),
    "Tokenize": Row({"Tokenize": tokenize, "Decode": decode}, frozenset()),
}
WAITING = frozenset({"Rerank"})
