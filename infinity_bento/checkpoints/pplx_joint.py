"""The files of a Perplexity Decider v1.2: how all questions of a request are written as one sequence, and its codes.

Its prompt text is not public. It is taken from ``protocol.json`` where that has it in the form below, else from an
``infinity_decision.json`` that the user puts beside it. Read by preflight, so free of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.checkpoints.temperatures import DEFAULT, Temperatures
from infinity_bento.decisions import QuestionKind
from infinity_bento.errors import LoadError

OWN_FILE = "infinity_decision.json"
PROTOCOL_FILE = "protocol.json"
CONFIG_FILE = "decision_config.json"
PROTOCOL = "pplx-joint"
TEMPLATE_NAME = "joint-question-inline-readout-v1"
NOTE = (
    "contract-only: the prompt of this family is not public, so it is the text of the checkpoint's or your own files, "
    "not verified against published weights"
)
# The texts of a template, and the places that each must have, once.
TEXTS: Mapping[str, tuple[str, ...]] = {
    "system": (),
    "state": ("{state}",),
    "question": ("{n}", "{instructions}", "{options}", "{marker}"),
    "option": ("{code}", "{text}"),
}
NOUL_TEXTS = ("No / false", "Yes / true")
MOST_CODES = 255
_ORDERS = (["false", "true"], ["true", "false"])


@dataclass(frozen=True, slots=True)
class JointTemplate:
    """The texts that a request is written with; ``{places}`` are filled in, and nothing else is special."""

    system: str
    state: str
    question: str
    option: str
    close: str = ""  # behind the last question
    separator: str = "\n\n"  # before each question
    default_instructions: Mapping[QuestionKind, str] = field(default_factory=dict)
    noul: tuple[str, str] = NOUL_TEXTS  # undescribed outcomes: false, true


@dataclass(frozen=True, slots=True)
class JointSpec:
    """What the files say."""

    template: JointTemplate
    marker: str  # the token whose hidden state answers a question
    codes: tuple[str, ...]  # one for each row of the readout
    token_ids: tuple[int, ...] | None  # of the codes, for a check
    temperatures: Temperatures
    true_first: bool  # order of a noul's options
    state_indent: int | None
    readout_file: str
    readout_tensor: str
    notes: tuple[str, ...] = (NOTE,)


def read_joint(folder: Path) -> JointSpec:
    """The settings of a checkpoint folder; ``infinity_decision.json`` wins over the checkpoint's own files.

    Raises:
        LoadError: A file is malformed, of another version, or asks for something else; or nobody has the prompt text.
    """
    own, protocol, config = (JsonObject.read_optional(folder / name) for name in (OWN_FILE, PROTOCOL_FILE, CONFIG_FILE))
    _check_versions(own, protocol, config)
    readout = JsonObject(own.file, own.mapping("readout"))
    json_style = JsonObject(own.file, own.mapping("state_json"))
    if json_style.boolean("ensure_ascii", False):
        raise json_style.wrong("ensure_ascii", "false")
    order = own.data.get("noul_order", _ORDERS[0])
    if order not in _ORDERS:
        raise own.wrong("noul_order", '["false", "true"] or ["true", "false"]')
    token_ids = config.data.get("token_ids")
    if token_ids is not None and not (isinstance(token_ids, list) and all(type(token) is int for token in token_ids)):
        raise config.wrong("token_ids", "a list of token ids, one for each code")
    codes = _codes(own if "codes" in own.data else config)
    if token_ids is not None and "codes" not in own.data and len(token_ids) != len(codes):
        raise config.wrong("token_ids", f"a list of {len(codes)} token ids, one for each code")
    marker = own.string("marker", None) or protocol.string("marker", None)
    if marker is None:
        raise protocol.wrong("marker", "the token that answers are read at")
    return JointSpec(
        template=_template(own, protocol),
        marker=marker,
        codes=codes,
        token_ids=tuple(token_ids) if token_ids is not None and "codes" not in own.data else None,
        temperatures=_temperatures(own if "temperature" in own.data else config),
        true_first=order == _ORDERS[1],
        state_indent=json_style.integer("indent", None, minimum=0),
        readout_file=readout.string("file", "readout.safetensors"),
        readout_tensor=readout.string("tensor", "weight"),
    )


def _check_versions(own: JsonObject, protocol: JsonObject, config: JsonObject) -> None:
    if own.data:
        if own.integer("format_version") != 1:
            raise own.wrong("format_version", "1")
        own.choice("protocol", PROTOCOL, (PROTOCOL,))
        own.choice("attention", "noncausal_full", ("noncausal_full",))
        own.choice("pooling", "marker", ("marker",))
        kind = JsonObject(own.file, own.mapping("readout"))
        kind.choice("kind", "rows", ("rows",))
    if protocol.data and protocol.integer("version") != 3:
        raise protocol.wrong("version", "3")
    if config.data and config.integer("format_version") != 2:
        raise config.wrong("format_version", "2 for a checkpoint that answers all questions at once")
    if not own.data and not protocol.data:
        raise LoadError(
            f"{protocol.file} is missing; the joint form of pplx-decider needs it, or an {OWN_FILE} beside it."
        )


def _template(own: JsonObject, protocol: JsonObject) -> JointTemplate:
    """The texts, of whichever file has them."""
    source = own if "template" in own.data else protocol
    given = source.data.get("template")
    if not isinstance(given, dict):
        if given not in (None, TEMPLATE_NAME):
            raise source.wrong("template", f"{TEMPLATE_NAME!r} or an object of texts")
        raise LoadError(
            f"{source.file} names its template without the text, which is not public; put an {OWN_FILE} with a "
            f"'template' ({', '.join(TEXTS)}) beside it."
        )
    texts = JsonObject(source.file, given)
    for name, places in TEXTS.items():
        text = texts.string(name)
        wrong = [place for place in places if text.count(place) != 1]
        if wrong:
            raise texts.wrong(name, f"a text with {', '.join(places)}, each once; {wrong[0]} is not")
    defaults = JsonObject(source.file, texts.mapping("default_instructions"))
    noul = texts.data.get("noul", list(NOUL_TEXTS))
    if not isinstance(noul, list) or len(noul) != 2 or not all(isinstance(text, str) for text in noul):
        raise texts.wrong("noul", "a list of two texts, for false and for true")
    return JointTemplate(
        system=texts.string("system"),
        state=texts.string("state"),
        question=texts.string("question"),
        option=texts.string("option"),
        close=texts.string("close", ""),
        separator=texts.string("separator", "\n\n"),
        default_instructions={kind: defaults.string(kind) for kind in QuestionKind if kind in defaults.data},
        noul=(noul[0], noul[1]),
    )


def _codes(source: JsonObject) -> tuple[str, ...]:
    given = source.data.get("codes")
    if given == "single_token_AZ":
        return tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    codes = source.strings("codes")
    distinct = len(set(codes)) == len(codes) and all(re.fullmatch(r"\S+", code) for code in codes)
    if not 2 <= len(codes) <= MOST_CODES or not distinct:
        raise source.wrong("codes", f"a list of 2 to {MOST_CODES} different codes without blanks")
    return codes


def _temperatures(source: JsonObject) -> Temperatures:
    given: Any = source.data.get("temperature", 1.0)
    table = given if isinstance(given, dict) else {DEFAULT: given}
    return Temperatures.read(table, source.file)
