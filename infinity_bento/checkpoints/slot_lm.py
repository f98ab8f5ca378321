"""The files that say that a language model answers by the letters of OneJev's prompt, and under which mask.

``readout.json`` and the overrides in ``config.json`` come with Elephant and Mammoth. Their schema is not public, so
they are read by a contract of our own, which ``infinity_decision.json`` may complete. Read by preflight, so free of
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.checkpoints.temperatures import DEFAULT, Temperatures
from infinity_bento.errors import LoadError

READOUT_FILE = "readout.json"
OWN_FILE = "infinity_decision.json"
KIND = "slot_lm"
PROMPT = "qev-labels-v2"  # OneJev's
BLOCK, CAUSAL = "block_bidirectional", "causal"
OVERRIDES = ("baseten_modeling_overrides", "modeling_overrides")  # keys of config.json
READOUT_KEYS = frozenset({"readout", "prompt", "temperature"})
OVERRIDE_KEYS = frozenset({"attention"})
OWN_KEYS = frozenset(
    {"format_version", "protocol", "attention", "pooling", "readout", "temperature", "allow_unverified"}
)
NOTE = (
    "contract-only: the files and the mask of this family are not public, so they are read by a contract of our own, "
    "not verified against published weights"
)


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """What the files say."""

    blocks: bool | None  # the state does not see a question, and each sees itself both ways; None: nobody says
    origin: str  # what decided that
    temperatures: Temperatures
    notes: tuple[str, ...] = ()


def names_slots(folder: Path) -> str | None:
    """The file that makes a folder one of this kind; None: there is none."""
    if (folder / READOUT_FILE).is_file():
        return str(folder / READOUT_FILE)
    config = JsonObject.read_optional(folder / "config.json")
    found = next((key for key in OVERRIDES if _attention(config.data.get(key)) == BLOCK), None)
    return None if found is None else f"{config.file}: {found}"


def read_slots(folder: Path) -> SlotSpec:
    """The settings of a checkpoint folder; ``infinity_decision.json`` wins over the checkpoint's own files.

    Raises:
        LoadError: A key is unknown and ``allow_unverified`` does not permit it, or a value cannot be honoured.
    """
    own, readout, config = (JsonObject.read_optional(folder / name) for name in (OWN_FILE, READOUT_FILE, "config.json"))
    lenient = own.boolean("allow_unverified", False)
    passed: list[str] = []
    _check_own(own)
    _known(own, OWN_KEYS, False, passed)
    if readout.data:
        readout.choice("readout", "", (KIND,))
        _known(readout, READOUT_KEYS, lenient, passed)
        if not lenient:
            readout.choice("prompt", PROMPT, (PROMPT,))
    blocks, origin = None, ""
    for key in OVERRIDES:
        overrides = JsonObject(config.file, config.mapping(key))
        _known(overrides, OVERRIDE_KEYS, lenient, passed)
        if overrides.data.get("attention") is not None:
            blocks, origin = overrides.choice("attention", "", (BLOCK, CAUSAL)) == BLOCK, f"{config.file}: {key}"
    if own.data.get("attention") is not None:
        blocks, origin = own.choice("attention", "", (BLOCK, CAUSAL)) == BLOCK, str(own.file)
    source = own if "temperature" in own.data else readout
    given: Any = source.data.get("temperature", 1.0)
    table = given if isinstance(given, dict) else {DEFAULT: given}
    notes = [f"{', '.join(passed)}: not applied (allow_unverified)"] if passed else []
    return SlotSpec(blocks, origin, Temperatures.read(table, source.file), tuple(notes))


def _check_own(own: JsonObject) -> None:
    if not own.data:
        return
    if own.integer("format_version") != 1:
        raise own.wrong("format_version", "1")
    own.choice("pooling", "last", ("last",))
    kind = JsonObject(own.file, own.mapping("readout"))
    kind.choice("kind", KIND, (KIND,))


def _known(source: JsonObject, allowed: frozenset[str], lenient: bool, passed: list[str]) -> None:
    """Refuse what is not known, or note it.

    Raises:
        LoadError: A key is unknown.
    """
    unknown = sorted(set(source.data) - allowed)
    if unknown and not lenient:
        raise LoadError(
            f"{source.file}: key {unknown[0]!r} is unknown, so what it asks for cannot be honoured; allowed are "
            f'{", ".join(sorted(allowed))}, unless an {OWN_FILE} beside it says "allow_unverified": true.'
        )
    passed += [f"{source.file.name}: {key}" for key in unknown]


def _attention(overrides: Any) -> Any:
    return overrides.get("attention") if isinstance(overrides, Mapping) else None
