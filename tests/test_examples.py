"""Examples that work when pasted: those of the documents, answered by a real engine for every kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from infinity_bento.api import native
from infinity_bento.api.app import create_app
from infinity_bento.api.native_table import NATIVE_METHODS
from infinity_bento.api.openapi import NATIVE_TAG
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.engine import Engine
from infinity_bento.settings import resolve
from tests import tiny, tiny_retrieval
from tests.parity.test_classification import language_model


def yes_no() -> Path:
    """A reranker that answers pairs only."""
    folder = tiny.root() / "Qwen3-Reranker-0.6B"
    language_model("qwen3-noeos", folder, "yes", "no")
    return folder


# Kind -> how to make a checkpoint of it, and a few of the routes and methods that must be there, and must not.
KINDS: dict[str, tuple[Callable[[], Path], set[str], set[str]]] = {
    "embedder": (lambda: tiny.checkpoint("bert"), {"/embed", "/v1/embeddings", "/bento/embed"}, {"/rerank"}),
    "classifier": (lambda: tiny.checkpoint("roberta", "cls"), {"/predict", "/v1/classify"}, {"/embed", "/rerank"}),
    "tagger": (lambda: tiny.checkpoint("bert", "token-cls"), {"/predict", "/bento/classify"}, {"/rerank"}),
    "reranker": (yes_no, {"/rerank", "/v2/rerank", "/bento/rerank"}, {"/embed", "/v1/embeddings"}),
    "splade": (tiny_retrieval.splade, {"/embed_sparse", "/bento/embed_sparse"}, {"/embed", "/rerank"}),
    "colbert": (tiny_retrieval.pylate, {"/rerank", "/embed_all", "/bento/rerank", "/v1/embeddings"}, {"/embed"}),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_example_works_or_says_what_it_needs(kind: str) -> None:
    make, present, absent = KINDS[kind]
    settings = resolve({"model-id": str(make()), "served-model-name": "m", "warmup": "false"})
    with Engine.from_settings(settings) as engine:
        app = create_app(lambda: engine, ApiSettings(), native=NATIVE_METHODS)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            paths = (await client.get("/openapi.json")).json()["paths"]
            operations = {path: row["post"] for path, row in paths.items() if "post" in row}
            served = {path for path, operation in operations.items() if "x-needs" not in operation}
            assert present <= served and not absent & served
            for path, operation in operations.items():
                example = operation["requestBody"]["content"]["application/json"]["example"]
                assert "null" not in str(example) and "None" not in str(example)
                if NATIVE_TAG in operation["tags"]:
                    continue
                answer = await client.post(path, json=example)
                assert (answer.status_code == 200) == (path in served), (path, example, answer.text)
                assert ("(needs a" in operation["summary"]) == (path not in served)
        for method in NATIVE_METHODS:
            (item,) = operations[method.path]["requestBody"]["content"]["application/json"]["example"]["items"]
            (result,) = await getattr(native, method.name)(engine, [method.item(**item)])
            assert (result.error is None) == (method.path in served), (method.name, result)
