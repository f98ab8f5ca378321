from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.util import maxsim as reference

from infinity_bento import maxsim as module
from infinity_bento.core import FloatArray
from infinity_bento.maxsim import maxsim


def matrices(lengths: list[int], seed: int = 0) -> list[FloatArray]:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(length, 8)).astype(np.float32) for length in lengths]


def theirs(query: FloatArray, documents: list[FloatArray], *, mean: bool) -> FloatArray:
    tensors = [torch.from_numpy(document) for document in documents]
    scores: FloatArray = reference([torch.from_numpy(query)], tensors, length_normalize=mean)[0].numpy()
    return scores


@pytest.mark.parametrize("mean", [False, True])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_equals_the_library(mean: bool, rows: int, lengths: list[int]) -> None:
    (query,) = matrices([rows], seed=1)
    documents = matrices(lengths)
    scores = maxsim(query, documents, mean=mean)
    assert scores.dtype == np.float32
    assert np.allclose(scores, theirs(query, documents, mean=mean), atol=1e-5)


def test_blocks_do_not_change_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    (query,) = matrices([4], seed=1)
    documents = matrices([3, 0, 7, 1, 12, 2, 0, 5])
    whole = maxsim(query, documents)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 8 * 6)  # six rows of a document
    assert np.allclose(maxsim(query, documents), whole, atol=1e-6)
    assert np.allclose([maxsim(query, [document])[0] for document in documents], whole, atol=1e-6)
    assert (whole[[0, 2, 3, 4, 5, 7]] != 0).all()


def test_nothing_to_compare_is_zero() -> None:
    (query,) = matrices([4])
    empty = np.zeros((0, 8), np.float32)
    assert maxsim(query, []).shape == (0,)
    assert maxsim(query, [empty, empty]).tolist() == [0.0, 0.0]
    assert maxsim(empty, [query], mean=True).tolist() == [0.0]


def test_half_precision_matrices_are_scored_in_float32() -> None:
    (query,), documents = matrices([4]), matrices([3, 5], seed=2)
    halves = [document.astype(np.float16) for document in documents]
    scores = maxsim(query, halves)  # type: ignore[arg-type]
    assert scores.dtype == np.float32
    assert np.allclose(scores, maxsim(query, [half.astype(np.float32) for half in halves]))
