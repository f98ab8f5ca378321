"""Request bodies: counted against the payload limit, decompressed, then parsed as JSON or MessagePack. Called by the
handlers.
"""

from __future__ import annotations

from typing import Any

import msgpack
import orjson
from starlette.types import Receive, Scope

from infinity_bento.api.compression import decompress
from infinity_bento.api.exchange import JSON_TYPE, MSGPACK_TYPES, Call, ClientGone, header
from infinity_bento.errors import InvalidInput, MalformedBody, PayloadTooLarge, UnsupportedMedia

_TYPE_NAMES = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}


async def read_object(call: Call) -> dict[str, Any]:
    """The object in the body of ``call``, sent as JSON or as MessagePack, plain or compressed with gzip or zstd.

    Raises:
        UnsupportedMedia: Another content type or content encoding.
        PayloadTooLarge: More bytes than ``payload_limit``: by Content-Length, by count, or after decompression.
        MalformedBody: Not JSON or MessagePack; for JSON the text names line and column.
        InvalidInput: No object.
        ClientGone: The client hung up while sending.
    """
    packed = is_msgpack(call.scope)
    return parse_object(await read_plain(call), packed=packed)


def parse_object(raw: bytes, *, packed: bool) -> dict[str, Any]:
    """The object in ``raw``, JSON or (packed) MessagePack. Raises as ``read_object`` does about its content."""
    value = _parse_msgpack(raw) if packed else parse_json(raw)
    if type(value) is not dict:
        kind = _TYPE_NAMES.get(type(value), "null")
        raise InvalidInput(f"The body is {kind}; send one object with the fields of this route.")
    return value


async def read_plain(call: Call) -> bytes:
    """The body of ``call``, whatever it is, decompressed. Raises as ``read_object`` does about size and coding."""
    limit = call.context.settings.payload_limit
    raw = await read_bytes(call.scope, call.receive, limit)
    coding = header(call.scope, b"content-encoding")
    return raw if coding is None else decompress(raw, coding, limit)


async def read_bytes(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body, at most ``limit`` bytes of it held in memory.

    Raises:
        PayloadTooLarge: More than ``limit`` bytes.
        ClientGone: The client hung up while sending.
    """
    check_declared_size(scope, limit)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):  # the usual case: one chunk
        body: bytes = message.get("body", b"")
        if len(body) > limit:
            raise too_large(f"{len(body)} bytes", limit)
        return body
    chunks: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(f"more than {limit} bytes", limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)
        message = await receive()


def check_declared_size(scope: Scope, limit: int) -> None:
    """Refuse a body before a byte of it is read, if its Content-Length says enough.

    Raises:
        PayloadTooLarge: Content-Length exceeds ``limit`` bytes.
    """
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared[:20]) > limit:
        raise too_large(f"{int(declared[:20])} bytes", limit)


def too_large(size: str, limit: int) -> PayloadTooLarge:
    """The error for a body of ``size``, given in words."""
    return PayloadTooLarge(
        f"The body has {size}; the limit is {limit} bytes (payload_limit). Split the inputs over several requests."
    )


def is_msgpack(scope: Scope) -> bool:
    """Whether the body is MessagePack rather than JSON, as which a missing content type counts."""
    value = header(scope, b"content-type")
    if value is None or value == JSON_TYPE:
        return False
    media = value.split(b";", 1)[0].strip().lower()
    if media and media != JSON_TYPE and media not in MSGPACK_TYPES and not media.endswith(b"+json"):
        shown = media[:80].decode("latin-1")
        raise UnsupportedMedia(
            f"Content-Type {shown!r} is not read here; send application/json or application/msgpack."
        )
    return media in MSGPACK_TYPES


def parse_json(raw: bytes) -> Any:
    """JSON to Python, with the position of a mistake in the error."""
    if not raw:
        raise MalformedBody("The body is empty; send one JSON object with the fields of this route.")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(
            f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; "
            "correct it there and send UTF-8 JSON."
        ) from None


def _parse_msgpack(raw: bytes) -> Any:
    """MessagePack to Python; what JSON cannot hold arrives as bytes or extension objects, which no field accepts."""
    try:
        return msgpack.unpackb(raw)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedBody(
            f"The body is not valid MessagePack ({error or type(error).__name__}); send one map with the fields of "
            "this route."
        ) from None
