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
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bentoml
from _bentoml_impl.server.app import ServiceAppFactory
from _bentoml_sdk import Service
from _bentoml_sdk.service import get_current_service
from bentoml._internal.server.http.traffic import TimeoutMiddleware
from bentoml.exceptions import BentoMLException
from bentoml.serving import running_inside_container
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from pydantic import ValidationError
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from infinity_bento import bundled
from infinity_bento.accelerators import check_image, visible_gpus
from infinity_bento.announcing import announce, told_address
from infinity_bento.api.app import StraightWay, create_app, harden
from infinity_bento.api.envelopes import TEI
from infinity_bento.api.native_refusals import BAD_BODY, count_item_errors, refusal
from infinity_bento.api.native_table import NATIVE_METHODS
from infinity_bento.api.probes import livez_reply, readyz_reply
from infinity_bento.api.protocol import ApiSettings, EngineLike
from infinity_bento.core import EngineStatus
from infinity_bento.engine import Engine
from infinity_bento.errors import InfinityError, NotReady
from infinity_bento.fleet import RUN_FOLDER_VARIABLE, Fleet, choose_gpu
from infinity_bento.grpc_door import GrpcDoor, require_grpc
from infinity_bento.images import BUILD_ARGUMENTS, ImageArguments
from infinity_bento.listening import Address, leave_host, leave_url, read_host, read_url, require_free
from infinity_bento.settings import Settings, from_bentoml_arguments, resolve
from infinity_bento.sources import Source
from infinity_bento.telemetry.logs import configure_logging
from infinity_bento.telemetry.metrics import CONTENT_TYPE, Metrics

logger = logging.getLogger(__name__)

Callback = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]

FAILURE_FILE = "failure"  # where a worker leaves the reason why it cannot serve
METRICS_FOLDER = "metrics"


def settings_from_bentoml(service_file: str | None = None) -> Settings:
    """The settings of this process: ``bentoml serve --arg`` or what a Bento was built with, environment, preset.

    Args:
        service_file: Path of the service's module; tells a built Bento, whose models are pinned, from a checkout.

    Raises:
        BentoMLException: With one sentence, if an option cannot be honoured; BentoML prints it and stops.
    """
    arguments = from_bentoml_arguments(vars(bentoml.use_arguments()), ignore=BUILD_ARGUMENTS)
    bento = bundled.built_bento(Path(service_file)) if service_file is not None else None
    try:
        if bento is None:
            return resolve(arguments, os.environ, source=Source.ARGUMENT)
        arguments = bundled.unless_in_environment(arguments, os.environ)
        settings = resolve(arguments, os.environ, source=Source.BENTO)
        return bundled.pinned(settings, bundled.carried_models(bento), os.environ)
    except InfinityError as error:
        raise BentoMLException(error.message) from None


def image_from_bentoml() -> ImageArguments:
    """What `bentoml build` was told about the image. Raises as ``settings_from_bentoml``."""
    try:
        return ImageArguments.read(vars(bentoml.use_arguments()))
    except InfinityError as error:
        raise BentoMLException(error.message) from None


def front_workers_from_bentoml() -> int:
    """HTTP processes of the distributed service: ``--arg front_workers=N``. Raises as ``settings_from_bentoml``."""
    text = str(vars(bentoml.use_arguments()).get("front_workers", "1"))
    if not text.isdigit() or int(text) < 1:
        raise BentoMLException(f"--arg front_workers is {text!r}; it must be an integer of at least 1.")
    return int(text)


def weights_to_build_in(settings: Settings) -> list[bundled.BundledWeights]:
    """The models that `bentoml build` puts into a Bento, or a refusal that it will meet."""
    arguments = from_bentoml_arguments(vars(bentoml.use_arguments()), ignore=BUILD_ARGUMENTS)
    return bundled.bundled_weights(settings, bundled.refusal_to_build(settings, arguments))


@dataclass(frozen=True, slots=True)
class Wire:
    """What the seam needs of a service class, found there as ``wire``."""

    settings: Settings
    api: ApiSettings
    metrics: Metrics
    tracing: bool
    fleet: Fleet
    observed: bool = False  # BentoML's spans or access log are wanted, so requests must pass through its app

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
            decisions=settings.decisions,
            version=version,
        )
        observed = settings.tracing or settings.access_log
        return cls(settings, api, Metrics(), settings.tracing, Fleet.of_this_run(settings.workers), observed)

    def grpc_door(self, processes: int) -> GrpcDoor:
        """The gRPC port of one of ``processes`` that listen on it."""
        return GrpcDoor(self.settings, self.api, self.metrics, processes)

    def app(self) -> ASGIApp:
        """The app to mount; ``EngineService`` puts the middleware around all of BentoML."""
        return create_app(current_engine, self.api, metrics=self.metrics, hardened=False, native=NATIVE_METHODS)


def current_engine() -> Engine:
    """The engine of the service instance of this process."""
    engine: Engine = get_current_service().engine
    return engine


class EngineDispatcher:
    """Hands each call of a batchable method straight to the method, which hands its items to the engine.

    Args:
        metrics: Counts the items that are answered with an error.

    BentoML's own dispatcher counts rows, runs one batch at a time and fails it as a whole. The engine's queue, under
    its token budget, is where the items of all callers meet; a second queue before it would only add waiting.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, callback: Callback) -> Callable[[Any], Awaitable[Any]]:
        """BentoML's calling convention: ``await dispatcher(callback)(value)``."""

        async def run(value: Any) -> Any:
            (result,) = await callback((value,))
            count_item_errors(self._metrics, result)
            return result

        return run

    def shutdown(self) -> None:
        """Nothing to stop."""


class EngineAppFactory(ServiceAppFactory):  # type: ignore[misc]
    """BentoML's app for a service whose instance has an ``engine`` and whose class has a ``wire``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        metrics = self.service.inner.wire.metrics
        self.dispatchers = {name: EngineDispatcher(metrics) for name, api in self.service.apis.items() if api.batchable}

    @property
    def middlewares(self) -> list[Middleware]:
        """BentoML's own, less its timeout (ours also notices a client that leaves) and, unless traced, its spans."""
        unwanted = (
            {TimeoutMiddleware} if self.service.inner.wire.tracing else {TimeoutMiddleware, OpenTelemetryMiddleware}
        )
        return [middleware for middleware in super().middlewares if middleware.cls not in unwanted]

    async def api_endpoint(self, name: str, request: Request) -> Response:
        """A native method; its refusals are sentences with their status, instead of BentoML's 500 and a stack trace."""
        try:
            answer: Response = await super().api_endpoint(name, request)
        except ValidationError as error:
            media_type = request.headers.get("content-type", "application/json")
            return self._refuse(refusal(error, media_type), BAD_BODY)
        except InfinityError as error:
            return self._refuse(error)
        return answer

    def _refuse(self, error: InfinityError, status: int | None = None) -> Response:
        self.service.inner.wire.metrics.count_error(error.code)
        reply = TEI.reply(error, status=status)
        headers = {key.decode(): value.decode() for key, value in reply.headers}
        return Response(reply.body, reply.status, headers, "application/json")

    async def livez(self, request: Request) -> Response:
        """Ours: JSON, and 503 once a device thread has died."""
        return await livez_reply(self._service_instance.engine)  # type: ignore[return-value]

    async def readyz(self, request: Request) -> Response:
        """Ours: JSON with the stage while the models load, in this worker or another."""
        engine = with_readiness_of_all(self._service_instance.engine, self.service.inner.wire.fleet)
        return await readyz_reply(engine)  # type: ignore[return-value]

    async def metrics(self, request: Request) -> Response:
        """Ours, of all workers together."""
        return Response(self.service.inner.wire.metrics.render(), media_type=CONTENT_TYPE)


class WaitingForOthers:
    """The engine of this worker, never ready: another worker still loads, and might get the next request."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    def status(self) -> EngineStatus:
        """As the engine's, but waiting where that would be ready."""
        status = self._engine.status()
        return replace(status, ready=False, stage="other workers load") if status.ready else status

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def with_readiness_of_all(engine: EngineLike, fleet: Fleet) -> EngineLike:
    """The engine of this worker, but ready only once every worker has been."""
    return engine if fleet.complete else WaitingForOthers(engine)


class EngineService(Service[Any]):  # type: ignore[misc]
    """A BentoML service served through ``EngineAppFactory``; its class may list ``weights`` to build in."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.models.extend(getattr(self.inner, "weights", ()))

    def to_asgi(self, is_main: bool = True) -> ASGIApp:
        """The whole server as one ASGI app: request ids, JSON errors, time limit and keys hold for every route."""
        self.inject_config()
        wire: Wire = self.inner.wire
        configure_logging(wire.settings, worker_number() if wire.settings.workers > 1 else None)
        app: ASGIApp = EngineAppFactory(self, is_main=is_main)()
        if not wire.observed:
            app = StraightWay(app, current_engine, wire.api, wire.metrics)
        return harden(app, wire.api, wire.metrics, NATIVE_METHODS)


# Starting and refusing to start ----------------------------------------------------------------------------------


def check_before_workers(settings: Settings, image: ImageArguments | None = None) -> None:
    """In the supervisor, before it starts workers: find every model's files and read their layout.

    Downloads happen here, once. It also makes sure that a worker which fails later ends the whole server with an exit
    code, instead of being started again for ever.

    Args:
        settings: Of the server.
        image: What the Bento's image was built for; None: unknown.

    Raises:
        BentoMLException: With one sentence, if a model cannot be served, or not by this image on this machine.
    """
    from infinity_bento.checkpoints.preflight import plan_model

    folder = Path(tempfile.mkdtemp(prefix="infinity-bento-"))
    (folder / METRICS_FOLDER).mkdir()
    os.environ[RUN_FOLDER_VARIABLE] = str(folder)
    atexit.register(_leave_run_folder, folder)
    address = told_address()
    try:
        if address is not None:
            require_free(address)
        require_grpc(settings, address or Address(settings.hostname, settings.port))
        if image is not None and image.declared and _wants_gpu(settings):
            notice = check_image(image.architecture, visible_gpus())
            if notice is not None:
                logger.warning("%s", notice)
        for model in settings.models:
            plan_model(model, settings)
    except InfinityError as error:
        raise BentoMLException(error.message) from None
    if address is not None:
        leave_url(folder, address)
        leave_host(folder, address)
    announce(settings, address)
    if settings.workers > 1:
        replace_dead_workers()


def _wants_gpu(settings: Settings) -> bool:
    return any(model.torch_device == "auto" or model.torch_device.startswith("cuda") for model in settings.models)


def replace_dead_workers() -> None:
    """Have the supervisor replace a worker that dies, in a container as well.

    There BentoML leaves that to whoever runs the container; but a container lives on while one of its workers does.
    """
    os.environ.pop("BENTOML_CONTAINERIZED", None)
    running_inside_container.cache_clear()


def _leave_run_folder(folder: Path) -> None:
    """At the supervisor's end: repeat the worker's reason, and make the exit code say that it failed."""
    file = folder / FAILURE_FILE
    reason = file.read_text() if file.is_file() else ""
    shutil.rmtree(folder, ignore_errors=True)
    if reason:
        logger.critical("%s", reason)
        os._exit(1)


def load_models(engine: Engine, fleet: Fleet) -> threading.Thread | None:
    """In a worker: load the models while the process already answers probes; if that fails, stop the server.

    A worker that replaces another loads first and accepts connections then, since others answer; if it fails, only it
    ends, and the supervisor tries again.
    """
    index = worker_number()
    if fleet.workers > 1 and _wants_gpu(engine.settings):
        choose_gpu(os.environ, index, len(visible_gpus({})))
    if fleet.replacing:
        logger.warning("worker %d replaces one that died", index)
        engine.load()
        return None

    def load() -> None:
        try:
            url = read_url(fleet.folder)
            engine.load(url=url if fleet.workers == 1 else "")
            if fleet.announce_ready(index):
                logger.info("all %d workers are ready: %s", fleet.workers, url)
        except NotReady:
            logger.info("stopped while loading")
        except InfinityError as error:
            _stop_server(error.message)
        except Exception as error:
            logger.critical("loading failed unexpectedly", exc_info=error)
            _stop_server(f"Loading failed unexpectedly ({type(error).__name__}: {error}); the log has the details.")

    thread = threading.Thread(target=load, name="load-models", daemon=True)
    thread.start()
    return thread


async def open_grpc(door: GrpcDoor, engine: EngineLike, wire: Wire) -> None:
    """In a worker: open the gRPC port, if there is to be one; if it cannot be had, stop the server."""
    host = read_host(wire.fleet.folder) or wire.settings.hostname
    try:
        await door.open(host, lambda: engine, lambda: with_readiness_of_all(engine, wire.fleet))
    except InfinityError as error:
        _stop_server(error.message)


def worker_number() -> int:
    """Which of the workers this process is, from 1."""
    return int(bentoml.server_context.worker_index or 1)


def _stop_server(reason: str) -> None:
    """Have the supervisor say why, and end it; without a supervisor (tests, plain uvicorn) readiness tells as well."""
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if folder and os.path.isdir(folder):
        (Path(folder) / FAILURE_FILE).write_text(reason)
        os.kill(os.getppid(), signal.SIGTERM)
    else:
        logger.critical("%s", reason)
