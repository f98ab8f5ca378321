"""The files in configs/: each resolves under its name, in every place where a preset can be named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from infinity_bento import cli
from infinity_bento.catalogue import FACT, Preset, configs_folder, read_presets, tasks_of
from infinity_bento.checkpoints.families import BY_MODEL_TYPE
from infinity_bento.core import Pooling, Task
from infinity_bento.engine import Engine
from infinity_bento.settings import Settings, from_bentoml_arguments, resolve
from infinity_bento.sources import Source
from tests.conftest import embed_items, mixed_texts, vectors

ROOT = Path(__file__).parent.parent
PRESETS = read_presets(configs_folder())
# A preset describes a checkpoint. Devices, ports and secrets are the business of whoever serves it.
ALLOWED = {"model-id", "served-model-name", "pooling", "max-sequence-length", "max-batch-tokens"}

each_preset = pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)


def given_by_preset(settings: Settings) -> set[str]:
    return {name for name, origin in settings.origins.items() if origin.source is Source.PRESET}


def test_there_are_enough_and_each_checkpoint_has_one() -> None:
    assert len(PRESETS) >= 25
    assert len({preset.model.model_id for preset in PRESETS}) == len(PRESETS)
    assert {"all-minilm-l6-v2", "bge-m3", "qwen3-embedding-0.6b", "bge-reranker-base"} <= {p.name for p in PRESETS}


@each_preset
def test_it_resolves_under_its_name_from_anywhere(
    preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = resolve(preset=preset.name)
    (model,) = settings.models
    assert model == preset.model
    assert model.served_model_name == preset.name == model.model_id.rsplit("/", 1)[-1].lower()
    assert model.model_id.count("/") == 1
    assert given_by_preset(settings) <= ALLOWED
    assert settings.notes == ()


@each_preset
def test_its_facts_fit_the_family_and_the_limits(preset: Preset) -> None:
    family = BY_MODEL_TYPE[preset.facts["family"]]
    assert set(preset.tasks) <= set(tasks_of(family))
    assert preset.max_length is None or 0 < preset.max_length <= preset.model.max_batch_tokens
    if Task.EMBED in preset.tasks:
        assert Pooling(preset.facts["pooling"]) in (family.poolings or Pooling)
        assert int(preset.facts["dimensions"]) > 0
        assert preset.model.pooling in (None, Pooling(preset.facts["pooling"]))


@each_preset
def test_what_it_says_has_a_place_or_is_marked_unverified(preset: Preset) -> None:
    claims = set(preset.facts) - {"task", "note"} | ({"length"} if preset.model.max_sequence_length else set())
    assert {"family", "licence"} <= claims <= set(preset.sources) | preset.unverified
    assert not set(preset.sources) & preset.unverified
    assert "pooling" in preset.sources or preset.model.pooling is None
    for place in preset.sources.values():
        parts = urlsplit(place)
        assert (parts.scheme, bool(parts.hostname), parts.query) == ("https", True, "")
        assert parts.path.strip("/"), f"{place} names a site, not a page"
        if parts.hostname == "github.com":
            assert re.match(r"/[^/]+/[^/]+/blob/[0-9a-f]{40}/.", parts.path), f"{place} can change"


def test_few_facts_are_unverified() -> None:
    assert {(preset.name, *sorted(preset.unverified)) for preset in PRESETS if preset.unverified} == {
        ("llama-nemotron-embed-1b-v2", "prompts"),
        ("snowflake-arctic-embed-m-v2.0", "prompts"),
    }


@each_preset
def test_the_file_holds_facts_and_options_only(preset: Preset) -> None:
    for line in (configs_folder() / f"{preset.name}.yaml").read_text().splitlines():
        assert FACT.fullmatch(line) or line.split(":")[0] in ALLOWED, line


@each_preset
def test_it_can_be_named_on_both_command_lines_and_in_the_environment(
    preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "service_target", lambda: ("service.py", ROOT))
    monkeypatch.chdir(tmp_path)
    launch = cli.plan_launch({"preset": [preset.name]}, {}, tmp_path)
    passed = dict(word.split("=", 1) for word in launch.arguments if "=" in word)
    for arguments in (passed, {"preset": preset.name}):  # infinity-bento serve, bentoml serve
        assert resolve(from_bentoml_arguments(arguments)).models == (preset.model,)
    assert resolve(environ={"INFINITY_PRESET": preset.name}).models == (preset.model,)
    own = resolve({"preset": preset.name, "served-model-name": "mine", "max-sequence-length": "8"}).models[0]
    assert (own.served_model_name, own.max_sequence_length) == ("mine", 8)
    assert own.model_id == preset.model.model_id


def test_the_service_takes_a_preset_as_bentoml_hands_it_over(tmp_path: Path) -> None:
    code = (
        "from bentoml._internal.utils.args import set_arguments; set_arguments({'preset': 'bge-m3', 'port': 3977}); "
        "import service; print(service.settings.models[0].model_id, service.settings.port)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["BAAI/bge-m3", "3977"], done.stderr


def test_the_preset_with_weights_at_hand_is_as_described(oracle: SentenceTransformer) -> None:
    (preset,) = [preset for preset in PRESETS if preset.name == "all-minilm-l6-v2"]
    texts = mixed_texts(12)
    with Engine.from_settings(resolve(preset=preset.name)) as engine:
        (info,) = engine.infos()
        found = vectors(engine.submit_sync(preset.name, embed_items(texts)))
    assert info.name == preset.name
    assert (info.pooling, str(info.dimensions)) == (preset.facts["pooling"], preset.facts["dimensions"])
    assert info.max_input_length == preset.max_length
    assert info.architecture == preset.facts["family"]
    assert found == pytest.approx(np.asarray(oracle.encode(texts)), abs=1e-5)
