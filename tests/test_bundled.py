"""The weights a Bento carries: what may be built, what the built Bento pins, and who has the last word there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bentoml
import pytest
import yaml
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.models import ModelStore
from bentoml.exceptions import BentoMLException

from infinity_bento.bundled import (
    CarriedModel,
    built_bento,
    bundled_weights,
    carried_models,
    carrying_packages,
    needs_hub_token,
    pinned,
    refusal_to_build,
    unless_in_environment,
)
from infinity_bento.checkpoints.resolve import resolve as find
from infinity_bento.settings import Settings, resolve
from infinity_bento.sources import Source
from tests import tiny
from tests.conftest import MINILM
from tests.fake_hub import COMMIT, FakeHub, point_at, serving_hub


@pytest.fixture(autouse=True)
def store(tmp_path: Path) -> Iterator[None]:
    """A model store of its own, with two versions of one model."""
    (tmp_path / "models").mkdir()
    BentoMLContainer.model_store.set(ModelStore(tmp_path / "models"))
    yield
    BentoMLContainer.model_store.reset()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving_hub() as made:
        made.repositories["Org/Model"] = tiny.checkpoint("bert")
        point_at(monkeypatch, made.url)
        yield made


def add(tag: str, **metadata: str) -> None:
    with bentoml.models.create(tag, metadata=metadata) as model:
        (Path(model.path) / "config.json").write_text("{}")


def settings(**options: str) -> Settings:
    return resolve(options)


def test_imported_models_come_from_the_store_each_once() -> None:
    add("org--one:v1", revision=COMMIT)
    add("two:v7")
    weights = bundled_weights(settings(model_id="org/One;two;org/One", served_model_name="a;b;c"))
    infos = [entry.to_info() for entry in weights]
    assert [str(info.tag) for info in infos] == ["org--one:v1", "two:v7"]
    assert [info.metadata for info in infos] == [
        {"model_id": "org/One", "revision": COMMIT},
        {"model_id": "two", "revision": "v7"},
    ]
    assert {info.registry for info in infos} == {"bentoml"}
    assert not needs_hub_token(weights)


def test_others_come_from_the_hub_at_the_commit_of_now(hub: FakeHub) -> None:
    (weights,) = bundled_weights(resolve({"model-id": "Org/Model"}, {"HF_TOKEN": "hf_t"}))
    info = weights.to_info()
    assert info.registry == "huggingface"
    assert info.metadata["model_id"] == "Org/Model", "BentoML's own class would write it in lower case"
    assert info.metadata["revision"] == COMMIT and info.metadata["endpoint"] == hub.url
    assert "model.safetensors" in info.metadata["include"] and "README.md" not in info.metadata["include"]
    assert needs_hub_token([weights])
    assert not needs_hub_token(bundled_weights(settings(model_id="Org/Model")))
    model = info.to_model()
    assert (model.model_id, model.revision) == ("Org/Model", COMMIT)


def test_a_package_carries_its_model_unless_it_was_imported() -> None:
    assert list(carrying_packages(settings())) == [MINILM]
    assert bundled_weights(settings()) == []
    add("sentence-transformers--all-minilm-l6-v2:v1")
    assert carrying_packages(settings()) == {}
    assert len(bundled_weights(settings())) == 1
    assert carrying_packages(settings(revision="main")) == {}, "the package does not say which revision it is"


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(arguments: dict[str, str], environ: dict[str, str] | None = None) -> str:
        return refusal_to_build(resolve(arguments, environ or {}), arguments) or ""

    assert refusal({"model_id": "org/one", "port": "80"}, {"HF_TOKEN": "t", "INFINITY_PORT": "81"}) == ""
    assert refusal({"preset": "bge-m3"}) == ""
    assert "set INFINITY_API_KEY where it is served" in refusal({"api_key": "k"})
    assert "set INFINITY_HF_TOKEN where it is served" in refusal({"hf_token": "t"})
    for variable, name in (("INFINITY_MODEL_ID", "model_id"), ("INFINITY_REVISION", "revision")):
        text = refusal({}, {variable: "org/one"})
        assert variable in text and f"give --arg {name}=" in text
    preset = tmp_path / "own.yaml"
    preset.write_text("model-id: org/one\n")
    assert "outside configs/" in refusal({"preset": str(preset)})
    with pytest.raises(BentoMLException, match="reason"):
        bundled_weights(settings(), "reason")[0].to_info()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (weights,) = bundled_weights(settings(model_id="folder"))
    with pytest.raises(BentoMLException, match="import folder --name NAME"):
        weights.to_info()


def test_without_a_hub_the_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(monkeypatch, "http://127.0.0.1:9")
    (weights,) = bundled_weights(settings(model_id="Org/Model"))
    with pytest.raises(BentoMLException, match=r"cannot be reached.*run 'infinity-bento import Org/Model' first"):
        weights.to_info()
    assert weights.resolve() is None, "a checkout finds its files itself"


def test_a_built_bento_serves_what_was_built_in(tmp_path: Path) -> None:
    source = tmp_path / "bento" / "src"
    source.mkdir(parents=True)
    service = source / "service.py"
    assert built_bento(service) is None
    models = [
        {"tag": "org--one:v1", "metadata": {"model_id": "org/One", "revision": COMMIT}},
        {"tag": "two:v7", "metadata": {"model_id": "two", "revision": "v7"}},
        {"tag": "org--three:x", "registry": "huggingface", "metadata": {"model_id": "org/Three", "revision": "c" * 40}},
    ]
    file = tmp_path / "bento" / "bento.yaml"
    file.write_text(yaml.safe_dump({"services": [{"name": "s", "models": models}]}))
    assert built_bento(service) == file
    carried = carried_models(file)
    assert carried[2] == CarriedModel("org/Three", "org--three:x", "huggingface", "c" * 40)

    served = settings(model_id="org/One;two;org/Three;else/where")
    got = pinned(served, carried, {"BENTOML_HF_CACHE_DIR": "/image/hf-models"})
    assert [model.revision for model in got.models] == [COMMIT, "v7", "c" * 40, None]
    assert [model.model_id for model in got.models] == [model.model_id for model in served.models]
    assert got.huggingface_hub_cache == "/image/hf-models"
    assert got.origins["revision"].source is Source.BENTO
    assert pinned(settings(model_id="else/where"), carried, {}).models[0].revision is None
    assert pinned(settings(model_id="two"), carried, {"BENTOML_HF_CACHE_DIR": "/x"}).huggingface_hub_cache is None

    # Later imports change nothing: the pinned version is found beside a newer one.
    add("two:v7")
    add("two:v8")
    assert find("two", revision="v7", offline=True).path.name == "v7"
    assert find("two", offline=True).path.name == "v8"


def test_the_environment_of_a_built_bento_has_the_last_word() -> None:
    arguments = {"max_batch_tokens": "8192", "port": "80", "huggingface-hub-cache": "/a"}
    assert unless_in_environment(arguments, {}) == arguments
    assert unless_in_environment(arguments, {"INFINITY_PORT": "81", "HF_HUB_CACHE": "/b"}) == {
        "max_batch_tokens": "8192"
    }
    assert unless_in_environment(arguments, {"INFINITY_PORT": ""}) == arguments
