"""Every method of the gRPC port against the HTTP route of the same task, over one engine of tiny checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from infinity_bento.api.app import create_app
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.engine import Engine
from infinity_bento.grpc_api import tei_pb2 as pb
from infinity_bento.settings import resolve
from tests import tiny, tiny_retrieval
from tests.conftest import mixed_texts
from tests.grpc_api.rig import Client, refusal, serving

TEXT = "the quick brown fox, and a café"
# Batches of a stream differ from a lone request's; a row's numbers do not, but for the last bit of a float32.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def tiny_engine() -> Iterator[Engine]:
    models = {
        "embedder": tiny.checkpoint("bert"),
        "sparse": tiny_retrieval.splade(),
        "reranker": tiny.checkpoint("bert", head="cls"),
        "classifier": tiny.checkpoint("roberta", head="cls"),
        "late": tiny_retrieval.pylate(),
    }
    options = {"model_id": list(map(str, models.values())), "served_model_name": list(models)}
    with Engine.from_settings(resolve(options)) as engine:
        yield engine


@pytest.fixture
async def client(tiny_engine: Engine) -> AsyncIterator[Client]:
    async with serving(tiny_engine) as made:
        yield made


@pytest.fixture
async def http(tiny_engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(lambda: tiny_engine, ApiSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as made:
        yield made


def named(model: str) -> tuple[tuple[str, str], ...]:
    return (("model", model),)


async def post(http: httpx.AsyncClient, route: str, model: str, **body: Any) -> Any:
    answer = await http.post(route, json={"model": model, "truncate": False, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def float32(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"dimensions": 16}])
async def test_embed_is_bit_equal(client: Client, http: httpx.AsyncClient, options: dict[str, Any]) -> None:
    expected = float32((await post(http, "/embed", "embedder", inputs=TEXT, **options))[0])
    answer = await client.Embed(pb.EmbedRequest(inputs=TEXT, **options), metadata=named("embedder"))
    assert np.array_equal(float32(answer.embeddings), expected)
    assert len(expected) == options.get("dimensions", tiny.WIDTH)


async def test_embed_all_is_bit_equal(client: Client, http: httpx.AsyncClient) -> None:
    for model in ("embedder", "late"):
        expected = float32((await post(http, "/embed_all", model, inputs=TEXT))[0])
        answer = await client.EmbedAll(pb.EmbedAllRequest(inputs=TEXT), metadata=named(model))
        assert np.array_equal(float32([row.embeddings for row in answer.token_embeddings]), expected)
        assert len(expected) > 5


async def test_embed_sparse_is_bit_equal_and_needs_no_name(client: Client, http: httpx.AsyncClient) -> None:
    expected = (await post(http, "/embed_sparse", "sparse", inputs=TEXT))[0]
    answer = await client.EmbedSparse(pb.EmbedSparseRequest(inputs=TEXT))
    got = [(value.index, np.float32(value.value)) for value in answer.sparse_embeddings]
    assert got == [(pair["index"], np.float32(pair["value"])) for pair in expected] and got


@pytest.mark.parametrize("raw", [False, True])
async def test_predict_and_predict_pair(client: Client, http: httpx.AsyncClient, raw: bool) -> None:
    for model in ("classifier", "reranker"):
        expected = await post(http, "/predict", model, inputs=TEXT, raw_scores=raw)
        answer = await client.Predict(pb.PredictRequest(inputs=TEXT, raw_scores=raw), metadata=named(model))
        got = [(row.label, np.float32(row.score)) for row in answer.predictions]
        assert got == [(row["label"], np.float32(row["score"])) for row in expected] and got
    pair = ["a question", "an answer"]
    expected = await post(http, "/predict", "reranker", inputs=pair, raw_scores=raw)
    answer = await client.PredictPair(pb.PredictPairRequest(inputs=pair, raw_scores=raw), metadata=named("reranker"))
    assert np.array_equal(float32(answer.predictions[0].score), float32(expected[0]["score"]))


async def test_rerank_orders_as_http_also_by_maxsim(client: Client, http: httpx.AsyncClient) -> None:
    texts = ["red fox", "blue whale", "red fox", "", "grey wolf"]
    for model in ("reranker", "late"):
        if model == "late":
            texts = [text for text in texts if text]
        expected = await post(http, "/rerank", model, query="fox", texts=texts, return_text=True)
        request = pb.RerankRequest(query="fox", texts=texts, return_text=True)
        answer = await client.Rerank(request, metadata=named(model))
        assert [(rank.index, rank.text) for rank in answer.ranks] == [(row["index"], row["text"]) for row in expected]
        assert np.array_equal(
            float32([rank.score for rank in answer.ranks]), float32([row["score"] for row in expected])
        )
    plain = await client.Rerank(pb.RerankRequest(query="fox", texts=texts, raw_scores=True), metadata=named("reranker"))
    raw = await post(http, "/rerank", "reranker", query="fox", texts=texts, raw_scores=True)
    assert not plain.ranks[0].HasField("text")
    assert [rank.index for rank in plain.ranks] == [row["index"] for row in raw]
    assert abs(plain.ranks[0].score - raw[0]["score"]) < TOLERANCE


async def test_rerank_stream_is_one_ranking_of_all_messages(client: Client, http: httpx.AsyncClient) -> None:
    texts = mixed_texts(50, seed=3)
    expected = await post(http, "/rerank", "reranker", query="fox", texts=texts)
    # Only the first message decides about return_text and raw_scores.
    requests = [pb.RerankStreamRequest(query="fox", text=text, raw_scores=text != texts[0]) for text in texts]
    answer = await client.RerankStream(requests, metadata=named("reranker"))
    assert [rank.index for rank in answer.ranks] == [row["index"] for row in expected]
    assert (
        np.abs(float32([rank.score for rank in answer.ranks]) - float32([row["score"] for row in expected])).max()
        < TOLERANCE
    )
    assert not answer.ranks[0].HasField("text")
    again = await client.RerankStream(
        [pb.RerankStreamRequest(query="fox", text=text, return_text=True) for text in texts],
        metadata=named("reranker"),
    )
    assert [rank.text for rank in again.ranks] == [texts[rank.index] for rank in again.ranks]
    assert again.metadata.compute_tokens == answer.metadata.compute_tokens > 50


async def test_tokenize_and_decode(client: Client, http: httpx.AsyncClient) -> None:
    for special in (False, True):
        expected = (await post(http, "/tokenize", "embedder", inputs=TEXT, add_special_tokens=special))[0]
        request = pb.EncodeRequest(inputs=TEXT, add_special_tokens=special)
        answer = await client.Tokenize(request, metadata=named("embedder"))
        got = [
            {
                "id": token.id,
                "text": token.text,
                "special": token.special,
                "start": token.start if token.HasField("start") else None,
                "stop": token.stop if token.HasField("stop") else None,
            }
            for token in answer.tokens
        ]
        assert got == expected and len(got) > 5
        ids = [token["id"] for token in expected]
        text = (await post(http, "/decode", "embedder", ids=ids, skip_special_tokens=special))[0]
        decoded = await client.Decode(
            pb.DecodeRequest(ids=ids, skip_special_tokens=special), metadata=named("embedder")
        )
        assert decoded.text == text != ""


async def test_info_describes_the_first_model_or_the_named_one(client: Client, http: httpx.AsyncClient) -> None:
    expected = (await http.get("/info")).json()
    answer = await client.Info(pb.InfoRequest())
    assert (answer.model_id, answer.model_dtype) == (expected["model_id"], expected["model_dtype"])
    assert answer.max_input_length == expected["max_input_length"]
    assert answer.max_batch_tokens == expected["max_batch_tokens"]
    assert not answer.HasField("max_batch_requests") and not answer.HasField("model_sha")
    kinds = {
        model: (await client.Info(pb.InfoRequest(), metadata=named(model))).model_type
        for model in ("embedder", "sparse", "reranker", "classifier", "late")
    }
    assert kinds == {
        "embedder": pb.MODEL_TYPE_EMBEDDING,
        "sparse": pb.MODEL_TYPE_EMBEDDING,
        "late": pb.MODEL_TYPE_EMBEDDING,
        "reranker": pb.MODEL_TYPE_RERANKER,
        "classifier": pb.MODEL_TYPE_CLASSIFIER,
    }


async def test_a_stream_of_200_is_answered_in_order(client: Client, tiny_engine: Engine) -> None:
    texts = mixed_texts(200, seed=5)
    requests = [pb.EmbedRequest(inputs=text, truncate=True) for text in texts]
    answers = await client.all("EmbedStream", requests, metadata=named("embedder"))
    alone = [await client.Embed(request, metadata=named("embedder")) for request in requests[::20]]
    assert len(answers) == 200
    got = float32([answer.embeddings for answer in answers])
    assert np.abs(got[::20] - float32([answer.embeddings for answer in alone])).max() < TOLERANCE
    assert [answer.metadata.compute_chars for answer in answers] == list(map(len, texts))


async def test_every_other_stream_answers_as_its_method(client: Client) -> None:
    cases = [
        ("EmbedSparse", "sparse", [pb.EmbedSparseRequest(inputs=text) for text in mixed_texts(5)]),
        ("EmbedAll", "embedder", [pb.EmbedAllRequest(inputs=text) for text in mixed_texts(5)]),
        ("Predict", "classifier", [pb.PredictRequest(inputs=text) for text in mixed_texts(5)]),
        ("PredictPair", "reranker", [pb.PredictPairRequest(inputs=["q", text]) for text in mixed_texts(5)]),
        ("Tokenize", "embedder", [pb.EncodeRequest(inputs=text) for text in mixed_texts(5)]),
        ("Decode", "embedder", [pb.DecodeRequest(ids=[10 + number, 11]) for number in range(5)]),
    ]
    for name, model, requests in cases:
        streamed = await client.all(f"{name}Stream", requests, metadata=named(model))
        alone = [await getattr(client, name)(request, metadata=named(model)) for request in requests]
        assert len(streamed) == 5
        assert all(map(close, streamed, alone)), name


def close(one: Any, other: Any) -> bool:
    """Equal messages, but for the last bits of numbers."""
    for field in one.DESCRIPTOR.fields:
        left, right = getattr(one, field.name), getattr(other, field.name)
        if field.name == "metadata":
            continue  # times
        if field.message_type is not None:
            if len(left) != len(right) or not all(map(close, left, right)):
                return False
        elif field.cpp_type == field.CPPTYPE_FLOAT:
            if np.shape(left) != np.shape(right) or not np.allclose(left, right, atol=TOLERANCE):
                return False
        elif left != right:
            return False
    return True


async def test_metadata_and_headers_tell_the_cost(client: Client, http: httpx.AsyncClient) -> None:
    expected = await http.post("/embed", json={"model": "embedder", "inputs": TEXT})
    call = client.Embed(pb.EmbedRequest(inputs=TEXT), metadata=named("embedder"))
    cost = (await call).metadata
    assert cost.compute_chars == int(expected.headers["x-compute-characters"]) == len(TEXT)
    assert cost.compute_tokens == int(expected.headers["x-compute-tokens"])
    assert cost.total_time_ns >= cost.tokenization_time_ns + cost.queue_time_ns + cost.inference_time_ns > 0
    headers = dict(await call.initial_metadata())
    ours = {name for name in expected.headers if name.startswith("x-") and name != "x-request-id"}
    assert ours <= set(headers) and headers["x-compute-tokens"] == str(cost.compute_tokens)


async def test_truncation_is_off_unless_asked_for(client: Client) -> None:
    long = "word " * 2000
    cut = client.Embed(pb.EmbedRequest(inputs=long, truncate=True), metadata=named("embedder"))
    right = await cut
    assert dict(await cut.initial_metadata())["x-truncated-inputs"] == "1"
    request = pb.EmbedRequest(inputs="start " + long, truncate=True, truncation_direction=pb.TRUNCATION_DIRECTION_LEFT)
    left = await client.Embed(request, metadata=named("embedder"))
    # Cut at its left end, the text that starts otherwise is the same.
    assert np.array_equal(float32(left.embeddings), float32(right.embeddings))
    status = await refusal(client.Embed(pb.EmbedRequest(inputs=long), metadata=named("embedder")))
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT and "tokens" in status.details()
