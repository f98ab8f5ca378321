from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgpack
import orjson
import pytest

from tests.api.fakes import FakeEngine, client_for

GOOD = b'{"inputs": "a"}'


async def test_broken_json_names_the_position() -> None:
    async with client_for(FakeEngine()) as client:
        tei = await client.post("/embed", content=b'{"inputs": "a",\n  oops}')
        openai = await client.post("/v1/embeddings", content=b'{"input": NaN}')
    assert tei.status_code == 400 and "line 2, column 3" in tei.json()["error"]
    assert openai.status_code == 400 and openai.json()["error"]["code"] == "malformed_body"
    assert "line 1, column 11" in openai.json()["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b'{"inputs": "\\ud800"}', b"[" * 5000, b'{"a":1}{"b":2}'])
async def test_what_is_no_json_is_400(raw: bytes) -> None:
    async with client_for(FakeEngine()) as client:
        answer = await client.post("/embed", content=raw)
    assert answer.status_code == 400 and "error" in answer.json()


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        (None, 200),
        ("", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/jsonx", 415),
    ],
)
async def test_content_types(content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    async with client_for(FakeEngine()) as client:
        answer = await client.post("/embed", content=GOOD, headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert repr(content_type) in answer.json()["error"] and "application/json" in answer.json()["error"]


@pytest.mark.parametrize("media", ["application/msgpack", "application/x-msgpack", "Application/Vnd.MsgPack; v=1"])
async def test_messagepack_bodies_are_read(media: str) -> None:
    body = msgpack.packb({"inputs": ["a", [5, 6]], "normalize": False})
    async with client_for(FakeEngine()) as client:
        packed = await client.post("/embed", content=body, headers={"content-type": media})
        plain = await client.post("/embed", json={"inputs": ["a", [5, 6]], "normalize": False})
    assert packed.status_code == 200 and packed.json() == plain.json()


@pytest.mark.parametrize(
    ("raw", "status", "text"),
    [
        (b"", 400, "not valid MessagePack"),
        (msgpack.packb({"inputs": "a"})[:-1], 400, "not valid MessagePack"),
        (msgpack.packb({"inputs": "a"}) + b"x", 400, "not valid MessagePack"),
        (b"\x81\xa1a\xc1", 400, "not valid MessagePack"),
        (b"\x91" * 5000, 400, "not valid MessagePack"),
        (b"\xdd\xff\xff\xff\xff", 400, "not valid MessagePack"),
        (b"\x81\xa6inputs\xa1\xff", 400, "not valid MessagePack"),  # no UTF-8
        (msgpack.packb({1: "a"}), 400, "not valid MessagePack"),
        (msgpack.packb([1]), 422, "The body is an array"),
        (msgpack.packb({"inputs": b"a"}), 422, "binary data of 1 bytes"),
        (msgpack.packb({"inputs": msgpack.Timestamp(1)}), 422, "an object"),
        (msgpack.packb({"inputs": msgpack.ExtType(5, b"x")}), 422, "an object"),
    ],
)
async def test_broken_messagepack_is_refused(raw: bytes, status: int, text: str) -> None:
    async with client_for(FakeEngine()) as client:
        answer = await client.post("/embed", content=raw, headers={"content-type": "application/msgpack"})
    assert answer.status_code == status and text in answer.json()["error"]


async def _chunks(total: int, sent: list[int]) -> AsyncIterator[bytes]:
    for _ in range(total):
        sent.append(1)
        yield b" " * 10


async def test_payload_limit_by_header_and_by_count() -> None:
    exact = GOOD + b" " * (100 - len(GOOD))
    async with client_for(FakeEngine(), payload_limit=100) as client:
        assert (await client.post("/embed", content=exact)).status_code == 200
        declared = await client.post("/embed", content=exact + b" ")
        counted = await client.post("/v1/embeddings", content=_chunks(50, []))
        lied = await client.post("/embed", content=exact + b" ", headers={"content-length": "5"})
    assert declared.status_code == 413 and "101 bytes; the limit is 100" in declared.json()["error"]
    assert counted.status_code == 413 and counted.json()["error"]["code"] == "payload_too_large"
    assert lied.status_code == 413


async def test_reading_stops_at_the_limit() -> None:
    sent: list[int] = []
    async with client_for(FakeEngine(), payload_limit=100) as client:
        await client.post("/embed", content=_chunks(1000, sent))
    assert len(sent) <= 12


async def test_chunked_bodies_are_joined() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield GOOD[:5]
        yield b""
        yield GOOD[5:]

    async with client_for(FakeEngine()) as client:
        assert (await client.post("/embed", content=chunks())).status_code == 200


async def test_client_that_hangs_up_while_sending_gets_nothing() -> None:
    from infinity_bento.api.app import create_app
    from infinity_bento.api.protocol import ApiSettings

    messages: list[Any] = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/embed", "headers": [], "query_string": b""}
    await create_app(FakeEngine, ApiSettings())(scope, receive, send)
    assert sent == [] and messages == []


async def test_unpaired_key_order_and_duplicates_are_harmless() -> None:
    async with client_for(FakeEngine()) as client:
        answer = await client.post("/embed", content=b'{"inputs": 1, "inputs": "a"}')
    assert answer.status_code == 200 and len(orjson.loads(answer.content)) == 1
