"""Learned sparse and static models against sentence-transformers on the same files."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling

from infinity_bento.checkpoints.families import TABLE, family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.checkpoints.learned_sparse import read_learned_sparse
from infinity_bento.core import FloatArray, InputType, Item, Pooling, SparseRow, Task
from infinity_bento.heads.build import build_embedding_head
from infinity_bento.heads.sparse import build_sparse_head
from infinity_bento.inputs.static import load_routed_tokenizer, load_static_tokenizer
from infinity_bento.inputs.tokenization import TextRules, TextTokenizer, load_text_tokenizer
from infinity_bento.models.backbone import load_backbone
from infinity_bento.models.static import RoutedBackbone, StaticBackbone
from infinity_bento.runners.runner import Runner
from tests import tiny
from tests import tiny_retrieval as made
from tests.tiny_retrieval import DOCUMENTS, QUERIES

TOLERANCE = 2e-5
TEXTS = QUERIES + DOCUMENTS
MASKED = [family.model_type for family in TABLE if family.heads.masked_lm is not None]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Sums over several threads may differ in the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def served(folder: Path) -> tuple[Runner, TextTokenizer]:
    """Our runner and tokenizer of a sparse checkpoint."""
    layout = read_layout(folder)
    sparse = read_learned_sparse(layout)
    family = family_of(layout.config, layout.transformer_path / "config.json")
    backbone = load_backbone(layout, family, dtype=torch.float32)
    head = build_sparse_head(layout, family, backbone, sparse)
    rules = TextRules(max_input_length=510, vocabulary_size=layout.config["vocab_size"], prompts=layout.prompts)
    if sparse.query is None:
        return Runner(backbone, {Task.EMBED_SPARSE: head}), load_text_tokenizer(layout.transformer_path, rules)
    tokenizer = load_routed_tokenizer(layout, sparse, rules, token_budget=16384)
    return Runner(RoutedBackbone(backbone), {Task.EMBED_SPARSE: head}), tokenizer


def dense(rows: list[SparseRow], width: int) -> FloatArray:
    """Sparse rows as a matrix; checks that they are in order and hold no zeros."""
    matrix = np.zeros((len(rows), width), dtype=np.float32)
    for row, target in zip(rows, matrix, strict=True):
        assert row.indices.dtype == np.int32
        assert row.values.dtype == np.float32
        assert (np.diff(row.indices) > 0).all()
        assert (row.values > 0).all()
        target[row.indices] = row.values
    return matrix


def check(folder: Path, items: list[Item], expected: FloatArray) -> None:
    """Alone, together and shuffled equal the reference."""
    runner, tokenizer = served(folder)
    width = expected.shape[1]
    assert 0.05 < (expected > 0).mean() < 0.99
    order = random.Random(1).sample(range(len(items)), len(items))
    for outputs in (
        made.alone(runner, tokenizer, items),
        made.run(runner, tokenizer, items),
        made.run(runner, tokenizer, items, order),
    ):
        ours = dense(outputs, width)
        assert np.abs(ours - expected).max() < TOLERANCE
        assert ((ours > 0) != (expected > TOLERANCE)).mean() < 1e-3  # what is zero there is absent here


def items(side: InputType | None = None, texts: list[str] = TEXTS) -> list[Item]:
    return [Item(Task.EMBED_SPARSE, text=text, input_type=side) for text in texts]


@pytest.mark.parametrize("name", MASKED)
def test_every_masked_language_model(name: str) -> None:
    folder = tiny.checkpoint(name, "mlm")
    expected = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    check(folder, items(), expected)


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_pooling_and_activation(pooling: str, activation: str) -> None:
    folder = made.splade(pooling=pooling, activation=activation)
    model = SparseEncoder(str(folder), device="cpu")
    assert isinstance(model[1], SpladePooling)
    expected = model.encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    check(folder, items(), expected)


@pytest.mark.parametrize("by_token", [False, True], ids=["tensor", "JSON"])
def test_queries_of_an_inference_free_model(by_token: bool) -> None:
    folder = made.inference_free(by_token=by_token)
    model = SparseEncoder(str(made.inference_free()), device="cpu")
    queries = model.encode_query(QUERIES, convert_to_sparse_tensor=False).numpy()
    documents = model.encode_document(DOCUMENTS, convert_to_sparse_tensor=False).numpy()
    width = documents.shape[1]
    queries = np.pad(queries, ((0, 0), (0, width - queries.shape[1])))
    runner, tokenizer = served(folder)
    mixed = [*items(InputType.QUERY, QUERIES), *items(InputType.DOCUMENT, DOCUMENTS)]
    expected = np.concatenate([queries, documents])
    order = random.Random(1).sample(range(len(mixed)), len(mixed))
    for outputs in (
        made.alone(runner, tokenizer, mixed),
        made.run(runner, tokenizer, mixed),
        made.run(runner, tokenizer, mixed, order),
        made.run(runner, tokenizer, mixed[: len(QUERIES)]) + made.run(runner, tokenizer, mixed[len(QUERIES) :]),
    ):
        assert np.abs(dense(outputs, width) - expected).max() < TOLERANCE
    unsaid = dense(made.run(runner, tokenizer, items(None, DOCUMENTS)), width)
    assert np.abs(unsaid - documents).max() < TOLERANCE


@pytest.mark.parametrize("normalize", [True, False])
def test_static_embeddings(normalize: bool) -> None:
    folder = made.static_embedding(normalize=normalize)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    layout = read_layout(folder)
    backbone = StaticBackbone.load(layout.transformer_path)
    head = build_embedding_head(
        replace(layout, modules=layout.modules[1:]),
        hidden_size=backbone.hidden_size,
        device=backbone.device,
        default_pooling=Pooling.MEAN,
    )
    rules = TextRules(max_input_length=16384, vocabulary_size=backbone.vocabulary_size)
    tokenizer = load_static_tokenizer(layout.transformer_path, rules)
    runner = Runner(backbone, {Task.EMBED: head})
    asked = [Item(Task.EMBED, text=text) for text in TEXTS]
    order = random.Random(1).sample(range(len(asked)), len(asked))
    for outputs in (
        made.alone(runner, tokenizer, asked),
        made.run(runner, tokenizer, asked),
        made.run(runner, tokenizer, asked, order),
    ):
        assert np.abs(np.stack(outputs) - expected).max() < TOLERANCE
