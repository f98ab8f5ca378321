from __future__ import annotations

import base64
from typing import Any

import msgpack
import numpy as np
import orjson
import pytest
from sentence_transformers.util import quantize_embeddings

from infinity_bento.api.encoding import FORMATS, OUTPUT_DTYPES, Encoding, as_base64, as_float16, as_floats, as_tensor
from infinity_bento.api.exchange import Reply
from infinity_bento.errors import InvalidInput
from tests.api.fakes import client_for, every_task

MSGPACK = {"accept": "application/msgpack"}
BYTES_PER_VALUE = {"float32": 4, "float16": 2, "int8": 1, "uint8": 1, "binary": 1, "ubinary": 1}


def awkward_rows() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    table = rng.standard_normal((4, 6)).astype(np.float32)
    tiny = np.array([1e-45, -0.0, 3.4e38, 1 / 3, 0.1, 1e-7], dtype=np.float32)
    empty = np.zeros((0, 6), np.float32)
    return [
        table[0],
        table[:, 2],
        table[::-1][1],
        table.T,
        tiny,
        table.astype(">f4")[0],
        np.zeros(0, np.float32),
        empty,
    ]


def unit_rows(count: int, width: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def untensor(tensor: dict[str, Any]) -> np.ndarray:
    """What a client does with a packed tensor."""
    data = tensor["data"] if isinstance(tensor["data"], bytes) else base64.b64decode(tensor["data"], validate=True)
    assert tensor["byte_order"] == "little"
    dtype = np.dtype(tensor["dtype"]).newbyteorder("<")
    return np.frombuffer(data, dtype).reshape(tensor["shape"])


@pytest.mark.parametrize("row", awkward_rows())
def test_all_forms_give_back_the_same_bits(row: np.ndarray) -> None:
    wanted = np.ascontiguousarray(row, dtype="<f4")
    assert base64.b64decode(as_base64(as_floats(row)), validate=True) == wanted.tobytes()
    for encode in (Encoding(as_floats, form) for form in FORMATS.values()):
        in_json = orjson.loads(Reply.of_json({"v": encode(row)}).body)["v"]
        in_msgpack = msgpack.unpackb(Reply.of_msgpack({"v": encode(row)}).body)["v"]
        for value in (in_json, in_msgpack):
            if isinstance(value, dict):
                assert value["shape"] == list(row.shape) and untensor(value).tobytes() == wanted.tobytes()
            elif isinstance(value, str):
                assert base64.b64decode(value) == wanted.tobytes()
            else:
                assert np.array(value, dtype="<f4").reshape(row.shape).tobytes() == wanted.tobytes()


def test_float32_digits_are_short() -> None:
    assert Reply.of_json(as_floats(np.array([0.1], dtype=np.float32))).body == b"[0.1]"


def test_msgpack_numbers_take_five_bytes() -> None:
    body = Reply.of_msgpack(as_floats(np.full(10, 0.1, dtype=np.float32))).body
    assert len(body) == 1 + 10 * 5


@pytest.mark.parametrize("shape", [(384,), (7, 384), (5, 12), (3,)])
@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_bits_are_those_of_sentence_transformers(precision: Any, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    rows.flat[0] = 0.0
    wanted = quantize_embeddings(np.atleast_2d(rows), precision=precision)
    got = OUTPUT_DTYPES[precision](rows)
    assert got.dtype == wanted.dtype and np.array_equal(np.atleast_2d(got), wanted)


@pytest.mark.parametrize("width", [3, 64, 384, 1024])
@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_bytes_are_those_of_sentence_transformers_with_a_fixed_range(precision: Any, width: int) -> None:
    rows = unit_rows(20, width)
    step = min(1.0, 8 / np.sqrt(width)) / 127
    ranges = np.stack([np.full(width, -128.5 * step), np.full(width, 126.5 * step)])
    wanted = quantize_embeddings(rows, precision=precision, ranges=ranges)
    got = np.stack([OUTPUT_DTYPES[precision](row) for row in rows])  # each row alone
    assert got.dtype == wanted.dtype
    assert np.abs(got.astype(int) - wanted.astype(int)).max() <= 1 and (got != wanted).mean() < 0.001


@pytest.mark.parametrize("width", [64, 384, 1024])
def test_bytes_keep_the_cosines(width: int) -> None:
    rows = unit_rows(50, width)
    coarse = OUTPUT_DTYPES["int8"](rows).astype(np.float32)
    coarse /= np.linalg.norm(coarse, axis=1, keepdims=True)
    assert np.abs(coarse @ coarse.T - rows @ rows.T).max() < 0.1 / np.sqrt(width)


def test_float16_rounds_and_refuses_what_it_cannot_hold() -> None:
    row = unit_rows(1, 384)[0]
    assert as_float16(row).dtype == np.float16 and np.abs(as_float16(row) - row).max() < 1e-3
    with pytest.raises(InvalidInput, match="beyond 65504"):
        as_float16(np.array([1e5], dtype=np.float32))


def test_a_tensor_says_what_it_is() -> None:
    assert as_tensor(np.array([[1, 2, 3]], dtype=np.int32)) == {
        "dtype": "int32",
        "shape": [1, 3],
        "byte_order": "little",
        "data": b"\1\0\0\0\2\0\0\0\3\0\0\0",
    }


ROUTES = [("/v1/embeddings", "input", "m"), ("/embed", "inputs", "m"), ("/embed_all", "inputs", "m")]


def vectors_of(body: Any) -> list[Any]:
    return [entry["embedding"] for entry in body["data"]] if isinstance(body, dict) else body


@pytest.mark.parametrize(("path", "name", "model"), [*ROUTES, ("/v1/embeddings", "input", "late")])
async def test_every_route_gives_the_same_bits_in_every_form(path: str, name: str, model: str) -> None:
    request = {name: ["a b c", "d"], "model": model}
    async with client_for(every_task()) as client:
        plain = [np.array(row, dtype=np.float32) for row in vectors_of((await client.post(path, json=request)).json())]
        assert plain[0].ndim == (2 if path == "/embed_all" or model == "late" else 1)
        for form in FORMATS:
            body = {**request, "encoding_format": form}
            in_json = (await client.post(path, json=body)).json()
            answer = await client.post(path, json=body, headers=MSGPACK)
            assert answer.headers["content-type"] == "application/msgpack"
            for received in (in_json, msgpack.unpackb(answer.content)):
                for value, wanted in zip(vectors_of(received), plain, strict=True):
                    if form == "tensor":
                        got = untensor(value)
                        assert got.shape == wanted.shape
                    elif form == "base64":
                        got = np.frombuffer(base64.b64decode(value), "<f4")
                    else:
                        got = np.array(value, dtype=np.float32)
                    assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", OUTPUT_DTYPES)
async def test_output_types_over_the_wire(dtype: str) -> None:
    request = {"input": ["a"], "output_dtype": dtype, "model": "m"}
    async with client_for(every_task()) as client:
        floats = (await client.post("/v1/embeddings", json={**request, "output_dtype": None})).json()
        numbers = (await client.post("/v1/embeddings", json=request)).json()["data"][0]["embedding"]
        packed = (await client.post("/v1/embeddings", json={**request, "encoding_format": "base64"})).json()
        tensor = (await client.post("/v1/embeddings", json={**request, "encoding_format": "tensor"})).json()
    wanted = OUTPUT_DTYPES[dtype](np.array(floats["data"][0]["embedding"], dtype=np.float32))
    assert np.array_equal(np.array(numbers, dtype=wanted.dtype), wanted)
    assert base64.b64decode(packed["data"][0]["embedding"]) == wanted.tobytes()
    assert len(wanted.tobytes()) == BYTES_PER_VALUE[dtype] * (1 if "binary" in dtype else 8)
    assert np.array_equal(untensor(tensor["data"][0]["embedding"]), wanted)


@pytest.mark.parametrize(
    ("accept", "binary"),
    [
        ("application/msgpack", True),
        ("application/x-msgpack;q=0.9, application/json;q=0.1", True),
        ("application/json, application/msgpack", False),
        ("application/msgpack, application/json", True),
        ("application/json;q=0.2, application/vnd.msgpack;q=0.5", True),
        ("application/msgpack;q=0", False),
        ("application/msgpack;q=nonsense", False),
        ("*/*", False),
    ],
)
async def test_accept_chooses_the_form(accept: str, binary: bool) -> None:
    async with client_for(every_task()) as client:
        answer = await client.post("/embed", json={"inputs": "a"}, headers={"accept": accept})
    assert answer.headers["content-type"] == ("application/msgpack" if binary else "application/json")


async def test_sparse_vectors_as_pairs_and_as_tensors() -> None:
    async with client_for(every_task()) as client:
        pairs = (await client.post("/embed_sparse", json={"inputs": "ab!a"})).json()[0]
        tensors = (await client.post("/embed_sparse", json={"inputs": "ab!a", "encoding_format": "tensor"})).json()[0]
        binary = await client.post("/embed_sparse", json={"inputs": "ab!a"}, headers=MSGPACK)
    assert [pair["index"] for pair in pairs] == [33, 97, 98] == untensor(tensors["indices"]).tolist()
    assert np.array_equal(np.float32([pair["value"] for pair in pairs]), untensor(tensors["values"]))
    assert msgpack.unpackb(binary.content)[0][1] == {"index": 97, "value": float(np.float32(2 / 3))}
