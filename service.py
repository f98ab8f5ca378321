"""The BentoML service: batchable API methods per task, the mounted app, and the life of the engine.

``bentoml serve`` finds it through ``bentofile.yaml``. Options come from ``--arg NAME=VALUE`` and ``INFINITY_*``.
"""

from __future__ import annotations

import logging

import bentoml

from infinity_bento import __version__
from infinity_bento.api import native
from infinity_bento.api.native_items import (
    ClassifyItem,
    ClassifyResult,
    EmbedAllResult,
    EmbedItem,
    EmbedResult,
    EmbedSparseResult,
    RerankItem,
    RerankResult,
    SimilarityItem,
    SimilarityResult,
    TextItem,
    TokenizeItem,
    TokenizeResult,
)
from infinity_bento.engine import Engine
from infinity_bento.images import ENVIRONMENT, cpu_image
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
    image=cpu_image(),
    envs=list(ENVIRONMENT),
    workers=1,
    # Time limits and disconnects are handled by our own middleware, which wraps BentoML's whole app.
    traffic={"timeout": 86_400},
    logging={"access": {"enabled": settings.access_log}},
    metrics={"enabled": False},
    http={"host": settings.hostname, "port": settings.port},
)
@bentoml.asgi_app(wire.app(), path="/")
class InfinityBento:
    """Embeddings, reranking and classification for any supported checkpoint, packed without padding."""

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

    @bentoml.api(batchable=True, route="/bento/embed_all", max_batch_size=MOST_ITEMS)
    async def embed_all(self, items: list[TextItem]) -> list[EmbedAllResult]:
        """Turn texts into matrices with one row per token."""
        return await native.embed_all(self.engine, items)

    @bentoml.api(batchable=True, route="/bento/embed_sparse", max_batch_size=MOST_ITEMS)
    async def embed_sparse(self, items: list[TextItem]) -> list[EmbedSparseResult]:
        """Turn texts into learned sparse vectors."""
        return await native.embed_sparse(self.engine, items)

    @bentoml.api(batchable=True, route="/bento/rerank", max_batch_size=MOST_ITEMS)
    async def rerank(self, items: list[RerankItem]) -> list[RerankResult]:
        """Rank the documents of each query, best first."""
        return await native.rerank(self.engine, items)

    @bentoml.api(batchable=True, route="/bento/classify", max_batch_size=MOST_ITEMS)
    async def classify(self, items: list[ClassifyItem]) -> list[ClassifyResult]:
        """Label texts or pairs of texts."""
        return await native.classify(self.engine, items)

    @bentoml.api(batchable=True, route="/bento/similarity", max_batch_size=MOST_ITEMS)
    async def similarity(self, items: list[SimilarityItem]) -> list[SimilarityResult]:
        """Compare one sentence with others: the cosines of their vectors."""
        return await native.similarity(self.engine, items)

    @bentoml.api(batchable=True, route="/bento/tokenize", max_batch_size=MOST_ITEMS)
    async def tokenize(self, items: list[TokenizeItem]) -> list[TokenizeResult]:
        """Show the tokens of texts."""
        return await native.tokenize(self.engine, items)
