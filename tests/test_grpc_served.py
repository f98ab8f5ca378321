"""The gRPC port of real servers: a user with generated stubs, several workers, overload, metrics, the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from infinity_bento.grpc_api import tei_pb2 as pb
from tests.bentos import Served, environment, free_port, serve
from tests.conftest import mixed_texts
from tests.grpc_api.rig import Client, connected, refusal

ROOT = Path(__file__).parent.parent
KEY = "key-of-this-test"
AUTHORIZED = (("authorization", f"Bearer {KEY}"),)

# What a user writes, with the files that grpcio-tools makes; it never sees this package.
USER = """
import sys, grpc, tei_pb2, tei_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    key = (("authorization", "Bearer " + sys.argv[2]),)
    embed = tei_pb2_grpc.EmbedStub(channel)
    request = tei_pb2.EmbedRequest(inputs="What is Deep Learning?")
    answer, call = embed.Embed.with_call(request, metadata=key, timeout=30)
    requests = (tei_pb2.EmbedRequest(inputs="What is Deep Learning?", truncate=True) for _ in range(200))
    answers = list(embed.EmbedStream(requests, metadata=key, timeout=60))
    assert len(answers) == 200 and all(len(one.embeddings) == 384 for one in answers)
    info = tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest(), metadata=key)
    print(info.model_id, dict(call.initial_metadata())["x-compute-tokens"], *answer.embeddings)
"""


@dataclass
class Both:
    """A running server, and its other port."""

    http: Served
    port: int


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Two workers on one gRPC port, and few permits."""
    folder, port = tmp_path_factory.mktemp("grpc"), free_port()
    options = {
        "INFINITY_GRPC_PORT": str(port),
        "INFINITY_WORKERS": "2",
        "INFINITY_MAX_CONCURRENT_REQUESTS": "4",
        "INFINITY_API_KEY": KEY,
    }
    environ = environment(folder / "home", TMPDIR=str(folder), PYTHONPATH=str(ROOT), **options)
    with serve(["service:InfinityBento"], ROOT, environ, folder / "server.log") as made:
        yield Both(made, port)


def post(served: Both, text: str) -> np.ndarray:
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{served.http.url}/embed", json={"inputs": text}, headers=headers, timeout=30)
    return np.array(answer.json()[0], dtype=np.float32)


def test_a_user_with_generated_stubs(served: Both, tmp_path: Path) -> None:
    folder = ROOT / "infinity_bento" / "grpc_api"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"--python_out={tmp_path}"]
    command += [f"--grpc_python_out={tmp_path}", str(folder / "tei.proto")]
    subprocess.run(command, check=True, timeout=60)
    words = [sys.executable, "-c", USER, f"127.0.0.1:{served.port}", KEY]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    model, tokens, *numbers = done.stdout.split()
    assert model == "sentence-transformers/all-MiniLM-L6-v2" and tokens == "7"
    expected = post(served, "What is Deep Learning?")
    assert np.array_equal(np.array(numbers, dtype=np.float64).astype(np.float32), expected)


async def test_every_worker_takes_connections_of_the_port(served: Both) -> None:
    """Each channel is a connection of its own, and the kernel deals them out."""
    assert len(served.http.workers()) == 2
    before = [worker.cpu_times().user for worker in served.http.workers()]

    async def some(number: int) -> None:
        # Without this option gRPC shares one connection among the channels of a process.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}", options=options) as channel:
            client = Client(channel)
            requests = [pb.EmbedRequest(inputs=text, truncate=True) for text in mixed_texts(20, seed=number)]
            assert len(await client.all("EmbedStream", requests, metadata=AUTHORIZED)) == 20

    await asyncio.gather(*map(some, range(16)))
    after = [worker.cpu_times().user for worker in served.http.workers()]
    assert all(late - early > 0.02 for early, late in zip(before, after, strict=True)), (before, after)


async def test_when_full_unary_calls_are_refused_at_once_and_streams_wait(served: Both) -> None:
    async with connected(served.port) as client:
        text = "word " * 200
        requests = [pb.EmbedRequest(inputs=text, truncate=True) for _ in range(40)]
        stream = asyncio.create_task(client.all("EmbedStream", requests, metadata=AUTHORIZED))
        await asyncio.sleep(0.1)
        started = time.perf_counter()
        calls = [client.Embed(pb.EmbedRequest(inputs=text, truncate=True), metadata=AUTHORIZED) for _ in range(8)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, grpc.aio.AioRpcError)]
        assert refused and {one.code() for one in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert "retry-after" in dict(refused[0].trailing_metadata())
        assert not stream.done() or time.perf_counter() - started < 5
        assert len(await asyncio.wait_for(stream, 60)) == 40
        rerank = await refusal(client.Rerank(pb.RerankRequest(query="q", texts=["a"]), metadata=AUTHORIZED))
        assert rerank.code() is grpc.StatusCode.FAILED_PRECONDITION


def metric(served: Both, name: str) -> float:
    lines = httpx.get(f"{served.http.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


async def test_requests_of_both_ports_are_counted_alike(served: Both) -> None:
    await asyncio.sleep(0.5)  # what the tests before counted is booked as well
    counted, succeeded = metric(served, "te_request_count"), metric(served, "te_request_success")
    async with connected(served.port) as client:
        await client.Embed(pb.EmbedRequest(inputs="one"), metadata=AUTHORIZED)
        await client.all("EmbedStream", [pb.EmbedRequest(inputs="two")] * 3, metadata=AUTHORIZED)
    post(served, "one")
    async with asyncio.timeout(5):  # each worker books what it counted a moment later
        while metric(served, "te_request_success") - succeeded < 5:
            await asyncio.sleep(0.05)
    assert metric(served, "te_request_success") - succeeded == 5
    assert metric(served, "te_request_count") - counted == 5


def test_the_start_tells_of_the_port(served: Both) -> None:
    log = served.http.log.read_text()
    assert f"gRPC: tei.v1 on port {served.port}" in log and KEY not in log


def test_a_server_that_is_told_to_end_answers_and_says_why_it_ends(served: Both) -> None:
    """The last test: afterwards nobody serves."""
    hung_up = threading.Event()
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        stream = channel.stream_stream(
            "/tei.v1.Embed/EmbedStream",
            request_serializer=pb.EmbedRequest.SerializeToString,
            response_deserializer=pb.EmbedResponse.FromString,
        )

        def requests() -> Iterator[pb.EmbedRequest]:
            yield pb.EmbedRequest(inputs="before the end")
            hung_up.wait(30)

        call = stream(requests(), metadata=AUTHORIZED)
        assert len(next(call).embeddings) == 384
        os.kill(served.http.process.pid, signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        hung_up.set()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and "stopping" in caught.value.details()
    assert served.http.process.wait(20) == 0
    log = served.http.log.read_text()
    assert "Traceback" not in log, log
