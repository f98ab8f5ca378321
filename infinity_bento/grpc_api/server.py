"""The gRPC server: handlers for the table of ``methods``, health and reflection, on a port of its own.

Started and stopped with the engine by ``grpc_door``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from infinity_bento.api.protocol import ApiSettings, GetEngine
from infinity_bento.errors import ConfigError, MalformedBody
from infinity_bento.grpc_api import tei_pb2
from infinity_bento.grpc_api.health import Health
from infinity_bento.grpc_api.methods import SERVICES, WAITING
from infinity_bento.grpc_api.rpc import Rpcs
from infinity_bento.grpc_api.streams import Streams
from infinity_bento.listening import Address
from infinity_bento.telemetry.metrics import Metrics

_MOST_BYTES = 2**31 - 1  # a message length is a C int
_KEEPALIVE_MS = 60_000  # a peer that vanished without a word holds its streams no longer than this and the timeout
_KEEPALIVE_TIMEOUT_MS = 20_000


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """Options of the gRPC port.

    Args:
        address: Where to listen; port 0 takes a free one.
        window: Most messages of a stream at work at a time.
        shared: Several worker processes listen on this port, and the kernel deals out the connections.
    """

    address: Address
    window: int = 1024
    shared: bool = False


class GrpcServer:
    """The server of one process; belongs to the running event loop.

    Args:
        get_engine: As for the HTTP routes.
        settings: Of the port.
        api: Key and limits, as for the HTTP routes.
        metrics: Shared with the engine.
        get_readiness: Gives the engine that health asks; None: ``get_engine``.
    """

    def __init__(
        self,
        get_engine: GetEngine,
        settings: GrpcSettings,
        api: ApiSettings,
        metrics: Metrics,
        *,
        get_readiness: GetEngine | None = None,
    ) -> None:
        self._settings = settings
        self._streams = Streams(settings.window)
        self._health = Health(get_readiness or get_engine)
        self._server = grpc.aio.server(options=_transport_options(settings, api))
        rpcs = Rpcs(get_engine, api, metrics, self._streams)
        for service in tei_pb2.DESCRIPTOR.services_by_name.values():
            handlers = {method.name: _handler(rpcs, method) for method in service.methods}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        services = [service.full_name for service in tei_pb2.DESCRIPTOR.services_by_name.values()]
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            ConfigError: If the port cannot be had.
        """
        address = self._settings.address
        host = f"[{address.host}]" if ":" in address.host else address.host
        try:
            port = int(self._server.add_insecure_port(f"{host}:{address.port}"))
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"Port {address.port} of {address.host} cannot be had for gRPC; choose another one with --grpc-port, "
                "or stop the process that has it.",
                param="grpc-port",
            )
        await self._server.start()
        return port

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls and messages, answer what was read, for at most ``grace_seconds``."""
        self._health.stop()
        self._streams.stop()
        await self._server.stop(grace_seconds)


def _handler(rpcs: Rpcs, method: MethodDescriptor) -> Any:
    """The handler of a method of the contract, by the row of its service in the table."""
    service = method.containing_service
    path = f"/{service.full_name}/{method.name}"
    coders = {
        "request_deserializer": _reader(message_factory.GetMessageClass(method.input_type)),
        "response_serializer": message_factory.GetMessageClass(method.output_type).SerializeToString,
    }
    answer = SERVICES[service.name].methods[method.name.removesuffix("Stream")]
    if not method.client_streaming:
        waits = service.name in WAITING
        return grpc.unary_unary_rpc_method_handler(rpcs.unary(path, answer, waits=waits), **coders)
    if not method.server_streaming:
        return grpc.stream_unary_rpc_method_handler(rpcs.rerank_stream(path), **coders)
    return grpc.stream_stream_rpc_method_handler(rpcs.stream(path, answer), **coders)


def _reader(message_class: type[Message]) -> Callable[[bytes], Message | MalformedBody]:
    """Reads a message. What is none becomes an error for the handler to raise: gRPC would log it as a fault of ours."""

    def read(data: bytes) -> Message | MalformedBody:
        try:
            return message_class.FromString(data)
        except DecodeError:
            name = message_class.DESCRIPTOR.full_name
            return MalformedBody(f"The message is no {name}; send what code made from tei.proto writes.")

    return read


def _transport_options(settings: GrpcSettings, api: ApiSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", min(api.payload_limit, _MOST_BYTES)),
        ("grpc.max_send_message_length", -1),  # the client says what it can take
        ("grpc.so_reuseport", int(settings.shared)),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ]
