"""The seam to BentoML: its app with our dispatcher behind batchable methods, our probes, and our middleware around it.

``EngineService`` is the ``service_class=`` of ``service.py``; it finds what it needs in the service class's ``wire``.
``ServiceAppFactory`` is private API of BentoML 1.4: ``tests/test_serving.py`` holds the contract.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bentoml
from _bentoml_impl.server.app import ServiceAppFactory
from _bentoml_sdk import Service
from bentoml._internal.server.http.traffic import TimeoutMiddleware
from bentoml.exceptions import BentoMLException
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from infinity_bento.api.app import create_app, harden
from infinity_bento.api.envelopes import TEI
from infinity_bento.api.probes import livez_reply, readyz_reply
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.engine import Engine
from infinity_bento.errors import InfinityError, NotReady
from infinity_bento.settings import Settings, from_bentoml_arguments, resolve
from infinity_bento.telemetry.metrics import CONTENT_TYPE, Metrics

logger = logging.getLogger(__name__)

Callback = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]

# Names the folder of one running server, which the supervisor makes and its workers inherit.
RUN_FOLDER_VARIABLE = "INFINITY_BENTO_RUN_FOLDER"
FAILURE_FILE = "failure"  # where a worker leaves the reason why it cannot serve
METRICS_FOLDER = "metrics"


def settings_from_bentoml() -> Settings:
    """The settings of this process: ``bentoml serve --arg``, environment, preset.

    Raises:
        BentoMLException: With one sentence, if an option cannot be honoured; BentoML prints it and stops.
    """
    try:
        return resolve(from_bentoml_arguments(vars(bentoml.use_arguments())), os.environ)
    except InfinityError as error:
        raise BentoMLException(error.message) from None


@dataclass(frozen=True, slots=True)
class Wire:
    """What the seam needs of a service class, found there as ``wire``."""

    api: ApiSettings
    metrics: Metrics
    tracing: bool

    @classmethod
    def from_settings(cls, settings: Settings, version: str) -> Wire:
        """The wire layer's share of the settings."""
        run_folder = os.environ.get(RUN_FOLDER_VARIABLE)
        if run_folder:
            # BentoML's own folder is one for all servers of a machine, and each of them empties it.
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(Path(run_folder) / METRICS_FOLDER)
        api = ApiSettings(
            payload_limit=settings.payload_limit,
            request_timeout_seconds=settings.request_timeout_seconds,
            api_key=settings.api_key.reveal() if settings.api_key else None,
            cors_allow_origin=settings.cors_allow_origin,
            version=version,
        )
        return cls(api, Metrics(), settings.tracing)

    def app(self) -> ASGIApp:
        """The app to mount; ``EngineService`` puts the middleware around all of BentoML."""
        return create_app(current_engine, self.api, metrics=self.metrics, hardened=False)


def current_engine() -> Engine:
    """The engine of the service instance of this process."""
    engine: Engine = bentoml.get_current_service().engine
    return engine


class EngineDispatcher:
    """Hands each call of a batchable method straight to the method, which hands its items to the engine.

    BentoML's own dispatcher counts rows, runs one batch at a time and fails it as a whole. The engine's queue, under
    its token budget, is where the items of all callers meet; a second queue before it would only add waiting.
    """

    def __call__(self, callback: Callback) -> Callable[[Any], Awaitable[Any]]:
        """BentoML's calling convention: ``await dispatcher(callback)(value)``."""

        async def run(value: Any) -> Any:
            (result,) = await callback((value,))
            return result

        return run

    def shutdown(self) -> None:
        """Nothing to stop."""


class EngineAppFactory(ServiceAppFactory):  # type: ignore[misc]
    """BentoML's app for a service whose instance has an ``engine`` and whose class has a ``wire``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dispatchers = {name: EngineDispatcher() for name, api in self.service.apis.items() if api.batchable}

    @property
    def middlewares(self) -> list[Middleware]:
        """BentoML's own, less its timeout (ours also notices a client that leaves) and, unless traced, its spans."""
        unwanted = (
            {TimeoutMiddleware} if self.service.inner.wire.tracing else {TimeoutMiddleware, OpenTelemetryMiddleware}
        )
        return [middleware for middleware in super().middlewares if middleware.cls not in unwanted]

    async def api_endpoint(self, name: str, request: Request) -> Response:
        """A native method; its refusals keep their status, instead of becoming BentoML's 500."""
        try:
            answer: Response = await super().api_endpoint(name, request)
        except InfinityError as error:
            reply = TEI.reply(error)
            headers = {key.decode(): value.decode() for key, value in reply.headers}
            return Response(reply.body, reply.status, headers, "application/json")
        return answer

    async def livez(self, request: Request) -> Response:
        """Ours: JSON, and 503 once a device thread has died."""
        return await livez_reply(self._service_instance.engine)  # type: ignore[return-value]

    async def readyz(self, request: Request) -> Response:
        """Ours: JSON with the stage while the models load."""
        return await readyz_reply(self._service_instance.engine)  # type: ignore[return-value]

    async def metrics(self, request: Request) -> Response:
        """Ours, of all workers together."""
        return Response(self.service.inner.wire.metrics.render(), media_type=CONTENT_TYPE)


class EngineService(Service[Any]):  # type: ignore[misc]
    """A BentoML service served through ``EngineAppFactory``."""

    def to_asgi(self, is_main: bool = True) -> ASGIApp:
        """The whole server as one ASGI app: request ids, JSON errors, time limit and keys hold for every route."""
        self.inject_config()
        wire: Wire = self.inner.wire
        return harden(EngineAppFactory(self, is_main=is_main)(), wire.api, wire.metrics)


# Starting and refusing to start ----------------------------------------------------------------------------------


def check_before_workers(settings: Settings) -> None:
    """In the supervisor, before it starts workers: find every model's files and read their layout.

    Downloads happen here, once. It also makes sure that a worker which fails later ends the whole server with an exit
    code, instead of being started again for ever.

    Raises:
        BentoMLException: With one sentence, if a model cannot be served.
    """
    from infinity_bento.checkpoints.preflight import plan_model

    folder = Path(tempfile.mkdtemp(prefix="infinity-bento-"))
    (folder / METRICS_FOLDER).mkdir()
    os.environ[RUN_FOLDER_VARIABLE] = str(folder)
    atexit.register(_leave_run_folder, folder)
    try:
        for model in settings.models:
            plan_model(model, settings)
    except InfinityError as error:
        raise BentoMLException(error.message) from None


def _leave_run_folder(folder: Path) -> None:
    """At the supervisor's end: repeat the worker's reason, and make the exit code say that it failed."""
    file = folder / FAILURE_FILE
    reason = file.read_text() if file.is_file() else ""
    shutil.rmtree(folder, ignore_errors=True)
    if reason:
        print(f"Error: {reason}", file=sys.stderr, flush=True)
        os._exit(1)


def load_in_background(engine: Engine) -> threading.Thread:
    """Load the models while the process already answers probes; if that fails, stop the server."""

    def load() -> None:
        try:
            engine.load()
        except NotReady:
            logger.info("stopped while loading")
        except InfinityError as error:
            logger.critical("%s", error.message)
            _stop_server(error.message)
        except Exception as error:
            logger.critical("loading failed unexpectedly", exc_info=error)
            _stop_server(f"loading failed unexpectedly ({type(error).__name__}: {error}); the log has the details")

    thread = threading.Thread(target=load, name="load-models", daemon=True)
    thread.start()
    return thread


def _stop_server(reason: str) -> None:
    """Tell the supervisor why, and end it; without a supervisor (tests, plain uvicorn) readiness tells the reason."""
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if folder and os.path.isdir(folder):
        (Path(folder) / FAILURE_FILE).write_text(reason)
        os.kill(os.getppid(), signal.SIGTERM)
