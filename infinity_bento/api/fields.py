"""Strict, cheap readers for the options of a body: a boolean is no integer, null means the default, unknown fields are
ignored. Called by every dialect; each error names the path, the offending value and what is allowed. The inputs
themselves are read by ``inputs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import orjson

from infinity_bento.core import InputType, Item, ModelInfo, Task, TruncationDirection
from infinity_bento.errors import InvalidInput

Body = Mapping[str, Any]
T = TypeVar("T")
D = TypeVar("D")

_SHOWN_CHARACTERS = 40
_DIRECTIONS: Mapping[str, TruncationDirection] = {"right": "right", "left": "left", "Right": "right", "Left": "left"}
_INPUT_TYPES: Mapping[str, InputType] = {
    "query": InputType.QUERY,
    "document": InputType.DOCUMENT,
    "passage": InputType.DOCUMENT,
    "search_query": InputType.QUERY,
    "search_document": InputType.DOCUMENT,
}
DIRECTION_NAMES = tuple(_DIRECTIONS)
INPUT_TYPE_NAMES = tuple(_INPUT_TYPES)


def describe(value: Any) -> str:
    """A value as error texts show it: its JSON type, and itself where it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {'true' if value else 'false'}"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        cut = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "..."
        return f"the string {orjson.dumps(cut).decode()}"
    if isinstance(value, bytes):
        return f"binary data of {len(value)} bytes"
    return f"an array of {len(value)}" if isinstance(value, list) else "an object"


def boolean(body: Body, name: str, default: T) -> bool | T:
    """A true or false; absent or null gives ``default``."""
    value = body.get(name)
    if value is None:
        return default
    if value is True or value is False:
        return bool(value)
    refuse(name, value, "true or false")


def string(body: Body, name: str) -> str | None:
    """A string; absent or null gives None."""
    value = body.get(name)
    if value is None or type(value) is str:
        return value
    refuse(name, value, "a string")


def positive_integer(body: Body, name: str) -> int | None:
    """A whole number from 1; absent or null gives None."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is int and value >= 1:
        return value
    refuse(name, value, "a whole number of at least 1")


def choice(body: Body, name: str, allowed: Mapping[str, T], default: D) -> T | D:
    """One of the keys of ``allowed``, as its value; absent or null gives ``default``."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is str and value in allowed:
        return allowed[value]
    refuse(name, value, " or ".join(f'"{key}"' for key in allowed))


def dimensions(body: Body, info: ModelInfo, name: str = "dimensions") -> int | None:
    """How many leading values of the vector to keep; None for all.

    Raises:
        InvalidInput: Not a whole number from 1 to the model's width.
    """
    value = positive_integer(body, name)
    if value is not None and info.dimensions is not None and value > info.dimensions:
        raise InvalidInput(
            f"`{name}` is {value}; model {info.name!r} gives vectors of {info.dimensions}, so send a whole number "
            f"from 1 to {info.dimensions}.",
            param=name,
        )
    return value


def prompt_name(body: Body, info: ModelInfo) -> str | None:
    """A key of the checkpoint's prompts; None for its default.

    Raises:
        InvalidInput: The checkpoint has no prompt of this name.
    """
    value = string(body, "prompt_name")
    if value is not None and value not in info.prompts:
        known = ", ".join(repr(key) for key in info.prompts) or "none: leave the field out"
        raise InvalidInput(
            f"`prompt_name` is {describe(value)}; the prompts of model {info.name!r} are {known}.", param="prompt_name"
        )
    return value


def text_item(body: Body, info: ModelInfo, task: Task) -> Item:
    """A template of items with the text options of a body: model prompts, truncation.

    Raises:
        InvalidInput: One of them has a wrong type or value, or the checkpoint has no such prompt.
    """
    return Item(
        task=task,
        prompt_name=prompt_name(body, info),
        prompt=string(body, "prompt"),
        input_type=choice(body, "input_type", _INPUT_TYPES, None),
        truncate=boolean(body, "truncate", None),
        truncation_direction=choice(body, "truncation_direction", _DIRECTIONS, "right"),
    )


def pair_item(body: Body, task: Task) -> Item:
    """A template of items that are scored: truncation, instruction and kind of scores.

    Raises:
        InvalidInput: One of them has a wrong type or value.
    """
    return Item(
        task=task,
        instruction=string(body, "instruction"),
        truncate=boolean(body, "truncate", None),
        truncation_direction=choice(body, "truncation_direction", _DIRECTIONS, "right"),
        raw_scores=boolean(body, "raw_scores", False),
    )


def nested(body: Body, name: str) -> Body:
    """An object inside the body; absent or null gives an empty one."""
    value = body.get(name)
    if value is None:
        return {}
    if type(value) is dict:
        return value
    refuse(name, value, "an object")


def refuse(path: str, value: Any, allowed: str) -> NoReturn:
    """Raise the error for a value at ``path`` that is not what is ``allowed``."""
    raise InvalidInput(f"`{path}` is {describe(value)}; it must be {allowed}.", param=path)
