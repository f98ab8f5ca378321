"""The Starlette application: the rows of ``table``, and the middleware around them. Built once by the service."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from infinity_bento.api.exchange import ApiContext
from infinity_bento.api.guard import Guard
from infinity_bento.api.middleware import ApiKey, RequestContext
from infinity_bento.api.native_table import NativeMethod
from infinity_bento.api.packed_bodies import PackedBodies
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
    get_engine: GetEngine,
    settings: ApiSettings,
    *,
    metrics: Metrics | None = None,
    hardened: bool = True,
    native: tuple[NativeMethod, ...] = (),
) -> Starlette:
    """The application with all routes.

    Args:
        get_engine: Gives the engine at request time; may raise ``NotReady``.
        settings: Limits, key, origins.
        metrics: Shared with the engine; None makes new ones.
        hardened: False if the caller puts ``harden`` around an application that contains this one.
        native: BentoML's methods, for the documents; they are served by BentoML around this application.
    """
    metrics = metrics if metrics is not None else Metrics()
    routes = route_table()
    context = ApiContext(get_engine, settings, metrics, routes, native)
    starlette_routes = [
        StarletteRoute(path, Endpoint(route, context), methods=[route.method], name=path)
        for route in routes
        for path in route.paths
    ]
    layers = middleware_stack(settings, metrics) if hardened else []
    app = Starlette(routes=starlette_routes, middleware=layers)
    app.router.redirect_slashes = False  # a redirect would name the Host header; the 404 names the close route
    return app


class StraightWay:
    """Takes inference requests to their handler, past everything between: another framework's app and its router.

    Probes and documents go the long way, since the framework may have its own.

    Args:
        app: Gets all other requests.
        get_engine: As ``create_app``.
        settings: As ``create_app``.
        metrics: As ``create_app``.
    """

    def __init__(self, app: ASGIApp, get_engine: GetEngine, settings: ApiSettings, metrics: Metrics) -> None:
        self.app = app
        routes = route_table()
        context = ApiContext(get_engine, settings, metrics, routes)
        self._endpoints = {
            (route.method, path): Endpoint(route, context)
            for route in routes
            if not route.is_open
            for path in route.paths
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, one way or the other."""
        if scope["type"] == "http":
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await self.app(scope, receive, send)


def harden(app: ASGIApp, settings: ApiSettings, metrics: Metrics, native: tuple[NativeMethod, ...] = ()) -> ASGIApp:
    """``app`` inside this package's middleware, so that BentoML's own routes get ids, JSON errors and limits too."""
    for layer in reversed(middleware_stack(settings, metrics, native)):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app


def middleware_stack(
    settings: ApiSettings, metrics: Metrics, native: tuple[NativeMethod, ...] = ()
) -> list[Middleware]:
    """The layers, outermost first."""
    index = RouteIndex(route_table(), [method.path for method in native])
    layers = [Middleware(RequestContext, index)]
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
    if native:
        layers.append(Middleware(PackedBodies, [method.path for method in native], index, metrics, settings))
    return layers
