"""The shapes of Infinity, Cohere and Jina; the bodies are those that their clients were recorded to send."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from infinity_bento.api.encoding import OUTPUT_DTYPES
from infinity_bento.core import Aggregation, InputType, Task
from infinity_bento.errors import Overloaded
from tests.api.fakes import EMBEDDER, FakeEngine, client_for, every_task, scores_of, serving, vector_of


async def post(path: str, body: Any, engine: FakeEngine | None = None) -> httpx.Response:
    async with client_for(engine or every_task()) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_infinity_classify(path: str) -> None:
    engine = every_task()
    answer = (await post(path, {"input": ["a b", "very long"], "model": "c", "raw_scores": True}, engine)).json()
    assert set(answer) == {"object", "data", "model", "usage", "id", "created"}
    assert answer["object"] == "classify" and answer["model"] == "c"
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4, "truncated": 1}
    for row, item in zip(answer["data"], engine.submitted, strict=True):
        assert item.raw_scores and item.task is Task.CLASSIFY
        logits = scores_of(item, 2)
        assert [np.float32(entry["score"]) for entry in row] == sorted(logits, reverse=True)
    one = (await post(path, {"input": "a", "model": "c", "top_k": 1})).json()
    assert len(one["data"]) == 1 and len(one["data"][0]) == 1


async def test_infinity_classify_with_a_token_classifier() -> None:
    engine = every_task()
    body = {"input": ["ab cd"], "model": "t"}
    answer = (await post("/classify", body, engine)).json()
    assert answer["data"][0][0] == {"label": "WORD", "score": 0.75, "start": 0, "end": 2, "word": "ab"}
    assert engine.submitted[0].aggregation is Aggregation.SIMPLE
    await post("/classify", {**body, "aggregation_strategy": "max"}, engine)
    assert engine.submitted[0].aggregation is Aggregation.MAX


@pytest.mark.parametrize(("path", "version"), [("/v1/rerank", "1"), ("/v2/rerank", "2")])
async def test_cohere_rerank(path: str, version: str) -> None:
    body = {"model": "r", "query": "q", "documents": ["score 1", "score 2", {"text": "score 1"}], "top_n": 2}
    answer = (await post(path, body)).json()
    assert [set(row) for row in answer["results"]] == [{"index", "relevance_score"}] * 2
    assert [row["index"] for row in answer["results"]] == [1, 0]
    assert answer["meta"] == {"api_version": {"version": version}, "billed_units": {"search_units": 1}}
    assert answer["usage"]["total_tokens"] == 9 and answer["id"] and answer["model"] == "r"
    shown = (await post(path, {**body, "return_documents": True})).json()
    assert shown["results"][0]["document"] == {"text": "score 2"}


async def test_cohere_shows_truncation() -> None:
    answer = await post("/v2/rerank", {"model": "r", "query": "q", "documents": ["a", "very long"]})
    cut = {row["index"]: row.get("truncated") for row in answer.json()["results"]}
    assert cut == {0: None, 1: {"from": 99, "to": 3}} and answer.headers["x-truncated-inputs"] == "1"
    assert answer.json()["meta"]["warnings"] == ["1 of 2 inputs were cut to the model's length limit"]


async def test_cohere_embed() -> None:
    engine = every_task()
    body = {"texts": ["a"], "model": "m", "input_type": "search_query", "embedding_types": ["float"]}
    answer = (await post("/v2/embed", body, engine)).json()
    item = engine.submitted[0]
    assert item.input_type is InputType.QUERY and item.normalize is True and item.truncate is None
    assert np.array_equal(np.float32(answer["embeddings"]["float"][0]), vector_of(item, 8))
    assert answer["texts"] == ["a"] and answer["response_type"] == "embeddings_by_type"
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 1}}


async def test_cohere_embed_types() -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = (await post("/v2/embed", {"texts": ["a", "b"], "model": "m", "embedding_types": types})).json()
    assert list(answer["embeddings"]) == types
    for index, row in enumerate(np.float32(answer["embeddings"]["float"])):
        for name in types[1:-1]:
            assert answer["embeddings"][name][index] == OUTPUT_DTYPES[name](row).tolist()
        assert base64.b64decode(answer["embeddings"]["base64"][index]) == row.tobytes()


@pytest.mark.parametrize(
    ("given", "truncate", "direction"),
    [("NONE", False, "right"), ("START", True, "left"), ("END", True, "right"), (None, None, "right")],
)
async def test_cohere_truncate(given: str | None, truncate: bool | None, direction: str) -> None:
    engine = serving(EMBEDDER)
    body = {"texts": ["a"], "truncate": given, "output_dimension": 4}
    assert (await post("/v2/embed", body, engine)).status_code == 200
    item = engine.submitted[0]
    assert (item.truncate, item.truncation_direction, item.dimensions) == (truncate, direction, 4)


async def test_cohere_inputs_and_input_types() -> None:
    from dataclasses import replace

    engine = serving(replace(EMBEDDER, prompts={"clustering": "cluster: "}))
    content = [{"content": [{"type": "text", "text": text}]} for text in ("a", "b")]
    answer = (await post("/v2/embed", {"inputs": content, "input_type": "clustering"}, engine)).json()
    assert answer["texts"] == ["a", "b"] and engine.submitted[0].prompt_name == "clustering"
    assert (await post("/v2/embed", {"texts": ["a"], "input_type": "classification"}, engine)).status_code == 200
    assert engine.submitted[0].prompt_name is None


async def test_cohere_errors() -> None:
    full = await post("/v2/rerank", {"query": "q", "documents": ["a"]}, every_task(raises=Overloaded("Full; retry.")))
    assert full.status_code == 429 and full.json() == {"message": "Full; retry.", "code": "overloaded", "param": None}
    assert full.headers["retry-after"] == "1"
    async with client_for(every_task()) as client:
        unknown = await client.post("/v2/chat", json={})
    assert unknown.status_code == 404 and unknown.json()["code"] == "route_not_found"


async def test_late_interaction_models_give_matrices_to_openai_clients() -> None:
    engine = every_task()
    answer = (await post("/v1/embeddings", {"model": "late", "input": "a b", "input_type": "query"}, engine)).json()
    assert np.array(answer["data"][0]["embedding"]).shape == (2, 8)
    assert engine.submitted[0].input_type is InputType.QUERY


async def test_truncated_inputs_of_openai_clients_are_named_one_by_one() -> None:
    answer = await post("/v1/embeddings", {"model": "m", "input": ["a", "very long", "b"]})
    cut = [entry.get("truncated") for entry in answer.json()["data"]]
    assert cut == [None, {"from": 99, "to": 2}, None] and answer.json()["usage"]["truncated"] == 1
    assert answer.headers["x-truncated-indices"] == "1"


async def test_the_list_of_truncated_inputs_is_bounded() -> None:
    from infinity_bento.api.inference import truncation_headers
    from infinity_bento.core import Result, Usage

    headers = dict(truncation_headers([Result(None, Usage(1, 1, 2))] * 1000))
    assert headers[b"x-truncated-inputs"] == b"1000"
    assert headers[b"x-truncated-indices"].startswith(b"0,1,2,") and headers[b"x-truncated-indices"].endswith(b"99,...")
