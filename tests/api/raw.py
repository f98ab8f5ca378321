"""A hand-driven ASGI connection: the test decides when the client hangs up. For what ``httpx`` cannot show."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import ASGIApp


class Connection:
    """One POST or GET; ``hang_up`` is what a closing client does."""

    def __init__(self, path: str, body: bytes = b"", method: str = "POST", headers: Any = ()) -> None:
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": list(headers),
            "scheme": "http",
            "state": {},
        }
        self.sent: list[Any] = []
        self.receive_calls = 0
        self._pending: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
        self._gone = asyncio.Event()

    def hang_up(self) -> None:
        self._gone.set()

    async def receive(self) -> Any:
        self.receive_calls += 1
        if self._pending:
            return self._pending.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def run(self, app: ASGIApp) -> Connection:
        await app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def json(self) -> Any:
        return orjson.loads(b"".join(message.get("body", b"") for message in self.sent[1:]))
