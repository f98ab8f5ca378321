"""``infinity-bento calibrate`` on models that have learnt something, and the file that the server reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity_bento import cli
from infinity_bento.calibrate import LEAST_ANSWERS, Labelled, answered, fit, read_data, table
from infinity_bento.checkpoints.preflight import plan_model
from infinity_bento.checkpoints.temperatures import CALIBRATION_FILE, read_calibration
from infinity_bento.decisions import QuestionKind
from infinity_bento.engine import Engine
from infinity_bento.errors import ConfigError, LoadError
from infinity_bento.reliability import Sample, figures, softmax
from infinity_bento.settings import resolve
from tests import tiny, tiny_readouts, toy_decisions

TOYS: dict[str, tuple[Callable[[], Path], int]] = {
    "laya": (toy_decisions.laya, 160),
    "readout": (toy_decisions.readout, 80),
}


def served(folder: Path, data: list[Labelled], **options: str) -> dict[QuestionKind, list[Sample]]:
    """The answers that a server gives."""
    options |= {"model-id": str(folder), "served-model-name": "m", "warmup": "false"}
    found: dict[QuestionKind, list[Sample]] = {kind: [] for kind in QuestionKind}
    with Engine.from_settings(resolve(options)) as engine:
        for line in answered(engine, "m", data):
            for kind, sample in line:
                found[kind].append(sample)
    return found


@pytest.mark.parametrize("name", TOYS)
def test_calibrated_answers_are_more_honest(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, count = TOYS[name]
    folder, output = make(), tmp_path / "out.json"
    data = toy_decisions.write(tmp_path / "data.jsonl", toy_decisions.examples(count, seed=7))
    arguments = ["calibrate", str(folder), "--data", str(data), "--output", str(output), "--held-out", "0.3"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr()
    assert all(kind.value in shown.out for kind in QuestionKind) and str(output) in shown.err

    content = json.loads(output.read_text())
    assert content["figures"]["noul"]["fitted_on"] + content["figures"]["noul"]["held_out"] == count
    temperatures = read_calibration(output)
    assert all(temperatures.of(kind, 3) > 1.2 for kind in QuestionKind)  # it was too sure of itself

    fresh = read_data(toy_decisions.write(tmp_path / "fresh.jsonl", toy_decisions.examples(count, seed=8)))
    samples = served(folder, fresh, **{"decision-calibration": str(output)})
    assert {sample.temperature for sample in samples[QuestionKind.CHOICE]} == {temperatures.of(QuestionKind.CHOICE, 3)}
    before = {kind: figures(samples[kind], 1.0) for kind in QuestionKind}  # what these checkpoints say themselves
    after = {kind: figures(samples[kind]) for kind in QuestionKind}
    chance = {QuestionKind.NOUL: 0.5, QuestionKind.CHOICE: 1 / 3, QuestionKind.SCORE: 1 / 3}
    for kind in QuestionKind:
        assert before[kind].accuracy == after[kind].accuracy > chance[kind] + 0.05
    for figure in ("ece", "brier", "log_loss"):
        old, new = (np.mean([getattr(by_kind[kind], figure) for kind in QuestionKind]) for by_kind in (before, after))
        assert new < old, figure


def test_the_file_in_the_checkpoint_counts_and_the_option_wins(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_readouts.readout("d3"), tmp_path / "model")
    data = read_data(toy_decisions.write(tmp_path / "data.jsonl", toy_decisions.examples(2, seed=1)))

    def temperatures_served(**options: str) -> set[float]:
        settings = resolve({"model-id": str(folder), "served-model-name": "m", "warmup": "false", **options})
        with Engine.from_settings(settings) as engine:
            return {sample.temperature for line in answered(engine, "m", data) for _, sample in line}

    assert temperatures_served() == {tiny_readouts.TEMPERATURE}
    write_calibration(folder / CALIBRATION_FILE, {"noul": 2.0, "choice": 3.0})
    assert temperatures_served() == {2.0, 3.0, tiny_readouts.TEMPERATURE}
    write_calibration(tmp_path / "other.json", {"default": 4.0})
    assert temperatures_served(**{"decision-calibration": str(tmp_path / "other.json")}) == {4.0}


def write_calibration(file: Path, table: dict[str, float]) -> None:
    file.write_text(json.dumps({"format_version": 1, "temperature": table}))


def test_a_wrong_calibration_stops_the_start(tmp_path: Path) -> None:
    folder, file = tiny_readouts.readout("d3"), tmp_path / "c.json"

    def plan(model: Path = folder) -> object:
        settings = resolve({"model-id": str(model), "decision-calibration": str(file)})
        return plan_model(settings.models[0], settings)

    with pytest.raises(LoadError, match=r"c\.json is missing"):
        plan()
    write_calibration(file, {"choice": 0.0})
    with pytest.raises(LoadError, match=r"c\.json: 'temperature' has choice=0.0; a temperature must be"):
        plan()
    file.write_text(json.dumps({"format_version": 2, "temperature": {}}))
    with pytest.raises(LoadError, match=r"c\.json: 'format_version' is 2; it must be 1"):
        plan()
    with pytest.raises(ConfigError, match="--decision-calibration is for decision models"):
        plan(tiny.checkpoint("bert"))


LINE: dict[str, Any] = {"state": "s", "questions": toy_decisions.QUESTIONS, "labels": {"warm": True}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "line 1: An object with state"),
        (LINE | {"state": None}, "line 1: `state` is null; it must be a string"),
        (LINE | {"questions": {"q": {"type": "box"}}}, r"line 1: `questions\.q\.type` is .*; it must be noul"),
        (LINE | {"labels": {}}, "line 1: `labels` must be an object"),
        (LINE | {"labels": {"cold": True}}, "line 1: `labels` names question 'cold', which is not asked"),
        (LINE | {"labels": {"warm": 1}}, "line 1: The label of question 'warm' is 1; it must be true or false"),
        (LINE | {"labels": {"colour": "black"}}, "line 1: .*'black'; it must be one of red, blue, green"),
        (LINE | {"labels": {"size": 3}}, "line 1: .* is 3; it must be a level from 0 to 2"),
        (LINE | {"labels": {"size": True}}, "line 1: .* is True; it must be a level from 0 to 2"),
        ("", "has no line"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(line if isinstance(line, str) else json.dumps(line))
    with pytest.raises(ConfigError, match=message):
        read_data(file)


def test_lines_are_counted_with_the_empty_ones(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(LINE) + "\n\n" + json.dumps(LINE | {"labels": {"size": 2, "colour": "blue"}}))
    first, second = read_data(file)
    assert (first.line, second.line) == (1, 3)
    assert (first.labels, second.labels) == ({"warm": 1}, {"size": 2, "colour": 1})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_data(tmp_path / "absent.jsonl")


def test_a_line_that_cannot_be_answered_is_named(tmp_path: Path) -> None:
    long = LINE | {"state": "word " * 40000}
    data = read_data(toy_decisions.write(tmp_path / "data.jsonl", iter([LINE, long])))
    settings = resolve({"model-id": str(tiny_readouts.readout("d3")), "served-model-name": "m", "warmup": "false"})
    with Engine.from_settings(settings) as engine, pytest.raises(ConfigError, match="line 2 has no answer"):
        list(answered(engine, "m", data))


@pytest.mark.parametrize(
    ("model", "extra", "message"),
    [
        (lambda: tiny_readouts.readout("d3"), ["--held-out", "1"], "--held-out is '1'; it must be a number from 0"),
        (lambda: tiny_readouts.readout("d3"), ["--held-out", "x"], "--held-out is 'x'"),
        (lambda: tiny_readouts.readout("d3"), [], f"No kind of question has {LEAST_ANSWERS} labelled answers"),
        (lambda: tiny.checkpoint("bert"), [], "does not decide, it can embed"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    tmp_path: Path, model: Any, extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = toy_decisions.write(tmp_path / "data.jsonl", toy_decisions.examples(3, seed=1))
    output = tmp_path / "out.json"
    assert cli.main(["calibrate", str(model()), "--data", str(data), "--output", str(output), *extra]) == 2
    assert message in capsys.readouterr().err and not output.exists()


def random_lines(count: int, kind: QuestionKind) -> list[list[tuple[QuestionKind, Sample]]]:
    generator = np.random.default_rng(0)
    rows = generator.normal(0, 3, (count, 3))
    return [[(kind, Sample(row, int(generator.choice(3, p=softmax(row / 2))), 1.0))] for row in rows]


def test_few_answers_leave_a_temperature_alone() -> None:
    few = random_lines(LEAST_ANSWERS - 1, QuestionKind.NOUL)
    many = random_lines(LEAST_ANSWERS, QuestionKind.SCORE)
    noul, score = fit([*few, *many], held_out=0)
    assert noul.temperature is None and noul.before == noul.after
    assert score.temperature is not None and score.after.log_loss < score.before.log_loss
    assert f"unchanged: fewer than {LEAST_ANSWERS}" in table([noul, score])


def test_held_out_lines_are_not_fitted_to() -> None:
    lines = random_lines(100, QuestionKind.CHOICE)
    (whole,), (part,), (again,) = fit(lines, 0), fit(lines, 0.2), fit(lines, 0.2)
    assert (whole.fitted_on, whole.held_out) == (100, 0)
    assert (part.fitted_on, part.held_out) == (80, 20)
    assert part == again and part.temperature != whole.temperature


def test_a_relative_file_is_meant_from_where_the_command_was_given(tmp_path: Path) -> None:
    """BentoML changes the directory."""
    options = {"model-id": ["a;b"], "decision-calibration": ["c.json;"]}
    arguments = cli.plan_launch(options, {}, tmp_path).arguments
    assert f"decision_calibration={tmp_path / 'c.json'};" in arguments


def test_a_line_may_hold_other_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(LINE | {"state": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    (line,) = read_data(file)
    assert line.request.state == "a\u2028b\x85c"
