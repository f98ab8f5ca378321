"""Front and runner as two services: no request is lost on the line between them, and it behaves as one server."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import bentoml
import grpc
import httpx
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from infinity_bento.grpc_api import tei_pb2
from tests.bentos import Served, environment, free_port, serve
from tests.conftest import MINILM, mixed_texts
from tests.grpc_api.rig import connected, refusal

ROOT = Path(__file__).parent.parent
KEY = "key-of-this-test"
HEADERS = {"authorization": f"Bearer {KEY}"}
FRONTS = 2
GRPC_PORT = free_port()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("distributed")
    environ = environment(folder / "home", INFINITY_API_KEY=KEY, INFINITY_GRPC_PORT=str(GRPC_PORT))
    arguments = ["service_distributed:InfinityFront", "--arg", f"front_workers={FRONTS}"]
    with serve(arguments, ROOT, environ, folder / "server.log") as made:
        yield made


def test_its_processes(served: Served) -> None:
    commands = [" ".join(worker.cmdline()) for worker in served.workers()]
    assert sum("--service-name infinity-bento" in command for command in commands) == FRONTS
    assert sum("--service-name infinity-runner" in command for command in commands) == 1
    assert httpx.post(f"{served.url}/ask", content=b"x", headers=HEADERS).status_code == 404
    assert httpx.post(f"{served.url}/embed", json={"inputs": "x"}).status_code == 401


async def test_the_fronts_share_a_grpc_port_and_ask_the_runner(served: Served, oracle: SentenceTransformer) -> None:
    texts = mixed_texts(100, seed=22)
    requests = [tei_pb2.EmbedRequest(inputs=text, truncate=True) for text in texts]
    async with connected(GRPC_PORT) as client:
        error = await refusal(client.Embed(requests[0]))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        answers = await client.all("EmbedStream", requests, metadata=tuple(HEADERS.items()))
        error = await refusal(client.Embed(tei_pb2.EmbedRequest(inputs="word " * 999), metadata=tuple(HEADERS.items())))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    vectors = np.array([answer.embeddings for answer in answers])
    assert np.abs(vectors - oracle.encode(texts)).max() < 1e-5


async def test_nothing_is_lost_at_concurrency_16(served: Served, oracle: SentenceTransformer) -> None:
    """BentoML's default connection settings lose 6 to 13 % here: they close sessions every 100 requests."""
    texts = mixed_texts(48, seed=21)
    expected = oracle.encode(texts)
    statuses: Counter[int] = Counter()

    async with httpx.AsyncClient(base_url=served.url, headers=HEADERS, timeout=60) as http:

        async def client(number: int) -> None:
            for step in range(30):
                index = (number * 7 + step) % len(texts)
                answer = await http.post("/embed", json={"inputs": texts[index]})
                statuses[answer.status_code] += 1
                assert np.abs(np.array(answer.json()[0]) - expected[index]).max() < 1e-5

        await asyncio.gather(*map(client, range(16)))
    assert statuses == {200: 480}


def test_errors_and_native_methods_cross_the_line(served: Served) -> None:
    with httpx.Client(base_url=served.url, headers=HEADERS, timeout=60) as http:
        assert http.post("/embed", json={"inputs": ""}).status_code == 400
        assert http.post("/embed", json={"inputs": ["x"] * 2049}).status_code in (413, 422)
        unknown = http.post("/v1/embeddings", json={"model": "nope", "input": "x"})
        assert unknown.status_code == 404 and MINILM in unknown.text
        assert http.post("/rerank", json={"query": "a", "texts": ["b"]}).status_code in (400, 424)
        assert http.get("/info").json()["model_id"] == MINILM
        tokens = http.post("/tokenize", json={"inputs": "hello"}).json()
        assert [token["text"] for token in tokens[0]][1] == "hello"
        many = http.post("/embed", json={"inputs": ["a short text"] * 2000})
        assert many.status_code == 200 and len(many.json()) == 2000
        metrics = http.get("/metrics").text
        assert "te_request_count" in metrics and "infinity_batch_tokens_sum" in metrics
    with bentoml.SyncHTTPClient(served.url, token=KEY, server_ready_timeout=30) as client:
        good, bad = client.embed(items=[{"text": "hello"}, {"text": ""}])
    assert len(good["embedding"]) == 384 and bad["error"]["code"] == "empty_input"


def test_a_runner_that_dies_is_replaced_and_the_front_says_so(served: Served) -> None:
    runner = next(worker for worker in served.workers() if "infinity-runner" in " ".join(worker.cmdline()))
    os.kill(runner.pid, signal.SIGKILL)
    statuses: list[int] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (503 not in statuses or statuses[-FRONTS * 3 :] != [200] * FRONTS * 3):
        answer = httpx.post(f"{served.url}/embed", json={"inputs": "x"}, headers=HEADERS, timeout=30)
        statuses.append(answer.status_code)
        time.sleep(0.1)
    assert set(statuses) == {200, 503}, answer.text
    assert statuses[-1] == 200, served.log.read_text()
