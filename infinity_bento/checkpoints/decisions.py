"""Which decision protocol a checkpoint speaks, by its files; and the layout of the language model inside it.

Read by preflight, so free of torch. The rules are asked in order, and the first that knows the checkpoint answers; a
family without a marker file is served only where the option ``decision-protocol`` names it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infinity_bento.checkpoints import chat_decisions, jev, laya, pplx_joint, slot_lm
from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.checkpoints.layout import Layout
from infinity_bento.checkpoints.temperatures import DEFAULT, Temperatures
from infinity_bento.errors import ConfigError, LoadError

CONFIG_FILE = "decision_config.json"
CLEF_FILE = "joint_head_config.json"
READOUT_FILE = "readout.safetensors"
ATTENTION = ("causal", "noncausal_full_attention")
# Whole models that carry a language model beside towers for other media: architecture -> prefix of its tensors.
WRAPPERS = {
    "Qwen3_5Model": "language_model.",
    "Qwen3_5ForConditionalGeneration": "model.language_model.",
    "Qwen3_5MoeModel": "language_model.",
    "Qwen3_5MoeForConditionalGeneration": "model.language_model.",
    "Gemma4ForConditionalGeneration": "model.language_model.",
}


class Protocol(enum.StrEnum):
    """The served decision protocols; the values are those of the option ``decision-protocol``."""

    LAYA = "laya"
    CLEF = "clef"
    PPLX_JOINT = "pplx-joint"
    PPLX = "pplx"
    D3 = "d3"
    JEV = "jev"
    ONEJEV = "onejev"
    BLOCK = "block"
    RUNE = "rune"
    CHAT = "chat"


# Without a file that says so, by option.
BY_OPTION_ALONE = (Protocol.ONEJEV, Protocol.BLOCK, Protocol.RUNE, Protocol.CHAT)
RUNE_NOTE = "the prompt of this family is written from its published description, not verified against a reference"


@dataclass(frozen=True, slots=True)
class ReadoutSpec:
    """What ``decision_config.json`` says: Perplexity Decider v1 and D3."""

    codes: tuple[str, ...]
    token_ids: tuple[int, ...]
    temperatures: Temperatures
    causal: bool


def find_protocol(folder: Path, asked: str | None = None) -> tuple[Protocol, str] | None:
    """The protocol of a checkpoint, and what decided.

    Args:
        folder: The checkpoint.
        asked: The option ``decision-protocol``.

    Raises:
        ConfigError: The option names a protocol whose files are not there, or another than the files do.
        LoadError: A file is malformed.
    """
    found = _by_files(folder)
    if asked is None:
        return found
    wanted = Protocol(asked)
    if found is not None and found[0] is not wanted:
        raise ConfigError(f"--decision-protocol {asked} contradicts {found[1]}, which says {found[0]}: leave it out.")
    if found is None and wanted not in BY_OPTION_ALONE:
        raise ConfigError(
            f"--decision-protocol {asked} needs files that {folder} lacks; without them only "
            f"{', '.join(BY_OPTION_ALONE)} can be served."
        )
    return found or (wanted, "the option decision-protocol")


def _by_files(folder: Path) -> tuple[Protocol, str] | None:
    if laya.is_laya(folder):
        return Protocol.LAYA, str(folder / laya.CONFIG_FILE)
    if (folder / CLEF_FILE).is_file():
        return Protocol.CLEF, str(folder / CLEF_FILE)
    own = JsonObject.read_optional(folder / slot_lm.OWN_FILE)
    if own.data.get("protocol") is not None:
        named = Protocol(own.choice("protocol", "", tuple(Protocol)))
        if named in (Protocol.ONEJEV, Protocol.BLOCK):
            _check_mask(own, named, slot_lm.read_slots(folder))
        elif named is not Protocol.PPLX_JOINT:
            _check_bare(own, named)
        return named, str(own.file)
    config = JsonObject.read_optional(folder / CONFIG_FILE)
    if not config.data:
        return _by_other_files(folder)
    version = config.integer("format_version")
    if version == 2:
        return Protocol.PPLX_JOINT, f"{config.file}: format_version 2"
    if version != 1:
        raise config.wrong("format_version", "1 or 2")
    prompt = config.string("prompt", None)
    if prompt not in (None, "d3"):
        raise config.wrong("prompt", 'absent or "d3"')
    return (Protocol.D3 if prompt == "d3" else Protocol.PPLX), str(config.file)


def _by_other_files(folder: Path) -> tuple[Protocol, str] | None:
    """The families that are told by a file's name alone."""
    if (folder / jev.CONFIG_FILE).is_file():
        return Protocol.JEV, str(folder / jev.CONFIG_FILE)
    slots = slot_lm.names_slots(folder)
    if slots is not None:
        spec = slot_lm.read_slots(folder)
        return (Protocol.BLOCK, spec.origin) if spec.blocks else (Protocol.ONEJEV, slots)
    for name in (chat_decisions.CONFIG_FILE, chat_decisions.TEMPLATE_FILE):
        if (folder / name).is_file():
            return Protocol.CHAT, str(folder / name)
    return None


def _check_mask(own: JsonObject, named: Protocol, spec: slot_lm.SlotSpec) -> None:
    """The mask is part of the family.

    Raises:
        LoadError: Another file asks for another one.
    """
    if spec.blocks is not None and spec.blocks != (named is Protocol.BLOCK):
        mask = slot_lm.BLOCK if spec.blocks else slot_lm.CAUSAL
        raise LoadError(f"{own.file}: 'protocol' is {named.value!r}, but {spec.origin} asks for the mask {mask}.")


def _check_bare(own: JsonObject, named: Protocol) -> None:
    """Families with files of their own are only named.

    Raises:
        LoadError: There is more in the file, which nobody would read.
    """
    if own.integer("format_version") != 1:
        raise own.wrong("format_version", "1")
    unread = sorted(set(own.data) - {"format_version", "protocol"})
    if unread:
        raise LoadError(
            f"{own.file}: key {unread[0]!r} is not read for {named}; only format_version and protocol are. Remove it, "
            "and put temperatures into a calibration file."
        )


def decision_notes(folder: Path, protocol: Protocol) -> tuple[str, ...]:
    """What a user must know of how a family is served; part of ``/info``.

    Raises:
        LoadError: A file is malformed.
    """
    if protocol is Protocol.LAYA:
        return laya.read_laya(folder).notes
    if protocol is Protocol.PPLX_JOINT:
        return pplx_joint.read_joint(folder).notes
    if protocol in (Protocol.ONEJEV, Protocol.BLOCK):
        notes = slot_lm.read_slots(folder).notes
        return (slot_lm.NOTE, *notes) if protocol is Protocol.BLOCK else notes
    return (RUNE_NOTE,) if protocol is Protocol.RUNE else ()


def read_readout(folder: Path) -> ReadoutSpec:
    """``decision_config.json`` of version 1.

    Raises:
        LoadError: A key is missing or has a value that cannot be honoured.
    """
    config = JsonObject.read(folder / CONFIG_FILE)
    codes, ids = config.strings("codes"), config.data.get("token_ids")
    if not codes or len(set(codes)) != len(codes):
        raise config.wrong("codes", "a list of distinct strings")
    if not isinstance(ids, list) or len(ids) != len(codes) or any(type(token) is not int for token in ids):
        raise config.wrong("token_ids", f"a list of {len(codes)} token ids, one for each of 'codes'")
    if config.string("pooling", "last") != "last":
        raise config.wrong("pooling", '"last"')
    temperature = config.data.get("temperature", 1.0)
    return ReadoutSpec(
        tuple(codes),
        tuple(ids),
        Temperatures.read({DEFAULT: temperature}, config.file),
        causal=config.choice("attention_mode", ATTENTION[0], ATTENTION) == ATTENTION[0],
    )


def language_model(layout: Layout, protocol: Protocol) -> Layout:
    """The layout of the language model that decides: out of its wrapper, looking both ways where the files say so.

    Raises:
        LoadError: The architecture is a wrapper that is not known.
    """
    config: Mapping[str, Any] = layout.config
    prefix = layout.tensor_prefix
    if isinstance(config.get("text_config"), Mapping):
        architecture = next((name for name in layout.architectures if name in WRAPPERS), None)
        if architecture is None:
            raise LoadError(
                f"{layout.path / 'config.json'}: architectures {', '.join(layout.architectures) or 'none'} cannot "
                f"decide; supported around a language model are {', '.join(sorted(WRAPPERS))}."
            )
        config, prefix = config["text_config"], WRAPPERS[architecture]
    changed = dict(config)
    if protocol in (Protocol.PPLX_JOINT, Protocol.BLOCK) or (
        protocol in (Protocol.PPLX, Protocol.D3) and not read_readout(layout.path).causal
    ):
        changed["is_causal"] = False
    adapter = None
    if protocol is Protocol.JEV:
        adapter = jev.read_jev(layout.path).adapter
    elif protocol is Protocol.CHAT:
        adapter = chat_decisions.read_chat(layout.path).adapter
    return replace(
        layout,
        config=changed,
        model_type=str(changed.get("model_type")),
        tensor_prefix=prefix,
        adapter_path=None if adapter is None else layout.path / adapter,
    )
