"""Bodies of System One requests: JSON, MessagePack or a multipart form; no object has a key twice.

Called by ``systemone`` and ``systemone_openai``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgpack
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from infinity_bento.api.body import is_msgpack, parse_object, read_plain
from infinity_bento.api.exchange import Call, header
from infinity_bento.decisions import FieldPath
from infinity_bento.errors import InvalidInput, MalformedBody

Parts = dict[str, bytes]


async def read_body(call: Call) -> tuple[dict[str, Any], Parts]:
    """The request object, and the files of a multipart form by name.

    Raises:
        UnsupportedMedia, PayloadTooLarge, ClientGone: As ``body.read_object``.
        MalformedBody: Not what the content type says.
        InvalidInput: No object, or a key is there twice; ``param`` is its path.
    """
    content_type = header(call.scope, b"content-type") or b""
    if content_type.lower().startswith(b"multipart/"):
        parts = await _read_form(call, content_type)
        if "request" not in parts:
            raise InvalidInput("The form has no part `request`; send the request object in it.", param="request")
        return _unambiguous(parts.pop("request"), packed=False), parts
    packed = is_msgpack(call.scope)
    return _unambiguous(await read_plain(call), packed=packed), {}


async def _read_form(call: Call, content_type: bytes) -> Parts:
    """The parts of a form by name, as bytes."""
    limit = call.context.settings.payload_limit
    raw = await read_plain(call)
    _, parameters = parse_options_header(content_type)
    boundary = parameters.get(b"boundary", b"").decode("latin-1").replace("\\", "\\\\").replace('"', '\\"')

    async def stream() -> AsyncGenerator[bytes, None]:
        yield raw
        yield b""

    # Latin-1 keeps every byte of a part, whatever encoding the client claims.
    headers = Headers({"content-type": f'multipart/form-data; charset=latin-1; boundary="{boundary}"'})
    most = call.context.settings.decisions.images + 1
    parser = MultiPartParser(headers, stream(), max_files=most, max_fields=most, max_part_size=limit)
    try:
        if not boundary:
            raise MultiPartException("its content type names no boundary")
        form = await parser.parse()
    except MultiPartException as error:
        reason = error.message.rstrip(".")
        raise MalformedBody(f"The multipart form cannot be read ({reason}); send a first part `request`.") from None
    parts: Parts = {}
    try:
        for key, value in form.multi_items():
            name = key.encode("latin-1").decode("utf-8", "replace")
            if name in parts:
                raise InvalidInput(f"The form has two parts {name!r}; give each its own name.", param=name)
            parts[name] = await value.read() if isinstance(value, UploadFile) else value.encode("latin-1")
    finally:
        await form.close()
    return parts


class _Repeating(dict[str, Any]):
    """An object that had a key twice."""

    key = ""


def _unambiguous(raw: bytes, *, packed: bool) -> dict[str, Any]:
    """The object in ``raw``, which has no key twice at any depth: parsers keep the last of them without a word."""
    body = parse_object(raw, packed=packed)
    repeats = False

    def collected(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeats
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        repeats = True
        marked = _Repeating(made)
        names = [name for name, _ in pairs]
        marked.key = next(name for index, name in enumerate(names) if name in names[:index])
        return marked

    try:
        # Numbers stay texts: what they are worth, the first parser knows.
        marked = (
            msgpack.unpackb(raw, object_pairs_hook=collected)
            if packed
            else json.loads(raw, object_pairs_hook=collected, parse_int=str, parse_float=str)
        )
    except RecursionError:
        raise InvalidInput("The body is nested too deeply; send a flatter state.") from None
    if repeats:
        path = _first_repeat(marked)
        raise InvalidInput(f"`{path}` is there twice; give every key of an object once.", param=path)
    return body


def _first_repeat(value: Any) -> FieldPath:
    """Where the outermost repeated key is."""
    level: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while level:
        inner: list[tuple[tuple[str | int, ...], Any]] = []
        for path, one in level:
            if isinstance(one, _Repeating):
                return FieldPath(*path, one.key)
            entries = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
            inner += [((*path, key), below) for key, below in entries]
        level = inner
    raise AssertionError("asked only where a key is repeated")
