"""A gRPC server on loopback over any engine, and a client made from the contract."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from infinity_bento.api.protocol import ApiSettings, EngineLike
from infinity_bento.grpc_api import tei_pb2
from infinity_bento.grpc_api.server import GrpcServer, GrpcSettings
from infinity_bento.listening import Address
from infinity_bento.telemetry.metrics import Metrics

SERVICES = tei_pb2.DESCRIPTOR.services_by_name
EVERY_METHOD = [method for service in SERVICES.values() for method in service.methods]


def call_of(channel: Any, method: MethodDescriptor) -> Any:
    """What a generated stub has for a method."""
    kind = ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
    return getattr(channel, kind)(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=message_factory.GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )


class Client:
    """Every method by its name, such as ``client.Embed(request)``; no two services share a name."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._calls = {method.name: call_of(channel, method) for method in EVERY_METHOD}

    def __getattr__(self, name: str) -> Any:
        return self._calls[name]

    async def all(self, name: str, requests: Iterable[Any] | AsyncIterable[Any], **options: Any) -> list[Any]:
        """Every answer of a stream."""
        return [answer async for answer in self._calls[name](requests, **options)]


@asynccontextmanager
async def serving(
    engine: EngineLike, metrics: Metrics | None = None, *, window: int = 1024, **options: Any
) -> AsyncIterator[Client]:
    """A server over an engine; ``options`` are fields of ``ApiSettings``."""
    async with serving_at(engine, metrics, window=window, **options) as (port, _), connected(port) as client:
        yield client


@asynccontextmanager
async def serving_at(
    engine: EngineLike, metrics: Metrics | None = None, *, window: int = 1024, **options: Any
) -> AsyncIterator[tuple[int, GrpcServer]]:
    """As ``serving``: the port and the server itself."""
    settings = GrpcSettings(Address("127.0.0.1", 0), window)
    server = GrpcServer(lambda: engine, settings, ApiSettings(**options), metrics or Metrics())
    port = await server.start()
    try:
        yield port, server
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    """A client of a port of this machine."""
    limits = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=limits) as channel:
        yield Client(channel)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """The status that a call ends with, which is not OK."""
    try:
        answer = [item async for item in call] if hasattr(call, "__aiter__") else await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"answered: {answer}")
