"""One call of a method: key, model, time limit, answer or status. ``server`` makes its handlers here."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, NoReturn

import numpy as np

from infinity_bento.api.choosing import resolve_or_late_interaction
from infinity_bento.api.exchange import ApiContext, Call, RequestState
from infinity_bento.api.protocol import ApiSettings, EngineLike, GetEngine
from infinity_bento.api.ranking import best_first
from infinity_bento.api.routes import unexpected
from infinity_bento.api.tei_answer import Answer
from infinity_bento.core import Item, Result, Task, Timing
from infinity_bento.errors import (
    DeadlineExceeded,
    EmptyInput,
    InfinityError,
    PayloadTooLarge,
    ServerError,
    Unauthorized,
    UnsupportedTask,
)
from infinity_bento.grpc_api import methods, tei_pb2
from infinity_bento.grpc_api.methods import Made, Method
from infinity_bento.grpc_api.statuses import details_of, status_of, trailer_of
from infinity_bento.grpc_api.streams import Streams
from infinity_bento.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_RANK_BYTES = 16  # of one rank without its text, in the answer


class PatientEngine:
    """An engine that is asked to wait where it is full."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    async def submit(self, name: str, items: list[Item], *, wait: bool = True) -> Any:
        """As the engine's, in turn."""
        return await self._engine.submit(name, items, wait=wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Rpcs:
    """Makes handlers of methods.

    Args:
        get_engine: As for the HTTP routes.
        settings: Key, limits of time and of bytes.
        metrics: Counts what is answered with an error.
        streams: The streams of the server.
    """

    def __init__(self, get_engine: GetEngine, settings: ApiSettings, metrics: Metrics, streams: Streams) -> None:
        self._settings = settings
        self._metrics = metrics
        self._streams = streams
        self._at_once = ApiContext(get_engine, settings, metrics, ())
        self._in_turn = ApiContext(lambda: PatientEngine(get_engine()), settings, metrics, ())

    def unary(self, path: str, method: Method, *, waits: bool) -> Any:
        """A handler for one message; refused at once where the model is full, unless it ``waits``."""

        async def handle(request: Any, context: Any) -> Any:
            try:
                call = self._call(context, waits)
                made = await self._in_time(method(call, _read(request), _model(context)))
                await _send_headers(context, call, made)
                return made.response
            except BaseException as error:
                await self._end(path, context, error)

        return handle

    def stream(self, path: str, method: Method) -> Any:
        """A handler for many messages, answered in their order; each waits for its turn."""

        async def handle(requests: AsyncIterator[Any], context: Any) -> None:
            try:
                model = self._admitted_model(context)

                async def answer(request: Any) -> Made:
                    return await self._in_time(method(self._call(context, True), _read(request), model))

                async with aclosing(self._streams.answers(requests, answer)) as answers:
                    async for made in answers:
                        await context.write(made.response)
            except BaseException as error:
                await self._end(path, context, error)

        return handle

    def rerank_stream(self, path: str) -> Any:
        """A handler for pairs of a query and a text, answered together as one ranking."""

        async def handle(requests: AsyncIterator[Any], context: Any) -> Any:
            try:
                call = self._call(context, True)
                made = await self._ranked(call, requests, context)
                await _send_headers(context, call, made)
                return made.response
            except BaseException as error:
                await self._end(path, context, error)

        return handle

    async def _ranked(self, call: Call, requests: AsyncIterator[Any], context: Any) -> Made:
        """The ranking of everything that comes, by the options of the first message."""
        info = resolve_or_late_interaction(call.engine, _model(context), Task.RERANK)
        if info.listwise:
            raise UnsupportedTask(
                f"Model {info.name!r} reads all texts of a query together, and a stream brings one at a time: call "
                "Rerank with all of them."
            )
        texts: list[str] = []
        first: list[Any] = []
        size = 0

        def answer(request: Any) -> Coroutine[Any, Any, Made]:
            nonlocal size
            _read(request)
            first[:] = first or [request]
            size += _RANK_BYTES
            if first[0].return_text:
                size += len(request.text.encode())
                texts.append(request.text)
            if size > self._settings.payload_limit:
                raise PayloadTooLarge(
                    f"The ranking has more than {self._settings.payload_limit} bytes (payload_limit) after "
                    f"{len(texts) or size // _RANK_BYTES} texts; send fewer, or leave return_text out."
                )
            one = tei_pb2.RerankRequest(query=request.query, texts=[request.text], truncate=request.truncate)
            one.truncation_direction = request.truncation_direction
            one.raw_scores = first[0].raw_scores
            return self._in_time(methods.rerank(self._call(context, True), one, info.name))

        scores: list[float] = []
        results: list[Result] = []
        async with aclosing(self._streams.answers(requests, answer)) as answers:
            async for made in answers:
                assert made.answer is not None
                scores.append(made.answer.value[0]["score"])
                results += made.answer.results
        if not scores:
            raise EmptyInput("The stream has no message; send at least one, with a query and a text.")
        call.state.timing = Timing.mean([result.timing for result in results])
        order = best_first(np.array(scores, dtype=np.float32), "texts")
        rows = [{"index": i, "score": scores[i], **({"text": texts[i]} if texts else {})} for i in order]
        return methods.ranked(call, Answer(rows, info, results))

    def _call(self, context: Any, waits: bool) -> Call:
        """The call as the functions of the HTTP routes want it.

        Raises:
            Unauthorized: The key is missing or wrong.
        """
        self._check_key(context)
        state = RequestState(f"{random.getrandbits(128):032x}")
        return Call({"headers": []}, _no_body, state, self._in_turn if waits else self._at_once)

    def _admitted_model(self, context: Any) -> str | None:
        self._check_key(context)
        return _model(context)

    def _check_key(self, context: Any) -> None:
        if self._settings.api_key is None:
            return
        given = _value(context, "authorization")
        scheme, _, key = (given or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._settings.api_key.encode()):
            raise Unauthorized(
                f"The authorization metadata {'is missing' if given is None else 'holds another key'}; this server "
                "needs an API key. Send the metadata `authorization: Bearer <key>`."
            )

    async def _in_time(self, answer: Any) -> Made:
        """The answer, or what to say when it takes too long."""
        limit = self._settings.request_timeout_seconds
        timeout = asyncio.timeout(limit or None)
        try:
            async with timeout:
                made: Made = await answer
                return made
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(
                f"The message was not answered within {limit:g} s (request_timeout_seconds) and was dropped. "
                "Send fewer at the same time, or retry when the server is less busy."
            ) from None

    async def _end(self, path: str, context: Any, error: BaseException) -> NoReturn:
        """End a call with the status of an error; it is counted here."""
        if isinstance(error, asyncio.CancelledError):  # the client has gone, its deadline is over, or the server ends
            self._metrics.count_error("client_gone")
            raise error
        if not isinstance(error, Exception):
            raise error
        if not isinstance(error, InfinityError):
            request_id = f"{random.getrandbits(128):032x}"
            logger.error("request %s: unexpected failure in %s", request_id, path, exc_info=error)
            error = unexpected(request_id)
        elif isinstance(error, ServerError):
            logger.error("%s: %s", path, error)
        self._metrics.count_error(error.code)
        await context.abort(status_of(error), details_of(error), trailer_of(error))
        raise AssertionError("abort raises")


def _read(request: Any) -> Any:
    """The message; raises if it could not be read."""
    if isinstance(request, InfinityError):
        raise request
    return request


async def _send_headers(context: Any, call: Call, made: Made) -> None:
    headers = made.headers(call)
    if headers:
        await context.send_initial_metadata(tuple((name.decode(), value.decode()) for name, value in headers))


def _model(context: Any) -> str | None:
    """The model that the caller names in the metadata."""
    return _value(context, "model")


def _value(context: Any, name: str) -> str | None:
    """The value of a key of the call's metadata; the first one wins."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None


async def _no_body() -> Any:
    raise AssertionError("the body of a message is not read")
