"""``infinity-bento calibrate``: labelled questions in, temperatures out, and how much better the answers are with them.

The model runs in this process, as it would be served. The file that is written is read by ``checkpoints/temperatures``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infinity_bento.api.systemone_request import read_request
from infinity_bento.checkpoints.temperatures import CALIBRATION_FILE, FORMAT_VERSION
from infinity_bento.core import Item, Result, Task
from infinity_bento.decisions import DecisionRequest, Json, Question, QuestionKind
from infinity_bento.errors import ConfigError, InfinityError
from infinity_bento.options import MODEL_OPTIONS
from infinity_bento.reliability import HIGHEST, LOWEST, Figures, Sample, best_temperature, figures
from infinity_bento.settings import Settings, resolve
from infinity_bento.sources import join_values

if TYPE_CHECKING:
    from infinity_bento.engine import Engine

LEAST_ANSWERS = 20  # of a kind, to fit its temperature to
REQUESTS_AT_ONCE = 16
HELD_OUT = 0.2
# Options of ``serve`` that change the answers, or what is needed to get them.
OPTIONS = ("revision", "decision-protocol", "dtype", "torch-device", "max-sequence-length", "decision-calibration")


@dataclass(frozen=True, slots=True)
class Labelled:
    """A line of the data: a request, and the right option of some of its questions."""

    line: int
    request: DecisionRequest
    labels: Mapping[str, int]  # question id -> index of the option


@dataclass(frozen=True, slots=True)
class Fit:
    """The outcome for one kind of question."""

    kind: QuestionKind
    temperature: float | None  # None: too few answers, the one in force stays
    fitted_on: int
    held_out: int
    before: Figures
    after: Figures


# Data ---------------------------------------------------------------------------------------------------------------


def read_data(file: Path) -> list[Labelled]:
    """The labelled requests of a JSONL file.

    Each line has ``state`` and ``questions`` as in ``POST /v1/systemone``, and ``labels``: question id -> true or false
    (noul), a label (choice) or a level from 0 (score). Empty lines do not count.

    Raises:
        ConfigError: The file cannot be read, or a line is wrong; names the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # JSON texts may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {file} cannot be read ({error}); give a JSONL file in UTF-8.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(_labelled(number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise ConfigError(f"--data {file}: line {number} is not JSON ({error.msg}); repair it.") from error
            except InfinityError as error:
                raise ConfigError(f"--data {file}: line {number}: {error.message}") from error
    if not found:
        raise ConfigError(f"--data {file} has no line; give one labelled request on each.")
    return found


def _labelled(number: int, body: Any) -> Labelled:
    if not isinstance(body, dict):
        raise ConfigError("An object with state, questions and labels is expected.")
    request = read_request(body)
    given = body.get("labels")
    if not isinstance(given, dict) or not given:
        raise ConfigError("`labels` must be an object with the right answer of at least one question by its id.")
    questions = {question.id: question for question in request.questions}
    unknown = next((name for name in given if name not in questions), None)
    if unknown is not None:
        raise ConfigError(f"`labels` names question {unknown!r}, which is not asked; it must be an id of `questions`.")
    return Labelled(number, request, {name: _label(questions[name], value) for name, value in given.items()})


def _label(question: Question, value: Json) -> int:
    """The index of the option that a label means."""
    names = [option.name for option in question.options]
    if question.kind is QuestionKind.NOUL:
        good, allowed, name = isinstance(value, bool), "true or false", str(value).lower()
    elif question.kind is QuestionKind.CHOICE:
        good, allowed, name = isinstance(value, str), f"one of {', '.join(names)}", str(value)
    else:
        good, allowed, name = type(value) is int, f"a level from 0 to {len(names) - 1}", str(value)
    if not good or name not in names:
        raise ConfigError(f"The label of question {question.id!r} is {value!r}; it must be {allowed}.")
    return names.index(name)


# Answers ------------------------------------------------------------------------------------------------------------


def answered(engine: Engine, name: str, data: Sequence[Labelled]) -> Iterator[list[tuple[QuestionKind, Sample]]]:
    """The labelled answers of each line.

    Raises:
        ConfigError: A line cannot be answered; names it.
    """
    for start in range(0, len(data), REQUESTS_AT_ONCE):
        lines = data[start : start + REQUESTS_AT_ONCE]
        outcomes = engine.submit_sync(name, [Item(Task.DECIDE, decision=line.request) for line in lines])
        for line, outcome in zip(lines, outcomes, strict=True):
            if not isinstance(outcome, Result):
                raise ConfigError(f"--data: line {line.line} has no answer: {outcome.message}")
            pairs = zip(line.request.questions, outcome.output, strict=True)
            yield [(q.kind, Sample.of(decision, line.labels[q.id])) for q, decision in pairs if q.id in line.labels]


def fit(lines: Sequence[Sequence[tuple[QuestionKind, Sample]]], held_out: float = HELD_OUT) -> list[Fit]:
    """A temperature for each kind of question, and its figures on lines that it was not fitted to.

    Args:
        lines: The answers of each line.
        held_out: Share of the lines that only the figures are taken from; 0: they are taken from all.
    """
    order = np.random.default_rng(0).permutation(len(lines)).tolist()
    apart = set(order[: round(len(lines) * held_out)])
    fits = []
    for kind in QuestionKind:
        inside, outside = (
            [sample for index, line in enumerate(lines) if (index in apart) is out for k, sample in line if k is kind]
            for out in (False, True)
        )
        shown = outside or inside
        if not shown:
            continue
        temperature = best_temperature(inside) if len(inside) >= LEAST_ANSWERS else None
        after = figures(shown, temperature)
        fits.append(Fit(kind, temperature, len(inside), len(outside), figures(shown), after))
    return fits


def content_of(fits: Sequence[Fit], model: str, protocol: str | None) -> dict[str, Any]:
    """The calibration file."""
    return {
        "format_version": FORMAT_VERSION,
        "model": model,
        "protocol": protocol,
        "temperature": {fit.kind.value: round(fit.temperature, 6) for fit in fits if fit.temperature is not None},
        "figures": {
            fit.kind.value: {
                "fitted_on": fit.fitted_on,
                "held_out": fit.held_out,
                "before": fit.before.as_dict(),
                "after": fit.after.as_dict(),
            }
            for fit in fits
        },
    }


def table(fits: Sequence[Fit]) -> str:
    """The figures as aligned text, before and after."""
    rows = [["kind", "fitted on", "held out", "temperature", "accuracy", "log loss", "Brier", "ECE"]]
    for fit in fits:
        pairs = [
            f"{before:.3f} -> {after:.3f}"
            for before, after in (
                (fit.before.accuracy, fit.after.accuracy),
                (fit.before.log_loss, fit.after.log_loss),
                (fit.before.brier, fit.after.brier),
                (fit.before.ece, fit.after.ece),
            )
        ]
        rows.append([fit.kind.value, str(fit.fitted_on), str(fit.held_out), _shown(fit), *pairs])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def _shown(fit: Fit) -> str:
    if fit.temperature is None:
        return f"unchanged: fewer than {LEAST_ANSWERS} answers"
    return f"{fit.temperature:.3f}" + (" (the limit)" if fit.temperature in (LOWEST, HIGHEST) else "")


# Command ------------------------------------------------------------------------------------------------------------


def calibrate(settings: Settings, data: Sequence[Labelled], held_out: float = HELD_OUT) -> tuple[list[Fit], str | None]:
    """Run the model over the data and fit its temperatures.

    Args:
        settings: Of one decision model.
        data: What it is asked.
        held_out: As in ``fit``.

    Returns:
        The outcome by kind, and the model's protocol.

    Raises:
        ConfigError: The model does not decide, a line cannot be answered, or no kind has enough answers.
        LoadError: The model cannot be served.
    """
    from infinity_bento.engine import Engine

    (model,) = settings.models
    with Engine.from_settings(settings) as engine:
        (info,) = engine.infos()
        if Task.DECIDE not in info.tasks:
            raise ConfigError(
                f"{model.model_id} does not decide, it can {', '.join(info.tasks)}: give a decision model."
            )
        fits = fit(list(answered(engine, info.name, data)), held_out)
    if all(found.temperature is None for found in fits):
        raise ConfigError(
            f"No kind of question has {LEAST_ANSWERS} labelled answers to fit a temperature to: give more data, or a "
            "smaller --held-out."
        )
    return fits, info.decision_protocol


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Register ``calibrate`` with the command line."""
    parser = commands.add_parser(
        "calibrate",
        help="fit the temperatures of a decision model to labelled questions",
        description="Fit a temperature per kind of question, and show accuracy, log loss, Brier score and expected "
        "calibration error before and after, on lines that were held out.",
        epilog=f"Serve with --decision-calibration FILE, or put the file into the checkpoint's folder as "
        f"{CALIBRATION_FILE}.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a hub id, or the folder of a checkpoint")
    parser.add_argument(
        "--data",
        metavar="FILE",
        required=True,
        help='JSONL: {"state": ..., "questions": {...}, "labels": {id: true or false, a label, or a level}}',
    )
    parser.add_argument(
        "--output", metavar="FILE", default=CALIBRATION_FILE, help="where the temperatures go [default: %(default)s]"
    )
    parser.add_argument(
        "--held-out",
        metavar="SHARE",
        default=str(HELD_OUT),
        help="share of the lines that only the figures are taken from, 0 for none [default: %(default)s]",
    )
    for name in OPTIONS:
        parser.add_argument(f"--{name}", metavar="VALUE", help="as for serve")


def run_command(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run ``calibrate``; returns the exit code."""
    held_out = _share(parsed.held_out)
    options = {"model-id": [join_values([parsed.model])], "warmup": ["false"]}
    for name in OPTIONS:
        value = getattr(parsed, name.replace("-", "_"))
        if value is not None:
            options[name] = [join_values([value])]
    settings = resolve(options, {name: text for name, text in environ.items() if name not in _MODEL_VARIABLES})
    data = read_data(Path(parsed.data))
    fits, protocol = calibrate(settings, data, held_out)
    output = Path(parsed.output)
    _write(output, content_of(fits, parsed.model, protocol))
    print(table(fits), end="")
    print(f"{output}: serve with --decision-calibration {output}", file=sys.stderr)
    return 0


# Options of served models have no say in what is calibrated.
_MODEL_VARIABLES = {"INFINITY_PRESET", *(option.env for option in MODEL_OPTIONS)}


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise ConfigError(f"--held-out is {text!r}; it must be a number from 0 to below 1.", param="held-out")
    return value


def _write(file: Path, content: Mapping[str, Any]) -> None:
    try:
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {file} cannot be written ({error.strerror}); give another place.") from error
