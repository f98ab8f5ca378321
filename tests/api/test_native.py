"""The BentoML methods without BentoML: items in, one result or error per item out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from infinity_bento.api import native
from infinity_bento.api.native_items import (
    ClassifyItem,
    EmbedItem,
    RerankItem,
    SimilarityItem,
    TextItem,
    TokenizeItem,
)
from infinity_bento.core import Aggregation, InputType, Task
from infinity_bento.errors import NotReady, Overloaded
from tests.api.fakes import EMBEDDER, LOADING, FakeEngine, every_task, matrix_of, serving, sparse_of, vector_of


async def test_embed_answers_each_item_in_its_place() -> None:
    engine = serving(EMBEDDER, replace(EMBEDDER, name="n"))
    items = [
        EmbedItem(text="a", model="m"),
        EmbedItem(text="too long", model="m"),
        EmbedItem(model="m"),
        EmbedItem(text="b", model="nope"),
        EmbedItem(token_ids=[5, 6], model="n", normalize=True, dimensions=4, input_type="query"),
        EmbedItem(text="c"),
    ]
    results = await native.embed(engine, items)
    codes = [result.error.code if result.error else None for result in results]
    assert codes == [None, "input_too_long", "invalid_input", "model_not_found", None, "invalid_input"]
    assert results[0].embedding == vector_of(EmbedItem(text="a").to_item(Task.EMBED), 8).tolist()
    assert len(results[4].embedding or []) == 4 and results[4].tokens == 2
    assert results[1].error is not None and results[1].error.status == 413 and results[1].embedding is None


async def test_token_matrices_and_sparse_vectors() -> None:
    engine = every_task()
    item = TextItem(text="ab ba", model="m", prompt_name="query", truncate=False, truncation_direction="left")
    (matrix,) = await native.embed_all(engine, [item])
    assert np.array_equal(np.float32(matrix.embeddings), matrix_of(engine.submitted[0], 8))
    assert engine.submitted[0].prompt_name == "query" and engine.submitted[0].truncation_direction == "left"
    (sparse, failed) = await native.embed_sparse(engine, [TextItem(text="ab ba"), TextItem(text="a", model="m")])
    row = sparse_of(engine.submitted[0])
    assert sparse.indices == row.indices.tolist() and sparse.values == row.values.tolist()
    assert failed.error is not None and failed.error.code == "unsupported_task"


async def test_rerank_ranks_the_documents_of_each_query() -> None:
    items = [
        RerankItem(query="q", documents=["score 1", "score 3", "score 1"], raw_scores=True),
        RerankItem(query="q", documents=["a", "too long"]),
        RerankItem(query="q", documents=["very long", "score -9"], top_n=1, model="r"),
        RerankItem(query="q", documents=["a"], model="m"),
    ]
    first, second, third, fourth = await native.rerank(every_task(), items)
    assert [(row.index, row.score) for row in first.results or []] == [(1, 3.0), (0, 1.0), (2, 1.0)]
    assert first.tokens == 9
    assert second.results is None and second.error is not None and second.error.code == "input_too_long"
    assert [(row.index, row.truncated_from) for row in third.results or []] == [(0, 99)]
    assert fourth.error is not None and fourth.error.code == "unsupported_task"


async def test_rerank_by_maxsim() -> None:
    engine = every_task()
    (result,) = await native.rerank(engine, [RerankItem(query="a", documents=["b", "a b"], model="late")])
    assert result.results is not None and result.results[0].index == 1
    assert result.results[0].score == pytest.approx(1.0, abs=1e-6)
    assert [item.input_type for item in engine.submitted] == [InputType.QUERY] + [InputType.DOCUMENT] * 2


async def test_classify_gives_labels_or_spans() -> None:
    engine = every_task()
    items = [
        ClassifyItem(text="a", model="c"),
        ClassifyItem(text="a", text_pair="b", model="c", raw_scores=True),
        ClassifyItem(text="ab cd", model="t", aggregation="first"),
        ClassifyItem(text="very long", model="c"),
        ClassifyItem(text="a", model="s"),
    ]
    results = await native.classify(engine, items)
    assert [len(result.labels or []) for result in results] == [2, 2, 2, 2, 0]
    assert sum(label.score for label in results[0].labels or []) == pytest.approx(1.0, abs=1e-6)
    assert results[2].labels is not None and (results[2].labels[1].start, results[2].labels[1].word) == (3, "cd")
    assert results[3].truncated_from == 99 and results[3].tokens == 2
    assert results[4].error is not None and results[4].error.code == "unsupported_task"
    await native.classify(engine, [ClassifyItem(text="a", model="t", aggregation="max")])
    assert engine.submitted[0].aggregation is Aggregation.MAX


async def test_similarity() -> None:
    items = [
        SimilarityItem(source_sentence="a b", sentences=["a b", "c"], model="m"),
        SimilarityItem(source_sentence="a", sentences=["too long"], model="m"),
        SimilarityItem(source_sentence="a", sentences=["very long"], model="m"),
        SimilarityItem(source_sentence="a", sentences=["b"], model="late"),
    ]
    first, second, third, fourth = await native.similarity(every_task(), items)
    assert first.similarities is not None and first.similarities[0] == pytest.approx(1.0, abs=1e-6)
    assert first.tokens == 5 and first.truncated == 0 and third.truncated == 1
    assert second.error is not None and fourth.error is not None and fourth.error.code == "unsupported_task"


async def test_tokenize() -> None:
    engine = serving(EMBEDDER)
    items = [TokenizeItem(text="ab"), TokenizeItem(text="a", add_special_tokens=False), TokenizeItem(text="too long")]
    first, second, third = await native.tokenize(engine, items)
    assert [token.text for token in first.tokens or []] == ["<s>", "a", "b"]
    assert [(token.start, token.stop) for token in second.tokens or []] == [(0, 1)]
    assert third.tokens is None and third.error is not None
    (unnamed,) = await native.tokenize(every_task(), [TokenizeItem(text="a")])
    assert unnamed.error is not None and "'m'" in unnamed.error.message


CALLS: list[tuple[Any, Any]] = [
    (native.embed, EmbedItem(text="a", model="m")),
    (native.embed_all, TextItem(text="a", model="m")),
    (native.embed_sparse, TextItem(text="a")),
    (native.rerank, RerankItem(query="q", documents=["a"])),
    (native.classify, ClassifyItem(text="a", model="c")),
    (native.similarity, SimilarityItem(source_sentence="a", sentences=["b"], model="m")),
]


@pytest.mark.parametrize(("method", "item"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
async def test_what_concerns_the_call_as_a_whole_is_raised(method: Any, item: Any) -> None:
    assert await method(every_task(), []) == []
    with pytest.raises(Overloaded):
        await method(every_task(raises=Overloaded("Full; retry.")), [item])
    with pytest.raises(NotReady):
        await method(FakeEngine(state=LOADING), [item])


@pytest.mark.parametrize(
    ("item_class", "fields"),
    [
        (EmbedItem, {"text": 5}),
        (EmbedItem, {"text": "a", "normalise": True}),
        (EmbedItem, {"token_ids": [-1]}),
        (EmbedItem, {"token_ids": [True]}),
        (EmbedItem, {"token_ids": [1.5]}),
        (EmbedItem, {"text": "a", "dimensions": 0}),
        (TextItem, {"text": "a", "input_type": "passage"}),
        (RerankItem, {"query": "", "documents": ["a"]}),
        (RerankItem, {"query": "q", "documents": []}),
        (RerankItem, {"query": "q", "documents": [{"text": "a"}]}),
        (RerankItem, {"query": "q", "documents": ["a"], "top_n": 0}),
        (ClassifyItem, {"text": ["a"]}),
        (ClassifyItem, {"text": "a", "aggregation": "mean"}),
        (SimilarityItem, {"source_sentence": "a", "sentences": [""]}),
        (TokenizeItem, {"text": "a", "add_special_tokens": 1}),
    ],
)
def test_items_are_strict(item_class: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        item_class(**fields)
