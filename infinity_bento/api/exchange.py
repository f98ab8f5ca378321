"""One HTTP exchange without framework objects: ``RequestState``, ``Call`` and ``Reply``.

Middleware makes the state, routes make a ``Call`` from it, handlers answer with a ``Reply``.
"""

from __future__ import annotations

import binascii
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import orjson
from starlette.types import Receive, Scope, Send

from infinity_bento.api.protocol import ApiSettings, EngineLike, GetEngine
from infinity_bento.core import ModelInfo, Timing
from infinity_bento.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from infinity_bento.api.native_table import NativeMethod
    from infinity_bento.api.routes import Route

_STATE_KEY = "infinity_bento"
_REQUEST_ID_MAX_CHARACTERS = 128
_VISIBLE_ASCII = frozenset(range(0x21, 0x7F))

Headers = list[tuple[bytes, bytes]]
JSON_TYPE = b"application/json"
MSGPACK_TYPE = b"application/msgpack"
MSGPACK_TYPES = frozenset((MSGPACK_TYPE, b"application/x-msgpack", b"application/vnd.msgpack"))


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
    compressible: bool = True  # False: bytes without redundancy, where compressing would be time lost

    @classmethod
    def of_json(cls, value: Any, status: int = 200, headers: Headers | None = None) -> Reply:
        """``value`` as JSON; float32 arrays become lists of the shortest digits that read back equal, bytes base64."""
        body = orjson.dumps(value, default=_base64_of_bytes, option=orjson.OPT_SERIALIZE_NUMPY)
        return cls(body, status, JSON_TYPE, headers or [])

    @classmethod
    def of_msgpack(cls, value: Any, headers: Headers | None = None) -> Reply:
        """``value`` as MessagePack; arrays become lists of single-precision numbers, bytes stay bytes."""
        body = msgpack.packb(value, default=_plain_of_numpy, use_single_float=True)
        return cls(body, 200, MSGPACK_TYPE, headers or [], compressible=False)

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
    native: tuple[NativeMethod, ...] = ()  # BentoML's methods, where its server is around the routes


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

    def reply(self, value: Any, headers: Headers | None = None) -> Reply:
        """``value`` as JSON, or as MessagePack if the caller prefers that (``Accept: application/msgpack``)."""
        accept = header(self.scope, b"accept")
        if accept is not None and b"msgpack" in accept and _prefers_msgpack(accept):
            return Reply.of_msgpack(value, headers)
        return Reply.of_json(value, headers=headers)


Handler = Callable[[Call], Awaitable[Reply]]


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a request header; ``name`` in lower case. The first one wins."""
    for key, value in scope["headers"]:
        if key == name:
            return value  # type: ignore[no-any-return]
    return None


def _prefers_msgpack(accept: bytes) -> bool:
    """Whether an Accept header ranks MessagePack above JSON; of equals the one named first wins."""
    best, chosen = 0.0, b""
    for part in accept.lower().split(b","):
        media, *parameters = (piece.strip() for piece in part.split(b";"))
        weight = next((piece[2:] for piece in parameters if piece.startswith(b"q=")), b"1")
        try:
            rank = float(weight)
        except ValueError:
            rank = 0.0
        if rank > best:
            best, chosen = rank, media
    return chosen in MSGPACK_TYPES


def _base64_of_bytes(value: Any) -> str:
    """orjson asks for what it cannot write: the data of packed tensors."""
    if isinstance(value, bytes):
        return binascii.b2a_base64(value, newline=False).decode("ascii")
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _plain_of_numpy(value: Any) -> Any:
    """msgpack asks for what it cannot write: numpy's arrays and scalars."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no MessagePack form")


def _request_id(scope: Scope) -> str:
    """The caller's x-request-id if it is safe to repeat in headers and logs, else a new one."""
    given = header(scope, b"x-request-id")
    if given and len(given) <= _REQUEST_ID_MAX_CHARACTERS and _VISIBLE_ASCII.issuperset(given):
        return given.decode("ascii")
    return f"{random.getrandbits(128):032x}"  # no secret, and quicker than asking the system
