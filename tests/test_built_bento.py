"""A built Bento, served from the store in an empty folder without a network: every native method, every dialect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bentoml
import httpx
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from infinity_bento.api.envelopes import COHERE, OPENAI, SYSTEMONE, TEI
from infinity_bento.api.table import route_table
from tests.bentos import MODELS, Served, environment, serve, tag_of

TEXT = "a cat sat on the mat"
DOCUMENTS = ["a dog lay down", "the cat sat", "stock prices fell"]

# Of each BentoML method: an item, and the field that its result fills.
QUESTIONS = {"q": {"type": "noul", "instructions": "Is it so?"}}
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "embed": ({"text": TEXT, "model": "embedder"}, "embedding"),
    "embed_all": ({"text": TEXT, "model": "embedder"}, "embeddings"),
    "embed_sparse": ({"text": TEXT}, "indices"),
    "rerank": ({"query": TEXT, "documents": DOCUMENTS, "model": "reranker"}, "results"),
    "classify": ({"text": TEXT, "model": "classifier"}, "labels"),
    "similarity": ({"source_sentence": TEXT, "sentences": DOCUMENTS}, "similarities"),
    "decide": ({"state": TEXT, "questions": QUESTIONS, "model": "decider"}, "answers"),
    "tokenize": ({"text": TEXT, "model": "embedder"}, "tokens"),
}

# Of each dialect: a path, a body, and a part of the answer.
REQUESTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/embeddings", {"model": "embedder", "input": TEXT}, '"embedding"'),
    ("/embed", {"model": "embedder", "inputs": TEXT}, "["),
    ("/embed_all", {"model": "embedder", "inputs": TEXT}, "[["),
    ("/embed_sparse", {"inputs": TEXT}, '"index"'),
    ("/similarity", {"inputs": {"source_sentence": TEXT, "sentences": DOCUMENTS}}, "["),
    ("/rerank", {"model": "reranker", "query": TEXT, "texts": DOCUMENTS}, '"score"'),
    ("/predict", {"model": "classifier", "inputs": TEXT}, '"label"'),
    ("/tokenize", {"model": "embedder", "inputs": TEXT}, '"special"'),
    ("/decode", {"model": "embedder", "ids": [101, 7592, 102]}, "hello"),
    ("/v1/rerank", {"model": "reranker", "query": TEXT, "documents": DOCUMENTS}, '"relevance_score"'),
    ("/v1/classify", {"model": "classifier", "input": [TEXT]}, '"label"'),
    ("/v2/embed", {"model": "embedder", "texts": [TEXT], "input_type": "search_query"}, '"float"'),
    ("/v1/systemone", {"model": "decider", "state": TEXT, "questions": QUESTIONS}, '"noul"'),
    ("/v2/rerank", {"model": "reranker", "query": TEXT, "documents": DOCUMENTS}, '"relevance_score"'),
)


@pytest.fixture(scope="module")
def served(built_bento: Path, bento_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    empty = tmp_path_factory.mktemp("empty")
    environ = environment(bento_home, HF_HUB_OFFLINE="1", INFINITY_MAX_BATCH_TOKENS="4096")
    with serve([tag_of(built_bento)], empty, environ, tmp_path_factory.mktemp("log") / "server.log") as made:
        yield made
    assert not list(empty.iterdir()), "serving leaves nothing behind"


@pytest.mark.parametrize("method", METHODS)
def test_each_native_method(method: str, served: Served) -> None:
    item, field = METHODS[method]
    with bentoml.SyncHTTPClient(served.url, server_ready_timeout=30) as client:
        good, bad = getattr(client, method)(items=[item, {**item, "model": "no-such-model"}])
    assert good["error"] is None, good
    assert good[field]
    assert bad["error"]["code"] == "model_not_found"


def test_the_client_sees_all_of_them(served: Served) -> None:
    schema = httpx.get(f"{served.url}/schema.json").json()
    assert set(METHODS) <= {route["name"] for route in schema["routes"]}


@pytest.mark.parametrize(("path", "body", "part"), REQUESTS, ids=[path for path, _, _ in REQUESTS])
def test_each_dialect(path: str, body: dict[str, Any], part: str, served: Served) -> None:
    answer = httpx.post(f"{served.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert part in answer.text


def test_no_dialect_is_left_out() -> None:
    by_path = {path: route for route in route_table() for path in route.paths}
    reached = {id(by_path[path].dialect) for path, _, _ in REQUESTS}
    assert reached == {id(dialect) for dialect in (OPENAI, TEI, COHERE, SYSTEMONE)}


def test_its_numbers_are_those_of_the_reference(served: Served, oracle: SentenceTransformer) -> None:
    answer = httpx.post(f"{served.url}/embed", json={"model": "embedder", "inputs": DOCUMENTS}).json()
    assert np.abs(np.array(answer) - oracle.encode(DOCUMENTS)).max() < 1e-5


def test_models_are_those_built_in_and_the_environment_has_the_last_word(served: Served, built_bento: Path) -> None:
    infos = httpx.get(f"{served.url}/info").json()["models"]
    assert [info["name"] for info in infos] == list(MODELS)
    assert {info["source"] for info in infos} == {"Bento model store"}
    carried = (built_bento / "bento.yaml").read_text()
    assert all(info["revision"] in carried for info in infos)
    assert {info["max_batch_tokens"] for info in infos} == {4096}
    log = served.log.read_text()
    assert "this Bento" in log and "environment INFINITY_MAX_BATCH_TOKENS" in log
    assert "Traceback" not in log
