"""Two workers on the CPU: both serve, their metrics add up, and one that is killed is replaced without further loss."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from sentence_transformers import SentenceTransformer

from infinity_bento.telemetry.ledger import BOOK_AFTER_SECONDS
from tests.bentos import Served, environment, serve
from tests.conftest import mixed_texts

ROOT = Path(__file__).parent.parent
CLIENTS = 16
# Each request gets a connection of its own: which worker takes it is the kernel's choice.
HEADERS = {"connection": "close"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("workers")
    environ = environment(folder / "home", INFINITY_WORKERS="2", TMPDIR=str(folder), PYTHONPATH=str(ROOT))
    with serve(["service:InfinityBento"], ROOT, environ, folder / "server.log") as made:
        yield made


@dataclass
class Sent:
    """One request: when it was out, and what came back."""

    started: float
    ended: float
    status: int | None  # None: the connection was lost


def metric(served: Served, name: str) -> float:
    lines = httpx.get(f"{served.url}/metrics", headers=HEADERS).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def busy_seconds(workers: list[psutil.Process]) -> list[float]:
    return [sum(worker.cpu_times()[:2]) for worker in workers]


async def load(served: Served, texts: list[str], seconds: float, sent: list[Sent]) -> None:
    """16 clients that send one request after another."""
    stop = time.perf_counter() + seconds

    async def client(number: int) -> None:
        index = number
        async with httpx.AsyncClient(timeout=60, headers=HEADERS) as http:
            while time.perf_counter() < stop:
                started = time.perf_counter()
                try:
                    answer = await http.post(f"{served.url}/embed", json={"inputs": texts[index % len(texts)]})
                    status: int | None = answer.status_code
                except httpx.TransportError:
                    status = None
                sent.append(Sent(started, time.perf_counter(), status))
                index += CLIENTS

    await asyncio.gather(*map(client, range(CLIENTS)))


async def test_both_serve_and_their_metrics_add_up(served: Served, oracle: SentenceTransformer) -> None:
    workers = served.workers()
    assert len(workers) == 2
    texts = mixed_texts(64, seed=11)
    before = busy_seconds(workers)
    counted = metric(served, "te_request_count")
    expected = oracle.encode(texts)

    async with httpx.AsyncClient(timeout=60, headers=HEADERS) as http:
        for _ in range(3):
            answers = await asyncio.gather(*(http.post(f"{served.url}/embed", json={"inputs": text}) for text in texts))
            got = np.array([answer.json()[0] for answer in answers])
            assert np.abs(got - expected).max() < 1e-5
    assert all(after - earlier > 0.05 for earlier, after in zip(before, busy_seconds(workers), strict=True))
    await asyncio.sleep(2 * BOOK_AFTER_SECONDS)
    assert metric(served, "te_request_count") - counted == 3 * 64
    # Whichever worker is asked: the sums are those of both.
    assert {metric(served, "te_request_success") for _ in range(10)} == {metric(served, "te_request_count")}


async def test_a_killed_worker_takes_only_its_requests_along_and_is_replaced(served: Served) -> None:
    workers = served.workers()
    counted = metric(served, "te_request_success")
    sent: list[Sent] = []
    running = asyncio.create_task(load(served, mixed_texts(64, seed=12), 14.0, sent))
    before = busy_seconds(workers)
    await asyncio.sleep(2.0)
    # The busier one, since all connections may have come to the same.
    work = [after - earlier for earlier, after in zip(before, busy_seconds(workers), strict=True)]
    victim, survivor = workers if work[0] >= work[1] else workers[::-1]
    killed = time.perf_counter()
    os.kill(victim.pid, signal.SIGKILL)
    replacement: psutil.Process | None = None
    while time.perf_counter() - killed < 12 and replacement is None:
        await asyncio.sleep(0.2)
        replacement = next((w for w in served.workers() if w.pid not in (victim.pid, survivor.pid)), None)
    await running
    assert replacement is not None, served.log.read_text()

    lost = [request for request in sent if request.status is None]
    assert {request.status for request in sent} <= {200, None}
    assert 0 < len(lost) <= CLIENTS
    for request in lost:
        assert request.started <= killed + 0.05, "only requests in flight on the dead worker may fail"
        assert request.ended >= killed
    answered = sum(request.status == 200 for request in sent)
    assert any(request.started > killed + 1 for request in sent)

    # The new worker loads before it accepts connections, then takes its share. Of the old one's counts only those of
    # its last moment are lost.
    for _ in range(200):
        log = served.log.read_text()
        if "replaces one that died" in log and log.count("ready after") >= 3:
            break
        await asyncio.sleep(0.1)
    idle = busy_seconds([replacement])[0]
    await load(served, mixed_texts(64, seed=13), 3.0, sent)
    assert busy_seconds([replacement])[0] - idle > 0.3
    assert [request.status for request in sent if request.started > killed + 0.05].count(None) == 0
    await asyncio.sleep(2 * BOOK_AFTER_SECONDS)
    unbooked = sum(killed - 2 * BOOK_AFTER_SECONDS < r.ended < killed + 0.05 for r in sent)
    answered_all = sum(r.status == 200 for r in sent)
    assert metric(served, "te_request_success") - counted >= answered_all - unbooked > answered
    assert metric(served, "infinity_queue_inputs") == 0, "what the dead worker had queued is forgotten"
