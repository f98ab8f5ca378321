"""The server as two BentoML services: HTTP processes in front, and a runner with the engine behind them.

For those who need the isolation, or more HTTP processes than runners: ``bentoml serve service_distributed:InfinityFront
--arg front_workers=4``. The price is one hop over a Unix socket for each request; ``service.py`` has none.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import bentoml

from infinity_bento.engine import Engine
from infinity_bento.images import build_image, gpu_resources, image_environment
from infinity_bento.remote import RUNNER_CONNECTION, Parcel, RemoteEngine, RunnerEnd
from infinity_bento.serving import EngineService, front_workers_from_bentoml, load_models, open_grpc

# Beside this file in a checkout or a Bento, inside the package when installed: as this file itself.
single: Any = importlib.import_module("infinity_bento.service" if __package__ else "service")
settings, wire, image = single.settings, single.wire, single.image

# The front has checked keys and sizes; a packed request is somewhat larger than its body was.
BEHIND_THE_FRONT = replace(wire.api, api_key=None, cors_allow_origin=(), payload_limit=16 * wire.api.payload_limit)

FRONT_WORKERS = front_workers_from_bentoml()

COMMON: dict[str, Any] = {
    "traffic": {"timeout": 86_400},
    "metrics": {"enabled": False},
    "runner_connection": RUNNER_CONNECTION,
    "service_class": EngineService,
    "envs": image_environment(image, hub_token=single.hub_token),
}


@bentoml.service(
    name="infinity-runner",
    workers=settings.workers,
    logging={"access": {"enabled": False}},
    **gpu_resources(image, settings.workers),
    **COMMON,
)
class InfinityRunner:
    """The engine, for the front alone: what it is asked is pickled, so nobody else may reach it."""

    wire = replace(wire, api=BEHIND_THE_FRONT)
    weights = single.weights

    def __init__(self) -> None:
        self.engine = Engine(settings, wire.metrics)
        self.end = RunnerEnd(self.engine)

    @bentoml.on_startup
    def start(self) -> None:
        """In each runner process: load the models."""
        load_models(self.engine, wire.fleet)

    @bentoml.on_shutdown
    def stop(self) -> None:
        """Finish running batches and end the engine's threads."""
        self.engine.close()

    @bentoml.api(route="/ask")
    async def ask(self, question: Any) -> Any:
        """Answer one question of the front."""
        return await self.end.answer(question)


@bentoml.service(
    name="infinity-bento",
    image=build_image(image, single.packages),
    workers=FRONT_WORKERS,
    logging={"access": {"enabled": settings.access_log}},
    http={"host": settings.hostname, "port": settings.port},
    **COMMON,
)
@bentoml.asgi_app(wire.app(), path="/")
class InfinityFront(single.InfinityBento.inner):  # type: ignore[misc]
    """Embeddings, reranking and classification for any supported checkpoint; the engine is in another process."""

    runner = bentoml.depends(InfinityRunner)
    weights = ()

    def __init__(self) -> None:
        self.engine = RemoteEngine(self._ask_runner)
        self.grpc = wire.grpc_door(FRONT_WORKERS)

    async def _ask_runner(self, question: Parcel) -> Parcel:
        answer: Parcel = await self.runner.to_async.call("ask", question)
        return answer

    @bentoml.on_startup
    async def start(self) -> None:
        """In each HTTP process: follow what the runner says of itself."""
        self.engine.start()
        await open_grpc(self.grpc, self.engine, wire)

    @bentoml.on_shutdown
    async def stop(self) -> None:
        """Take no more over gRPC, and end the polling."""
        await self.grpc.close()
        await self.engine.stop()
