"""Sparse and late-interaction models over HTTP, against sentence-transformers on the same files."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SparseEncoder

from infinity_bento.api.app import create_app
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.engine import Engine
from infinity_bento.settings import resolve
from tests import tiny_retrieval as made
from tests.tiny_retrieval import DOCUMENTS, QUERIES

MSGPACK = {"accept": "application/msgpack"}
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    models = {"late": made.pylate(), "sparse": made.splade(), "routed": made.inference_free()}
    chosen = {"model-id": [str(folder) for folder in models.values()], "served-model-name": list(models)}
    with Engine.from_settings(resolve(chosen)) as loaded:
        yield loaded


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(lambda: engine, ApiSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as made_client:
        yield made_client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def untensor(value: Any) -> np.ndarray[Any, Any]:
    data = value["data"] if isinstance(value["data"], bytes) else base64.b64decode(value["data"])
    return np.frombuffer(data, np.dtype(value["dtype"]).newbyteorder("<")).reshape(value["shape"])


def dense(rows: list[list[dict[str, Any]]], width: int) -> np.ndarray[Any, Any]:
    matrix = np.zeros((len(rows), width), np.float32)
    for row, target in zip(rows, matrix, strict=True):
        for entry in row:
            target[entry["index"]] = entry["value"]
    return matrix


async def test_sparse_vectors(client: httpx.AsyncClient) -> None:
    model = SparseEncoder(str(made.splade()), device="cpu")
    expected = model.encode(DOCUMENTS, convert_to_sparse_tensor=False).numpy()
    rows = await post(client, "/embed_sparse", inputs=DOCUMENTS, model="sparse")
    assert np.abs(dense(rows, expected.shape[1]) - expected).max() < TOLERANCE
    alone = [(await post(client, "/embed_sparse", inputs=text, model="sparse"))[0] for text in DOCUMENTS]
    assert np.abs(dense(alone, expected.shape[1]) - expected).max() < TOLERANCE


async def test_queries_and_documents_of_a_model_that_tells_them_apart(client: httpx.AsyncClient) -> None:
    model = SparseEncoder(str(made.inference_free()), device="cpu")
    for texts, side, encode in (
        (QUERIES, "query", model.encode_query),
        (DOCUMENTS, "document", model.encode_document),
    ):
        expected = encode(texts, convert_to_sparse_tensor=False).numpy()
        rows = await post(client, "/embed_sparse", inputs=texts, model="routed", input_type=side)
        assert np.abs(dense(rows, expected.shape[1]) - expected).max() < TOLERANCE


async def test_a_sparse_vector_has_the_same_bits_in_every_form(client: httpx.AsyncClient) -> None:
    body = {"inputs": DOCUMENTS[0], "model": "sparse"}
    (pairs,) = await post(client, "/embed_sparse", **body)
    (tensors,) = await post(client, "/embed_sparse", **body, encoding_format="tensor")
    (packed,) = msgpack.unpackb((await client.post("/embed_sparse", json=body, headers=MSGPACK)).content)
    assert untensor(tensors["indices"]).tolist() == [pair["index"] for pair in pairs] == [p["index"] for p in packed]
    values = np.float32([pair["value"] for pair in pairs]).tobytes()
    assert untensor(tensors["values"]).tobytes() == values == np.float32([p["value"] for p in packed]).tobytes()


@pytest.mark.parametrize(("path", "field"), [("/embed_all", "inputs"), ("/v1/embeddings", "input")])
async def test_token_matrices(client: httpx.AsyncClient, path: str, field: str) -> None:
    model = MultiVectorEncoder(str(made.pylate()), device="cpu")
    for texts, side, expected in (
        (QUERIES, "query", model.encode_query(QUERIES)),
        (DOCUMENTS, "document", model.encode_document(DOCUMENTS)),
    ):
        body = {field: texts, "model": "late", "input_type": side}
        found = await post(client, path, **body)
        rows = found if isinstance(found, list) else [entry["embedding"] for entry in found["data"]]
        for row, wanted in zip(rows, expected, strict=True):
            assert np.abs(np.array(row) - np.asarray(wanted)).max() < TOLERANCE
        tensors = await client.post(path, json={**body, "encoding_format": "tensor"}, headers=MSGPACK)
        unpacked = msgpack.unpackb(tensors.content)
        packed = unpacked if isinstance(unpacked, list) else [entry["embedding"] for entry in unpacked["data"]]
        for row, tensor in zip(rows, packed, strict=True):
            assert np.array(row, dtype=np.float32).tobytes() == untensor(tensor).tobytes()


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_ranked_by_maxsim(client: httpx.AsyncClient, path: str) -> None:
    model = MultiVectorEncoder(str(made.pylate()), device="cpu")
    expected = model.similarity(model.encode_query(QUERIES), model.encode_document(DOCUMENTS)).numpy()
    for query, scores in zip(QUERIES, expected, strict=True):
        answer = await post(client, path, query=query, documents=DOCUMENTS, model="late")
        found = {row["index"]: row["relevance_score"] for row in answer["results"]}
        assert [row["index"] for row in answer["results"]] == np.argsort(-scores, kind="stable").tolist()
        # Sums of 32 cosines.
        assert found == pytest.approx(dict(enumerate(scores.tolist())), abs=32 * TOLERANCE)


async def test_another_task_names_the_models_that_can(client: httpx.AsyncClient) -> None:
    answer = await client.post("/embed_sparse", json={"inputs": "a", "model": "late"})
    assert answer.status_code == 424 and "'sparse', 'routed'" in answer.json()["error"]
