"""The layer that answers in JSON whatever goes wrong inside, and ends requests that are too big, too slow, or that
nobody waits for any more. ``app.harden`` puts it around the routes or around BentoML's whole server.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infinity_bento.api.body import check_declared_size, too_large
from infinity_bento.api.envelopes import from_status
from infinity_bento.api.exchange import Reply, RequestState
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.api.routes import RouteIndex, shown_path, unexpected
from infinity_bento.errors import DeadlineExceeded, InfinityError, PayloadTooLarge
from infinity_bento.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# How often requests in flight are looked at: whether their client has hung up, and whether their time is over.
LOOK_SECONDS = 0.05
_KEPT_TEXT_BYTES = 2048


class Guard:
    """The guard around an application.

    Args:
        app: The application inside.
        index: Knows dialects and open paths; those have no time limit.
        metrics: Counts the errors made here.
        settings: Holds the limits of time and of body bytes.
    """

    def __init__(self, app: ASGIApp, index: RouteIndex, metrics: Metrics, settings: ApiSettings) -> None:
        self.app = app
        self.index = index
        self.metrics = metrics
        self.timeout_seconds = settings.request_timeout_seconds
        self.payload_limit = settings.payload_limit
        self.in_flight = _InFlight()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application under guard."""
        if scope["type"] == "http":
            await _Exchange(self, scope, receive, send).run()
        else:
            await self.app(scope, receive, send)


class _InFlight:
    """The requests in flight, looked at in turn: one timer for all, however many there are."""

    def __init__(self) -> None:
        self._exchanges: dict[_Exchange, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that the timer runs in

    def add(self, exchange: _Exchange, loop: asyncio.AbstractEventLoop) -> None:
        self._exchanges[exchange] = None
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(LOOK_SECONDS, self._look, loop)

    def remove(self, exchange: _Exchange) -> None:
        self._exchanges.pop(exchange, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for exchange in list(self._exchanges):
            exchange.look(now)
        if self._exchanges:
            loop.call_later(LOOK_SECONDS, self._look, loop)
        else:
            self._loop = None


class _Exchange:
    """One guarded request. The application runs in the current task, so that cancelling is all it takes to stop it.

    A framework may run its inner part in a task of its own that it does not cancel (BentoML's time limit does). Whoever
    reads the request is that part, so the reading task is remembered and cancelled as well.
    """

    __slots__ = (
        "_body_complete",
        "_connection",
        "_deadline",
        "_end_error",
        "_ended_here",
        "_finished",
        "_guard",
        "_held",
        "_held_text",
        "_loop",
        "_reader",
        "_receive",
        "_received_bytes",
        "_scope",
        "_send",
        "_slow",
        "_started",
        "_task",
        "_watcher",
    )

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard, self._scope, self._receive, self._send = guard, scope, receive, send
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._reader = self._task
        # uvicorn says whether the client is still there; of other servers it can only be awaited, in a task.
        connection = getattr(receive, "__self__", None)
        self._connection = connection if isinstance(getattr(connection, "disconnected", None), bool) else None
        self._deadline: float | None = None  # in the event loop's time
        self._watcher: asyncio.Task[None] | None = None
        self._body_complete = self._slow = self._started = self._finished = False
        self._received_bytes = 0
        self._ended_here = False
        self._end_error: InfinityError | None = None  # what the caller is told of it; None: it has hung up
        self._held: Message | None = None  # the start of an answer that is not JSON and will be replaced
        self._held_text = b""

    async def run(self) -> None:
        """Run the application; afterwards no task of this exchange is left."""
        if not self._guard.index.is_open(self._scope["method"], self._scope["path"]):
            limit = self._guard.timeout_seconds
            self._deadline = self._loop.time() + limit if limit else None
            self._guard.in_flight.add(self, self._loop)
        broken = False
        try:
            check_declared_size(self._scope, self._guard.payload_limit)
            await self._guard.app(self._scope, self.receive, self.send)
        except PayloadTooLarge as error:
            self._ended_here, self._end_error = True, error
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
        self._reader = asyncio.current_task()
        message = await self._receive()
        self._received_bytes += len(message.get("body", b""))
        if self._received_bytes > self._guard.payload_limit:
            self._end(too_large(f"more than {self._guard.payload_limit} bytes", self._guard.payload_limit))
            await asyncio.sleep(0)  # the cancellation arrives here
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._body_complete = True
            if self._slow and self._connection is None:
                self._watch_now()
        return message

    async def send(self, message: Message) -> None:
        """What the application gets for ``send``: plain-text errors are held back and replaced by JSON."""
        if self._ended_here:
            return  # the last words of an application that was ended
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
        self._started = self._finished = True
        await reply(self._scope, self.receive, self._send)

    def look(self, now: float) -> None:
        """No answer yet: end the application if the client has hung up, or if it took too long."""
        self._slow = True
        if self._deadline is not None and now >= self._deadline:
            self._expire()
        elif self._connection is None:
            if self._body_complete:
                self._watch_now()
        elif self._connection.disconnected:
            self._end(None)

    def _expire(self) -> None:
        limit = self._guard.timeout_seconds
        error = DeadlineExceeded(
            f"The request was not answered within {limit:g} s (request_timeout_seconds) and was dropped. "
            "Send fewer or shorter inputs per request, or retry when the server is less busy."
        )
        self._end(error)

    def _watch_now(self) -> asyncio.Task[None]:
        if self._watcher is None:
            self._watcher = self._loop.create_task(self._watch())
        return self._watcher

    async def _watch(self) -> None:
        """Wait for the client to hang up; end the application if it has not answered by then."""
        while (await self._receive())["type"] != "http.disconnect":
            await asyncio.sleep(LOOK_SECONDS)  # not all servers block once the body is out; never spin
        self._end(None)

    def _end(self, error: InfinityError | None) -> None:
        """Cancel the application, once, unless its answer is out."""
        if not self._finished and not self._ended_here and self._task is not None:
            self._ended_here = True
            self._end_error = error
            self._task.cancel()
            if self._reader is not None and self._reader is not self._task:
                self._reader.cancel()

    def _uncancel(self) -> bool:
        """Take back our own request to cancel; False if the task is to end for another reason as well."""
        if self._task is None or not self._ended_here:
            return False
        return self._task.cancelling() == 0 or self._task.uncancel() == 0

    async def _answer_failure(self) -> None:
        """Tell the caller why there is no proper answer, if it still listens and nothing was sent."""
        error = self._end_error if self._ended_here else unexpected(RequestState.of(self._scope).request_id)
        if error is None:
            self._guard.metrics.count_error("client_gone")
            return
        self._guard.metrics.count_error(error.code)
        if not self._started:
            await self._reply(self._guard.index.dialect_of(self._scope["path"]).reply(error))

    def _stop_watching(self) -> None:
        self._guard.in_flight.remove(self)
        if self._watcher is not None:
            self._watcher.cancel()


def _is_text(start: Message) -> bool:
    """Whether an answer is plain text, HTML, or of no stated type."""
    for name, value in start.get("headers", ()):
        if name.lower() == b"content-type":
            return bool(value.lower().startswith(b"text/"))
    return True
