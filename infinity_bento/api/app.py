"""The Starlette application: the table of routes, and the middleware around it. Built once by the service.

A new route is one row of ``route_table``; Starlette routes, the OpenAPI document, the docs page, the error shapes and
the rules for keys and time limits all follow from it.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from infinity_bento.api import openai, probes, tei
from infinity_bento.api.envelopes import OPENAI, TEI
from infinity_bento.api.exchange import ApiContext
from infinity_bento.api.guard import Guard
from infinity_bento.api.middleware import ApiKey, RequestContext
from infinity_bento.api.pages import HTML_TYPE, DocumentPages, metrics
from infinity_bento.api.protocol import ApiSettings, GetEngine
from infinity_bento.api.routes import Endpoint, Route, RouteIndex
from infinity_bento.core import Task
from infinity_bento.telemetry.metrics import CONTENT_TYPE, Metrics

SCHEMAS = {
    **openai.SCHEMAS,
    **tei.SCHEMAS,
    **probes.SCHEMAS,
    "Text": {"type": "string"},
    "Document": {"type": "object", "required": ["openapi", "info", "paths"]},
}

_EXPOSED_HEADERS = (
    "x-request-id",
    "server-timing",
    "retry-after",
    "x-truncated-inputs",
    "x-compute-type",
    "x-compute-time",
    "x-compute-characters",
    "x-compute-tokens",
    "x-total-time",
    "x-tokenization-time",
    "x-queue-time",
    "x-inference-time",
)


def route_table() -> tuple[Route, ...]:
    """Every route of the wire layer, the hottest first."""
    pages = DocumentPages(SCHEMAS)
    embeddings_example = {"model": "$MODEL", "input": ["What is packed execution?", "Rows without padding."]}
    embed_example = {"model": "$MODEL", "inputs": "What is packed execution?", "normalize": True}
    return (
        Route(
            ("/v1/embeddings", "/embeddings"),
            "POST",
            openai.create_embeddings,
            OPENAI,
            "Embed texts (OpenAI)",
            "OpenAIEmbeddingsResponse",
            "OpenAIEmbeddingsRequest",
            task=Task.EMBED,
            example=embeddings_example,
        ),
        Route(
            ("/embed",),
            "POST",
            tei.embed,
            TEI,
            "Embed texts (TEI)",
            "EmbedResponse",
            "EmbedRequest",
            task=Task.EMBED,
            example=embed_example,
        ),
        Route(("/v1/models", "/models"), "GET", openai.list_models, OPENAI, "List the loaded models", "OpenAIModels"),
        Route(("/info",), "GET", tei.info, TEI, "Describe the loaded models", "Info", is_open=True),
        Route(("/health", "/ping"), "GET", probes.health, TEI, "200 when the models answer", "Health", is_open=True),
        Route(
            ("/livez", "/healthz"),
            "GET",
            probes.livez,
            TEI,
            "200 unless only a restart helps",
            "Liveness",
            statuses={503: "Liveness"},
            is_open=True,
        ),
        Route(
            ("/readyz",),
            "GET",
            probes.readyz,
            TEI,
            "200 when the models answer, else how far loading is",
            "Readiness",
            statuses={503: "Readiness"},
            is_open=True,
        ),
        Route(("/metrics",), "GET", metrics, TEI, "Prometheus metrics", "Text", media=CONTENT_TYPE, is_open=True),
        Route(
            ("/openapi.json", "/api-doc/openapi.json"),
            "GET",
            pages.openapi,
            TEI,
            "This document",
            "Document",
            is_open=True,
        ),
        Route(("/docs",), "GET", pages.docs, TEI, "Routes and examples", "Text", media=HTML_TYPE, is_open=True),
    )


def create_app(
    get_engine: GetEngine, settings: ApiSettings, *, metrics: Metrics | None = None, hardened: bool = True
) -> Starlette:
    """The application with all routes.

    Args:
        get_engine: Gives the engine at request time; may raise ``NotReady``.
        settings: Limits, key, origins.
        metrics: Shared with the engine; None makes new ones.
        hardened: False if the caller puts ``harden`` around an application that contains this one.
    """
    metrics = metrics if metrics is not None else Metrics()
    routes = route_table()
    context = ApiContext(get_engine, settings, metrics, routes)
    starlette_routes = [
        StarletteRoute(path, Endpoint(route, context), methods=[route.method], name=path)
        for route in routes
        for path in route.paths
    ]
    layers = middleware_stack(settings, metrics) if hardened else []
    app = Starlette(routes=starlette_routes, middleware=layers)
    app.router.redirect_slashes = False  # a redirect would name the Host header; the 404 names the close route
    return app


def harden(app: ASGIApp, settings: ApiSettings, metrics: Metrics) -> ASGIApp:
    """``app`` inside this package's middleware, so that BentoML's own routes get ids, JSON errors and limits too."""
    for layer in reversed(middleware_stack(settings, metrics)):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app


def middleware_stack(settings: ApiSettings, metrics: Metrics) -> list[Middleware]:
    """The layers, outermost first."""
    index = RouteIndex(route_table())
    layers = [Middleware(RequestContext)]
    if settings.cors_allow_origin:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_allow_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # browsers ask for authorization and for headers of their SDKs
            expose_headers=list(_EXPOSED_HEADERS),
        )
        layers.append(cors)
    layers.append(Middleware(Guard, index, metrics, settings))
    if settings.api_key is not None:
        layers.append(Middleware(ApiKey, settings.api_key, index))
    return layers
