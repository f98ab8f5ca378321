"""The BentoML service: batchable API methods per task, the mounted app, and the life of the engine.

``bentoml serve`` finds it through ``bentofile.yaml``. Options come from ``--arg NAME=VALUE`` and ``INFINITY_*``.
"""

from __future__ import annotations

import logging

import bentoml

from infinity_bento import __version__
from infinity_bento.api import native
from infinity_bento.api.native import EmbedItem, EmbedResult
from infinity_bento.engine import Engine
from infinity_bento.serving import (
    EngineService,
    Wire,
    check_before_workers,
    load_in_background,
    settings_from_bentoml,
)
from infinity_bento.telemetry.logs import configure_logging
from infinity_bento.telemetry.startup import settings_block

settings = settings_from_bentoml()
wire = Wire.from_settings(settings, __version__)
logger = logging.getLogger("infinity_bento")

# The engine's queue decides what forms a batch; this bound only keeps one client call within the wire's limits.
MOST_ITEMS = max(2, *(model.max_client_batch_size for model in settings.models))


@bentoml.service(
    name="infinity-bento",
    service_class=EngineService,
    workers=1,
    # Time limits and disconnects are handled by our own middleware, which wraps BentoML's whole app.
    traffic={"timeout": 86_400},
    logging={"access": {"enabled": settings.access_log}},
    metrics={"enabled": False},
    http={"host": settings.hostname, "port": settings.port},
)
@bentoml.asgi_app(wire.app(), path="/")
class InfinityBento:
    """Embeddings for any supported checkpoint, packed without padding."""

    wire = wire

    def __init__(self) -> None:
        self.engine = Engine(settings, wire.metrics)

    @bentoml.on_deployment
    @staticmethod
    def check() -> None:
        """In the supervisor, before workers start."""
        configure_logging(settings)
        logger.info("%s", settings_block(settings))
        check_before_workers(settings)

    @bentoml.on_startup
    def start(self) -> None:
        """In each worker: load while probes are answered."""
        configure_logging(settings)
        load_in_background(self.engine)

    @bentoml.on_shutdown
    def stop(self) -> None:
        """Finish running batches and end the engine's threads."""
        self.engine.close()

    @bentoml.api(batchable=True, route="/bento/embed", max_batch_size=MOST_ITEMS)
    async def embed(self, items: list[EmbedItem]) -> list[EmbedResult]:
        """Turn texts into vectors; each item is answered in its place, with an embedding or an error."""
        return await native.embed(self.engine, items)
