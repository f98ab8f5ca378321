"""A served process, and the clients people use: OpenAI, BentoML sync and async, plain HTTP, all unmodified."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import bentoml
import httpx
import numpy as np
import openai
import pytest
from sentence_transformers import SentenceTransformer

from tests.conftest import MINILM, mixed_texts

ROOT = Path(__file__).parent.parent
TOLERANCE = 1e-5
KEY = "s3cr3t-key-of-this-test"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "server.log"


@pytest.fixture(scope="module")
def url(log: Path) -> Iterator[str]:
    """A server started as a user starts it, with an API key."""
    port = free_port()
    command = [sys.executable, "-m", "infinity_bento.cli", "serve", "--hostname", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "INFINITY_API_KEY": KEY}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            try:
                if httpx.get(f"{address}/readyz", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        else:
            raise AssertionError(log.read_text())
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_openai_client(client: openai.OpenAI, oracle: SentenceTransformer) -> None:
    texts = mixed_texts(32, seed=5)
    answer = client.embeddings.create(model=MINILM, input=texts)  # asks for base64
    got = np.array([row.embedding for row in answer.data])
    assert np.abs(got - oracle.encode(texts)).max() < TOLERANCE
    assert [row.index for row in answer.data] == list(range(32))
    expected_tokens = sum(min(256, len(oracle.tokenizer(text)["input_ids"])) for text in texts)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == expected_tokens

    plain = client.embeddings.create(model=MINILM, input=texts, encoding_format="float")
    assert np.abs(np.array([row.embedding for row in plain.data]) - got).max() < TOLERANCE
    short = client.embeddings.create(model=MINILM, input="hello", dimensions=8)
    assert len(short.data[0].embedding) == 8
    ids = oracle.tokenizer(["hello", "two words"])["input_ids"]
    by_ids = client.embeddings.create(model=MINILM, input=ids)
    by_text = client.embeddings.create(model=MINILM, input=["hello", "two words"])
    for first, second in zip(by_ids.data, by_text.data, strict=True):
        assert np.abs(np.array(first.embedding) - np.array(second.embedding)).max() < TOLERANCE
    assert [model.id for model in client.models.list().data] == [MINILM]


def test_openai_errors(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.embeddings.create(model="nope", input="a")
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.embeddings.create(model=MINILM, input="")
    with pytest.raises(openai.BadRequestError, match="from 1 to 384"):
        client.embeddings.create(model=MINILM, input="a", dimensions=999)
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.embeddings.create(model=MINILM, input="a")


def test_bentoml_sync_client(url: str, oracle: SentenceTransformer) -> None:
    texts = mixed_texts(16, seed=6)
    with bentoml.SyncHTTPClient(url, token=KEY, server_ready_timeout=30) as client:
        results = client.embed(items=[{"text": text, "model": MINILM} for text in [*texts, ""]])
    got = np.array([result["embedding"] for result in results[:-1]])
    assert np.abs(got - oracle.encode(texts)).max() < TOLERANCE
    assert results[-1]["embedding"] is None
    assert results[-1]["error"]["code"] == "empty_input"


async def test_bentoml_async_clients_together(url: str, oracle: SentenceTransformer) -> None:
    texts = mixed_texts(24, seed=7)
    expected = oracle.encode(texts)
    async with bentoml.AsyncHTTPClient(url, token=KEY) as client:
        answers = await asyncio.gather(*(client.embed(items=[{"text": text}]) for text in texts))
    got = np.array([answer[0]["embedding"] for answer in answers])
    assert np.abs(got - expected).max() < TOLERANCE


async def test_the_same_text_alone_in_a_batch_shuffled_and_under_32_clients(url: str) -> None:
    texts = mixed_texts(64, seed=8)
    headers = {"authorization": f"Bearer {KEY}"}

    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:

        async def embed(inputs: list[str]) -> np.ndarray:
            answer = await client.post("/embed", json={"inputs": inputs})
            assert answer.status_code == 200, answer.text
            return np.array(answer.json())

        batch = await embed(texts)
        order = np.random.default_rng(0).permutation(64)
        assert np.abs(await embed([texts[index] for index in order]) - batch[order]).max() < TOLERANCE
        for index in (0, 13, 63):
            assert np.abs((await embed([texts[index]]))[0] - batch[index]).max() < TOLERANCE

        async def one_of_32(number: int) -> float:
            chosen = [(number * 7 + step) % 64 for step in range(4)]
            return max([float(np.abs((await embed([texts[index]]))[0] - batch[index]).max()) for index in chosen])

        assert max(await asyncio.gather(*map(one_of_32, range(32)))) < TOLERANCE


async def test_600_at_once_at_a_limit_of_512(url: str, oracle: SentenceTransformer) -> None:
    # All different: equal texts would be computed once.
    texts = [f"{number} is a text of some length that keeps the device busy for a moment " * 4 for number in range(600)]
    expected = oracle.encode(texts)
    limits = httpx.Limits(max_connections=600)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=180, limits=limits) as client:
        # Connections first, so that the requests themselves arrive together.
        await asyncio.gather(*(client.get("/livez") for _ in range(600)))
        answers = await asyncio.gather(*(client.post("/embed", json={"inputs": text}) for text in texts))
        statuses = Counter(answer.status_code for answer in answers)
        assert set(statuses) == {200, 429}, statuses
        assert statuses[200] >= 512
        refused_after, answered_after = [], []  # milliseconds by the server's clock: the client itself is slow here
        for answer, vector in zip(answers, expected, strict=True):
            total = float(answer.headers["server-timing"].removeprefix("total;dur=").partition(",")[0])
            if answer.status_code == 200:
                answered_after.append(total)
                assert np.abs(np.array(answer.json()[0]) - vector).max() < TOLERANCE
            else:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error_type"] == "Overloaded"
                assert "limit of 512" in answer.json()["error"]
                refused_after.append(total)
        assert max(refused_after) < max(answered_after) / 2, "a refusal must not wait for the work in front of it"
        assert (await client.post("/embed", json={"inputs": "next"})).status_code == 200


async def test_a_client_that_leaves_frees_its_place(url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/embed", json={"inputs": ["word " * 250] * 400}, timeout=0.5)
        started = time.perf_counter()
        assert (await client.post("/embed", json={"inputs": "next"})).status_code == 200
        waited = time.perf_counter() - started
        lines = (await client.get("/metrics")).text.splitlines()
        dropped = [line for line in lines if line.startswith("infinity_dropped_inputs_total{")]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in dropped) > 100, (waited, dropped)


def test_the_log_tells_the_stages_and_never_the_key(url: str, log: Path) -> None:
    text = log.read_text()
    for part in ("[1/6] import libraries", "[6/6] warm up", "ready after", "api-key", "***"):
        assert part in text
    assert KEY not in text
