from __future__ import annotations

import gzip
import zlib

import orjson
import pytest
import zstandard

from infinity_bento.api.compression import accepted_coding, decompress
from infinity_bento.api.exchange import Reply
from infinity_bento.errors import MalformedBody, PayloadTooLarge, UnsupportedMedia
from tests.api.fakes import FakeEngine, client_for, every_task

GOOD = b'{"inputs": "a"}'


def zstd(body: bytes, *, with_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=with_size).compress(body)


PACKERS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "ZSTD": zstd}


@pytest.mark.parametrize("coding", PACKERS)
async def test_compressed_requests_are_answered_like_plain_ones(coding: str) -> None:
    async with client_for(FakeEngine()) as client:
        plain = await client.post("/embed", content=GOOD)
        packed = await client.post("/embed", content=PACKERS[coding](GOOD), headers={"content-encoding": coding})
    assert packed.status_code == 200 and packed.json() == plain.json()


@pytest.mark.parametrize("coding", ["br", "deflate", "gzip, zstd", "x" * 500])
async def test_other_codings_are_refused_by_name(coding: str) -> None:
    async with client_for(FakeEngine()) as client:
        answer = await client.post("/embed", content=GOOD, headers={"content-encoding": coding})
    assert answer.status_code == 415 and coding[:80] in answer.json()["error"] and len(answer.json()["error"]) < 250
    assert "gzip, zstd or identity" in answer.json()["error"]


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_a_bomb_is_refused_and_never_unpacked(coding: str) -> None:
    body = b" " * 50_000_000
    bomb = gzip.compress(body, 9) if coding == "gzip" else zstd(body, with_size=False)
    async with client_for(FakeEngine(), payload_limit=100_000) as client:
        answer = await client.post("/embed", content=bomb, headers={"content-encoding": coding})
    assert len(bomb) < 100_000
    assert answer.status_code == 413
    assert "more than 100000 bytes once it is decompressed; the limit is 100000" in answer.json()["error"]


@pytest.mark.parametrize("packer", [gzip.compress, zstd])
def test_the_limit_itself_is_allowed(packer: object) -> None:
    body = b"x" * 1000
    packed = packer(body)  # type: ignore[operator]
    coding = b"gzip" if packer is gzip.compress else b"zstd"
    assert decompress(packed, coding, 1000) == body
    with pytest.raises(PayloadTooLarge):
        decompress(packed, coding, 999)


@pytest.mark.parametrize(
    ("coding", "raw"),
    [
        (b"gzip", b"not gzip at all"),
        (b"gzip", b""),
        (b"gzip", gzip.compress(GOOD)[:-9]),
        (b"gzip", gzip.compress(GOOD) * 2),
        (b"gzip", zlib.compress(GOOD)),
        (b"zstd", b"not zstd at all"),
        (b"zstd", b""),
        (b"zstd", zstd(GOOD * 100)[:-4]),
    ],
)
def test_broken_bodies_are_malformed(coding: bytes, raw: bytes) -> None:
    with pytest.raises(MalformedBody, match=coding.decode()):
        decompress(raw, coding, 10_000)


def test_a_frame_that_wants_a_large_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    raw = packer.compress(b"x" * 100) + packer.flush()
    with pytest.raises(MalformedBody, match="zstd"):
        decompress(raw, b"zstd", 1000)


@pytest.mark.parametrize("coding", [b"", b" identity ", b"IDENTITY"])
def test_identity_is_no_coding(coding: bytes) -> None:
    assert decompress(b"raw", coding, 1) == b"raw"
    with pytest.raises(UnsupportedMedia):
        decompress(b"raw", b"br", 1)


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (b"gzip, deflate, zstd", b"zstd"),
        (b"gzip, deflate", b"gzip"),
        (b"gzip;q=0.5, zstd;q=0", b"gzip"),
        (b"gzip; q=0.0, zstd; q=0.000", None),
        (b"GZIP", b"gzip"),
        (b"identity", None),
        (b"", None),
        (b"br, deflate;q=1", None),
    ],
)
def test_choice_of_coding(accept: bytes, chosen: bytes | None) -> None:
    assert accepted_coding(accept) == chosen


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_large_answers_are_compressed_for_clients_that_allow_it(coding: str) -> None:
    body = {"model": "m", "input": ["a", "b"]}
    async with client_for(FakeEngine(), compression_min_bytes=100) as client:
        plain = await client.post("/v1/embeddings", json=body, headers={"accept-encoding": "identity"})
        packed = await client.post("/v1/embeddings", json=body, headers={"accept-encoding": coding})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == coding and packed.headers["vary"] == "accept-encoding"
    assert packed.json() == plain.json()
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])


async def test_small_answers_and_dense_bytes_are_sent_as_they_are() -> None:
    body = {"input": ["a"] * 4}
    async with client_for(every_task()) as client:
        small = await client.post("/v1/embeddings", json=body)
    async with client_for(FakeEngine(), compression_min_bytes=100) as client:
        dense = await client.post("/v1/embeddings", json={**body, "encoding_format": "base64"})
        binary = await client.post("/v1/embeddings", json=body, headers={"accept": "application/msgpack"})
        sparse = await client.post("/embed", json={"inputs": "a", "encoding_format": "tensor"})
    for answer in (small, dense, binary, sparse):
        assert answer.status_code == 200 and "content-encoding" not in answer.headers


def test_replies_keep_what_compression_does_not_touch() -> None:
    import asyncio

    from infinity_bento.api.compression import compress

    reply = Reply.of_json({"a": "b" * 1000}, 201, [(b"x-own", b"1")])
    packed = asyncio.run(compress(reply, b"gzip"))
    assert packed.status == 201 and (b"x-own", b"1") in packed.headers and len(packed.body) < 100
    assert orjson.loads(gzip.decompress(packed.body)) == {"a": "b" * 1000}
    assert reply.headers == [(b"x-own", b"1")]
