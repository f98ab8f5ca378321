"""The weights a Bento carries: chosen when `bentoml build` asks, found again when the built Bento is served.

``service.py`` hands the models to BentoML through ``EngineService``. A checkout finds its weights by itself; a built
Bento serves exactly those that were built into it, whatever was imported since.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import yaml
from _bentoml_sdk.models import BentoModel, Model
from bentoml import Tag
from bentoml._internal.bento.bento import BentoModelInfo
from bentoml.exceptions import BentoMLException

from infinity_bento.catalogue import configs_folder
from infinity_bento.checkpoints.resolve import carrying_package, find_in_store, list_hub, store_tag
from infinity_bento.errors import LoadError
from infinity_bento.options import OPTIONS
from infinity_bento.settings import ModelSettings, Settings
from infinity_bento.sources import Origin, Source, preset_file

_DEFAULT_ENDPOINT = "https://huggingface.co"


class BundledWeights(Model[None]):  # type: ignore[misc]
    """The weights of one served model, as BentoML sees them.

    Args:
        model: Which model.
        server: Token and cache.
        refusal: Why nothing may be built with these settings; None: it may.
    """

    def __init__(self, model: ModelSettings, server: Settings, refusal: str | None = None) -> None:
        self.model = model
        self.server = server
        self.refusal = refusal

    def to_info(self, alias: str | None = None) -> BentoModelInfo:
        """What ``bento.yaml`` says of these weights. BentoML asks only while it builds.

        Imported weights are copied from the model store into the image; others are fetched from the hub by ``bentoml
        containerize``, at the commit that the revision means now.

        Raises:
            BentoMLException: With one sentence, if the Bento could not be served elsewhere.
        """
        if self.refusal is not None:
            raise BentoMLException(self.refusal)
        try:
            return self._from_store(alias) or self._from_hub(alias)
        except LoadError as error:
            raise BentoMLException(
                f"{error.message} A Bento carries its weights: run 'infinity-bento import {self.model.model_id}' "
                "first, or build where the hub can be reached."
            ) from None

    def _from_store(self, alias: str | None) -> BentoModelInfo | None:
        model_id = self.model.model_id
        if Path(model_id).expanduser().is_dir():
            raise BentoMLException(
                f"Model {model_id!r} is a folder of this machine, and a Bento carries imported models only: run "
                f"'infinity-bento import {model_id} --name NAME', then build with --arg model_id=NAME."
            )
        found = find_in_store(model_id, self.model.revision)
        if found is None:
            return None
        info = BentoModel(Tag(found.path.parent.name, found.path.name)).to_info(alias)
        return BentoModelInfo(
            info.tag,
            module=info.module,
            creation_time=info.creation_time,
            alias=alias,
            metadata={"model_id": model_id, "revision": found.revision or info.tag.version},
        )

    def _from_hub(self, alias: str | None) -> BentoModelInfo:
        token = self.server.hf_token.reveal() if self.server.hf_token else None
        listing = list_hub(self.model.model_id, revision=self.model.revision, token=token)
        metadata = {
            "model_id": self.model.model_id,  # BentoML's own class writes it in lower case: not every mirror finds it
            "revision": listing.commit,
            "endpoint": os.environ.get("HF_ENDPOINT", _DEFAULT_ENDPOINT),
            "include": [file.name for file in listing.files],
            "exclude": None,
        }
        tag = Tag(store_tag(self.model.model_id), listing.commit)
        return BentoModelInfo(tag, alias=alias, registry="huggingface", metadata=metadata)

    def resolve(self, base_path: str | os.PathLike[str] | None = None) -> None:
        """Nothing: served from a checkout, the engine finds its files itself."""

    @classmethod
    def from_info(cls, info: BentoModelInfo) -> Model[Any]:
        """BentoML's own class for the registry that ``to_info`` chose."""
        return cast("Model[Any]", info.to_model())

    def to_create_schema(self) -> Any:
        """What BentoCloud is told."""
        return self.to_info().to_model().to_create_schema()

    def __str__(self) -> str:
        return self.model.model_id


def bundled_weights(settings: Settings, refusal: str | None = None) -> list[BundledWeights]:
    """What to build in: each checkpoint once, without those that an installed package carries."""
    packages = carrying_packages(settings)
    wanted = {(model.model_id, model.revision): model for model in settings.models}
    kept = [model for model in wanted.values() if model.model_id not in packages]
    # Somebody must say the refusal, even where a package carries everything.
    return [BundledWeights(model, settings, refusal) for model in (kept if refusal is None else wanted.values())]


def needs_hub_token(weights: Sequence[BundledWeights]) -> bool:
    """Whether a build fetches weights from the hub, and has a token for it."""
    return any(
        entry.server.hf_token is not None and find_in_store(entry.model.model_id, entry.model.revision) is None
        for entry in weights
    )


def carrying_packages(settings: Settings) -> dict[str, str]:
    """Model id -> installed package with its weights, for models that were not imported."""
    found = {}
    for model in settings.models:
        package = carrying_package(model.model_id, model.revision)
        if package is not None and find_in_store(model.model_id, model.revision) is None:
            found[model.model_id] = f"{package.replace('_', '-')}=={version(package)}"
    return found


def refusal_to_build(settings: Settings, arguments: Mapping[str, Any]) -> str | None:
    """Why a Bento of these settings could not be served elsewhere, or would give a secret away; None: it is fine."""
    given = {name.replace("_", "-") for name in arguments}
    for option in OPTIONS:
        if option.secret and option.name in given:
            return (
                f"--arg {option.field} would be written into the Bento for everyone to read; set {option.env} where it "
                "is served instead."
            )
        origin = settings.origins[option.name]
        if (option.per_model or option.name == "preset") and origin.source is Source.ENVIRONMENT:
            return (
                f"{option.name} comes from {origin.detail}, and a Bento does not remember the environment it was built "
                f"in; give --arg {option.field}=..."
            )
    if settings.preset is not None and not _inside(preset_file(settings.preset)):
        return (
            f"--arg preset={settings.preset} is a file outside configs/, which a Bento does not carry; put it there "
            "and name it without its folder."
        )
    return None


def _inside(preset: Path) -> bool:
    return preset.resolve().is_relative_to(configs_folder().resolve())


# A built Bento ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CarriedModel:
    """One entry of ``bento.yaml``."""

    model_id: str
    tag: str
    registry: str
    revision: str  # a commit, or the version in the store


def built_bento(service_file: Path) -> Path | None:
    """The ``bento.yaml`` of the Bento that a service file is part of; None in a checkout or an installed package."""
    file = service_file.absolute().parent.parent / "bento.yaml"
    return file if service_file.absolute().parent.name == "src" and file.is_file() else None


def unless_in_environment(arguments: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The options of a build, without those that the environment of the served Bento gives: there it has the last word.

    BentoML allows no ``--arg`` for a built Bento.
    """
    given = {option.field for option in OPTIONS if any(environ.get(name) for name in (option.env, *option.env_aliases))}
    return {name: text for name, text in arguments.items() if name.replace("-", "_") not in given}


def carried_models(bento_yaml: Path) -> list[CarriedModel]:
    """The models that were built into a Bento."""
    content = yaml.safe_load(bento_yaml.read_text(encoding="utf-8"))
    entries = [entry for service in content.get("services", ()) for entry in service.get("models", ())]
    return [
        CarriedModel(
            str((entry.get("metadata") or {}).get("model_id", entry["tag"])),
            str(entry["tag"]),
            str(entry.get("registry", "bentoml")),
            str((entry.get("metadata") or {}).get("revision") or entry["tag"].partition(":")[2]),
        )
        for entry in entries
    ]


def pinned(settings: Settings, carried: Sequence[CarriedModel], environ: Mapping[str, str]) -> Settings:
    """The settings with every model that the Bento carries pinned to exactly those files."""
    by_id = {model.model_id: model for model in carried}
    served = [by_id[model.model_id] for model in settings.models if model.model_id in by_id]
    if not served:
        return settings
    models = tuple(_pin(model, by_id.get(model.model_id)) for model in settings.models)
    origins = {**settings.origins, "revision": Origin(Source.BENTO)}
    cache = environ.get("BENTOML_HF_CACHE_DIR")  # where `bentoml containerize` puts what it fetched
    if any(model.registry == "huggingface" for model in served) and cache:
        origins["huggingface-hub-cache"] = Origin(Source.BENTO)
        return replace(settings, models=models, origins=origins, huggingface_hub_cache=cache)
    return replace(settings, models=models, origins=origins)


def _pin(model: ModelSettings, carried: CarriedModel | None) -> ModelSettings:
    return model if carried is None else replace(model, revision=carried.revision)
