"""Strict, cheap readers for the fields of a JSON body: a boolean is no integer, null means the default, unknown
fields are ignored. Called by every dialect; each error names the path, the offending value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import orjson

from infinity_bento.core import ModelInfo
from infinity_bento.errors import BatchTooLarge, EmptyInput, InvalidInput

Body = Mapping[str, Any]
T = TypeVar("T")

_TOKEN_ID_MAX = 2**31 - 1
_SHOWN_CHARACTERS = 40
_INPUTS_ALLOWED = "a string, an array of strings, an array of token ids, or an array of token-id arrays"


class Inputs(NamedTuple):
    """The inputs of one request; ``single`` if they came outside a list, so that errors need no index."""

    values: list[str | list[int]]
    single: bool


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
    return f"an array of {len(value)}" if isinstance(value, list) else "an object"


def boolean(body: Body, name: str, default: T) -> bool | T:
    """A true or false; absent or null gives ``default``."""
    value = body.get(name)
    if value is None:
        return default
    if value is True or value is False:
        return bool(value)
    _refuse(name, value, "true or false")


def string(body: Body, name: str) -> str | None:
    """A string; absent or null gives None."""
    value = body.get(name)
    if value is None or type(value) is str:
        return value
    _refuse(name, value, "a string")


def positive_integer(body: Body, name: str) -> int | None:
    """A whole number from 1; absent or null gives None."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is int and value >= 1:
        return value
    _refuse(name, value, "a whole number of at least 1")


def choice(body: Body, name: str, allowed: Mapping[str, T], default: T) -> T:
    """One of the keys of ``allowed``, as its value; absent or null gives ``default``."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is str and value in allowed:
        return allowed[value]
    _refuse(name, value, " or ".join(f'"{key}"' for key in allowed))


def inputs(body: Body, name: str) -> Inputs:
    """One or many texts or token-id lists, mixed if the caller likes.

    Raises:
        EmptyInput: An empty list, an empty text or an empty list of ids.
        InvalidInput: Any other shape; the path names the first element at fault.
    """
    value = body.get(name)
    if type(value) is str:
        _check_text(value, name)
        return Inputs([value], True)
    if type(value) is not list:
        if name not in body:
            raise InvalidInput(f"`{name}` is missing; it must be {_INPUTS_ALLOWED}.", param=name)
        _refuse(name, value, _INPUTS_ALLOWED)
    if not value:
        raise EmptyInput(f"`{name}` is an empty array; send at least one input.", param=name)
    types = set(map(type, value))
    if types == {str}:
        if "" in value:
            _check_text("", f"{name}[{value.index('')}]")
        return Inputs(value, False)
    if types == {int}:
        _check_ids(value, name)
        return Inputs([value], True)
    for index, element in enumerate(value):
        _check_element(element, f"{name}[{index}]")
    return Inputs(value, False)


def check_batch_size(count: int, info: ModelInfo, name: str) -> None:
    """Refuse more inputs than the model takes, before anything is made of them.

    Raises:
        BatchTooLarge: ``count`` exceeds ``max_client_batch_size``.
    """
    if count > info.max_client_batch_size:
        raise BatchTooLarge(
            f"`{name}` has {count} inputs; the limit of model {info.name!r} is {info.max_client_batch_size} "
            "(max_client_batch_size). Split them over several requests.",
            param=name,
        )


def dimensions(body: Body, info: ModelInfo) -> int | None:
    """How many leading values of the vector to keep; None for all.

    Raises:
        InvalidInput: Not a whole number from 1 to the model's width.
    """
    value = positive_integer(body, "dimensions")
    if value is not None and info.dimensions is not None and value > info.dimensions:
        raise InvalidInput(
            f"`dimensions` is {value}; model {info.name!r} gives vectors of {info.dimensions}, so send a whole number "
            f"from 1 to {info.dimensions}.",
            param="dimensions",
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


def _check_element(element: Any, path: str) -> None:
    if type(element) is str:
        _check_text(element, path)
    elif type(element) is list:
        if not element:
            raise EmptyInput(f"`{path}` is an empty array; send at least one token id.", param=path)
        _check_ids(element, path)
    else:
        _refuse(path, element, "a string or an array of token ids")


def _check_text(text: str, path: str) -> None:
    if not text:
        raise EmptyInput(f"`{path}` is an empty string; send at least one character, or leave it out.", param=path)


def _check_ids(ids: list[Any], path: str) -> None:
    """Whole numbers that fit int32; whether the vocabulary has them only the engine knows."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= _TOKEN_ID_MAX:
        return
    for index, value in enumerate(ids):
        if type(value) is not int or not 0 <= value <= _TOKEN_ID_MAX:
            _refuse(f"{path}[{index}]", value, f"a token id, a whole number from 0 to {_TOKEN_ID_MAX}")


def _refuse(path: str, value: Any, allowed: str) -> NoReturn:
    raise InvalidInput(f"`{path}` is {describe(value)}; it must be {allowed}.", param=path)
