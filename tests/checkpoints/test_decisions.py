"""What users of a decision model are told: prompts that nothing verifies, settings not applied, the calibration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity_bento.checkpoints.decisions import RUNE_NOTE
from infinity_bento.checkpoints.pplx_joint import NOTE
from infinity_bento.checkpoints.preflight import plan_model
from infinity_bento.checkpoints.temperatures import CALIBRATION_FILE
from infinity_bento.engine import Engine
from infinity_bento.errors import LoadError
from infinity_bento.settings import resolve
from tests import tiny_clef, tiny_laya, tiny_readouts
from tests.api.fakes import client_for
from tests.heads.decisions.test_pplx_joint import folder as joint

__all__ = ["joint"]  # a fixture


WHOLE = {"served-model-name": "m", "max-batch-tokens": "32768"}  # so that nothing is said of the length


def notes(folder: Path, **options: str) -> tuple[str, ...]:
    settings = resolve({"model-id": str(folder), **WHOLE, **options})
    return plan_model(settings.models[0], settings).notes


def change(folder: Path, name: str, **values: object) -> Path:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | values))
    return folder


QUIET: list[tuple[Callable[[], Path], dict[str, str]]] = [
    (lambda: tiny_readouts.readout("d3"), {}),
    (tiny_readouts.onejev, {"decision-protocol": "onejev"}),
    (tiny_clef.folder, {}),
    (tiny_laya.folder, {}),
]


@pytest.mark.parametrize(("make", "options"), QUIET)
def test_verified_families_have_nothing_to_say(make: Callable[[], Path], options: dict[str, str]) -> None:
    assert notes(make(), **options) == ()


def test_prompts_that_nothing_verifies_are_marked(joint: Path) -> None:
    assert notes(joint) == (NOTE,) and "contract-only" in NOTE
    assert notes(tiny_readouts.onejev(), **{"decision-protocol": "rune"}) == (RUNE_NOTE,)


def test_settings_that_are_not_applied_are_named(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_laya.folder(), tmp_path / "laya")
    change(folder, "rl_agent_config.json", lang_temperatures={"de": 2.0}, temperature=[9.0, 1.0, 1.0])
    first, second = notes(folder)
    assert "choice 9.0 as 5" in first and "lang_temperatures is not applied" in second


def test_a_calibration_in_force_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_readouts.readout("d3"), tmp_path / "model")
    table = json.dumps({"format_version": 1, "temperature": {"noul": 2.0}})
    (folder / CALIBRATION_FILE).write_text(table)
    other = tmp_path / "other.json"
    other.write_text(table)
    (own,), (given,) = notes(folder), notes(folder, **{"decision-calibration": str(other)})
    assert CALIBRATION_FILE in own and str(other) in given


def test_a_malformed_contract_is_refused_before_anything_is_loaded(joint: Path) -> None:
    change(joint, "infinity_decision.json", noul_order=["yes", "no"])
    with pytest.raises(LoadError, match="noul_order"):
        notes(joint)


async def test_info_shows_the_mark(joint: Path) -> None:
    options = {"model-id": str(joint), "warmup": "false", **WHOLE}
    with Engine.from_settings(resolve(options)) as engine:
        async with client_for(engine) as client:  # type: ignore[arg-type]
            (model,) = (await client.get("/info")).json()["models"]
    assert model["decision_protocol"] == "pplx-joint" and model["notes"] == [NOTE]
