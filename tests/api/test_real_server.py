"""The middleware on a real socket: what a server's ``receive`` does when a client closes is no matter of belief."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from infinity_bento.api.app import create_app
from infinity_bento.api.guard import LOOK_SECONDS
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.telemetry.metrics import Metrics
from tests.api.fakes import FakeEngine

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving(engine: FakeEngine, metrics: Metrics | None = None, **options: Any) -> AsyncIterator[int]:
    """The application behind uvicorn on a free port of 127.0.0.1."""
    app = create_app(lambda: engine, ApiSettings(**options), metrics=metrics)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, ws="none", lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())  # without serve()'s signal handlers, which belong to the test runner
    try:
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.005)
            yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


def request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: test", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return int(head.split(" ")[1]), await reader.readexactly(length)


async def test_closing_the_socket_cancels_the_engine_call() -> None:
    engine, metrics = FakeEngine(wait=asyncio.Event()), Metrics()
    async with serving(engine, metrics) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/embed", b'{"inputs": ["a", "b"]}'))
        async with asyncio.timeout(5):
            while not engine.submitted:
                await asyncio.sleep(0.005)
            writer.close()
            while not engine.cancelled:
                await asyncio.sleep(0.005)
    assert engine.cancelled == 2
    assert 'infinity_errors_total{code="client_gone"} 1.0' in metrics.render().decode()


async def test_no_task_watches_a_client_that_the_server_itself_watches() -> None:
    engine = FakeEngine(wait=asyncio.Event())
    assert engine.wait is not None
    async with serving(engine) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/embed", b'{"inputs": "a"}'))
        await asyncio.sleep(3 * LOOK_SECONDS)
        assert engine.submitted and not [
            task for task in asyncio.all_tasks() if "Exchange._watch" in repr(task.get_coro())
        ]
        engine.wait.set()
        assert (await answer(reader))[0] == 200
        writer.close()


async def test_one_connection_serves_many_requests_slow_and_fast() -> None:
    engine = FakeEngine(wait=asyncio.Event())
    assert engine.wait is not None
    async with serving(engine) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/embed", b'{"inputs": "a"}'))
        await asyncio.sleep(2 * LOOK_SECONDS)  # it has been looked at
        engine.wait.set()
        assert (await answer(reader))[0] == 200
        for body, status in ((b'{"inputs": "a"}', 200), (b"{", 400), (b'{"inputs": "a"}', 200)):
            writer.write(request("/embed", body))
            assert (await answer(reader))[0] == status
        writer.close()
    assert engine.cancelled == 0


async def test_an_oversized_upload_is_refused_and_the_connection_survives() -> None:
    async with serving(FakeEngine(), payload_limit=1000) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/embed", b" " * 200_000))
        status, body = await answer(reader)
        assert status == 413 and b"200000 bytes; the limit is 1000" in body
        writer.write(request("/embed", b'{"inputs": "a"}'))
        assert (await answer(reader))[0] == 200
        writer.close()


async def test_a_half_sent_body_times_out() -> None:
    async with serving(FakeEngine(), request_timeout_seconds=0.1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/embed", b'{"inputs": "a"}')[:-3])
        assert (await answer(reader))[0] == 504
        writer.close()
