"""The vectors that Text Embeddings Inference publishes for MiniLM (its candle backend's snapshots, float32)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity_bento.core import FloatArray, Item, Result, Task
from infinity_bento.engine import Engine
from infinity_bento.settings import resolve
from tests.conftest import MINILM

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "oracles" / "tei_minilm.json").read_text())
TEXTS = PUBLISHED["texts"]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    mean, cls = (resolve({"model-id": MINILM, **options}) for options in ({}, {"pooling": "cls"}))
    with Engine.from_settings(mean) as first, Engine.from_settings(cls) as second:
        yield {"mean": first, "cls": second}


def vectors(engine: Engine, texts: list[str], task: Task = Task.EMBED) -> list[FloatArray]:
    items = [Item(task, text=text, normalize=False) for text in texts]
    found = engine.submit_sync(engine.infos()[0].name, items)
    assert all(isinstance(outcome, Result) for outcome in found)
    return [outcome.output for outcome in found if isinstance(outcome, Result)]


def compare(ours: FloatArray, theirs: FloatArray) -> None:
    cosines = (ours * theirs).sum(-1) / np.linalg.norm(ours, axis=-1) / np.linalg.norm(theirs, axis=-1)
    assert cosines.min() > 0.99999
    assert np.abs(ours - theirs).max() < 6e-3  # candle's gelu is the tanh one


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_pooled_vectors(engines: dict[str, Engine], pooling: str) -> None:
    theirs = np.array(PUBLISHED[pooling])
    compare(np.stack(vectors(engines[pooling], TEXTS[: len(theirs)])), theirs)


def test_raw_vectors(engines: dict[str, Engine]) -> None:
    theirs = np.array(PUBLISHED["raw"])
    (ours,) = vectors(engines["mean"], TEXTS[:1], Task.EMBED_ALL)
    assert ours.shape == theirs.shape
    compare(ours, theirs)
