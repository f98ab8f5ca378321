"""``rl_agent_config.json``: how a Laya checkpoint writes its sequences, and how its decision head is shaped.

Read by preflight, so free of torch. The encoder's config lies in ``encoder/``, its weights beside the head's in the
folder itself, the tokenizer in ``tokenizer/``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.checkpoints.temperatures import Temperatures
from infinity_bento.decisions import QuestionKind

CONFIG_FILE = "rl_agent_config.json"
ENCODER_FOLDER = "encoder"
TOKENIZER_FOLDER = "tokenizer"
ENCODER_PREFIX = "encoder."  # of the encoder's tensors in the weight file

# The order of the type embedding, and of the list ``temperature``.
KINDS = (QuestionKind.CHOICE, QuestionKind.SCORE, QuestionKind.NOUL)
LAYOUTS = ("sequential", "parallel")
LOWEST, HIGHEST = 0.5, 5.0  # temperatures beyond are not applied: a fit on few answers can give almost anything
_SIZES = {"2": "1-2", "3-5": "3-5", "6-10": "6-10", "11+": "11+"}
_UNUSED = ("lang_temperatures", "binning")


@dataclass(frozen=True, slots=True)
class LayaSpec:
    """What ``rl_agent_config.json`` says."""

    max_length: int  # tokens of a sequence
    head_length: int  # ... of which the question and its options get so many before they are cut
    layers: int  # of the decision head
    actions: int  # outputs of the act head
    parallel: bool  # options lie side by side, blind to each other
    temperatures: Temperatures
    notes: tuple[str, ...] = ()


def is_laya(folder: Path) -> bool:
    """Whether a folder holds a Laya checkpoint."""
    return (folder / CONFIG_FILE).is_file()


def read_laya(folder: Path) -> LayaSpec:
    """The Laya settings of a checkpoint folder.

    Raises:
        LoadError: A key is missing or has a value that cannot be honoured.
    """
    config = JsonObject.read(folder / CONFIG_FILE)
    temperatures, notes = _temperatures(config)
    notes += [f"{CONFIG_FILE}: {key} is not applied" for key in _UNUSED if config.data.get(key)]
    return LayaSpec(
        max_length=config.integer("max_len", 512, minimum=16),
        head_length=config.integer("head_max_len", 192, minimum=16),
        layers=config.integer("head_layers", 2, minimum=0),
        actions=len(config.mapping("act_costs")) + 1,
        parallel=config.choice("option_layout", LAYOUTS[0], LAYOUTS) == "parallel",
        temperatures=temperatures,
        notes=tuple(notes),
    )


def _temperatures(config: JsonObject) -> tuple[Temperatures, list[str]]:
    """The table, and what of it had to be replaced; the reference clamps too, and takes 1 for what is no number."""
    listed = config.data.get("temperature")
    if listed is None:
        listed = [1.0] * len(KINDS)
    if not isinstance(listed, list) or len(listed) != len(KINDS):
        raise config.wrong("temperature", "a list of three numbers: for choice, score and noul")
    table: dict[str, Any] = {kind.value: value for kind, value in zip(KINDS, listed, strict=True)}
    for name, value in config.mapping("temperature_by_options").items():
        kind, _, size = name.partition(":")
        if kind not in table or size not in _SIZES:
            raise config.wrong("temperature_by_options", "an object with keys such as choice:2, score:3-5, noul:11+")
        table[f"{kind}:{_SIZES[size]}"] = value
    applied = {name: _clamped(value) for name, value in table.items()}
    replaced = [
        f"{name} {value!r} as {applied[name]:g}"
        for name, value in table.items()
        if isinstance(value, bool) or value != applied[name]
    ]
    notes = [f"{CONFIG_FILE}: temperatures outside {LOWEST:g} to {HIGHEST:g} ({', '.join(replaced)})"]
    return Temperatures.read(applied, config.file), notes if replaced else []


def _clamped(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 1.0
    return min(HIGHEST, max(LOWEST, float(value)))
