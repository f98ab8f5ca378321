"""``infinity-bento import``: a checkpoint into the Bento model store, from where a Bento carries it without a hub.

Only what a server needs is taken, every file is verified, and what was fetched before an interruption is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity_bento.checkpoints.preflight import read_plan
from infinity_bento.checkpoints.resolve import (
    HubFile,
    ResolvedModel,
    fetch_hub_file,
    find_locally,
    incomplete,
    list_hub,
    store_tag,
    wanted_files,
)
from infinity_bento.errors import ConfigError, LoadError
from infinity_bento.options import MODEL_OPTIONS
from infinity_bento.settings import Settings, resolve
from infinity_bento.sources import join_values

Report = Callable[[str], None]

_STORE_NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]*[a-z0-9])?")
_WEIGHTS = (".safetensors", ".bin")
_CHUNK = 1 << 20
VERSION_LENGTH = 16  # hexadecimal digits of the commit, or of the digest of the files


@dataclass(frozen=True, slots=True)
class Source:
    """A complete checkpoint on this machine, ready to enter the store."""

    folder: Path
    files: tuple[str, ...]
    version: str
    origin: str
    commit: str | None = None
    may_move: bool = False  # the folder is our own: its files move instead of being copied
    may_link: bool = False  # nobody edits these files in place: a hard link saves their size


def import_model(settings: Settings, name: str | None, report: Report) -> str:
    """Put a checkpoint into the Bento model store.

    Args:
        settings: Of one model: its id (a folder or a hub id) and revision; token, cache and offline of the server.
        name: Name in the store; None: that of the hub id or the folder, in lower case.
        report: Takes one line of text.

    Returns:
        The tag, such as ``baai--bge-m3:5617a9f61b028005``.

    Raises:
        LoadError: The checkpoint cannot be found, fetched, verified or served.
        ConfigError: ``name`` is no name for the store.
    """
    (model,) = settings.models
    found = find_locally(
        model.model_id, revision=model.revision, hub_cache=settings.huggingface_hub_cache, offline=settings.offline
    )
    name = _store_name(name, model.model_id)
    if found is None:
        source = _fetch(settings, name, report)
    else:
        report(f"{model.model_id}: {found.source}, {found.path}")
        source = _describe(found, report)
    read_plan(model, ResolvedModel(source.folder, source.origin, model.model_id, source.commit))
    tag = f"{name}:{source.version}"
    if _already_there(tag):
        report(f"{tag} is already in the Bento model store, with these files")
    else:
        verify_weights(source.folder, source.files)
        _store(tag, source, model.model_id, model.revision, report)
    if source.may_move:
        shutil.rmtree(source.folder, ignore_errors=True)
    return tag


def _store_name(name: str | None, model_id: str) -> str:
    chosen = name if name is not None else store_tag(_plain_name(model_id))
    if not _STORE_NAME.fullmatch(chosen):
        raise ConfigError(
            f"--name is {chosen!r}; it must be lower-case letters, digits, '-', '_' and '.', such as my-model.",
            param="name",
        )
    return chosen


def _plain_name(model_id: str) -> str:
    folder = Path(model_id).expanduser()
    if not folder.is_dir():
        return model_id
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.resolve().name).strip("-_.")


# From this machine --------------------------------------------------------------------------------------------------


def _describe(found: ResolvedModel, report: Report) -> Source:
    """A folder that is there: its needed files, and a version that follows from them."""
    missing = incomplete(found.path)
    if missing is not None:
        raise LoadError(f"{found.path} has no {missing}; give the folder of a complete checkpoint.")
    present = [path.relative_to(found.path).as_posix() for path in found.path.rglob("*") if path.is_file()]
    files = tuple(wanted_files(name for name in present if not name.startswith(".")))
    report(f"{len(files)} of {len(present)} files are needed, {_megabytes(_size(found.path, files))}")
    version = (found.revision or _digest(found.path, files))[:VERSION_LENGTH]
    in_cache = found.source != "local path"
    return Source(found.path, files, version, found.source, found.revision, may_link=in_cache)


def _digest(folder: Path, files: tuple[str, ...]) -> str:
    """The same files have the same digest, wherever they lie."""
    total = hashlib.sha256()
    for name in files:
        total.update(f"{name}\0{_sha256(folder / name)}\0".encode())
    return total.hexdigest()


# From the hub -------------------------------------------------------------------------------------------------------


def _fetch(settings: Settings, name: str, report: Report) -> Source:
    """Download into a folder beside the store; an interrupted download goes on there."""
    (model,) = settings.models
    token = settings.hf_token.reveal() if settings.hf_token else None
    listing = list_hub(model.model_id, revision=model.revision, token=token)
    names = tuple(file.name for file in listing.files)
    staging = _store_folder().parent / "imports" / f"{name}-{listing.commit}"
    total = sum(file.size or 0 for file in listing.files)
    report(f"{model.model_id} at {listing.commit}: {len(names)} files, {_megabytes(total)}, into {staging}")
    _require_space(staging, total)
    # Small files first: a checkpoint that cannot be served is refused before its weights are fetched.
    ordered = sorted(listing.files, key=lambda file: (file.name.endswith(_WEIGHTS), file.name))
    checked = False
    for number, file in enumerate(ordered, start=1):
        if file.name.endswith(_WEIGHTS) and not checked:
            read_plan(model, ResolvedModel(staging, "Hugging Face hub", model.model_id, listing.commit))
            checked = True
        known = (staging / file.name).is_file() and _fault(staging / file.name, file) is None
        if not known:
            _fetch_file(model.model_id, file, listing.commit, staging, token)
            _verify(staging / file.name, file, model.model_id)
        verb = "already here" if known else "verified"
        report(f"[{number}/{len(ordered)}] {file.name} {_megabytes(file.size or 0)} {verb}")
    missing = incomplete(staging)
    if missing is not None:
        raise LoadError(
            f"Hub repository {model.model_id!r} at {listing.commit} has no {missing}; choose a repository that holds a "
            "checkpoint with config.json, a tokenizer and weights (*.safetensors or pytorch_model*.bin)."
        )
    version = listing.commit[:VERSION_LENGTH]
    return Source(staging, names, version, "Hugging Face hub", listing.commit, may_move=True)


def _fetch_file(model_id: str, file: HubFile, commit: str, staging: Path, token: str | None) -> None:
    try:
        fetch_hub_file(model_id, file, commit=commit, folder=staging, token=token)
    except LoadError as error:
        raise LoadError(f"{error.message} What was fetched is kept in {staging}: run the import again.") from error


def _verify(path: Path, file: HubFile, model_id: str) -> None:
    fault = _fault(path, file)
    if fault is not None:
        path.unlink(missing_ok=True)
        raise LoadError(
            f"{file.name} of {model_id!r} arrived damaged ({fault}) and was removed; run the import again, which "
            "fetches only what is missing."
        )


def _fault(path: Path, file: HubFile) -> str | None:
    """How a file differs from what the hub says of it, or None."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"{size} bytes instead of {file.size}"
    if file.sha256 is not None and _sha256(path) != file.sha256:
        return "its SHA-256 differs"
    if file.blob_id is not None and _blob_id(path) != file.blob_id:
        return "its git blob id differs"
    return None


def _require_space(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    here = _size(folder, tuple(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()))
    free = shutil.disk_usage(folder).free
    if needed - here > free:
        raise LoadError(
            f"{folder} has {_megabytes(free)} free, and {_megabytes(needed - here)} more are needed; make room, or set "
            "BENTOML_HOME to a folder on a larger disk."
        )


# Verifying and storing ----------------------------------------------------------------------------------------------


def verify_weights(folder: Path, files: tuple[str, ...]) -> None:
    """Check that every safetensors file is as long as its header says.

    Raises:
        LoadError: A file was cut off, or is no safetensors file.
    """
    for name in files:
        if not name.endswith(".safetensors"):
            continue
        path = folder / name
        size = path.stat().st_size
        try:
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length)) if 0 < length <= size else {}
            end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise LoadError(f"{path} is not a safetensors file; fetch it again.") from error
        if size != 8 + length + end:
            raise LoadError(f"{path} has {size} bytes, its header says {8 + length + end}; fetch it again.")


def _store_folder() -> Path:
    from bentoml._internal.configuration.containers import BentoMLContainer

    return Path(BentoMLContainer.model_store.get()._path)


def _already_there(tag: str) -> bool:
    import bentoml
    from bentoml.exceptions import NotFound

    try:
        return bool(bentoml.models.list(tag))
    except NotFound:
        return False


def _store(tag: str, source: Source, model_id: str, revision: str | None, report: Report) -> None:
    """Enter the files under a tag, all or none; the public ``bentoml.models.create`` would copy them twice."""
    from bentoml._internal.configuration.containers import BentoMLContainer
    from bentoml.models import Model, ModelContext, ModelOptions

    is_folder = source.origin == "local path"
    metadata = {
        "model_id": tag.partition(":")[0] if is_folder else model_id,
        "revision": source.commit,
        "requested_revision": None if is_folder else revision or "main",
        "source": source.origin,
    }
    model = Model.create(
        tag,
        module="",
        api_version="v1",
        signatures={},
        labels={"project": "infinity-bento"},
        metadata={key: value for key, value in metadata.items() if value is not None},
        options=ModelOptions(),
        context=ModelContext(framework_name="infinity-bento", framework_versions={}),
    )
    model.flush()
    with BentoMLContainer.model_store.get().register(tag) as place:
        for number, name in enumerate(source.files, start=1):
            target = Path(place) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            how = _place(source, source.folder / name, target)
            report(f"[{number}/{len(source.files)}] {name} {_megabytes(target.stat().st_size)} {how}")
        shutil.copy(Path(model.path) / "model.yaml", Path(place) / "model.yaml")


def _place(source: Source, file: Path, target: Path) -> str:
    if source.may_move:
        shutil.move(file, target)
        return "stored"
    if source.may_link:
        try:
            os.link(file.resolve(), target)
            return "linked"
        except OSError:  # another file system
            pass
    shutil.copyfile(file, target)
    if target.stat().st_size != file.stat().st_size:
        raise LoadError(f"{file} changed while it was copied; run the import again.")
    return "copied"


def _size(folder: Path, files: tuple[str, ...]) -> int:
    return sum((folder / name).stat().st_size for name in files)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _blob_id(path: Path) -> str:
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


# The command --------------------------------------------------------------------------------------------------------


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Register ``import`` with the command line."""
    parser = commands.add_parser(
        "import",
        help="put a checkpoint into the Bento model store",
        description="Put a checkpoint into the Bento model store, from where 'bentoml build' carries it into a Bento.",
        epilog="HF_TOKEN opens private and gated repositories; HF_HUB_OFFLINE=1 forbids the hub.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a hub id, or the folder of a checkpoint")
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of the hub repository")
    parser.add_argument("--name", metavar="NAME", help="name in the store [default: made of the id or the folder]")


def run_command(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run ``import``; returns the exit code."""
    options = {"model-id": [join_values([parsed.model])]}
    if parsed.revision is not None:
        options["revision"] = [join_values([parsed.revision])]
    kept = {name: text for name, text in environ.items() if name not in _MODEL_VARIABLES}
    tag = import_model(resolve(options, kept), parsed.name, _print_line)
    print(tag)
    return 0


# Options of served models have no say in what is imported.
_MODEL_VARIABLES = {"INFINITY_PRESET", *(option.env for option in MODEL_OPTIONS)}


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
