"""The catalogue: docs/models.md is current, and says no more than the loading rules and the measurements do."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from infinity_bento import cli
from infinity_bento.catalogue import (
    Parity,
    configs_folder,
    models_markdown,
    models_text,
    published_as,
    read_preset,
    read_presets,
    read_results,
    results_file,
    tasks_of,
)
from infinity_bento.checkpoints.families import BY_MODEL_TYPE, TABLE, Family, family_of
from infinity_bento.checkpoints.remote_layouts import ALIASES, KNOWN_CODE
from infinity_bento.core import Task
from infinity_bento.errors import ConfigError
from infinity_bento.heads.classifiers import SHAPES
from infinity_bento.heads.masked_lm import LAYOUTS
from tests.parity.measure import NAMES, tolerance

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
FACTS = """\
# task: embed
# family: bert
# licence: MIT
# pooling: cls
# prompts: none
# length: 512
# dimensions: 384
# source: family, licence, pooling, prompts: https://host.example/one
# source: length: https://host.example/two
# unverified: dimensions
"""


def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), "run: infinity-bento models --markdown > docs/models.md"


def test_the_page_shows_every_family_every_remote_name_and_every_preset() -> None:
    lines = PAGE.read_text().splitlines()
    for family in TABLE:
        (row,) = [line for line in lines if line.startswith(f"| {family.title} | `")]
        assert all(name in row for name in published_as(family))
        assert all(name in row for name, target in ALIASES.items() if target == family.model_type)
        assert all(marker in row for _, marker, target in KNOWN_CODE if target == family.model_type)
        assert family.notes in row
    for preset in read_presets(configs_folder()):
        assert len([line for line in lines if f"[`{preset.name}`]" in line and preset.model.model_id in line]) == 1


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.model_type)
def test_every_family_was_measured_within_its_tolerance(family: Family) -> None:
    parity = read_results(results_file()).families[family.model_type]
    assert 0 < parity.largest_difference < parity.tolerance
    assert parity.tolerance == min(map(tolerance, parity.variants))


def test_every_tiny_checkpoint_was_measured() -> None:
    families = read_results(results_file()).families
    assert set(families) == set(BY_MODEL_TYPE)
    measured = [name for parity in families.values() for name in parity.variants]
    assert sorted(measured) == sorted(NAMES), "run: python -m tests.parity.report"


def test_a_family_without_a_result_stops_the_page() -> None:
    results = read_results(results_file())
    families = {name: parity for name, parity in results.families.items() if name != "mpnet"}
    with pytest.raises(ConfigError, match="mpnet has not been measured"):
        models_markdown(dataclasses.replace(results, families=families), ())
    families["mpnet"] = Parity(3e-6, 2e-5, ("mpnet",))
    assert "| 3.0e-06 of 2e-05 |" in models_markdown(dataclasses.replace(results, families=families), ())


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.model_type)
def test_a_task_is_listed_only_where_there_is_a_head(family: Family) -> None:
    tasks = tasks_of(family)
    heads = family.heads
    assert {Task.EMBED, Task.EMBED_ALL} <= set(tasks)
    assert (Task.CLASSIFY in tasks) == (heads.classifier is not None) == (Task.RERANK in tasks)
    assert (Task.CLASSIFY_TOKENS in tasks) == heads.token_classifier
    assert heads.classifier is None or heads.classifier in SHAPES
    assert (Task.EMBED_SPARSE in tasks) == (heads.masked_lm is not None)
    assert heads.masked_lm is None or heads.masked_lm in LAYOUTS


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.model_type)
def test_what_is_said_to_be_published_is_accepted(family: Family) -> None:
    for said in published_as(family):
        name, *code = re.findall("`([^`]+)`", said)
        config = {"model_type": name, "auto_map": {"AutoModel": code[0]}} if code else {"model_type": name}
        if family.model_type == "nomic_bert_moe":
            config |= {"n_embd": 8, "num_experts": 4}
        assert family_of(config, Path("config.json")) is family


def test_the_command_lists_families_and_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    printed = capsys.readouterr().out
    assert printed == models_text(read_presets(configs_folder()))
    for family in TABLE:
        assert f"\n  {family.model_type} " in printed
    assert "sentence-transformers/all-MiniLM-L6-v2" in printed


def test_results_that_are_not_there_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python -m tests\.parity\.report"):
        read_results(tmp_path / "results.json")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (FACTS.replace("# licence: MIT\n", "") + "model-id: a", "look at: licence"),
        (FACTS + "model-id: a\nmax-sequence-length: 512", "look at: length"),
        (FACTS.replace("embed", "classify") + "model-id: a", "look at: dimensions, pooling, prompts"),
        (FACTS.replace("# source: length: https://host.example/two\n", "") + "model-id: a", "look at: length"),
        (FACTS.replace("https://host.example/two", "from memory") + "model-id: a", "look at: length"),
        (FACTS.replace(": dimensions", ": dimensions, length") + "model-id: a", "look at: length"),
        (FACTS.replace("# pooling: cls\n", "") + "model-id: a", "look at: pooling"),
        (FACTS.replace("# source: length", "# source: size") + "model-id: a", "look at: length, size"),
        (FACTS + "model-id: [a, b]", "serves 2 models"),
        (FACTS + "max-batch-token: 1", "is not an option"),
    ],
)
def test_a_preset_that_the_page_cannot_show_is_refused(text: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_preset(file)
    assert part in caught.value.message


def test_a_preset_knows_where_its_facts_were_read_and_which_are_not(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(FACTS + "model-id: a")
    preset = read_preset(file)
    assert preset.sources == {
        **dict.fromkeys(("family", "licence", "pooling", "prompts"), "https://host.example/one"),
        "length": "https://host.example/two",
    }
    assert (preset.unverified, preset.max_length) == ({"dimensions"}, 512)
    row = models_markdown(read_results(results_file()), [preset]).splitlines()[-1]
    assert "| 512 | 384 (unverified) | MIT |  |" in row


def test_the_checkpoint_alone_may_say_what_it_defines(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "# task: embed\n# family: bert\n# licence: MIT\n# note: small\n"
        "# source: family, licence: https://host.example/one\nmodel-id: a\n"
    )
    preset = read_preset(file)
    assert preset.max_length is None
    row = models_markdown(read_results(results_file()), [preset]).splitlines()[-1]
    assert row.endswith("| BERT | embed | - | - | - | - | MIT | small |")
    limited = file.read_text() + "max-sequence-length: 64\n"
    file.write_text(limited)
    with pytest.raises(ConfigError, match="look at: length"):
        read_preset(file)
    file.write_text(limited.replace("family, licence", "family, licence, length"))
    assert read_preset(file).max_length == 64
