from __future__ import annotations

import random
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from infinity_bento.core import Aggregation, InputType, Task
from tests.api.fakes import CLASSIFIER, RERANKER, FakeEngine, client_for, every_task, matrix_of, scores_of, serving


async def post(path: str, body: Any, engine: FakeEngine | None = None) -> httpx.Response:
    async with client_for(engine or every_task()) as client:
        return await client.post(path, json=body)


DOCUMENTS = ["score 0.5", "score -2", "score 3", "score 0.5"]


async def test_tei_ranks_texts_with_ties_in_descending_index_order() -> None:
    answer = await post("/rerank", {"query": "q", "texts": DOCUMENTS})
    assert answer.status_code == 200
    assert [row["index"] for row in answer.json()] == [2, 3, 0, 1]
    assert set(answer.json()[0]) == {"index", "score"}
    assert answer.json()[0]["score"] == pytest.approx(1 / (1 + np.exp(-3)), abs=1e-6)
    raw = await post("/rerank", {"query": "q", "texts": DOCUMENTS, "raw_scores": True, "return_text": True})
    assert raw.json()[0] == {"index": 2, "text": "score 3", "score": 3.0}


async def test_documents_are_answered_in_infinitys_shape_with_ties_in_order() -> None:
    body = {"query": "q", "documents": [*DOCUMENTS[:3], {"text": "score 0.5"}], "model": "r", "return_documents": True}
    answer = (await post("/rerank", body)).json()
    assert set(answer) == {"object", "results", "model", "usage", "id", "created"}
    assert answer["object"] == "rerank" and answer["model"] == "r"
    assert [row["index"] for row in answer["results"]] == [2, 0, 3, 1]
    assert answer["results"][2]["document"] == "score 0.5"
    assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    without = (await post("/rerank", {**body, "return_documents": False})).json()
    assert all(row["document"] is None for row in without["results"])


@pytest.mark.parametrize(("top_n", "shown"), [(1, 1), (3, 3), (4, 4), (8000, 4), (None, 4)])
@pytest.mark.parametrize("name", ["texts", "documents"])
async def test_top_n(name: str, top_n: int | None, shown: int) -> None:
    answer = (await post("/rerank", {"query": "q", name: DOCUMENTS, "top_n": top_n})).json()
    assert len(answer if name == "texts" else answer["results"]) == shown


async def test_order_of_the_documents_does_not_matter() -> None:
    texts = ["a", "bb", "ccc", "dddd"]
    wanted = {row["text"]: row["score"] for row in (await _ranked(texts))}
    for seed in range(5):
        random.Random(seed).shuffle(texts)
        rows = await _ranked(texts)
        assert {row["text"]: row["score"] for row in rows} == wanted
        assert [row["score"] for row in rows] == sorted(wanted.values(), reverse=True)


async def _ranked(texts: list[str]) -> Any:
    return (await post("/rerank", {"query": "q", "texts": texts, "return_text": True})).json()


async def test_rerank_options_reach_the_items() -> None:
    engine = every_task()
    options = {"truncate": False, "truncation_direction": "Left", "raw_scores": True, "instruction": "be fair"}
    assert (await post("/rerank", {"query": "q", "texts": ["a", ""], **options}, engine)).status_code == 200
    assert [(item.text, item.text_pair) for item in engine.submitted] == [("q", "a"), ("q", "")]
    for item in engine.submitted:
        assert item.task is Task.RERANK and item.truncate is False and item.truncation_direction == "left"
        assert item.raw_scores and item.instruction == "be fair" and item.prompt_name is None


async def test_compute_headers_and_truncation() -> None:
    answer = await post("/rerank", {"query": "qq", "texts": ["a b", "very long", "c"]})
    assert answer.headers["x-compute-characters"] == str(2 * 3 + 3 + 9 + 1)
    assert answer.headers["x-compute-tokens"] == "8" and answer.headers["x-queue-time"] == "2"
    assert answer.headers["x-truncated-inputs"] == "1" and answer.headers["x-truncated-indices"] == "1"
    shown = (await post("/rerank", {"query": "qq", "documents": ["a b", "very long"]})).json()
    cut = {row["index"]: row.get("truncated") for row in shown["results"]}
    assert cut == {0: None, 1: {"from": 99, "to": 3}} and shown["usage"]["truncated"] == 1


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_late_interaction_models_rank_by_maxsim(path: str) -> None:
    engine = every_task()
    body = {"model": "late", "query": "a b", "documents": ["b c a", "x", "b"]}
    answer = (await post(path, body, engine)).json()
    items = engine.submitted
    assert [item.input_type for item in items] == [InputType.QUERY] + [InputType.DOCUMENT] * 3
    assert {item.task for item in items} == {Task.EMBED_ALL}
    query, *documents = [matrix_of(item, 8).astype(np.float64) for item in items]
    wanted = [sum(max(row @ other for other in document) for row in query) for document in documents]
    got = {row["index"]: row["relevance_score"] for row in answer["results"]}
    assert [got[index] for index in range(3)] == pytest.approx(wanted, abs=1e-5)
    assert got[0] == max(got.values())


@pytest.mark.parametrize(
    ("given", "pairs", "flat"),
    [
        ("a", [("a", None)], True),
        (["a"], [("a", None)], True),
        (["a", "b"], [("a", "b")], True),
        (["a", ""], [("a", "")], True),
        ([["a"], ["b", "c"]], [("a", None), ("b", "c")], False),
        ([["a"]], [("a", None)], False),
    ],
)
async def test_predict_takes_texts_pairs_and_batches(given: Any, pairs: list[Any], flat: bool) -> None:
    engine = serving(CLASSIFIER)
    answer = await post("/predict", {"inputs": given}, engine)
    assert answer.status_code == 200
    assert [(item.text, item.text_pair) for item in engine.submitted] == pairs
    rows = [answer.json()] if flat else answer.json()
    for row, item in zip(rows, engine.submitted, strict=True):
        scores = scores_of(item, 2)
        assert {entry["label"]: np.float32(entry["score"]) for entry in row} == {"no": scores[0], "yes": scores[1]}
        assert row[0]["score"] >= row[1]["score"]


async def test_predict_works_for_rerankers_and_names_unknown_labels() -> None:
    body = {"inputs": ["q", "score 2"], "raw_scores": True}
    answer = await post("/predict", body, serving(RERANKER, labels=1))
    assert answer.json() == [{"label": "relevant", "score": 2.0}]
    from dataclasses import replace

    unnamed = await post("/predict", {"inputs": "a"}, serving(replace(CLASSIFIER, id2label=None), labels=3))
    assert {entry["label"] for entry in unnamed.json()} == {"LABEL_0", "LABEL_1", "LABEL_2"}
    only = replace(RERANKER, tasks=(Task.RERANK,))
    engine = serving(only)
    assert (await post("/predict", {"inputs": "a"}, engine)).status_code == 200
    assert engine.submitted[0].task is Task.RERANK


async def test_hugging_face_parameters() -> None:
    engine = serving(CLASSIFIER, labels=2)
    plain = await post("/predict", {"inputs": "a", "parameters": {}}, engine)
    assert len(plain.json()) == 1 and len(plain.json()[0]) == 2 and not engine.submitted[0].raw_scores
    logits = scores_of(engine.submitted[0], 2)
    for name, function in (
        ("none", lambda x: x),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("softmax", lambda x: np.exp(x) / np.exp(x).sum()),
    ):
        body = {"inputs": "a", "parameters": {"function_to_apply": name, "top_k": 1}}
        row = (await post("/predict", body, engine)).json()[0]
        assert engine.submitted[0].raw_scores and len(row) == 1
        logits = scores_of(engine.submitted[0], 2)
        assert row[0]["score"] == pytest.approx(float(function(logits.astype(np.float64)).max()), abs=1e-6)


async def test_predict_with_a_token_classifier() -> None:
    engine = every_task()
    body = {"inputs": "ab cd", "model": "t", "parameters": {"aggregation_strategy": "first"}}
    answer = (await post("/predict", body, engine)).json()
    assert engine.submitted[0].aggregation is Aggregation.FIRST
    assert answer[1] == {"entity_group": "WORD", "score": 0.75, "start": 3, "end": 5, "word": "cd"}
    tokens = await post("/predict", {"inputs": "ab", "model": "t", "parameters": {"aggregation_strategy": "none"}})
    assert tokens.json()[0]["entity"] == "WORD"


async def test_scores_are_the_same_in_messagepack() -> None:
    async with client_for(every_task()) as client:
        body = {"query": "q", "texts": ["a", "b"]}
        plain = (await client.post("/rerank", json=body)).json()
        answer = await client.post("/rerank", json=body, headers={"accept": "application/msgpack"})
    packed = msgpack.unpackb(answer.content)
    assert [np.float32(row["score"]) for row in plain] == [np.float32(row["score"]) for row in packed]
    assert [row["index"] for row in plain] == [row["index"] for row in packed]


async def test_a_refused_body_counts_as_a_failure() -> None:
    from infinity_bento.api.app import create_app
    from infinity_bento.api.protocol import ApiSettings
    from infinity_bento.telemetry.metrics import Metrics

    metrics, engine = Metrics(), every_task()
    app = create_app(lambda: engine, ApiSettings(), metrics=metrics)
    async with client_for(engine, app) as client:
        await client.post("/rerank", json={"query": "q", "texts": ["a", "b", "c"]})
        await client.post("/rerank", json={"query": "q", "texts": []})
        text = (await client.get("/metrics")).text
    assert 'te_request_failure{err="validation"} 1.0' in text.splitlines()
