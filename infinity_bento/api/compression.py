"""Compressed bodies: requests are unpacked under a limit, large answers are packed if the client allows it.

``body`` calls the first half, ``routes.Endpoint`` the second.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace

import zstandard

from infinity_bento.api.exchange import Reply
from infinity_bento.errors import MalformedBody, PayloadTooLarge, UnsupportedMedia

_GZIP_WINDOW = 31  # zlib's name for "gzip, 32 KiB window"
_ZSTD_MAX_WINDOW = 8 << 20  # what RFC 9659 allows for zstd over HTTP; more is memory for nothing
_GZIP_LEVEL = 1  # the digits of vectors hardly shrink further, and the client waits
_SUPPORTED = "gzip, zstd or identity"


def decompress(raw: bytes, coding: bytes, limit: int) -> bytes:
    """The body inside ``raw``; never more than ``limit + 1`` bytes are unpacked.

    Args:
        raw: The body as received.
        coding: The Content-Encoding header's value.
        limit: Most bytes of the unpacked body.

    Raises:
        UnsupportedMedia: Another coding than gzip or zstd, or several of them.
        MalformedBody: ``raw`` is not what ``coding`` says, or is cut short.
        PayloadTooLarge: More than ``limit`` bytes inside.
    """
    name = coding.strip().lower()
    if name in (b"", b"identity"):
        return raw
    if name in (b"gzip", b"x-gzip"):
        body = _from_gzip(raw, limit)
    elif name == b"zstd":
        body = _from_zstd(raw, limit)
    else:
        shown = coding[:80].decode("latin-1")
        raise UnsupportedMedia(f"Content-Encoding {shown!r} is not read here; send the body as {_SUPPORTED}.")
    if len(body) > limit:
        raise PayloadTooLarge(
            f"The body has more than {limit} bytes once it is decompressed; the limit is {limit} bytes "
            "(payload_limit). Split the inputs over several requests."
        )
    return body


def accepted_coding(accept: bytes) -> bytes | None:
    """The coding to answer with: zstd before gzip, of those that an Accept-Encoding header allows."""
    allowed: dict[bytes, bool] = {}
    for part in accept.lower().split(b","):
        name, _, parameters = part.partition(b";")
        weight = parameters.replace(b" ", b"")
        allowed[name.strip()] = not (weight.startswith(b"q=0") and not weight.strip(b"q=0."))
    return next((name for name in (b"zstd", b"gzip") if allowed.get(name)), None)


async def compress(reply: Reply, coding: bytes) -> Reply:
    """``reply`` with a compressed body, made in a thread so that other requests go on."""
    body = await asyncio.to_thread(_to_zstd if coding == b"zstd" else _to_gzip, reply.body)
    headers = [*reply.headers, (b"content-encoding", coding), (b"vary", b"accept-encoding")]
    return replace(reply, body=body, headers=headers)


def _from_gzip(raw: bytes, limit: int) -> bytes:
    """One gzip member: several would let a small body cost quadratic time."""
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    try:
        body = unpacker.decompress(raw, limit + 1)
    except zlib.error as error:
        raise MalformedBody(f"The body is not valid gzip ({error}); compress it again, or send it as it is.") from None
    if len(body) <= limit and (not unpacker.eof or unpacker.unused_data):
        fault = "has data after its end" if unpacker.eof else "is cut short"
        raise MalformedBody(f"The gzip body {fault}; send exactly one complete gzip member.")
    return body


def _from_zstd(raw: bytes, limit: int) -> bytes:
    try:
        declared = zstandard.frame_content_size(raw)
        reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW).stream_reader(raw)
        body = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise MalformedBody(f"The body is not valid zstd ({error}); compress it again, or send it as it is.") from None
    if len(body) <= limit and declared not in (-1, len(body)):
        raise MalformedBody(f"The zstd body is cut short: {len(body)} bytes of {declared}; send the whole frame.")
    return body


def _to_gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    return packer.compress(body) + packer.flush()


def _to_zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(body)
