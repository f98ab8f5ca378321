"""Pure-ASGI layers around the routes, or around any other ASGI application such as BentoML's whole server.

From the outside in: ``RequestContext`` (request id, Server-Timing), CORS (Starlette's), ``Guard`` (every error is
JSON, time limit, client disconnect), ``ApiKey``. ``app.harden`` stacks them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infinity_bento.api.envelopes import from_status
from infinity_bento.api.exchange import Reply, RequestState, header
from infinity_bento.api.routes import RouteIndex, shown_path, unexpected
from infinity_bento.errors import DeadlineExceeded, InfinityError, Unauthorized
from infinity_bento.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# Answers that come sooner cost one timer; only slower ones get a task that watches for the client hanging up.
WATCH_AFTER_SECONDS = 0.005
_KEPT_TEXT_BYTES = 2048


class RequestContext:
    """Gives every request an id and every answer ``x-request-id`` and ``Server-Timing`` (milliseconds)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = RequestState.of(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", state.request_id.encode("ascii")),
                    (b"server-timing", _server_timing(state)),
                ]
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
        if self._index.is_open(scope["path"]):
            return True
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


class Guard:
    """Answers in JSON whatever goes wrong inside, ends requests that take too long or that nobody waits for.

    Args:
        app: The application inside.
        index: Knows dialects and open paths.
        metrics: Counts the errors made here.
        timeout_seconds: Time limit of a request on a path that is not open; 0 for none.
    """

    def __init__(self, app: ASGIApp, index: RouteIndex, metrics: Metrics, timeout_seconds: float) -> None:
        self.app = app
        self.index = index
        self.metrics = metrics
        self.timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application under guard."""
        if scope["type"] == "http":
            await _Exchange(self, scope, receive, send).run()
        else:
            await self.app(scope, receive, send)


class _Exchange:
    """One guarded request. The application runs in the current task, so that cancelling is all it takes to stop it."""

    __slots__ = (
        "_body_complete",
        "_ended_here",
        "_finished",
        "_guard",
        "_held",
        "_held_text",
        "_loop",
        "_receive",
        "_scope",
        "_send",
        "_slow",
        "_started",
        "_task",
        "_timed_out",
        "_timer",
        "_watcher",
    )

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard, self._scope, self._receive, self._send = guard, scope, receive, send
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._body_complete = self._slow = self._started = self._finished = False
        self._ended_here = self._timed_out = False
        self._held: Message | None = None  # the start of an answer that is not JSON and will be replaced
        self._held_text = b""

    async def run(self) -> None:
        """Run the application; afterwards no timer and no task of this exchange is left."""
        if not self._guard.index.is_open(self._scope["path"]):
            limit = self._guard.timeout_seconds
            delay = min(WATCH_AFTER_SECONDS, limit) if limit else WATCH_AFTER_SECONDS
            self._timer = self._loop.call_later(delay, self._become_slow)
        broken = False
        try:
            await self._guard.app(self._scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self._uncancel():
                raise  # somebody else wants this task to end
        except Exception:
            broken = True
            if not self._ended_here:
                request_id = RequestState.of(self._scope).request_id
                logger.exception("request %s: unexpected failure in %s", request_id, self._scope["path"])
        finally:
            self._stop_watching()
        self._uncancel()
        if broken or self._ended_here:
            await self._answer_failure()

    async def receive(self) -> Message:
        """What the application gets for ``receive``: the client's messages, then its hanging up."""
        if self._body_complete:
            # Streaming responses listen here as well; one reader at a time is all that servers promise to bear.
            await asyncio.wait([self._watch_now()])
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._body_complete = True
            if self._slow:
                self._watch_now()
        return message

    async def send(self, message: Message) -> None:
        """What the application gets for ``send``: plain-text errors are held back and replaced by JSON."""
        if message["type"] == "http.response.start":
            if message["status"] >= 400 and _is_text(message):
                self._held = message
                return
            self._started = True
        elif message["type"] == "http.response.body":
            last = not message.get("more_body", False)
            if self._held is not None:
                self._held_text = (self._held_text + message.get("body", b""))[:_KEPT_TEXT_BYTES]
                if last:
                    await self._send_replacement(self._held)
                return
            self._finished = self._finished or last
        await self._send(message)

    async def _send_replacement(self, start: Message) -> None:
        """The JSON form of a plain-text error; its other headers stay."""
        error = self._error_for(start)
        self._guard.metrics.count_error(error.code)
        dialect = self._guard.index.dialect_of(self._scope["path"])
        reply = dialect.reply(error, status=start["status"])
        ours = {b"content-type", b"content-length", *(name for name, _ in reply.headers)}
        reply.headers += [(name, value) for name, value in start.get("headers", ()) if name.lower() not in ours]
        self._held = None
        await self._reply(reply)

    def _error_for(self, start: Message) -> InfinityError:
        method, path, index = self._scope["method"], self._scope["path"], self._guard.index
        if start["status"] == 404:
            return index.unknown(method, path)
        if start["status"] == 405:
            allowed = dict(start.get("headers", ())).get(b"allow", b"").decode("latin-1")
            return index.wrong_method(method, path, " or ".join(sorted(filter(None, allowed.split(", ")))))
        text = self._held_text.decode("utf-8", "replace").strip()
        return from_status(start["status"], text or f"{method} {shown_path(path)} failed; see the server's log.")

    async def _reply(self, reply: Reply) -> None:
        await reply(self._scope, self.receive, self.send)

    def _become_slow(self) -> None:
        """No answer yet: from now on watch the client, and the clock."""
        self._slow = True
        self._timer = None
        limit = self._guard.timeout_seconds
        if limit:
            self._timer = self._loop.call_later(max(0.0, limit - WATCH_AFTER_SECONDS), self._expire)
        if self._body_complete:
            self._watch_now()

    def _expire(self) -> None:
        self._timer = None
        self._end(timed_out=True)

    def _watch_now(self) -> asyncio.Task[None]:
        if self._watcher is None:
            self._watcher = self._loop.create_task(self._watch())
        return self._watcher

    async def _watch(self) -> None:
        """Wait for the client to hang up; end the application if it has not answered by then."""
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._end(timed_out=False)

    def _end(self, *, timed_out: bool) -> None:
        """Cancel the application, once, unless its answer is out."""
        if not self._finished and not self._ended_here and self._task is not None:
            self._ended_here = True
            self._timed_out = timed_out
            self._task.cancel()

    def _uncancel(self) -> bool:
        """Take back our own request to cancel; False if the task is to end for another reason as well."""
        if self._task is None or not self._ended_here:
            return False
        return self._task.cancelling() == 0 or self._task.uncancel() == 0

    async def _answer_failure(self) -> None:
        """Tell the caller why there is no proper answer, if it still listens and nothing was sent."""
        error: InfinityError
        if self._timed_out:
            error = DeadlineExceeded(
                f"The request was not answered within {self._guard.timeout_seconds:g} s (request_timeout_seconds) and "
                "was dropped. Send fewer or shorter inputs per request, or retry when the server is less busy."
            )
        elif self._ended_here:
            self._guard.metrics.count_error("client_gone")
            return
        else:
            error = unexpected(RequestState.of(self._scope).request_id)
        self._guard.metrics.count_error(error.code)
        if not self._started:
            self._held = None
            await self._reply(self._guard.index.dialect_of(self._scope["path"]).reply(error))

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watcher is not None:
            self._watcher.cancel()


def _is_text(start: Message) -> bool:
    """Whether an answer is plain text, HTML, or of no stated type."""
    for name, value in start.get("headers", ()):
        if name.lower() == b"content-type":
            return bool(value.lower().startswith(b"text/"))
    return True
