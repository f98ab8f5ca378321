"""``decision.json`` and ``decision_template.jinja``: how a chat model is asked for a decision by the labels it may say.

Both are transformers' files, and both may be absent: then the generic prompt is used. Read by preflight, so free of
torch.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity_bento.checkpoints.json_files import JsonObject, relative_path
from infinity_bento.checkpoints.temperatures import Temperatures
from infinity_bento.decisions import QuestionKind
from infinity_bento.errors import LoadError

CONFIG_FILE = "decision.json"
TEMPLATE_FILE = "decision_template.jinja"
KEYS = ("labels", "temperature", "noul_options", "sanitize_control_tokens", "adapter")
LETTERS = tuple(string.ascii_uppercase)
YES_NO = ("Yes", "No")
_ORDERS = (["true", "false"], ["false", "true"])


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """What the files say, and transformers' defaults where they say nothing."""

    labels: Mapping[QuestionKind, tuple[str, ...]]
    temperatures: Temperatures
    true_first: bool  # order of a noul's options
    template: str | None  # Jinja; None: the generic prompt in the tokenizer's chat template
    adapter: str | None  # folder of a LoRA that belongs to the weights


def is_chat(folder: Path) -> bool:
    """Whether a folder says how to ask its model."""
    return (folder / CONFIG_FILE).is_file() or (folder / TEMPLATE_FILE).is_file()


def read_chat(folder: Path) -> ChatSpec:
    """The settings of a checkpoint folder.

    Raises:
        LoadError: A key is unknown, or has a value that cannot be honoured.
    """
    config = JsonObject.read_optional(folder / CONFIG_FILE)
    unknown = sorted(set(config.data) - set(KEYS))
    if unknown:
        raise LoadError(
            f"{config.file}: key {unknown[0]!r} is unknown; allowed are {', '.join(KEYS)}: remove it, if the model "
            "answers well without it."
        )
    if not config.boolean("sanitize_control_tokens", True):
        raise config.wrong("sanitize_control_tokens", "true: special tokens of callers are always read as text")
    order = config.data.get("noul_options", _ORDERS[0])
    if order not in _ORDERS:
        raise config.wrong("noul_options", '["true", "false"] or ["false", "true"]')
    adapter = config.string("adapter", None)
    return ChatSpec(
        labels=_labels(config),
        temperatures=_temperatures(config),
        true_first=order == _ORDERS[0],
        template=_template(folder / TEMPLATE_FILE),
        adapter=None if adapter is None else relative_path(adapter, config.file, "adapter"),
    )


def _labels(config: JsonObject) -> dict[QuestionKind, tuple[str, ...]]:
    given = JsonObject(config.file, config.mapping("labels"))
    if set(given.data) - set(QuestionKind):
        raise config.wrong("labels", f"an object with lists for {', '.join(QuestionKind)}, and no others")
    labels = {}
    for kind in QuestionKind:
        own = given.strings(kind) or (YES_NO if kind is QuestionKind.NOUL else LETTERS)
        if len(set(own)) != len(own) or "" in own or (kind is QuestionKind.NOUL and len(own) < 2):
            raise given.wrong(kind, "a list of different texts, at least two for a noul")
        labels[kind] = own
    return labels


def _temperatures(config: JsonObject) -> Temperatures:
    table = config.mapping("temperature")
    if set(table) - set(QuestionKind):
        raise config.wrong("temperature", f"an object with a number for {', '.join(QuestionKind)}, and no others")
    return Temperatures.read(table, config.file)


def _template(file: Path) -> str | None:
    if not file.is_file():
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{file} cannot be read ({type(error).__name__}); make it a readable UTF-8 file.") from error
