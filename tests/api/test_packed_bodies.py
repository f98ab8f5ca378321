"""BentoML's routes take compressed bodies and give compressed answers as our own do, under the same limits."""

from __future__ import annotations

import gzip
from typing import Any

import httpx
import orjson
import pytest
import zstandard
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from infinity_bento.api.app import harden
from infinity_bento.api.native_table import NATIVE_METHODS
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.telemetry.metrics import Metrics

PACKERS = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}
UNPACKERS = {"gzip": gzip.decompress, "zstd": lambda body: zstandard.ZstdDecompressor().decompress(body)}
BODY = orjson.dumps({"items": [{"text": "a" * 500}]})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what it got."""
    request = Request(scope, receive)
    body = await request.body()
    if scope["query_string"] == b"stream":
        response: Any = StreamingResponse(iter([body, body]), media_type="application/json")
    elif scope["query_string"] == b"text":
        response = PlainTextResponse(body)
    else:
        names = ("content-length", "content-encoding")
        response = JSONResponse({"body": body.decode(), **{name: request.headers.get(name) for name in names}})
    await response(scope, receive, send)


def client(**settings: Any) -> httpx.AsyncClient:
    app = harden(echo, ApiSettings(compression_min_bytes=200, **settings), Metrics(), NATIVE_METHODS)
    headers = {"accept-encoding": "identity", "content-type": "application/json"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)


@pytest.mark.parametrize("coding", PACKERS)
@pytest.mark.parametrize("method", NATIVE_METHODS, ids=lambda method: method.name)
async def test_a_packed_body_arrives_plain(coding: str, method: Any) -> None:
    async with client() as http:
        answer = await http.post(method.path, content=PACKERS[coding](BODY), headers={"content-encoding": coding})
    assert answer.json() == {"body": BODY.decode(), "content-length": str(len(BODY)), "content-encoding": None}


@pytest.mark.parametrize(
    ("content", "coding", "status", "says"),
    [
        (BODY, "br", 415, "send the body as gzip, zstd or identity"),
        (BODY, "gzip", 400, "not valid gzip"),
        (PACKERS["gzip"](BODY)[:-9], "gzip", 400, "cut short"),
        (PACKERS["zstd"](b" " * 50_000_000), "zstd", 413, "more than 100000 bytes once it is decompressed"),
    ],
)
async def test_a_bad_body_is_refused_in_one_sentence(content: bytes, coding: str, status: int, says: str) -> None:
    async with client(payload_limit=100_000) as http:
        answer = await http.post("/bento/embed", content=content, headers={"content-encoding": coding})
        assert answer.status_code == status and says in answer.json()["error"]
        assert (await http.post("/bento/embed", content=BODY)).json()["body"] == BODY.decode()


@pytest.mark.parametrize("coding", UNPACKERS)
async def test_a_large_answer_is_packed_for_whom_it_may_be(coding: str) -> None:
    async with client() as http:
        plain = await http.post("/bento/embed", content=BODY)
        async with http.stream("POST", "/bento/embed", content=BODY, headers={"accept-encoding": coding}) as packed:
            raw = b"".join([chunk async for chunk in packed.aiter_raw()])
    assert packed.headers["content-encoding"] == coding and packed.headers["vary"] == "accept-encoding"
    assert packed.headers["content-length"] == str(len(raw)) and len(raw) < len(plain.content)
    assert UNPACKERS[coding](raw) == plain.content and "content-encoding" not in plain.headers


@pytest.mark.parametrize("path", ["/bento/embed?stream", "/bento/embed?text", "/elsewhere"])
async def test_streams_texts_and_other_paths_pass_as_they_are(path: str) -> None:
    async with client() as http:
        answer = await http.post(path, content=BODY, headers={"accept-encoding": "gzip"})
    assert answer.status_code == 200 and "content-encoding" not in answer.headers


async def test_a_small_answer_is_not_packed() -> None:
    async with client() as http:
        answer = await http.post("/bento/embed", content=b"{}", headers={"accept-encoding": "gzip"})
    assert answer.json()["body"] == "{}" and "content-encoding" not in answer.headers
