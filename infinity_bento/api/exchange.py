"""One HTTP exchange without framework objects: ``RequestState``, ``Call`` and ``Reply``.

Middleware makes the state, routes make a ``Call`` from it, handlers answer with a ``Reply``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from starlette.types import Receive, Scope, Send

from infinity_bento.api.protocol import ApiSettings, EngineLike, GetEngine
from infinity_bento.core import ModelInfo, Timing
from infinity_bento.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from infinity_bento.api.routes import Route

_STATE_KEY = "infinity_bento"
_REQUEST_ID_MAX_CHARACTERS = 128
_VISIBLE_ASCII = frozenset(range(0x21, 0x7F))

Headers = list[tuple[bytes, bytes]]
JSON_TYPE = b"application/json"


class ClientGone(Exception):
    """The client hung up before its request body was complete; nobody waits for an answer."""


@dataclass(slots=True)
class RequestState:
    """What one request carries through the layers. Made by ``RequestContext``; ``timing`` is set by the handler."""

    request_id: str
    started: float = field(default_factory=time.perf_counter)
    timing: Timing | None = None

    @classmethod
    def of(cls, scope: Scope) -> RequestState:
        """The state of this request; made here if no middleware did."""
        shared = scope.setdefault("state", {})
        state = shared.get(_STATE_KEY)
        if state is None:
            state = shared[_STATE_KEY] = cls(_request_id(scope))
        return state  # type: ignore[no-any-return]

    def elapsed_seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.started


@dataclass(slots=True)
class Reply:
    """A complete answer. It is an ASGI application, so Starlette takes it wherever it takes a response."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON_TYPE
    headers: Headers = field(default_factory=list)

    @classmethod
    def of_json(cls, value: Any, status: int = 200, headers: Headers | None = None) -> Reply:
        """``value`` as JSON; float32 arrays become lists of the shortest digits that read back equal."""
        return cls(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, JSON_TYPE, headers or [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % len(self.body)),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What all handlers share. Made once by ``create_app``."""

    get_engine: GetEngine
    settings: ApiSettings
    metrics: Metrics
    routes: tuple[Route, ...]


@dataclass(slots=True)
class Call:
    """One request as a handler sees it."""

    scope: Scope
    receive: Receive
    state: RequestState
    context: ApiContext

    @property
    def engine(self) -> EngineLike:
        """The engine that answers."""
        return self.context.get_engine()

    def models(self) -> list[ModelInfo]:
        """The loaded models, the default one first."""
        return list(self.engine.infos())


Handler = Callable[[Call], Awaitable[Reply]]


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a request header; ``name`` in lower case. The first one wins."""
    for key, value in scope["headers"]:
        if key == name:
            return value  # type: ignore[no-any-return]
    return None


def _request_id(scope: Scope) -> str:
    """The caller's x-request-id if it is safe to repeat in headers and logs, else a new one."""
    given = header(scope, b"x-request-id")
    if given and len(given) <= _REQUEST_ID_MAX_CHARACTERS and _VISIBLE_ASCII.issuperset(given):
        return given.decode("ascii")
    return secrets.token_hex(16)
