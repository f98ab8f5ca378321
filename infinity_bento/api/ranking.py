"""Documents ranked against a query, by a reranker of pairs or of lists, or by MaxSim over token vectors.

The dialects' rerank routes end here; each writes the ``Ranking`` in its own shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from infinity_bento.api import fields
from infinity_bento.api.choosing import resolve_or_late_interaction
from infinity_bento.api.exchange import Call
from infinity_bento.api.fields import Body
from infinity_bento.api.inference import run
from infinity_bento.api.inputs import Documents, check_batch_size, documents, required_text
from infinity_bento.core import FloatArray, InputType, Item, ModelInfo, Result, Task, Usage
from infinity_bento.maxsim import MEAN_MAXSIM, maxsim


class Ranking(NamedTuple):
    """The answer to one rerank request."""

    info: ModelInfo
    documents: Documents
    scores: FloatArray  # [documents], in request order
    order: list[int]  # indices of the documents to show, best first
    with_text: bool
    results: list[Result]  # whatever was computed, for usage
    by_document: list[Result]  # the result that tells how a document was cut


async def rank(call: Call, body: Body) -> Ranking:
    """Score every document of a body and order them.

    Equal scores keep the order of ``documents``; of TEI's ``texts`` the last one comes first, as in TEI.

    Raises:
        InfinityError: As the readers of the body, ``EngineLike.resolve`` and ``inference.run`` do.
    """
    given = documents(body)
    query = required_text(body, "query")
    top_n = fields.positive_integer(body, "top_n")
    with_text = fields.boolean(body, "return_text", False) or fields.boolean(body, "return_documents", False)
    info = resolve_or_late_interaction(call.engine, fields.string(body, "model"), Task.RERANK)
    check_batch_size(len(given.values), info, given.field)
    if info.listwise:
        item = listwise_item(query, given.values, fields.pair_item(body, Task.RERANK))
        results = await run(call, info, [item], None)
        scores, by_document = results[0].output.scores, by_documents(results[0])
    elif Task.RERANK in info.tasks:
        items = pair_items(query, given.values, fields.pair_item(body, Task.RERANK))
        results = by_document = await run(call, info, items, given.path)
        scores = np.array([result.output[0] for result in results], dtype=np.float32)
    else:
        items = matrix_items(query, given.values, fields.pair_item(body, Task.EMBED_ALL))
        results = await run(call, info, items, _after_query(given.path))
        by_document = results[1:]
        query_matrix, *matrices = (result.output for result in results)
        scores = await asyncio.to_thread(maxsim, query_matrix, matrices, mean=info.similarity == MEAN_MAXSIM)
    return Ranking(info, given, scores, best_first(scores, given.field)[:top_n], with_text, results, by_document)


def pair_items(query: str, texts: Sequence[str], template: Item) -> list[Item]:
    """One item per document, for a reranker."""
    return [
        Item(
            template.task,
            text=query,
            text_pair=text,
            truncate=template.truncate,
            truncation_direction=template.truncation_direction,
            instruction=template.instruction,
            raw_scores=template.raw_scores,
        )
        for text in texts
    ]


def listwise_item(query: str, texts: Sequence[str], template: Item) -> Item:
    """All documents in one item, for a reranker that reads them together."""
    return Item(
        Task.RERANK,
        text=query,
        documents=list(texts),
        truncate=template.truncate,
        truncation_direction=template.truncation_direction,
        instruction=template.instruction,
    )


def by_documents(result: Result) -> list[Result]:
    """What became of each document of a listwise result; the tokens are counted in ``result`` itself."""
    cuts = ((0, None) if cut is None else (cut.kept, cut.tokens) for cut in result.output.cuts)
    return [Result(None, Usage(kept, 0, tokens), result.timing) for kept, tokens in cuts]


def matrix_items(query: str, texts: Sequence[str], template: Item) -> list[Item]:
    """The query, then one item per document, for a late-interaction model."""
    sides = [(query, InputType.QUERY), *((text, InputType.DOCUMENT) for text in texts)]
    return [
        Item(
            Task.EMBED_ALL,
            text=text,
            input_type=side,
            truncate=template.truncate,
            truncation_direction=template.truncation_direction,
        )
        for text, side in sides
    ]


def best_first(scores: FloatArray, field: str) -> list[int]:
    """Indices by descending score; ties descending for TEI's ``texts``, else ascending."""
    order = np.argsort(scores, kind="stable")[::-1] if field == "texts" else np.argsort(-scores, kind="stable")
    return [int(index) for index in order]


def _after_query(path: Callable[[int], str]) -> Callable[[int], str]:
    return lambda index: "query" if index == 0 else path(index - 1)
