"""What TEI's inference routes have in common: body in, answer and timing headers out. Used by the ``tei_*`` files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from infinity_bento.api.body import read_object
from infinity_bento.api.exchange import Call, Handler, Headers, Reply
from infinity_bento.api.fields import Body
from infinity_bento.api.inference import truncation_headers
from infinity_bento.core import ModelInfo, Result

_MILLISECONDS = 1000.0


class Answer(NamedTuple):
    """The answer to one body: what is sent, and what it was made from."""

    value: Any
    info: ModelInfo
    results: list[Result]
    compressible: bool = True


# Body -> answer; raises ``InfinityError``. Routes wrap one in ``handler``; /, /invocations and /vertex call several.
Answerer = Callable[[Call, Body], Awaitable[Answer]]


def handler(answer: Answerer) -> Handler:
    """The route handler that reads a body, answers it and reports the cost in TEI's headers."""

    async def handle(call: Call) -> Reply:
        made = await answer(call, await read_object(call))
        reply = call.reply(made.value)
        reply.compressible &= made.compressible
        reply.headers = compute_headers(call, made)
        return reply

    return handle


def compute_headers(call: Call, answer: Answer) -> Headers:
    """TEI's response headers: what was computed, and whole milliseconds per stage (mean over the inputs)."""
    results = answer.results
    total = b"%d" % (call.state.elapsed_seconds() * _MILLISECONDS)
    headers: Headers = [
        (b"x-compute-type", b"gpu" if answer.info.device.startswith("cuda") else b"cpu"),
        (b"x-compute-time", total),
        (b"x-compute-characters", b"%d" % sum(result.usage.characters for result in results)),
        (b"x-compute-tokens", b"%d" % sum(result.usage.tokens for result in results)),
        (b"x-total-time", total),
        *truncation_headers(results),
    ]
    timing = call.state.timing
    if timing is not None:
        headers += [
            (b"x-tokenization-time", b"%d" % (timing.tokenize_seconds * _MILLISECONDS)),
            (b"x-queue-time", b"%d" % (timing.queue_seconds * _MILLISECONDS)),
            (b"x-inference-time", b"%d" % (timing.inference_seconds * _MILLISECONDS)),
        ]
    return headers
