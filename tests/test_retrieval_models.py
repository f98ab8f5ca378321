"""Late-interaction, sparse and static checkpoints served by the engine, from the folder to the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder

from infinity_bento.core import FloatArray, InputType, Item, Result, Task
from infinity_bento.engine import Engine
from infinity_bento.errors import ConfigError, UnsupportedTask
from infinity_bento.maxsim import maxsim
from infinity_bento.settings import resolve
from tests import tiny
from tests import tiny_retrieval as made
from tests.tiny_retrieval import DOCUMENTS, QUERIES


def serve(folder: Path, **options: Any) -> Engine:
    return Engine.from_settings(resolve({"model-id": str(folder), "served-model-name": "m", **options}))


def ask(engine: Engine, task: Task, texts: list[str], side: InputType | None = None) -> list[Any]:
    outcomes = engine.submit_sync("m", [Item(task, text=text, input_type=side) for text in texts])
    assert all(isinstance(outcome, Result) for outcome in outcomes), outcomes
    return [outcome.output for outcome in outcomes if isinstance(outcome, Result)]


def dense(rows: list[Any], width: int) -> FloatArray:
    matrix = np.zeros((len(rows), width), np.float32)
    for row, target in zip(rows, matrix, strict=True):
        target[row.indices] = row.values
    return matrix


@pytest.mark.parametrize("make", [made.stanford, made.pylate, made.jina_colbert])
def test_late_interaction(make: Callable[[], Path]) -> None:
    folder = make()
    with serve(folder) as engine:
        (info,) = engine.infos()
        assert info.tasks == (Task.EMBED_ALL,)
        assert (info.dimensions, info.normalize, info.similarity) == (made.WIDTH, True, "MaxSim")
        queries = ask(engine, Task.EMBED_ALL, QUERIES, InputType.QUERY)
        documents = ask(engine, Task.EMBED_ALL, DOCUMENTS)
        with pytest.raises(UnsupportedTask, match="cannot embed; it can embed_all"):
            engine.resolve("m", Task.EMBED)
    assert [len(query) for query in queries] == [32] * 4
    if make is made.jina_colbert:
        return
    model = MultiVectorEncoder(str(folder), device="cpu")
    expected = model.similarity(model.encode_query(QUERIES), model.encode_document(DOCUMENTS)).numpy()
    assert np.abs(np.stack([maxsim(query, documents) for query in queries]) - expected).max() < 6e-4


def test_sparse_by_option_and_by_files() -> None:
    folder = tiny.checkpoint("distilbert", "mlm")
    with serve(folder, pooling="splade") as engine:
        rows = ask(engine, Task.EMBED_SPARSE, DOCUMENTS)
        assert engine.infos()[0].tasks == (Task.EMBED_SPARSE,)
    expected = SparseEncoder(str(folder), device="cpu").encode(DOCUMENTS, convert_to_sparse_tensor=False).numpy()
    assert np.abs(dense(rows, expected.shape[1]) - expected).max() < 2e-5
    with pytest.raises(ConfigError, match="pooling splade needs a masked language model"):
        serve(tiny.checkpoint("bert"), pooling="splade")


def test_inference_free_queries() -> None:
    folder = made.inference_free()
    with serve(folder) as engine:
        queries = ask(engine, Task.EMBED_SPARSE, QUERIES, InputType.QUERY)
        documents = ask(engine, Task.EMBED_SPARSE, DOCUMENTS, InputType.DOCUMENT)
    model = SparseEncoder(str(folder), device="cpu")
    expected = model.encode_query(QUERIES, convert_to_sparse_tensor=False).numpy()
    assert np.abs(dense(queries, expected.shape[1]) - expected).max() < 2e-5
    expected = model.encode_document(DOCUMENTS, convert_to_sparse_tensor=False).numpy()
    assert np.abs(dense(documents, expected.shape[1]) - expected).max() < 2e-5


def test_static_embeddings() -> None:
    folder = made.static_embedding()
    with serve(folder) as engine:
        rows = ask(engine, Task.EMBED, [*DOCUMENTS, "no yes paris " * 200])
        (info,) = engine.infos()
        assert (info.tasks, info.dimensions, info.pooling) == ((Task.EMBED,), made.WIDTH, "mean")
    expected = SentenceTransformer(str(folder), device="cpu").encode([*DOCUMENTS, "no yes paris " * 200])
    assert np.abs(np.stack(rows) - expected).max() < 2e-5


def test_token_embeddings_of_a_dense_model() -> None:
    with serve(tiny.checkpoint("bert")) as engine:
        matrices = ask(engine, Task.EMBED_ALL, DOCUMENTS)
        assert engine.infos()[0].tasks == (Task.EMBED, Task.EMBED_ALL)
    model = SentenceTransformer(str(tiny.checkpoint("bert")), device="cpu")
    expected = model.encode(DOCUMENTS, output_value="token_embeddings")
    for matrix, wanted in zip(matrices, expected, strict=True):
        assert np.abs(matrix - wanted.numpy()).max() < 2e-5
