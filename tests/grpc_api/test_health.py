"""grpc.health.v1 and reflection, asked as Kubernetes and grpcurl ask."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from infinity_bento.grpc_api import tei_pb2
from tests.api.fakes import BROKEN, CLASSIFIER, EMBEDDER, LATE, LOADING, READY, RERANKER, SPLADE, TAGGER, serving
from tests.grpc_api import rig
from tests.grpc_api.rig import refusal

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
ALWAYS = {"", "tei.v1.Info", "tei.v1.Tokenize"}


def asked(service: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def states(stub: Any) -> set[str]:
    """The services that are SERVING."""
    names = ["", *(service.full_name for service in rig.SERVICES.values())]
    return {name for name in names if (await stub.Check(asked(name))).status == SERVING}


@pytest.mark.parametrize(
    ("models", "able"),
    [
        ((EMBEDDER,), {"Embed"}),
        ((SPLADE,), {"Embed"}),
        ((RERANKER,), {"Predict", "Rerank"}),
        ((CLASSIFIER,), {"Predict"}),
        ((LATE,), {"Embed", "Rerank"}),
        ((TAGGER,), set()),
        ((EMBEDDER, RERANKER), {"Embed", "Predict", "Rerank"}),
    ],
)
async def test_a_service_is_serving_if_a_model_can_do_what_it_is_for(models: Any, able: set[str]) -> None:
    async with rig.serving(serving(*models), api_key="k3y") as client:
        found = await states(health_pb2_grpc.HealthStub(client.channel))
    assert found == ALWAYS | {f"tei.v1.{name}" for name in able}


@pytest.mark.parametrize("knobs", [{"state": LOADING}, {"state": BROKEN}, {"dead": True}])
async def test_nothing_is_serving_while_nothing_can_answer(knobs: Any) -> None:
    async with rig.serving(serving(EMBEDDER, **knobs)) as client:
        assert await states(health_pb2_grpc.HealthStub(client.channel)) == set()


async def test_an_unknown_service() -> None:
    async with rig.serving(serving(EMBEDDER)) as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        error = await refusal(stub.Check(asked("tei.v2.Embed")))
        assert error.code() is grpc.StatusCode.NOT_FOUND and "tei.v1.Embed" in error.details()
        assert (await stub.Watch(asked("tei.v2.Embed")).read()).status == UNKNOWN


async def test_who_watches_learns_of_changes_and_of_the_end() -> None:
    engine = serving(EMBEDDER, state=LOADING)
    async with rig.serving_at(engine) as (port, server), rig.connected(port) as client:
        watch = health_pb2_grpc.HealthStub(client.channel).Watch(asked())
        assert (await watch.read()).status == NOT_SERVING
        engine.state = READY
        assert (await asyncio.wait_for(watch.read(), 5)).status == SERVING
        stopping = asyncio.create_task(server.stop(5))
        assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
        assert await asyncio.wait_for(watch.read(), 5) is grpc.aio.EOF
        await asyncio.wait_for(stopping, 2)


async def test_reflection_lists_the_services_and_hands_out_the_contract() -> None:
    async with rig.serving(serving(EMBEDDER), api_key="k3y") as client:
        info = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo
        questions = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="tei.v1.Rerank"),
        ]
        listed, file = [answer async for answer in info(questions)]
    names = {service.name for service in listed.list_services_response.service}
    assert names >= {"grpc.health.v1.Health", *(service.full_name for service in rig.SERVICES.values())}
    (data,) = file.file_descriptor_response.file_descriptor_proto
    expected = FileDescriptorProto()
    tei_pb2.DESCRIPTOR.CopyToProto(expected)
    assert FileDescriptorProto.FromString(data) == expected
