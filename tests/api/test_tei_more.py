"""TEI's routes beyond /embed and the scores: matrices, sparse vectors, similarity, tokens, routes that choose."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from infinity_bento.core import InputType, Task
from tests.api.fakes import (
    CLASSIFIER,
    EMBEDDER,
    INFO,
    LATE,
    LOADING,
    RERANKER,
    SPLADE,
    TAGGER,
    FakeEngine,
    client_for,
    every_task,
    matrix_of,
    serving,
    sparse_of,
    vector_of,
)


async def post(path: str, body: Any, engine: FakeEngine | None = None) -> httpx.Response:
    async with client_for(engine or every_task()) as client:
        return await client.post(path, json=body)


OPTIONS = {"truncate": False, "truncation_direction": "left", "prompt_name": "query", "input_type": "search_query"}


async def test_embed_all_gives_one_matrix_per_input() -> None:
    engine = serving(EMBEDDER)
    answer = await post("/embed_all", {"inputs": ["a b c", "d"], **OPTIONS}, engine)
    assert [np.array(rows).shape for rows in answer.json()] == [(3, 8), (1, 8)]
    for rows, item in zip(answer.json(), engine.submitted, strict=True):
        assert np.array_equal(np.float32(rows), matrix_of(item, 8))
        assert item.task is Task.EMBED_ALL and item.truncate is False and item.truncation_direction == "left"
        assert item.prompt_name == "query" and item.input_type is InputType.QUERY
    assert answer.headers["x-compute-tokens"] == "4"


async def test_embed_sparse_gives_pairs() -> None:
    engine = serving(SPLADE)
    answer = await post("/embed_sparse", {"inputs": "abba"}, engine)
    row = sparse_of(engine.submitted[0])
    assert [pair["index"] for pair in answer.json()[0]] == row.indices.tolist() == [97, 98]
    assert [np.float32(pair["value"]) for pair in answer.json()[0]] == row.values.tolist()


async def test_similarity_is_the_cosine_in_request_order() -> None:
    engine = every_task()
    body = {
        "inputs": {"source_sentence": "a b", "sentences": ["c", "a b", "d"]},
        "parameters": {"prompt_name": "query", "truncate": True},
        "model": "m",
    }
    answer = await post("/similarity", body, engine)
    scores = answer.json()
    assert [item.text for item in engine.submitted] == ["a b", "c", "a b", "d"]
    assert all(item.normalize and item.prompt_name == "query" and item.truncate for item in engine.submitted)
    vectors = [vector_of(item, 8).astype(np.float64) for item in engine.submitted]
    assert scores == pytest.approx([float(vectors[0] @ other) for other in vectors[1:]], abs=1e-6)
    assert scores[1] == pytest.approx(1.0, abs=1e-6) and max(scores) <= 1.0
    assert answer.headers["x-compute-tokens"] == "6"


async def test_similarity_truncation_names_the_sentences() -> None:
    body = {"inputs": {"source_sentence": "a", "sentences": ["b", "very long"]}, "model": "m"}
    assert (await post("/similarity", body)).headers["x-truncated-indices"] == "2"


async def test_tokenize_shows_bytes_and_specials() -> None:
    body = {"inputs": ["a\u00e9", "b"], "model": "m"}
    answer = (await post("/tokenize", body)).json()
    assert answer[0] == [
        {"id": 0, "text": "<s>", "special": True, "start": None, "stop": None},
        {"id": 97, "text": "a", "special": False, "start": 0, "stop": 1},
        {"id": 233, "text": "\u00e9", "special": False, "start": 1, "stop": 3},
    ]
    bare = (await post("/tokenize", {**body, "add_special_tokens": False, "prompt_name": "query"})).json()
    assert "".join(token["text"] for token in bare[1]) == "query: b"
    single = (await post("/tokenize", {"inputs": "a"}, serving(INFO))).json()
    assert len(single) == 1 and len(single[0]) == 2


@pytest.mark.parametrize(("ids", "texts"), [([0, 65, 66], ["AB"]), ([[65], [0]], ["A", ""])])
async def test_decode(ids: Any, texts: list[str]) -> None:
    assert (await post("/decode", {"ids": ids, "model": "m"})).json() == texts
    kept = (await post("/decode", {"ids": ids, "model": "m", "skip_special_tokens": False})).json()
    assert "".join(kept).count("<s>") == 1


async def test_tokenize_while_loading_is_503() -> None:
    answer = await post("/tokenize", {"inputs": "a"}, FakeEngine(state=LOADING))
    assert answer.status_code == 503 and "stage 2 of 6" in answer.json()["error"]


DEFAULTS = [
    (EMBEDDER, {"inputs": "a"}, Task.EMBED),
    (SPLADE, {"inputs": "a"}, Task.EMBED_SPARSE),
    (LATE, {"inputs": "a"}, Task.EMBED_ALL),
    (RERANKER, {"query": "q", "texts": ["a"]}, Task.RERANK),
    (RERANKER, {"inputs": ["q", "a"]}, Task.CLASSIFY),
    (CLASSIFIER, {"inputs": "a"}, Task.CLASSIFY),
    (TAGGER, {"inputs": "a", "parameters": {}}, Task.CLASSIFY_TOKENS),
    (EMBEDDER, {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {}}, Task.EMBED),
]


@pytest.mark.parametrize("path", ["/", "/invocations"])
@pytest.mark.parametrize(("info", "body", "task"), DEFAULTS)
async def test_the_default_route_does_what_the_model_is_for(info: Any, body: Any, task: Task, path: str) -> None:
    engine = serving(info)
    answer = await post(path, body, engine)
    assert answer.status_code == 200, answer.text
    assert {item.task for item in engine.submitted} == {task}
    assert answer.headers["x-compute-type"] == "cpu"


async def test_the_default_route_takes_the_first_of_several_models_or_the_named_one() -> None:
    engine = every_task()
    assert (await post("/", {"inputs": "a"}, engine)).status_code == 200
    assert engine.submitted[0].task is Task.EMBED
    assert (await post("/", {"inputs": "a", "model": "s"}, engine)).status_code == 200
    assert engine.submitted[0].task is Task.EMBED_SPARSE


async def test_vertex_answers_each_instance_like_its_route() -> None:
    instances = [
        {"inputs": ["a", "b"]},
        {"query": "q", "texts": ["score 1", "score 2"], "raw_scores": True},
        {"inputs": "c", "model": "c"},
        {"inputs": {"source_sentence": "a", "sentences": ["a"]}, "model": "m"},
    ]
    answer = (await post("/vertex", {"instances": instances})).json()
    assert list(answer) == ["predictions"]
    vectors, ranks, labels, cosines = answer["predictions"]
    assert np.array(vectors).shape == (2, 8)
    assert ranks == [{"index": 1, "score": 2.0}, {"index": 0, "score": 1.0}]
    assert {entry["label"] for entry in labels} == {"no", "yes"}
    assert cosines == pytest.approx([1.0], abs=1e-6)
    assert (await post("/vertex", {"instances": []})).json() == {"predictions": []}


async def test_vertex_fault_of_the_server_is_500() -> None:
    answer = await post("/vertex", {"instances": [{"inputs": "a"}]}, every_task(raises=RuntimeError("secret")))
    assert answer.status_code == 500 and "secret" not in answer.text


async def test_the_hugging_face_client() -> None:
    """The bodies that ``InferenceClient`` was recorded to send, and what it makes of the answers."""
    from huggingface_hub.inference._generated.types import (
        TextClassificationOutputElement,
        TokenClassificationOutputElement,
    )

    vectors = (await post("/", {"inputs": ["a", "b"]}, serving(EMBEDDER))).json()
    assert np.array(vectors, dtype="float32").shape == (2, 8)
    options = {"normalize": True, "truncate": True, "prompt_name": "query", "truncation_direction": "Right"}
    assert (await post("/", {"inputs": "a", **options}, serving(EMBEDDER))).status_code == 200
    body = {"inputs": "a", "parameters": {"function_to_apply": "sigmoid", "top_k": 2}}
    labels = TextClassificationOutputElement.parse_obj_as_list((await post("/", body, serving(CLASSIFIER))).json())[0]
    assert [type(label.score) for label in labels] == [float, float]  # type: ignore[attr-defined]
    spans = (await post("/", {"inputs": "ab", "parameters": {}}, serving(TAGGER))).json()
    assert TokenClassificationOutputElement.parse_obj_as_list(spans)[0].entity_group == "WORD"
