"""A small HTTP/1.1 client on asyncio. Called by traffic.py.

It exists because load generator and server often share few cores: general clients cost more per request than the server
spends on it. One connection carries one request at a time and is kept open.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import orjson

from benchmarks.common import BenchmarkError


class Answer(NamedTuple):
    """One complete HTTP response."""

    status: int
    head: bytes  # status line and headers, lower case
    body: bytes
    finished: float  # time.perf_counter() when the last byte had arrived

    def header(self, name: str) -> str | None:
        """The value of a header, or None; ``name`` in lower case."""
        return _header(self.head, name.encode())


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. Set by ``parse_target``."""

    host: str
    port: int
    tls: bool
    prefix: str  # path of the base URL, no slash at its end
    authorization: str | None = None

    def payload(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of one request; made before measuring, so that sending costs nothing but a write."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}", f"Content-Length: {len(body)}"]
        if body:
            lines.append("Content-Type: application/json")
        if self.authorization:
            lines.append(f"Authorization: Bearer {self.authorization}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def parse_target(url: str, *, allow_remote: bool, authorization: str | None = None) -> Target:
    """The parts of a base URL.

    Raises:
        BenchmarkError: If it is not an HTTP URL, or leaves this machine without ``allow_remote``.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise BenchmarkError(f"--url {url} is not a URL ({error}): use one such as http://127.0.0.1:3000.") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchmarkError(f"--url {url} is not an HTTP URL: use one such as http://127.0.0.1:3000.")
    if not allow_remote and not _is_loopback(parts.hostname):
        raise BenchmarkError(
            f"--url {url} is another machine: add --allow-remote if you may put load on it, or use 127.0.0.1."
        )
    return Target(parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"), authorization)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _header(head: bytes, name: bytes) -> str | None:
    start = head.find(b"\r\n" + name + b":")
    if start < 0:
        return None
    start += len(name) + 3
    end = head.find(b"\r\n", start)
    return head[start : end if end >= 0 else None].strip().decode("latin-1")


class Connection(asyncio.Protocol):
    """One kept connection; ``request`` may be called again once the answer before has arrived."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._buffer = bytearray()
        self._reset()

    def _reset(self) -> None:
        self._buffer.clear()
        self._head = b""
        self._at = 0  # of the body, or of the next chunk's size line
        self._length: int | None = None  # None: chunked, or until the server closes
        self._chunked = False
        self._chunks: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def request(self, payload: bytes, timeout_seconds: float) -> asyncio.Future[Answer]:
        """Send and return the future of the answer; it fails with ``ConnectionError`` or ``TimeoutError``."""
        assert self._transport is not None and self._waiter is None, "one request at a time; this is a bug"
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._timer = loop.call_later(timeout_seconds, self._fail, TimeoutError(f"no answer in {timeout_seconds} s"))
        self._transport.write(payload)
        return self._waiter

    def close(self) -> None:
        """Drop the connection."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        finished = time.perf_counter()
        self._buffer += data
        if self._waiter is None:
            return self.close()  # bytes that nobody asked for
        try:
            if not self._head and not self._read_head():
                return None
            body = self._read_chunks() if self._chunked else self._read_plain()
        except ValueError as error:
            return self._fail(ConnectionError(f"not an HTTP response ({error})"))
        if body is not None:
            self._succeed(body, finished)
        return None

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        self._head = bytes(self._buffer[: end + 2]).lower()
        if not self._head.startswith(b"http/1."):
            raise ValueError("no HTTP/1 status line")
        self._at = end + 4
        length = _header(self._head, b"content-length")
        self._chunked = b"chunked" in (_header(self._head, b"transfer-encoding") or "").encode()
        self._length = int(length) if length is not None and not self._chunked else None
        if int(self._head[9:12]) in (204, 304):
            self._length = 0
        return True

    def _read_plain(self) -> bytes | None:
        if self._length is None or len(self._buffer) < self._at + self._length:
            return None
        return bytes(memoryview(self._buffer)[self._at : self._at + self._length])

    def _read_chunks(self) -> bytes | None:
        while (end := self._buffer.find(b"\r\n", self._at)) >= 0:
            size = int(self._buffer[self._at : end].split(b";")[0], 16)
            if len(self._buffer) < end + 2 + size + 2:
                return None
            if size == 0:
                return b"".join(self._chunks)
            self._chunks.append(bytes(memoryview(self._buffer)[end + 2 : end + 2 + size]))
            self._at = end + 2 + size + 2
        return None

    def _take_waiter(self) -> asyncio.Future[Answer] | None:
        waiter, self._waiter = self._waiter, None
        if self._timer is not None:
            self._timer.cancel()
        return waiter

    def _succeed(self, body: bytes, finished: float) -> None:
        answer = Answer(int(self._head[9:12]), self._head, body, finished)
        if answer.header("connection") == "close":
            self.close()
        waiter = self._take_waiter()
        self._reset()
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def _fail(self, error: Exception) -> None:
        self.close()
        waiter = self._take_waiter()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._head and self._length is None and not self._chunked and exc is None:
            self._succeed(bytes(self._buffer[self._at :]), time.perf_counter())
        else:
            self._fail(ConnectionError("the server closed the connection before it had answered"))


class Client:
    """A pool of kept connections to one target. The caller bounds how many requests are in flight."""

    def __init__(self, target: Target, timeout_seconds: float) -> None:
        self.target = target
        self._timeout_seconds = timeout_seconds
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def send(self, payload: bytes) -> Answer:
        """The answer to one request.

        Raises:
            OSError: If the connection cannot be made or breaks (``ConnectionError``), or time is up (``TimeoutError``).
        """
        connection = self._take_idle() or await self._open()
        answer = await connection.request(payload, self._timeout_seconds)
        if not connection.closed:
            self._idle.append(connection)
        return answer

    async def get_json(self, path: str) -> Any:
        """The JSON of a GET, or None where the server does not have it."""
        text = await self.get_text(path)
        try:
            return None if text is None else orjson.loads(text)
        except orjson.JSONDecodeError:
            return None

    async def get_text(self, path: str) -> str | None:
        """The body of a GET, or None unless it answers 200."""
        answer = await self.send(self.target.payload("GET", path))
        return answer.body.decode("utf-8", "replace") if answer.status == 200 else None

    async def connect(self, count: int) -> None:
        """Open connections until ``count`` lie idle."""
        while len(self._idle) < count:
            self._idle.append(await self._open())

    async def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes the sockets

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(Connection, self.target.host, self.target.port, ssl=self._tls)
        _, connection = await asyncio.wait_for(opening, self._timeout_seconds)
        return connection
