"""Readers for what a request wants computed: texts, token ids, pairs, documents. Called by the dialects.

As in ``fields``, each error names the path of the first element at fault, its value and what is allowed.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from infinity_bento.api.fields import Body, refuse
from infinity_bento.core import Item, ModelInfo
from infinity_bento.errors import BatchTooLarge, EmptyInput, InvalidInput

_TOKEN_ID_MAX = 2**31 - 1
_INPUTS_ALLOWED = "a string, an array of strings, an array of token ids, or an array of token-id arrays"
_TEXTS_ALLOWED = "a string or an array of strings"
_IDS_ALLOWED = "an array of token ids or an array of token-id arrays"
_PAIRS_ALLOWED = "a string, an array of one text or of a pair of texts, or an array of such arrays"


class Inputs(NamedTuple):
    """The inputs of one request, and the field they came from."""

    field: str
    values: list[str | list[int]]
    single: bool  # it came outside a list, so that errors need no index

    def path(self, index: int) -> str:
        """How errors name an input."""
        return self.field if self.single else f"{self.field}[{index}]"

    def items(self, template: Item) -> list[Item]:
        """One item per input, with the options of ``template``."""
        return [
            Item(
                template.task,
                text=value if isinstance(value, str) else None,
                token_ids=value if isinstance(value, list) else None,
                prompt_name=template.prompt_name,
                prompt=template.prompt,
                input_type=template.input_type,
                truncate=template.truncate,
                truncation_direction=template.truncation_direction,
                normalize=template.normalize,
                dimensions=template.dimensions,
                raw_scores=template.raw_scores,
                aggregation=template.aggregation,
                ignore_labels=template.ignore_labels,
            )
            for value in self.values
        ]


class Pairs(NamedTuple):
    """Texts and pairs of texts to classify."""

    values: list[tuple[str, str | None]]
    single: bool

    def path(self, index: int) -> str:
        """How errors name an input."""
        return "inputs" if self.single else f"inputs[{index}]"


class Documents(NamedTuple):
    """What a query is compared with, and the field it came from."""

    field: str
    values: list[str]

    def path(self, index: int) -> str:
        """How errors name a document."""
        return f"{self.field}[{index}]"


def texts_or_ids(body: Body, name: str) -> Inputs:
    """One or many texts or token-id lists, mixed if the caller likes.

    Raises:
        EmptyInput: An empty list, an empty text or an empty list of ids.
        InvalidInput: Any other shape.
    """
    value = body.get(name)
    if type(value) is str:
        _check_text(value, name)
        return Inputs(name, [value], True)
    if type(value) is not list:
        _refuse_or_missing(body, name, _INPUTS_ALLOWED)
    _check_not_empty(value, name, "input")
    types = set(map(type, value))
    if types == {str}:
        if "" in value:
            _check_text("", f"{name}[{value.index('')}]")
        return Inputs(name, value, False)
    if types == {int}:
        _check_ids(value, name)
        return Inputs(name, [value], True)
    for index, element in enumerate(value):
        _check_element(element, f"{name}[{index}]")
    return Inputs(name, value, False)


def texts(body: Body, name: str) -> Inputs:
    """One or many texts.

    Raises:
        EmptyInput: An empty list or an empty text.
        InvalidInput: Any other shape.
    """
    value = body.get(name)
    if type(value) is str:
        _check_text(value, name)
        return Inputs(name, [value], True)
    if type(value) is not list:
        _refuse_or_missing(body, name, _TEXTS_ALLOWED)
    _check_not_empty(value, name, "text")
    for index, element in enumerate(value):
        if not element or type(element) is not str:
            _check_is_text(element, f"{name}[{index}]")
    return Inputs(name, value, False)


def id_lists(body: Body, name: str) -> Inputs:
    """One or many lists of token ids.

    Raises:
        EmptyInput: An empty list.
        InvalidInput: Any other shape.
    """
    value = body.get(name)
    if type(value) is not list:
        _refuse_or_missing(body, name, _IDS_ALLOWED)
    _check_not_empty(value, name, "token id")
    if type(value[0]) is not list:
        _check_ids(value, name)
        return Inputs(name, [value], True)
    for index, element in enumerate(value):
        if type(element) is not list:
            refuse(f"{name}[{index}]", element, "an array of token ids")
        _check_element(element, f"{name}[{index}]")
    return Inputs(name, value, False)


def required_text(body: Body, name: str) -> str:
    """A text that must be there.

    Raises:
        EmptyInput: An empty text.
        InvalidInput: No string.
    """
    value = body.get(name)
    if type(value) is not str:
        _refuse_or_missing(body, name, "a string")
    _check_text(value, name)
    return value


def pairs(body: Body) -> Pairs:
    """TEI's ``inputs`` of /predict: ``"a"`` and ``["a"]`` are a text, ``["a", "b"]`` is a pair, an array of arrays is a
    batch of these.

    Raises:
        EmptyInput: An empty text, or a pair of two.
        InvalidInput: Any other shape.
    """
    value = body.get("inputs")
    if type(value) is str:
        _check_text(value, "inputs")
        return Pairs([(value, None)], True)
    if type(value) is not list:
        _refuse_or_missing(body, "inputs", _PAIRS_ALLOWED)
    if value and type(value[0]) is list:
        return Pairs([_pair(element, f"inputs[{index}]") for index, element in enumerate(value)], False)
    return Pairs([_pair(value, "inputs")], True)


def documents(body: Body) -> Documents:
    """The ``texts`` (strings) or the ``documents`` (strings, or objects with a ``text``) of a rerank request.

    Raises:
        EmptyInput: An empty list. A document itself may be empty.
        InvalidInput: Neither or both fields, or any other shape.
    """
    has_texts, has_documents = body.get("texts") is not None, body.get("documents") is not None
    if has_texts and has_documents:
        raise InvalidInput(
            "`texts` and `documents` are both given; send `texts` for TEI's answer or `documents` for Cohere's.",
            param="documents",
        )
    if not has_texts and not has_documents:
        raise InvalidInput(
            "`texts` and `documents` are both missing; one of them must be an array of strings.", param="documents"
        )
    name = "texts" if has_texts else "documents"
    value = body[name]
    if type(value) is not list:
        refuse(name, value, "an array of strings" if has_texts else "an array of strings or of objects with a text")
    _check_not_empty(value, name, "document")
    if set(map(type, value)) == {str}:
        return Documents(name, value)
    return Documents(name, [_document(element, f"{name}[{index}]", has_texts) for index, element in enumerate(value)])


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


def _pair(value: Any, path: str) -> tuple[str, str | None]:
    if type(value) is not list or not 1 <= len(value) <= 2:
        refuse(path, value, "an array of one text or of a pair of texts")
    for index, element in enumerate(value):
        if type(element) is not str:
            refuse(f"{path}[{index}]", element, "a string")
    if not any(value):
        _check_text("", path if len(value) == 2 else f"{path}[0]")
    return value[0], value[1] if len(value) == 2 else None


def _document(element: Any, path: str, strings_only: bool) -> str:
    if type(element) is str:
        return element
    if strings_only:
        refuse(path, element, "a string")
    if type(element) is not dict:
        refuse(path, element, "a string or an object with a text")
    text = element.get("text")
    if type(text) is not str:
        refuse(f"{path}.text", text, "a string")
    return text


def _refuse_or_missing(body: Body, name: str, allowed: str) -> NoReturn:
    if name not in body:
        raise InvalidInput(f"`{name}` is missing; it must be {allowed}.", param=name)
    refuse(name, body[name], allowed)


def _check_not_empty(value: list[Any], name: str, noun: str) -> None:
    if not value:
        raise EmptyInput(f"`{name}` is an empty array; send at least one {noun}.", param=name)


def _check_element(element: Any, path: str) -> None:
    if type(element) is str:
        _check_text(element, path)
    elif type(element) is list:
        _check_not_empty(element, path, "token id")
        _check_ids(element, path)
    else:
        refuse(path, element, "a string or an array of token ids")


def _check_is_text(value: Any, path: str) -> None:
    if type(value) is not str:
        refuse(path, value, "a string")
    _check_text(value, path)


def _check_text(text: str, path: str) -> None:
    if not text:
        raise EmptyInput(f"`{path}` is an empty string; send at least one character, or leave it out.", param=path)


def _check_ids(ids: list[Any], path: str) -> None:
    """Whole numbers that fit int32; whether the vocabulary has them only the engine knows."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= _TOKEN_ID_MAX:
        return
    for index, value in enumerate(ids):
        if type(value) is not int or not 0 <= value <= _TOKEN_ID_MAX:
            refuse(f"{path}[{index}]", value, f"a token id, a whole number from 0 to {_TOKEN_ID_MAX}")
