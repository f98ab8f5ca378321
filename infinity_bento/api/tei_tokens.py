"""TEI's POST /tokenize and /decode. Rows of ``table`` point here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinity_bento.api import fields
from infinity_bento.api.body import read_object
from infinity_bento.api.choosing import any_model
from infinity_bento.api.envelopes import located
from infinity_bento.api.exchange import Call, Reply
from infinity_bento.api.fields import Body
from infinity_bento.api.inputs import Inputs, check_batch_size, id_lists, texts
from infinity_bento.api.protocol import TokenRow
from infinity_bento.api.schemas import MODEL, TOKEN_IDS, array, nullable, record, ref
from infinity_bento.core import ModelInfo
from infinity_bento.errors import InfinityError, InputTooLong

# Nothing is cut here, so characters are bounded instead; no token of TEI's models is longer.
_CHARACTERS_PER_TOKEN = 250


async def tokenize(call: Call) -> Reply:
    """POST /tokenize. Raises as ``tokens_of``."""
    return call.reply([token_entries(row) for row in await tokens_of(call, await read_object(call))])


async def decode(call: Call) -> Reply:
    """POST /decode. Raises as ``texts_of``."""
    return call.reply(await texts_of(call, await read_object(call)))


async def tokens_of(call: Call, body: Body) -> list[Sequence[TokenRow]]:
    """The tokens of each text of a body with their place in it, nothing cut.

    Raises:
        InfinityError: As the readers of the body, ``choosing.any_model`` and ``EngineLike.tokenize`` do.
    """
    info = any_model(call.engine, fields.string(body, "model"))
    inputs = texts(body, "inputs")
    check_batch_size(len(inputs.values), info, "inputs")
    _check_lengths(inputs, info)
    rows = await call.engine.tokenize(
        info.name,
        [text for text in inputs.values if isinstance(text, str)],
        add_special_tokens=fields.boolean(body, "add_special_tokens", True),
        prompt_name=fields.prompt_name(body, info),
    )
    return _unwrapped(rows, inputs)


async def texts_of(call: Call, body: Body) -> list[str]:
    """The text of each list of token ids of a body.

    Raises:
        InfinityError: As the readers of the body, ``choosing.any_model`` and ``EngineLike.decode`` do.
    """
    info = any_model(call.engine, fields.string(body, "model"))
    inputs = id_lists(body, "ids")
    check_batch_size(len(inputs.values), info, "ids")
    skip = fields.boolean(body, "skip_special_tokens", True)
    ids = [value for value in inputs.values if isinstance(value, list)]
    return _unwrapped(await call.engine.decode(info.name, ids, skip_special_tokens=skip), inputs)


def token_entries(row: Sequence[TokenRow]) -> list[dict[str, Any]]:
    """One object per token, with TEI's keys."""
    return [
        {"id": token, "text": text, "special": special, "start": start, "stop": stop}
        for token, text, special, start, stop in row
    ]


def _check_lengths(inputs: Inputs, info: ModelInfo) -> None:
    most = info.max_input_length * _CHARACTERS_PER_TOKEN
    for index, text in enumerate(inputs.values):
        if len(text) > most:
            path = inputs.path(index)
            raise InputTooLong(
                f"`{path}` has {len(text)} characters; the limit is {most}, {_CHARACTERS_PER_TOKEN} for each of the "
                f"{info.max_input_length} tokens of model {info.name!r}. Send it in parts.",
                param=path,
            )


def _unwrapped(outcomes: Sequence[Any], inputs: Inputs) -> list[Any]:
    """The outcomes, unless one is an error."""
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, InfinityError):
            raise located(outcome, inputs.path(index)) from outcome
    return list(outcomes)


_TOKEN = record(
    {
        "id": {"type": "integer"},
        "text": {"type": "string", "description": "As in the input; a special token's name."},
        "special": {"type": "boolean"},
        "start": {"type": ["integer", "null"], "description": "In UTF-8 bytes of the text with its prompt."},
        "stop": {"type": ["integer", "null"]},
    }
)

SCHEMAS: dict[str, dict[str, Any]] = {
    "TokenizeRequest": record(
        {"inputs": ref("Texts")},
        {
            "model": MODEL,
            "add_special_tokens": nullable("boolean", "As when the model runs.", default=True),
            "prompt_name": nullable("string", "A key of the checkpoint's prompts, put before the text."),
        },
    ),
    "TokenizeResponse": array(array(_TOKEN)),
    "DecodeRequest": record(
        {"ids": {"anyOf": [TOKEN_IDS, array(TOKEN_IDS, minItems=1)]}},
        {"model": MODEL, "skip_special_tokens": nullable("boolean", "Leave them out of the text.", default=True)},
    ),
    "DecodeResponse": array({"type": "string"}),
}
