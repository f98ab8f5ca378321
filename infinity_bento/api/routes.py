"""What a route is: one row of ``table``, from which Starlette routes, middleware and the OpenAPI
document are made. ``Endpoint`` runs a row's handler and turns its errors into the row's dialect.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from infinity_bento.api.compression import accepted_coding, compress
from infinity_bento.api.envelopes import Dialect, dialect_of_unknown
from infinity_bento.api.exchange import ApiContext, Call, ClientGone, Handler, Reply, RequestState, header
from infinity_bento.core import ModelInfo, Task
from infinity_bento.errors import InfinityError, MethodNotAllowed, ServerError, UnknownRoute

logger = logging.getLogger(__name__)

_SHOWN_PATH_CHARACTERS = 200


Example = Mapping[str, Any] | Callable[[ModelInfo | None], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Route:
    """One row: where it is, what runs, and how it is documented.

    Args:
        paths: All paths it answers on; the first one is the documented name, the others are aliases.
        method: ``GET`` or ``POST``.
        handler: ``Call`` -> ``Reply``; raises ``InfinityError``.
        dialect: The shape of its errors.
        summary: One line for the document.
        response: Schema of the 200 answer, by name.
        request: Schema of the body, by name; None for routes without a body.
        tasks: One of these the model must be able to do; empty if any model will do.
        late_interaction: Late-interaction models can do it as well.
        example: A body that works as it is, ``$MODEL`` standing for a loaded model's name; or what makes such a body
            for the model, None standing for no model.
        media: Content type of the 200 answer.
        statuses: Further statuses with their own schema, such as the 503 of a probe.
        is_open: No API key and no time limit: probes, metrics, documents.
        forms: The body may be the part ``request`` of a multipart form, with files beside it.
    """

    paths: tuple[str, ...]
    method: str
    handler: Handler
    dialect: Dialect
    summary: str
    response: str
    request: str | None = None
    tasks: tuple[Task, ...] = ()
    late_interaction: bool = False
    example: Example | None = None
    media: str = "application/json"
    statuses: Mapping[int, str] | None = None
    is_open: bool = False
    forms: bool = False


class RouteIndex:
    """Answers middleware's questions about a path, known or not.

    Args:
        routes: All rows.
        others: Further paths that are served, to be named where somebody errs.
    """

    def __init__(self, routes: Iterable[Route], others: Iterable[str] = ()) -> None:
        rows = list(routes)
        self._by_path = {path: route for route in rows for path in route.paths}
        self._named = [*self._by_path, *others]
        self._open = frozenset((route.method, path) for route in rows if route.is_open for path in route.paths)

    def dialect_of(self, path: str) -> Dialect:
        """The error shape a caller of this path expects."""
        route = self._by_path.get(path)
        if route is not None:
            return route.dialect
        return dialect_of_unknown(path)

    def is_open(self, method: str, path: str) -> bool:
        """Whether a request needs no API key and has no time limit."""
        return ("GET" if method == "HEAD" else method, path) in self._open

    def unknown(self, method: str, path: str) -> UnknownRoute:
        """The error for a path nobody serves, with the ones that look alike."""
        close = difflib.get_close_matches(path[:_SHOWN_PATH_CHARACTERS], self._named, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        return UnknownRoute(f"There is no route {method} {shown_path(path)}; {hint}All routes are listed at GET /docs.")

    def wrong_method(self, method: str, path: str, allowed: str) -> MethodNotAllowed:
        """The error for a path that exists for other methods only."""
        use = allowed or "another method; GET /docs lists the routes"
        return MethodNotAllowed(f"{method} is not allowed on {shown_path(path)}; use {use}.")


class Endpoint:
    """A route as an ASGI application: handler in, reply or error envelope out."""

    def __init__(self, route: Route, context: ApiContext) -> None:
        self._handler = route.handler
        self._dialect = route.dialect
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state = RequestState.of(scope)
        try:
            reply = await self._handler(Call(scope, receive, state, self._context))
            if len(reply.body) >= self._context.settings.compression_min_bytes and reply.compressible:
                reply = await _compressed(reply, scope)
        except InfinityError as error:
            self._context.metrics.count_error(error.code)
            if isinstance(error, ServerError):
                logger.error("request %s: %s", state.request_id, error)
            reply = self._dialect.reply(error)
        except ClientGone:
            self._context.metrics.count_error("client_gone")
            return
        except Exception:
            logger.exception("request %s: unexpected failure in %s", state.request_id, scope["path"])
            self._context.metrics.count_error(ServerError.code)
            reply = self._dialect.reply(unexpected(state.request_id))
        await reply(scope, receive, send)


async def _compressed(reply: Reply, scope: Scope) -> Reply:
    """``reply`` as the client's Accept-Encoding allows."""
    coding = accepted_coding(header(scope, b"accept-encoding") or b"")
    return reply if coding is None else await compress(reply, coding)


def unexpected(request_id: str) -> ServerError:
    """What a caller learns of a fault in this server: nothing of its inside, and how to have it found."""
    return ServerError(
        f"The server failed on request {request_id} through a fault of its own, not of the input; the cause is in the "
        "server's log under that id. Retry once, and report the id if it fails again."
    )


def shown_path(path: str) -> str:
    """A path that is safe and short enough for an error text."""
    return path[:_SHOWN_PATH_CHARACTERS].encode("utf-8", "replace").decode()
