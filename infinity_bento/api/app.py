"""The Starlette application: the rows of ``table``, and the middleware around them. Built once by the service."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from infinity_bento.api.exchange import ApiContext
from infinity_bento.api.guard import Guard
from infinity_bento.api.middleware import ApiKey, RequestContext
from infinity_bento.api.protocol import ApiSettings, GetEngine
from infinity_bento.api.routes import Endpoint, RouteIndex
from infinity_bento.api.table import route_table
from infinity_bento.telemetry.metrics import Metrics

_EXPOSED_HEADERS = (
    "x-request-id",
    "server-timing",
    "retry-after",
    "x-truncated-inputs",
    "x-truncated-indices",
    "x-compute-type",
    "x-compute-time",
    "x-compute-characters",
    "x-compute-tokens",
    "x-total-time",
    "x-tokenization-time",
    "x-queue-time",
    "x-inference-time",
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
