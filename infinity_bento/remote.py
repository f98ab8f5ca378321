"""An engine in another process: the two ends of the line between the HTTP front and the runner.

``service_distributed.py`` puts ``RunnerEnd`` around the engine, and a ``RemoteEngine`` where routes expect an engine.
What travels is pickled, over a socket that only the two processes of one server share: never expose a runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from bentoml.exceptions import BentoMLException

from infinity_bento.core import EngineStatus, Item, ModelInfo, Outcome, Task
from infinity_bento.engine import Engine, choose_model
from infinity_bento.errors import InfinityError, NotReady, ServerError
from infinity_bento.inputs.inspection import TokenRow

logger = logging.getLogger(__name__)

# BentoML's client closes its connections after 100 requests or 5 minutes, with the requests that are in flight on them.
RUNNER_CONNECTION = {"max_requests": 2**31 - 1, "max_age": 10 * 365 * 86_400.0}

POLL_LOADING_SECONDS = 0.25
POLL_READY_SECONDS = 2.0
# Idle connections are closed many at once, after a wave of requests; the pauses let the client notice the others.
RETRY_PAUSES_SECONDS = (0.0, 0.05, 0.25)


class Parcel:
    """One pickled value. BentoML hands it on untouched: it neither validates it nor takes it apart."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def of(cls, value: object) -> Parcel:
        """The value, packed."""
        return cls(pickle.dumps(value, protocol=5))

    def value(self) -> Any:
        """The value again.

        Raises:
            InfinityError: If the value is the error that the other side met.
        """
        value = pickle.loads(self.data)
        if isinstance(value, InfinityError):
            raise value
        return value


@dataclass(frozen=True, slots=True)
class Description:
    """What the front must know without asking each time."""

    status: EngineStatus
    alive: bool
    infos: tuple[ModelInfo, ...]


# Runner side --------------------------------------------------------------------------------------------------------


class RunnerEnd:
    """Answers the front's questions from an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def answer(self, question: Parcel) -> Parcel:
        """One question, ``(method, arguments, keywords)``; an error of the engine becomes the answer."""
        method, arguments, keywords = question.value()
        try:
            if method == "describe":
                return Parcel.of(self.describe())
            if method not in ("submit", "tokenize", "decode"):
                raise ServerError(f"A runner answers describe, submit, tokenize and decode, not {method!r}.")
            return Parcel.of(await getattr(self.engine, method)(*arguments, **keywords))
        except InfinityError as error:
            return Parcel.of(error)

    def describe(self) -> Description:
        """The engine as it is now."""
        return Description(self.engine.status(), self.engine.alive, tuple(self.engine.infos()))


# Front side ---------------------------------------------------------------------------------------------------------


class RemoteEngine:
    """The part of an engine that the routes use, answered by a runner.

    Args:
        ask: Sends a question to the runner.
    """

    def __init__(self, ask: Callable[[Parcel], Awaitable[Parcel]]) -> None:
        self._ask = ask
        self._description = Description(EngineStatus(False, "wait for the runner", 1, 1, 0.0), True, ())
        self._polling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Keep the description current from now on; needs a running event loop."""
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def stop(self) -> None:
        """End the polling."""
        if self._polling is not None:
            self._polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polling

    async def _poll(self) -> None:
        while True:
            try:
                self._description = (await self._ask(Parcel.of(("describe", (), {})))).value()
            except (InfinityError, BentoMLException, aiohttp.ClientError, OSError) as error:
                self._lost(error)
            await asyncio.sleep(POLL_READY_SECONDS if self._description.status.ready else POLL_LOADING_SECONDS)

    def _lost(self, error: Exception) -> None:
        """Nobody answers: from now on requests are refused, until the runner says that it is ready again."""
        logger.debug("the runner does not answer: %r", error)
        waiting = EngineStatus(False, "wait for the runner", 1, 1, self._description.status.elapsed_seconds)
        self._description = Description(waiting, True, self._description.infos)

    def status(self) -> EngineStatus:
        """The runner's status when it last answered."""
        return self._description.status

    @property
    def alive(self) -> bool:
        """Whether the runner can still be of use; one that does not answer is being replaced."""
        return self._description.alive

    def infos(self) -> Sequence[ModelInfo]:
        """The runner's models."""
        return self._description.infos

    def resolve(self, name: str | None, task: Task) -> ModelInfo:
        """As ``Engine.resolve``."""
        status = self.status()
        if not status.ready:
            raise NotReady(f"The runner is not ready: {status.error or status.stage}; retry shortly.")
        return choose_model(self._description.infos, name, task)

    async def submit(self, name: str, items: Sequence[Item], *, wait: bool = False) -> Sequence[Outcome]:
        """As ``Engine.submit``; the runner drops the items if this call is cancelled."""
        answer: Sequence[Outcome] = await self._call("submit", name, list(items), wait=wait)
        return answer

    async def tokenize(
        self, name: str, texts: Sequence[str], *, add_special_tokens: bool = True, prompt_name: str | None = None
    ) -> Sequence[Sequence[TokenRow] | InfinityError]:
        """As ``Engine.tokenize``."""
        keywords = {"add_special_tokens": add_special_tokens, "prompt_name": prompt_name}
        answer: Sequence[Sequence[TokenRow] | InfinityError] = await self._call(
            "tokenize", name, list(texts), **keywords
        )
        return answer

    async def decode(
        self, name: str, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> Sequence[str | InfinityError]:
        """As ``Engine.decode``."""
        answer: Sequence[str | InfinityError] = await self._call(
            "decode", name, [list(row) for row in ids], skip_special_tokens=skip_special_tokens
        )
        return answer

    async def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        question = Parcel.of((method, arguments, keywords))
        for pause_seconds in RETRY_PAUSES_SECONDS:
            try:
                return (await self._ask(question)).value()
            except (aiohttp.ClientConnectionError, ConnectionError) as error:
                # The connection was idle too long, or the runner was replaced: asking again computes the same.
                logger.debug("asking the runner again: %r", error)
                await asyncio.sleep(pause_seconds)
        try:
            return (await self._ask(question)).value()
        except (aiohttp.ClientError, OSError) as error:
            self._lost(error)
            raise NotReady(f"The runner does not answer ({type(error).__name__}): retry shortly.") from error
