"""The engine: several models in one process, and the one way in. Free of torch until it loads.

``submit`` is where every door ends: the wire dialects, the BentoML methods and bulk jobs. An item goes from there
through admission, a tokenizer worker, the model's queue and a device lane, and comes back as a ``Result`` or an error.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinity_bento.batching.ticket import Ticket
from infinity_bento.core import EngineStatus, Item, ModelInfo, Outcome, Task
from infinity_bento.errors import (
    DeadlineExceeded,
    EmptyInput,
    InfinityError,
    InvalidInput,
    NotReady,
    Overloaded,
    UnknownModel,
    UnsupportedTask,
)
from infinity_bento.inputs.inspection import TokenRow, decoded, token_rows
from infinity_bento.served_model import ServedModel
from infinity_bento.telemetry.startup import Stages

if TYPE_CHECKING:
    from infinity_bento.settings import Settings
    from infinity_bento.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

FULL_QUEUE_SECONDS = 0.05  # a request that waits asks again after this long, where the queue holds too many tokens


class Mailbox:
    """Futures to finish in an event loop. A device thread finishes many at once: the loop is woken for the first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._finished: list[asyncio.Future[None]] = []
        self._woken = False
        self._lock = threading.Lock()

    def deliver(self, future: asyncio.Future[None]) -> None:
        """Finish a future; from any thread."""
        with self._lock:
            self._finished.append(future)
            waking, self._woken = not self._woken, True
        if waking:
            try:
                self.loop.call_soon_threadsafe(self._clear)
            except RuntimeError:  # the loop was closed while the item was computed: nobody waits any more
                logger.debug("a result came after its event loop was closed")

    def _clear(self) -> None:
        with self._lock:
            finished, self._finished, self._woken = self._finished, [], False
        for future in finished:
            if not future.done():
                future.set_result(None)


class Engine:
    """Several served models in one process.

    Args:
        settings: Which models, and how.
        metrics: Where counts go; None: nowhere.
    """

    def __init__(self, settings: Settings, metrics: Metrics | None = None) -> None:
        self.settings = settings
        self.metrics = metrics
        self._models: dict[str, ServedModel] = {}
        self._last_mailbox: Mailbox | None = None
        self._closing = False
        self._loading = threading.Lock()  # held while models load, and while they are closed
        self._stages = Stages(stage_names(settings), logger.info)

    @classmethod
    def from_settings(cls, settings: Settings, metrics: Metrics | None = None) -> Engine:
        """An engine with its models loaded and warm; takes seconds.

        Raises:
            LoadError: If a checkpoint cannot be served.
            ConfigError: If an option cannot be honoured on this machine.
        """
        engine = cls(settings, metrics)
        engine.load()
        return engine

    # Loading -----------------------------------------------------------------------------------------------------

    def load(self, *, url: str = "") -> None:
        """Load, check and warm up every model, one after the other, in this thread. Raises as ``from_settings``.

        ``url``, if given, is where the log says that they answer now.
        """
        with self._loading:
            try:
                self._load_models()
            except InfinityError as error:
                self._stages.fail(error.message)
                raise
            except Exception as error:
                self._stages.fail(f"Loading failed unexpectedly ({type(error).__name__}: {error}).")
                raise
            self._stages.ready(url)

    def _load_models(self) -> None:
        with self._stages.stage(STAGE_IMPORT):
            from infinity_bento import loading
            from infinity_bento.runners.lane import BusyLanes

            busy = BusyLanes()
        for model_settings in self.settings.models:
            if self._closing:
                raise NotReady("The server was stopped while its models were loading.")
            prefix = stage_prefix(self.settings, model_settings.served_model_name)
            model = loading.load_model(
                model_settings, self.settings, self._stages, prefix=prefix, busy=busy, metrics=self.metrics
            )
            self._models[model.info.name] = model

    def status(self) -> EngineStatus:
        """How far loading is; never blocks."""
        return self._stages.status()

    @property
    def alive(self) -> bool:
        """False once a device thread has died, or loading has failed."""
        return self.status().error is None and all(model.alive for model in self._models.values())

    # Asking ------------------------------------------------------------------------------------------------------

    def infos(self) -> list[ModelInfo]:
        """The loaded models, in the order of the settings."""
        return [model.info for model in self._models.values()]

    def resolve(self, name: str | None, task: Task) -> ModelInfo:
        """The model that answers a request.

        Args:
            name: As in the request; None or empty: the only model that can do the task.
            task: What is asked of it.

        Raises:
            NotReady: While the models load.
            UnknownModel: If no served model has this name.
            UnsupportedTask: If the named model, or no model at all, can do the task.
            InvalidInput: If several models can and none is named.
        """
        self._require_ready()
        return choose_model(self.infos(), name, task)

    async def submit(self, name: str, items: Sequence[Item], *, wait: bool = False) -> list[Outcome]:
        """Run items on a model; the event loop stays free meanwhile.

        If the awaiting task is cancelled (the client went away, or its time is up), items that still wait are never
        computed.

        Args:
            name: A served model's name, as ``resolve`` gives it.
            items: At least one, at most ``max_client_batch_size``; of tasks this model can do.
            wait: Where the model is full, wait in the order of arrival instead of being refused.

        Returns:
            For each item, in order, its ``Result`` or the error that concerns it alone.

        Raises:
            NotReady, UnknownModel, EmptyInput, BatchTooLarge: If the request as a whole is refused.
            Overloaded: Likewise; never with ``wait``.
        """
        model, started = self._checked(name, items), time.perf_counter()
        if not wait:
            return await self._run(model, model.admit(len(items)), items, started)
        while True:
            permits = await self._admit_in_turn(model, len(items))
            try:
                return await self._run(model, permits, items, started)
            except Overloaded:  # the queue is full of tokens: it was tokenised to know that, so it must come again
                await asyncio.sleep(FULL_QUEUE_SECONDS)

    async def _admit_in_turn(self, model: ServedModel, inputs: int) -> int:
        """The permits of a request, when its turn has come."""
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        mailbox = self._mailbox(loop)
        waiter = model.admit_or_wait(inputs, lambda: mailbox.deliver(granted))
        if not waiter.granted:
            try:
                await granted
                self._require_ready()  # it may have been stopped meanwhile
            except (asyncio.CancelledError, NotReady):
                model.give_up(waiter)
                raise
        return waiter.count

    async def _run(self, model: ServedModel, permits: int, items: Sequence[Item], started: float) -> list[Outcome]:
        """The outcomes of an admitted request that came at ``started``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        mailbox = self._mailbox(loop)

        def on_done() -> None:
            mailbox.deliver(future)

        ticket = Ticket(items, on_done)
        try:
            model.start(ticket)
            await future
        except asyncio.CancelledError:
            ticket.abandon()
            raise
        finally:
            model.release(permits)
        return model.finished(ticket, started)

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """The mailbox of a running event loop; nearly always there is one."""
        if self._last_mailbox is None or self._last_mailbox.loop is not loop:
            self._last_mailbox = Mailbox(loop)
        return self._last_mailbox

    def submit_sync(self, name: str, items: Sequence[Item], *, timeout_seconds: float | None = None) -> list[Outcome]:
        """``submit`` for callers without an event loop; blocks this thread.

        Raises:
            DeadlineExceeded: After ``timeout_seconds``; what still waits is dropped. Otherwise as ``submit``.
        """
        done = threading.Event()
        started = time.perf_counter()
        model = self._checked(name, items)
        permits = model.admit(len(items))
        ticket = Ticket(items, done.set)
        try:
            model.start(ticket)
            if not done.wait(timeout_seconds):
                ticket.abandon()
                raise DeadlineExceeded(
                    f"Not answered within {timeout_seconds:g} s: send less at once, or allow more time."
                )
        finally:
            model.release(permits)
        return model.finished(ticket, started)

    async def tokenize(
        self, name: str, texts: Sequence[str], *, add_special_tokens: bool = True, prompt_name: str | None = None
    ) -> list[list[TokenRow] | InfinityError]:
        """The tokens of each text, untruncated (``inputs.inspection.token_rows``), in a thread of its own.

        Raises:
            NotReady, UnknownModel: As ``submit``.
        """
        tokenizer = self._model(name).pool.tokenizer
        return await asyncio.to_thread(
            token_rows, tokenizer, texts, add_special_tokens=add_special_tokens, prompt_name=prompt_name
        )

    async def decode(
        self, name: str, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str | InfinityError]:
        """The text of each list of token ids (``inputs.inspection.decoded``), in a thread of its own.

        Raises:
            NotReady, UnknownModel: As ``submit``.
        """
        tokenizer = self._model(name).pool.tokenizer
        return await asyncio.to_thread(decoded, tokenizer, ids, skip_special_tokens=skip_special_tokens)

    def _model(self, name: str) -> ServedModel:
        self._require_ready()
        model = self._models.get(name)
        if model is None:
            raise _unknown(name, self.infos())
        return model

    def _checked(self, name: str, items: Sequence[Item]) -> ServedModel:
        """The model that gets these items, which are of its tasks; the request is counted."""
        model = self._model(name)
        if not items:
            raise EmptyInput("The list of inputs is empty: send at least one.")
        wrong = next((item.task for item in items if item.task not in model.info.tasks), None)
        if wrong is not None:
            raise UnsupportedTask(f"Model {name!r} cannot {wrong.value}; it can {_listed(model.info.tasks)}.")
        model.observe_request(items)
        return model

    def _require_ready(self) -> None:
        if self._closing:
            raise NotReady("The server is stopping: retry on another replica.")
        status = self.status()
        if status.error is not None:
            raise NotReady(f"The server could not load its models: {status.error}", retry_after_seconds=60)
        if not status.ready:
            raise NotReady(
                f"Models are loading: stage {status.stage_number} of {status.stage_count} ({status.stage}) after "
                f"{status.elapsed_seconds:.1f} s; retry shortly, or wait for /readyz."
            )

    # Stopping ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new requests, finish running batches, end all threads; waits for a load in progress.

        Safe to call twice.
        """
        self._closing = True
        with self._loading:
            for model in self._models.values():
                model.close()
            self._models.clear()
        if self.metrics is not None:
            self.metrics.book()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def choose_model(infos: Sequence[ModelInfo], name: str | None, task: Task) -> ModelInfo:
    """The one of several models that answers a request. Raises as ``Engine.resolve``, but for ``NotReady``."""
    able = [info for info in infos if task in info.tasks]
    if name:
        named = next((info for info in infos if info.name == name), None)
        if named is None:
            raise _unknown(name, infos)
        if task not in named.tasks:
            raise UnsupportedTask(
                f"Model {name!r} cannot {task.value}; it can {_listed(named.tasks)}. "
                f"Models that can {task.value}: {', '.join(repr(info.name) for info in able) or 'none'}.",
                param="model",
            )
        return named
    if len(able) == 1:
        return able[0]
    if not able:
        raise UnsupportedTask(
            f"No served model can {task.value}; served: "
            + "; ".join(f"{info.name!r} can {_listed(info.tasks)}" for info in infos)
            + ".",
            param="model",
        )
    raise InvalidInput(
        f"Several models can {task.value}: name one of {', '.join(repr(info.name) for info in able)} as model.",
        param="model",
    )


def _unknown(name: str, infos: Sequence[ModelInfo]) -> UnknownModel:
    available = ", ".join(repr(info.name) for info in infos)
    return UnknownModel(f"Model {name!r} is not served here; available: {available}.", param="model")


STAGE_IMPORT = "import libraries"
MODEL_STAGES = ("find files", "read layout", "load tokenizer and weights", "self-check", "warm up")


def stage_prefix(settings: Settings, name: str) -> str:
    """Stages carry the model's name only where there are several."""
    return f"{name}: " if len(settings.models) > 1 else ""


def stage_names(settings: Settings) -> list[str]:
    """All stages of a start, in order."""
    names = [STAGE_IMPORT]
    for model in settings.models:
        prefix = stage_prefix(settings, model.served_model_name)
        names += [prefix + stage for stage in MODEL_STAGES]
    return names


def _listed(tasks: Sequence[Task]) -> str:
    return ", ".join(task.value for task in tasks) or "nothing"
