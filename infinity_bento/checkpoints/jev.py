"""The files of a JEV checkpoint: ``judge_config.json`` and ``calibration.json``.

Read by preflight, so free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity_bento.checkpoints.json_files import JsonObject, relative_path
from infinity_bento.checkpoints.temperatures import Temperatures
from infinity_bento.decisions import QuestionKind

CONFIG_FILE = "judge_config.json"
CALIBRATION_FILE = "calibration.json"
HEAD_FILE = "head.safetensors"
ADAPTER_FOLDER = "adapter"  # where the config does not say


@dataclass(frozen=True, slots=True)
class JevSpec:
    """What the two files say."""

    rows: int  # of the head, one for each verbalizer
    slots: Mapping[
        QuestionKind, tuple[int, tuple[str, ...]]
    ]  # row of a kind's first option, and what options are called
    softcap: float | None
    adapter: str | None  # folder of the LoRA that belongs to the weights; None: merged into them
    temperatures: Temperatures


def read_jev(folder: Path) -> JevSpec:
    """The settings of a checkpoint folder.

    Raises:
        LoadError: A file or key is missing, or a value cannot be honoured.
    """
    config = JsonObject.read(folder / CONFIG_FILE)
    given = JsonObject(config.file, config.mapping("slots"))
    rows, labels = given.integer("num_slots"), given.strings("verbalizers")
    if len(labels) != rows:
        raise given.wrong("verbalizers", f"a list of {rows} texts, as many as 'num_slots' says")
    adapter = config.string("adapter_subfolder", None)
    if "adapter_subfolder" not in config.data:
        adapter = ADAPTER_FOLDER
    return JevSpec(
        rows=rows,
        slots=_slots(given, labels),
        softcap=_softcap(config),
        adapter=None if adapter is None else relative_path(adapter, config.file, "adapter_subfolder"),
        temperatures=_temperatures(folder),
    )


def _slots(given: JsonObject, labels: tuple[str, ...]) -> dict[QuestionKind, tuple[int, tuple[str, ...]]]:
    ranges = JsonObject(given.file, given.mapping("ranges"))
    unknown = sorted(set(ranges.data) - set(QuestionKind))
    if unknown:
        raise given.wrong("ranges", f"an object with the keys {', '.join(QuestionKind)}, and {unknown[0]!r} is none")
    slots = {}
    for kind in QuestionKind:
        bounds, expected = (
            ranges.data.get(kind),
            f"two row numbers, from 0 to {len(labels)}: first, and behind the last",
        )
        if not isinstance(bounds, list) or len(bounds) != 2 or any(type(bound) is not int for bound in bounds):
            raise ranges.wrong(kind, expected)
        first, end = bounds
        own = labels[first:end]
        if not 0 <= first < end <= len(labels):
            raise ranges.wrong(kind, expected)
        if len(set(own)) != len(own) or (kind is QuestionKind.NOUL and len(own) < 2):
            raise ranges.wrong(kind, "rows of different verbalizers, at least two for a noul")
        slots[kind] = (first, own)
    return slots


def _softcap(config: JsonObject) -> float | None:
    value = config.data.get("softcap")
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise config.wrong("softcap", "a finite number above 0, or null")
    return float(value)


def _temperatures(folder: Path) -> Temperatures:
    calibration = JsonObject.read(folder / CALIBRATION_FILE)
    table = calibration.mapping("per_kind")
    unknown = sorted(set(table) - set(QuestionKind))
    if not table or unknown:
        raise calibration.wrong(
            "per_kind", f"an object with a temperature for {', '.join(QuestionKind)}, and no others"
        )
    return Temperatures.read(table, calibration.file, "per_kind")
