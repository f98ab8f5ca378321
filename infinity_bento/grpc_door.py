"""The gRPC port as part of a server's life: refused in a sentence before workers start, open while the engine lives.

Called by ``serving`` and the command line. What grpcio is needed for is imported only once the port is opened.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from infinity_bento.errors import ConfigError
from infinity_bento.listening import Address, require_free
from infinity_bento.settings import Settings

if TYPE_CHECKING:
    from infinity_bento.api.protocol import ApiSettings, GetEngine
    from infinity_bento.grpc_api.server import GrpcServer
    from infinity_bento.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

FLAG = "--grpc-port"
# Module -> the package that has it.
PACKAGES = {
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
}
# Below the half minute after which BentoML's supervisor kills a worker that does not end.
GRACE_SECONDS = 20.0


def require_grpc(settings: Settings, address: Address) -> None:
    """Refuse a gRPC port that cannot be served; nothing to do where none is asked for.

    Args:
        settings: Of the server.
        address: Where its HTTP routes are.

    Raises:
        ConfigError: A package is missing, or the port is that of HTTP, is taken, or would lack the TLS that HTTP has.
    """
    port = settings.grpc_port
    if port is None:
        return
    missing = [package for module, package in PACKAGES.items() if not _is_installed(module)]
    if missing:
        raise ConfigError(
            f"{FLAG} is {port}, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; "
            "install the extra with pip install 'infinity-bento[grpc]', build an image with --arg grpc_port, or leave "
            "the option out.",
            param="grpc-port",
        )
    if port == address.port:
        raise ConfigError(
            f"{FLAG} is {port}, where the HTTP routes are; give each its own port, such as {FLAG} "
            f"{port + 1 if port < 65535 else 3001}.",
            param="grpc-port",
        )
    if address.scheme == "https":
        raise ConfigError(
            f"{FLAG} is {port}, and it has no TLS, while the HTTP routes have; keys would travel in the clear. Leave "
            "one of them out, or end TLS in a proxy in front of both.",
            param="grpc-port",
        )
    require_free(Address(address.host, port), flag=FLAG)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


class GrpcDoor:
    """The gRPC port of one process.

    Args:
        settings: Of the server; without a gRPC port nothing is opened.
        api: Key and limits, as for the HTTP routes.
        metrics: Shared with the engine.
        processes: How many processes listen on the port.
    """

    def __init__(self, settings: Settings, api: ApiSettings, metrics: Metrics, processes: int) -> None:
        self._settings = settings
        self._api = api
        self._metrics = metrics
        self._processes = processes
        self._server: GrpcServer | None = None

    async def open(self, host: str, get_engine: GetEngine, get_readiness: GetEngine) -> None:
        """Listen, in the running event loop.

        Args:
            host: The address that the HTTP routes listen on.
            get_engine: Gives the engine that answers.
            get_readiness: Gives the engine whose readiness health tells.

        Raises:
            ConfigError: If the port cannot be had.
        """
        port = self._settings.grpc_port
        if port is None:
            return
        from infinity_bento.grpc_api.server import GrpcServer, GrpcSettings

        settings = GrpcSettings(
            Address(host, port), self._settings.grpc_max_parallel_stream_requests, shared=self._processes > 1
        )
        server = GrpcServer(get_engine, settings, self._api, self._metrics, get_readiness=get_readiness)
        await server.start()
        self._server = server

    async def close(self) -> None:
        """Take nothing more, answer what was taken; waits for that a while."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(GRACE_SECONDS)
