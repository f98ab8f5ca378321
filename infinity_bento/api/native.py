"""The BentoML door: the batchable methods of ``service.py``, from items to the engine and back to results.

A method takes a list of items and answers each in its place, with an output or an error. Only what concerns the call as
a whole is raised: the server is full, or not ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from infinity_bento.api import systemone
from infinity_bento.api.choosing import any_model, resolve_any, resolve_or_late_interaction
from infinity_bento.api.labels import entities, labelled
from infinity_bento.api.native_items import (
    ClassifyItem,
    ClassifyResult,
    DecideItem,
    DecideResult,
    EmbedAllResult,
    EmbedItem,
    EmbedResult,
    EmbedSparseResult,
    ItemError,
    Label,
    Ranked,
    RerankItem,
    RerankResult,
    SimilarityItem,
    SimilarityResult,
    TextItem,
    Token,
    TokenizeItem,
    TokenizeResult,
)
from infinity_bento.api.protocol import EngineLike
from infinity_bento.api.ranking import best_first, by_documents, listwise_item, matrix_items, pair_items
from infinity_bento.api.systemone_request import read_request
from infinity_bento.core import Item, ModelInfo, Result, Task
from infinity_bento.decisions import DecisionRules
from infinity_bento.errors import CapacityError, InfinityError
from infinity_bento.maxsim import MEAN_MAXSIM, maxsim

R = TypeVar("R")
AnyResult = TypeVar("AnyResult", EmbedResult, EmbedAllResult, EmbedSparseResult, ClassifyResult)


async def embed(engine: EngineLike, items: Sequence[EmbedItem]) -> list[EmbedResult]:
    """One vector per item.

    Raises:
        CapacityError: If the call as a whole is refused; so do all functions of this file.
    """
    return await _each(
        engine, items, (Task.EMBED,), EmbedResult, lambda info, result: {"embedding": result.output.tolist()}
    )


async def embed_all(engine: EngineLike, items: Sequence[TextItem]) -> list[EmbedAllResult]:
    """One matrix per item."""
    return await _each(
        engine, items, (Task.EMBED_ALL,), EmbedAllResult, lambda info, result: {"embeddings": result.output.tolist()}
    )


async def embed_sparse(engine: EngineLike, items: Sequence[TextItem]) -> list[EmbedSparseResult]:
    """One sparse vector per item."""
    return await _each(
        engine,
        items,
        (Task.EMBED_SPARSE,),
        EmbedSparseResult,
        lambda info, result: {"indices": result.output.indices.tolist(), "values": result.output.values.tolist()},
    )


async def classify(engine: EngineLike, items: Sequence[ClassifyItem]) -> list[ClassifyResult]:
    """The labels of each item."""
    tasks = (Task.CLASSIFY, Task.CLASSIFY_TOKENS)
    return await _each(engine, items, tasks, ClassifyResult, lambda info, result: {"labels": _labels(info, result)})


async def rerank(engine: EngineLike, items: Sequence[RerankItem]) -> list[RerankResult]:
    """One ranking per item; an item fails as a whole if one of its documents does."""

    async def one(item: RerankItem) -> RerankResult:
        info = resolve_or_late_interaction(engine, item.model, Task.RERANK)
        template = Item(
            Task.RERANK,
            truncate=item.truncate,
            truncation_direction=item.truncation_direction or "right",
            instruction=item.instruction,
            raw_scores=item.raw_scores,
        )
        if info.listwise:
            results = await _all(engine, info, [listwise_item(item.query, item.documents, template)])
            scores, by_document = results[0].output.scores, by_documents(results[0])
        elif Task.RERANK in info.tasks:
            results = by_document = await _all(engine, info, pair_items(item.query, item.documents, template))
            scores = np.concatenate([result.output for result in results])
        else:
            results = await _all(engine, info, matrix_items(item.query, item.documents, template))
            by_document = results[1:]
            query, *matrices = (result.output for result in results)
            scores = await asyncio.to_thread(maxsim, query, matrices, mean=info.similarity == MEAN_MAXSIM)
        ranked = [
            Ranked(index=i, score=float(scores[i]), truncated_from=by_document[i].usage.truncated_from)
            for i in best_first(scores, "documents")[: item.top_n]
        ]
        return RerankResult(results=ranked, tokens=sum(result.usage.tokens for result in results))

    return await _independently(items, one, lambda error: RerankResult(error=error))


async def decide(
    engine: EngineLike, items: Sequence[DecideItem], rules: DecisionRules | None = None
) -> list[DecideResult]:
    """The answers to the questions of each item, under these limits; None: the usual ones."""
    limits = rules or DecisionRules()

    async def one(item: DecideItem) -> DecideResult:
        info = systemone.resolve(engine, item.model, limits.aliases)
        request = read_request({"state": item.state, "questions": item.questions}, limits)
        (result,) = await _all(engine, info, [Item(Task.DECIDE, decision=request)])
        return DecideResult(answers=systemone.answers(request, result), tokens=result.usage.tokens)

    return await _independently(items, one, lambda error: DecideResult(error=error))


async def similarity(engine: EngineLike, items: Sequence[SimilarityItem]) -> list[SimilarityResult]:
    """The cosines of each item; an item fails as a whole if one of its sentences does."""

    async def one(item: SimilarityItem) -> SimilarityResult:
        info = engine.resolve(item.model, Task.EMBED)
        texts = [
            Item(
                Task.EMBED,
                text=text,
                prompt_name=item.prompt_name,
                truncate=item.truncate,
                truncation_direction=item.truncation_direction or "right",
                normalize=True,
            )
            for text in (item.source_sentence, *item.sentences)
        ]
        results = await _all(engine, info, texts)
        vectors = np.stack([result.output for result in results])
        return SimilarityResult(
            similarities=np.clip(vectors[1:] @ vectors[0], -1.0, 1.0).tolist(),
            tokens=sum(result.usage.tokens for result in results),
            truncated=sum(result.usage.truncated_from is not None for result in results),
        )

    return await _independently(items, one, lambda error: SimilarityResult(error=error))


async def tokenize(engine: EngineLike, items: Sequence[TokenizeItem]) -> list[TokenizeResult]:
    """The tokens of each item."""

    async def one(item: TokenizeItem) -> TokenizeResult:
        info = any_model(engine, item.model)
        (row,) = await engine.tokenize(
            info.name, [item.text], add_special_tokens=item.add_special_tokens, prompt_name=item.prompt_name
        )
        if isinstance(row, InfinityError):
            raise row
        tokens = [
            Token(id=token, text=text, special=special, start=start, stop=stop)
            for token, text, special, start, stop in row
        ]
        return TokenizeResult(tokens=tokens)

    return await _independently(items, one, lambda error: TokenizeResult(error=error))


async def _each(
    engine: EngineLike,
    items: Sequence[TextItem | ClassifyItem],
    tasks: Sequence[Task],
    result_class: type[AnyResult],
    output: Callable[[ModelInfo, Result], dict[str, Any]],
) -> list[AnyResult]:
    """Run items on the models they name, all items of a model together; one result per item, in order."""
    results: list[AnyResult] = [result_class() for _ in items]
    by_model: dict[str, tuple[ModelInfo, list[int]]] = {}
    ready: dict[int, Item] = {}
    for index, item in enumerate(items):
        try:
            info, task = resolve_any(engine, item.model, *tasks)
            ready[index] = item.to_item(task)
            by_model.setdefault(info.name, (info, []))[1].append(index)
        except CapacityError:
            raise
        except InfinityError as error:
            results[index].error = _item_error(error)
    groups = list(by_model.values())
    answers = await asyncio.gather(
        *(engine.submit(info.name, [ready[index] for index in indices]) for info, indices in groups)
    )
    for (info, indices), outcomes in zip(groups, answers, strict=True):
        for index, outcome in zip(indices, outcomes, strict=True):
            if isinstance(outcome, InfinityError):
                results[index].error = _item_error(outcome)
            else:
                # Nothing to validate: these are our own numbers.
                results[index] = result_class.model_construct(
                    **output(info, outcome),
                    tokens=outcome.usage.tokens,
                    truncated_from=outcome.usage.truncated_from,
                    error=None,
                )
    return results


async def _independently(
    items: Sequence[Any], one: Callable[[Any], Awaitable[R]], failed: Callable[[ItemError], R]
) -> list[R]:
    """The result of ``one`` for every item, at the same time; an item's error becomes its own result."""

    async def guarded(item: Any) -> R:
        try:
            return await one(item)
        except CapacityError:
            raise
        except InfinityError as error:
            return failed(_item_error(error))

    return await asyncio.gather(*(guarded(item) for item in items))


async def _all(engine: EngineLike, info: ModelInfo, items: list[Item]) -> list[Result]:
    """The results of items that stand or fall together."""
    results: list[Result] = []
    for outcome in await engine.submit(info.name, items):
        if isinstance(outcome, InfinityError):
            raise outcome
        results.append(outcome)
    return results


def _labels(info: ModelInfo, result: Result) -> list[Label]:
    if isinstance(result.output, list):
        return [Label(**{**entry, "score": float(entry["score"])}) for entry in entities(result.output)]
    return [Label(label=row["label"], score=float(row["score"])) for row in labelled(info, result.output)]


def _item_error(error: InfinityError) -> ItemError:
    return ItemError(code=error.code, message=error.message, status=error.status)
