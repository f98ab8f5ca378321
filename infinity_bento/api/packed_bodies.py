"""Compressed bodies for routes that another framework reads and writes: BentoML's methods.

Our own routes do the same in ``body`` and ``routes``. ``app.harden`` puts this inside the guard, whose limits hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infinity_bento.api.body import read_bytes
from infinity_bento.api.compression import accepted_coding, compress, decompress
from infinity_bento.api.exchange import ClientGone, Reply, header
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.api.routes import RouteIndex
from infinity_bento.errors import ClientError
from infinity_bento.telemetry.metrics import Metrics


class PackedBodies:
    """Unpacks requests and packs large answers of some paths.

    Args:
        app: Reads and writes plain bodies.
        paths: The ones it answers.
        index: Knows how each path reports errors.
        metrics: Counts the errors made here.
        settings: Holds the limits.
    """

    def __init__(
        self, app: ASGIApp, paths: Iterable[str], index: RouteIndex, metrics: Metrics, settings: ApiSettings
    ) -> None:
        self.app = app
        self._paths = frozenset(paths)
        self._index = index
        self._metrics = metrics
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, as a plain one."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        coding = header(scope, b"content-encoding")
        if coding is not None:
            try:
                scope, receive = await self._unpacked(scope, receive, coding)
            except ClientError as error:
                self._metrics.count_error(error.code)
                await self._index.dialect_of(scope["path"]).reply(error)(scope, receive, send)
                return
            except ClientGone:
                self._metrics.count_error("client_gone")
                return
        accepted = accepted_coding(header(scope, b"accept-encoding") or b"")
        if accepted is not None:
            send = _Packing(send, accepted, self._settings.compression_min_bytes)
        await self.app(scope, receive, send)

    async def _unpacked(self, scope: Scope, receive: Receive, coding: bytes) -> tuple[Scope, Receive]:
        limit = self._settings.payload_limit
        body = await asyncio.to_thread(decompress, await read_bytes(scope, receive, limit), coding, limit)
        headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-encoding", b"content-length")]
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_plain() -> Message:
            return first.pop() if first else await receive()

        return {**scope, "headers": [*headers, (b"content-length", b"%d" % len(body))]}, receive_plain


class _Packing:
    """A ``send`` that compresses an answer whose size and type say that it pays; others pass as they are."""

    def __init__(self, send: Send, coding: bytes, least: int) -> None:
        self._send = send
        self._coding = coding
        self._least = least
        self._start: Message | None = None
        self._chunks: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._pays(message):
            self._start = message
            return
        if self._start is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._chunks.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        packed = await compress(Reply(b"".join(self._chunks)), self._coding)
        headers = [pair for pair in self._start["headers"] if pair[0].lower() != b"content-length"]
        headers += [(b"content-length", b"%d" % len(packed.body)), *packed.headers]
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": packed.body})

    def _pays(self, start: Message) -> bool:
        headers = {name.lower(): value for name, value in start.get("headers", ())}
        size = headers.get(b"content-length", b"")
        return (
            size.isdigit()
            and int(size) >= self._least
            and headers.get(b"content-type", b"").startswith(b"application/json")
            and b"content-encoding" not in headers
        )
