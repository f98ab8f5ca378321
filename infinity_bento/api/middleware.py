"""Pure-ASGI layers around the routes, or around any other ASGI application such as BentoML's whole server.

From the outside in: ``RequestContext`` (request id, Server-Timing), CORS (Starlette's), ``guard.Guard`` (JSON errors,
limits, client disconnect), ``ApiKey``. ``app.harden`` stacks them.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infinity_bento.api.exchange import RequestState, header
from infinity_bento.api.routes import RouteIndex
from infinity_bento.errors import Unauthorized


class RequestContext:
    """Gives every request an id and every answer ``x-request-id`` and ``Server-Timing`` (milliseconds)."""

    def __init__(self, app: ASGIApp, index: RouteIndex) -> None:
        self.app = app
        self._index = index

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = RequestState.of(scope)
        request_id = state.request_id.encode("ascii")
        other_name = self._index.dialect_of(scope["path"]).request_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id),
                    (b"server-timing", _server_timing(state)),
                ]
                if other_name is not None:
                    message["headers"].append((other_name, request_id))
            await send(message)

        await self.app(scope, receive, send_with_headers)


def _server_timing(state: RequestState) -> bytes:
    total = state.elapsed_seconds() * 1000.0
    timing = state.timing
    if timing is None:
        return b"total;dur=%.3f" % total
    stages = (timing.tokenize_seconds * 1e3, timing.queue_seconds * 1e3, timing.inference_seconds * 1e3)
    return b"total;dur=%.3f, tokenize;dur=%.3f, queue;dur=%.3f, inference;dur=%.3f" % (total, *stages)


class ApiKey:
    """Asks for ``Authorization: Bearer <key>`` on every path that is not open; CORS preflights carry no key."""

    def __init__(self, app: ASGIApp, key: str, index: RouteIndex) -> None:
        self.app = app
        self._key = key.encode()
        self._index = index

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or scope.get("method") == "OPTIONS" or self._admits(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            given = "is missing" if header(scope, b"authorization") is None else "holds another key"
            error = Unauthorized(
                f"The Authorization header {given}; this server needs an API key. "
                "Send the header `Authorization: Bearer <key>`."
            )
            await self._index.dialect_of(scope["path"]).reply(error)(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if self._index.is_open(scope.get("method", ""), scope["path"]):
            return True
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
