"""``infinity-bento import``: what enters the model store, how it is verified, how a download goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bentoml
import huggingface_hub
import pytest
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.models import ModelStore

from infinity_bento.checkpoints.preflight import plan_model
from infinity_bento.checkpoints.resolve import find_in_store, resolve
from infinity_bento.errors import ConfigError, LoadError
from infinity_bento.importing import import_model, verify_weights
from infinity_bento.settings import Settings
from infinity_bento.settings import resolve as resolve_settings
from tests import tiny, tiny_laya
from tests.fake_hub import COMMIT, TOKEN, FakeHub, point_at, serving_hub

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model store of its own; no cache of this machine."""
    folder = tmp_path / "home" / "models"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    BentoMLContainer.model_store.set(ModelStore(folder))
    yield folder
    BentoMLContainer.model_store.reset()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A published repository: a checkpoint with weights twice, and much that no server needs."""
    folder = tmp_path / "repository"
    shutil.copytree(tiny.checkpoint("bert"), folder)
    (folder / "pytorch_model.bin").write_bytes(b"the same weights as a pickle")
    (folder / "README.md").write_text("# A model")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"x" * 100)
    return folder


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving_hub() as made:
        made.repositories["org/Model"] = repository
        point_at(monkeypatch, made.url)
        yield made


def settings(model_id: str, **options: str) -> Settings:
    return resolve_settings({"model-id": model_id, "offline": "false", **options})


def run(model_id: str, name: str | None = None, **options: str) -> tuple[str, list[str]]:
    lines: list[str] = []
    return import_model(settings(model_id, **options), name, lines.append), lines


def stored_files(tag: str) -> set[str]:
    folder = Path(bentoml.models.get(tag).path)
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {"model.yaml"}


NEEDED = {
    "1_Pooling/config.json",
    "config.json",
    "config_sentence_transformers.json",
    "model.safetensors",
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_a_folder(repository: Path) -> None:
    tag, lines = run(str(repository), "my-model")
    assert tag.startswith("my-model:")
    assert stored_files(tag) <= NEEDED | {"special_tokens_map.json", "vocab.txt"}
    assert {"config.json", "model.safetensors", "1_Pooling/config.json"} <= stored_files(tag)
    stored = Path(bentoml.models.get(tag).path) / "model.safetensors"
    assert stored.read_bytes() == (repository / "model.safetensors").read_bytes()
    assert stored.stat().st_nlink == 1, "a folder that its owner may edit is copied"
    assert any("model.safetensors" in line and "copied" in line for line in lines)
    found = find_in_store("my-model")
    assert found is not None and found.source == "Bento model store"
    # The same files are the same version; other files are another.
    assert run(str(repository), "my-model")[0] == tag
    (repository / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    assert run(str(repository), "my-model")[0] != tag
    assert len(bentoml.models.list("my-model")) == 2


def test_a_checkpoint_whose_config_is_in_a_subfolder(tmp_path: Path) -> None:
    """Laya has its encoder and tokenizer in folders of their own; what the store has of it can be served."""
    folder = shutil.copytree(tiny_laya.folder(), tmp_path / "laya")
    tag, _ = run(str(folder))
    assert stored_files(tag) == {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    stored = settings(tag, warmup="false")
    plan = plan_model(stored.models[0], stored)
    assert plan.found.source == "Bento model store" and plan.purpose.protocol == "laya"
    (folder / "encoder" / "config.json").unlink()
    with pytest.raises(LoadError, match=r"config\.json"):
        run(str(folder), "broken")


def test_the_hub_needed_files_only_and_by_name_revision_or_version(hub: FakeHub, store: Path) -> None:
    tag, lines = run("org/Model")
    assert tag == f"org--model:{COMMIT[:16]}"
    asked = {path.split(f"{COMMIT}/")[1] for path, _ in hub.downloads()}
    assert asked == stored_files(tag)
    assert not asked & {"pytorch_model.bin", "README.md", "onnx/model.onnx"}
    assert any(line.startswith("[1/") for line in lines) and any("verified" in line for line in lines)
    assert not list((store.parent / "imports").iterdir()), "nothing is left over"
    metadata = bentoml.models.get(tag).info.metadata
    assert (metadata["model_id"], metadata["revision"]) == ("org/Model", COMMIT)
    for revision in (None, "main", COMMIT, COMMIT[:16]):
        assert resolve("org/Model", revision=revision, offline=True).revision == COMMIT
    with pytest.raises(LoadError, match="not revision v2"):
        resolve("org/Model", revision="v2", offline=True)


def test_an_interrupted_download_goes_on_where_it_ended(
    hub: FakeHub, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits between its attempts
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    size = (hub.repositories["org/Model"] / "model.safetensors").stat().st_size
    hub.cut_after = size // 10
    with pytest.raises(LoadError, match=r"is kept in .*: run the import again"):
        run("org/Model")
    assert bentoml.models.list() == []
    (partial,) = (store.parent / "imports").rglob("*.partial")
    assert 0 < partial.stat().st_size < size
    had = partial.stat().st_size
    small_before = len(hub.downloads("tokenizer.json"))
    hub.cut_after, hub.down = None, False
    hub.requests.clear()
    tag, lines = run("org/Model")
    assert [given for _, given in hub.downloads("model.safetensors")] == [f"bytes={had}-"]
    assert small_before == 1 and hub.downloads("tokenizer.json") == []
    assert any("tokenizer.json" in line and "already here" in line for line in lines)
    stored = Path(bentoml.models.get(tag).path) / "model.safetensors"
    assert stored.read_bytes() == (hub.repositories["org/Model"] / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "config_sentence_transformers.json"])
def test_a_damaged_file_is_refused_and_fetched_again(name: str, hub: FakeHub) -> None:
    (hub.repositories["org/Model"] / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    hub.damaged = {name}
    with pytest.raises(LoadError, match=f"{name} of 'org/Model' arrived damaged") as error:
        run("org/Model")
    assert "run the import again" in str(error.value)
    assert bentoml.models.list() == []
    hub.damaged = set()
    assert stored_files(run("org/Model")[0])


def test_a_private_repository(hub: FakeHub) -> None:
    hub.private.add("org/Model")
    with pytest.raises(LoadError, match="is gated; accept its terms"):
        run("org/Model")
    tag, lines = run("org/Model", **{"hf-token": TOKEN})
    assert stored_files(tag)
    written = [path.read_bytes() for path in Path(bentoml.models.get(tag).path).rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in data for data in written)
    assert not any(TOKEN in line for line in lines)


def test_what_cannot_be_served_is_refused_before_its_weights_are_fetched(hub: FakeHub) -> None:
    tiny.edit_config(hub.repositories["org/Model"], model_type="t5", architectures=["T5EncoderModel"])
    with pytest.raises(LoadError, match="'t5' is not supported"):
        run("org/Model")
    assert hub.downloads("config.json") and not hub.downloads("model.safetensors")


def test_cached_files_are_linked(hub: FakeHub, tmp_path: Path) -> None:
    resolve("org/Model", hub_cache=str(tmp_path / "cache"))
    hub.requests.clear()
    tag, _ = run("org/Model", **{"huggingface-hub-cache": str(tmp_path / "cache")})
    assert hub.requests == []
    assert (Path(bentoml.models.get(tag).path) / "model.safetensors").stat().st_nlink > 1


def test_offline_nobody_is_asked(hub: FakeHub) -> None:
    with pytest.raises(LoadError, match="offline mode is on"):
        run("org/Model", offline="true")
    assert hub.requests == []


def test_refusals(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        run(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="--name is 'My Model'"):
        run(str(repository), "My Model")
    weights = repository / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(LoadError, match="its header says"):
        run(str(repository))
    (repository / "bad.safetensors").write_bytes(b"nonsense" * 3)
    with pytest.raises(LoadError, match="is not a safetensors file"):
        verify_weights(repository, ("bad.safetensors",))
    weights.unlink()
    (repository / "pytorch_model.bin").unlink()
    (repository / "bad.safetensors").unlink()
    with pytest.raises(LoadError, match="has no weights"):
        run(str(repository))


def test_the_command(repository: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "BENTOML_HOME": str(tmp_path / "other"), "INFINITY_PRESET": "no-such-preset"}

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "infinity_bento.cli", "import", *words]
        return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    done = command(str(repository), "--name", "mine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine:") and done.stdout.count("\n") == 1
    assert "model.safetensors" in done.stderr
    assert (tmp_path / "other" / "models" / "mine").is_dir()
    failed = command(str(tmp_path / "missing"))
    assert failed.returncode == 2
    assert "does not exist" in failed.stderr and "Traceback" not in failed.stderr
