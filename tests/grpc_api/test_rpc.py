"""What the gRPC port refuses and how, over a deterministic engine: statuses, key, limits, overload, time, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from infinity_bento.api.envelopes import wire_errors
from infinity_bento.errors import (
    CapacityError,
    InferenceError,
    InfinityError,
    NotReady,
    OutOfMemory,
    Overloaded,
    ServerError,
)
from infinity_bento.grpc_api import tei_pb2 as pb
from infinity_bento.grpc_api.statuses import details_of, status_of, trailer_of
from infinity_bento.telemetry.metrics import Metrics
from tests.api.fakes import CLASSIFIER, EMBEDDER, INFO, LOADING, RERANKER, TAGGER, FakeEngine, every_task, serving
from tests.grpc_api import rig
from tests.grpc_api.rig import Client, refusal

Code = grpc.StatusCode
TEXT = pb.EmbedRequest(inputs="a few words")


async def status(engine: FakeEngine, name: str, request: Any, **options: Any) -> grpc.aio.AioRpcError:
    metadata = options.pop("metadata", None)
    async with rig.serving(engine, **options) as client:
        return await refusal(getattr(client, name)(request, metadata=metadata))


BAD = [
    ("Embed", pb.EmbedRequest(), Code.INVALID_ARGUMENT, "`inputs` is an empty string"),
    ("Embed", pb.EmbedRequest(inputs="too long"), Code.INVALID_ARGUMENT, "`inputs`: The input has 99 tokens"),
    ("Embed", pb.EmbedRequest(inputs="a", dimensions=0), Code.INVALID_ARGUMENT, "`dimensions` is the number 0"),
    ("Embed", pb.EmbedRequest(inputs="a", dimensions=9), Code.INVALID_ARGUMENT, "`dimensions` is 9; model 'm' gives"),
    ("Embed", pb.EmbedRequest(inputs="a", prompt_name="x"), Code.INVALID_ARGUMENT, "the prompts of model 'm' are"),
    ("Embed", pb.EmbedRequest(inputs="a", truncation_direction=7), Code.INVALID_ARGUMENT, "0 (right) or 1 (left)"),
    ("PredictPair", pb.PredictPairRequest(inputs=["a"]), Code.INVALID_ARGUMENT, "must be two strings"),
    ("PredictPair", pb.PredictPairRequest(inputs=["a", "b", "c"]), Code.INVALID_ARGUMENT, "an array of 3"),
    ("Predict", pb.PredictRequest(), Code.INVALID_ARGUMENT, "`inputs` is an empty string"),
    ("Rerank", pb.RerankRequest(query="q"), Code.INVALID_ARGUMENT, "`texts` is an empty array"),
    ("Rerank", pb.RerankRequest(texts=["a"]), Code.INVALID_ARGUMENT, "`query` is an empty string"),
    ("Rerank", pb.RerankRequest(query="q", texts=["a"] * 5), Code.INVALID_ARGUMENT, "`texts` has 5 inputs; the limit"),
    ("Rerank", pb.RerankRequest(query="q", texts=["a", "too long"]), Code.INVALID_ARGUMENT, "`texts[1]`: "),
    ("RerankStream", [], Code.INVALID_ARGUMENT, "The stream has no message"),
    ("Tokenize", pb.EncodeRequest(), Code.INVALID_ARGUMENT, "`inputs` is an empty string"),
    ("Decode", pb.DecodeRequest(), Code.INVALID_ARGUMENT, "`ids` is an empty array"),
    ("Decode", pb.DecodeRequest(ids=[2**32 - 1]), Code.INVALID_ARGUMENT, "`ids[0]` is the number 4294967295"),
    ("Decode", pb.DecodeRequest(ids=[1000]), Code.INVALID_ARGUMENT, "beyond the vocabulary"),
]


@pytest.mark.parametrize(("name", "request_", "code", "text"), BAD)
async def test_a_bad_request_is_told_what_is_wrong(name: str, request_: Any, code: Code, text: str) -> None:
    engine = serving(EMBEDDER, RERANKER)
    chosen = {"Tokenize": "m", "Decode": "m"}.get(name)
    error = await status(engine, name, request_, metadata=(("model", chosen),) if chosen else None)
    assert error.code() is code and text in error.details(), error.details()
    assert "error-code" in dict(error.trailing_metadata())


@pytest.mark.parametrize(
    ("engine", "name", "request_", "code"),
    [
        (serving(RERANKER), "Embed", TEXT, Code.FAILED_PRECONDITION),
        (serving(EMBEDDER), "EmbedSparse", pb.EmbedSparseRequest(inputs="a"), Code.FAILED_PRECONDITION),
        (serving(EMBEDDER), "Predict", pb.PredictRequest(inputs="a"), Code.FAILED_PRECONDITION),
        (serving(TAGGER), "Predict", pb.PredictRequest(inputs="a"), Code.FAILED_PRECONDITION),
        (serving(CLASSIFIER), "Rerank", pb.RerankRequest(query="q", texts=["a"]), Code.FAILED_PRECONDITION),
        (serving(CLASSIFIER), "RerankStream", [], Code.FAILED_PRECONDITION),
        (serving(replace(RERANKER, listwise=True)), "RerankStream", [], Code.FAILED_PRECONDITION),
        (serving(INFO, raises=InferenceError("It gave NaN; send another.")), "Embed", TEXT, Code.FAILED_PRECONDITION),
        (serving(INFO, raises=OutOfMemory("Too large; send less.")), "Embed", TEXT, Code.UNAVAILABLE),
        (serving(INFO, raises=NotReady("It stops; retry elsewhere.")), "Embed", TEXT, Code.UNAVAILABLE),
        (serving(INFO, state=LOADING), "Embed", TEXT, Code.UNAVAILABLE),
        (serving(INFO, state=LOADING), "Info", pb.InfoRequest(), Code.UNAVAILABLE),
        (serving(INFO, raises=ServerError("It broke; see the log.")), "Embed", TEXT, Code.INTERNAL),
        (serving(INFO, raises=RuntimeError("secret")), "Embed", TEXT, Code.INTERNAL),
    ],
)
async def test_the_status_tells_whose_fault_it_is(engine: FakeEngine, name: str, request_: Any, code: Code) -> None:
    error = await status(engine, name, request_)
    assert error.code() is code and error.details() and "secret" not in error.details()


async def test_several_models_need_a_name_and_a_wrong_one_is_not_found() -> None:
    engine = serving(EMBEDDER, replace(EMBEDDER, name="n"), RERANKER)
    async with rig.serving(engine) as client:
        error = await refusal(client.Embed(TEXT))
        assert error.code() is Code.INVALID_ARGUMENT and "n" in error.details()
        error = await refusal(client.Embed(TEXT, metadata=(("model", "nobody"),)))
        assert error.code() is Code.NOT_FOUND and "'nobody'" in error.details()
        error = await refusal(client.EmbedStream([TEXT], metadata=(("model", "r"),)))
        assert error.code() is Code.FAILED_PRECONDITION
        assert (await client.Embed(TEXT, metadata=(("model", "n"),))).embeddings
        assert (await client.Rerank(pb.RerankRequest(query="q", texts=["a"]))).ranks, "the only reranker needs no name"


def test_every_error_of_the_wire_has_a_status_and_a_trailer() -> None:
    for error_class in wire_errors():
        error = error_class("What is wrong, and what to do.")
        assert isinstance(status_of(error), Code) and status_of(error) is not Code.OK
        trailer = dict(trailer_of(error))
        assert trailer["error-code"] == error.code
        assert ("retry-after" in trailer) == isinstance(error, CapacityError)
    assert len(details_of(InfinityError("x" * 9000))) == 512


# Key ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [None, (("authorization", "Bearer other"),), (("authorization", "k3y"),)])
async def test_without_the_key_no_method_answers(metadata: Any) -> None:
    async with rig.serving(every_task(), api_key="k3y") as client:
        for method in rig.EVERY_METHOD:
            request = rig.message_factory.GetMessageClass(method.input_type)()
            call = getattr(client, method.name)([request] if method.client_streaming else request, metadata=metadata)
            error = await refusal(call)
            assert error.code() is Code.UNAUTHENTICATED, method.name
            assert "authorization" in error.details() and "k3y" not in error.details()


async def test_with_the_key_it_answers() -> None:
    async with rig.serving(serving(EMBEDDER), api_key="k3y") as client:
        metadata = (("authorization", "Bearer k3y"),)
        assert (await client.Embed(TEXT, metadata=metadata)).embeddings
        assert len(await client.all("EmbedStream", [TEXT, TEXT], metadata=metadata)) == 2


# Limits ---------------------------------------------------------------------------------------------------------------


async def test_unary_calls_are_refused_at_once_and_told_when_to_come_back() -> None:
    engine = serving(EMBEDDER, RERANKER, raises=Overloaded("Full; retry later.", retry_after_seconds=7))
    error = await status(engine, "Embed", TEXT)
    assert error.code() is Code.RESOURCE_EXHAUSTED and not engine.waits
    trailer = dict(error.trailing_metadata())
    assert (trailer["error-code"], trailer["retry-after"]) == ("overloaded", "7")
    assert trailer["grpc-retry-pushback-ms"] == "7000"


async def test_streams_and_rerank_wait_for_their_turn() -> None:
    engine = serving(EMBEDDER, RERANKER)
    async with rig.serving(engine) as client:
        await client.all("EmbedStream", [TEXT])
        assert engine.waits
        await client.Embed(TEXT)
        assert not engine.waits
        await client.Rerank(pb.RerankRequest(query="q", texts=["a"]))
        assert engine.waits
        await client.PredictPair(pb.PredictPairRequest(inputs=["q", "a"]))
        assert not engine.waits
        await client.RerankStream([pb.RerankStreamRequest(query="q", text="a")])
        assert engine.waits


async def test_a_message_above_the_payload_limit_is_refused() -> None:
    async with rig.serving(serving(EMBEDDER), payload_limit=1000) as client:
        error = await refusal(client.Embed(pb.EmbedRequest(inputs="a " * 1000)))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "larger than max" in error.details()
        assert (await client.Embed(TEXT)).embeddings


async def test_a_ranking_above_the_payload_limit_is_refused() -> None:
    engine = serving(RERANKER)
    async with rig.serving(engine, payload_limit=1000) as client:
        requests = [pb.RerankStreamRequest(query="q", text="a" * 200, return_text=True) for _ in range(5)]
        error = await refusal(client.RerankStream(requests))
        assert error.code() is Code.INVALID_ARGUMENT and "1000 bytes (payload_limit)" in error.details()
        assert len((await client.RerankStream(requests[:4])).ranks) == 4


@pytest.mark.parametrize("name", ["Embed", "EmbedStream"])
async def test_what_takes_too_long_is_dropped(name: str) -> None:
    engine = serving(EMBEDDER, wait=asyncio.Event())
    error = await status(engine, name, [TEXT] if name == "EmbedStream" else TEXT, request_timeout_seconds=0.05)
    assert error.code() is Code.DEADLINE_EXCEEDED and "within 0.05 s" in error.details()
    assert engine.cancelled == 1


async def test_without_a_time_limit_it_waits() -> None:
    engine = serving(EMBEDDER, wait=asyncio.Event())
    async with rig.serving(engine, request_timeout_seconds=0) as client:
        call = client.Embed(TEXT)
        await asyncio.sleep(0.1)
        assert engine.wait is not None
        engine.wait.set()
        assert (await call).embeddings


# Who goes away --------------------------------------------------------------------------------------------------------


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("name", ["Embed", "EmbedStream", "RerankStream"])
async def test_a_cancelled_call_cancels_what_waits(name: str) -> None:
    engine, metrics = serving(EMBEDDER, RERANKER, wait=asyncio.Event()), Metrics()
    requests = {
        "Embed": TEXT,
        "EmbedStream": [TEXT] * 20,
        "RerankStream": [pb.RerankStreamRequest(query="q", text="a")] * 20,
    }
    most = 1 if name == "Embed" else 20
    async with rig.serving(engine, metrics) as client:
        call = getattr(client, name)(requests[name])
        reading = asyncio.ensure_future(refusal(call))
        await until(lambda: engine.asked >= most)
        call.cancel()
        await until(lambda: engine.cancelled == most)
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: 'infinity_errors_total{code="client_gone"} 1.0' in metrics.render().decode())


async def test_the_clients_deadline_cancels_what_waits() -> None:
    engine = serving(EMBEDDER, wait=asyncio.Event())
    async with rig.serving(engine) as client:
        error = await refusal(client.Embed(TEXT, timeout=0.1))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await until(lambda: engine.cancelled == 1)


# Streams --------------------------------------------------------------------------------------------------------------


async def test_a_bad_message_ends_its_stream_after_the_answers_before_it() -> None:
    async with rig.serving(serving(EMBEDDER)) as client:
        requests = [TEXT, TEXT, pb.EmbedRequest(), *[TEXT] * 200]
        answers = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for answer in client.EmbedStream(requests):
                answers.append(answer)
        assert len(answers) == 2
        assert caught.value.code() is Code.INVALID_ARGUMENT and "empty string" in str(caught.value.details())


async def test_a_stream_keeps_to_its_window() -> None:
    engine = serving(EMBEDDER, wait=asyncio.Event())
    assert engine.wait is not None
    async with rig.serving(engine, window=4) as client:
        call = client.EmbedStream([TEXT] * 20)
        await until(lambda: engine.asked == 4)
        await asyncio.sleep(0.1)
        assert engine.asked == 4, "the rest is held back"
        engine.wait.set()
        assert len([answer async for answer in call]) == 20


async def test_a_stream_answers_while_it_is_still_sent() -> None:
    async with rig.serving(serving(EMBEDDER)) as client:
        call = client.EmbedStream()
        for number in range(3):
            await call.write(pb.EmbedRequest(inputs=f"text {number}"))
            assert (await asyncio.wait_for(call.read(), 5)).embeddings
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_an_empty_stream_is_answered_by_an_empty_one() -> None:
    async with rig.serving(serving(EMBEDDER)) as client:
        assert await client.all("EmbedStream", []) == []


async def test_a_stopping_server_answers_what_it_has_read_and_ends_the_stream() -> None:
    engine = serving(EMBEDDER, wait=asyncio.Event())
    assert engine.wait is not None
    async with rig.serving_at(engine) as (port, server), rig.connected(port) as client:
        call = client.EmbedStream()
        for _ in range(3):
            await call.write(TEXT)
        await until(lambda: engine.asked == 3)
        stopping = asyncio.create_task(server.stop(5))
        await asyncio.sleep(0.05)
        engine.wait.set()
        for _ in range(3):
            assert (await asyncio.wait_for(call.read(), 5)).embeddings
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is Code.UNAVAILABLE and "stopping" in str(caught.value.details())
        await asyncio.wait_for(stopping, 5)


async def test_a_stopping_server_completes_a_stream_that_was_sent_whole() -> None:
    engine = serving(EMBEDDER, RERANKER, wait=asyncio.Event())
    assert engine.wait is not None
    async with rig.serving_at(engine) as (port, server), rig.connected(port) as client:
        embedded = asyncio.create_task(client.all("EmbedStream", [TEXT] * 3))
        ranked = client.RerankStream([pb.RerankStreamRequest(query="q", text="a")] * 3)
        unary = client.Embed(TEXT)
        await until(lambda: engine.asked == 7)
        await asyncio.sleep(0.05)  # the ends of the streams arrive
        stopping = asyncio.create_task(server.stop(5))
        await asyncio.sleep(0.05)
        engine.wait.set()
        assert len(await embedded) == 3 and len((await ranked).ranks) == 3 and (await unary).embeddings
        await asyncio.wait_for(stopping, 5)


# Metrics --------------------------------------------------------------------------------------------------------------


async def test_refusals_are_counted_as_those_of_http() -> None:
    metrics = Metrics()
    async with rig.serving(serving(EMBEDDER), metrics) as client:
        await refusal(client.Embed(pb.EmbedRequest()))
        await refusal(client.EmbedStream([TEXT, pb.EmbedRequest(inputs="too long")]))
        await refusal(client.Predict(pb.PredictRequest(inputs="a")))
    text = metrics.render().decode()
    for cause in ("validation", "tokenization", "model_type"):
        assert f'te_request_failure{{err="{cause}"}} 1.0' in text
    for code in ("empty_input", "input_too_long", "unsupported_task"):
        assert f'infinity_errors_total{{code="{code}"}} 1.0' in text


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with rig.serving(every_task()) as made:
        yield made


async def test_an_unknown_method_and_a_malformed_message(client: Client) -> None:
    error = await refusal(client.channel.unary_unary("/tei.v1.Embed/Imagine")(b""))
    assert error.code() is Code.UNIMPLEMENTED
    for kind, name in (("unary_unary", "Embed"), ("stream_stream", "EmbedStream"), ("stream_unary", "RerankStream")):
        method = f"/tei.v1.{'Rerank' if 'Rerank' in name else 'Embed'}/{name}"
        call = getattr(client.channel, kind)(method)
        error = await refusal(call(b"\xff\xff\xff" if kind == "unary_unary" else [b"\xff\xff\xff"]))
        assert error.code() is Code.INVALID_ARGUMENT and "no tei.v1." in error.details()
    assert (await client.Embed(TEXT, metadata=(("model", "m"),))).embeddings
