from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from infinity_bento.core import Task
from infinity_bento.errors import BatchTooLarge, InferenceError, NotReady, Overloaded
from tests.api.fakes import LOADING, FakeEngine, client_for, two_models, vector_of

URL = "/v1/embeddings"


async def post(body: Any, engine: FakeEngine | None = None, url: str = URL) -> httpx.Response:
    async with client_for(engine or FakeEngine()) as client:
        return await client.post(url, json=body)


@pytest.mark.parametrize("url", [URL, "/embeddings"])
async def test_answers_in_openai_shape(url: str) -> None:
    engine = FakeEngine()
    answer = await post({"model": "m", "input": ["a b", "c"], "user": "u", "unheard_of": 1}, engine, url)
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "list" and body["model"] == "m"
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [(row["object"], row["index"]) for row in body["data"]] == [("embedding", 0), ("embedding", 1)]
    for row, item in zip(body["data"], engine.submitted, strict=True):
        assert item.task is Task.EMBED and item.normalize is True
        assert np.array_equal(np.array(row["embedding"], dtype=np.float32), vector_of(item, 8))


@pytest.mark.parametrize(
    ("given", "texts", "ids"),
    [
        ("a", ["a"], [None]),
        (["a"], ["a"], [None]),
        ([5, 6], [None], [[5, 6]]),
        ([[5, 6], [7]], [None, None], [[5, 6], [7]]),
        (["a", [5]], ["a", None], [None, [5]]),
    ],
)
async def test_every_form_of_input_becomes_items(given: Any, texts: list[Any], ids: list[Any]) -> None:
    engine = FakeEngine()
    assert (await post({"input": given}, engine)).status_code == 200
    assert [item.text for item in engine.submitted] == texts
    assert [item.token_ids for item in engine.submitted] == ids


async def test_base64_carries_the_same_bits_as_float() -> None:
    floats = (await post({"input": ["a", "b"], "encoding_format": "float"})).json()["data"]
    packed = (await post({"input": ["a", "b"], "encoding_format": "base64"})).json()["data"]
    for row, other in zip(floats, packed, strict=True):
        assert np.array(row["embedding"], dtype="<f4").tobytes() == base64.b64decode(other["embedding"], validate=True)


async def test_null_means_the_default() -> None:
    fields = ("model", "encoding_format", "dimensions", "user")
    with_null = await post({"input": "a", **dict.fromkeys(fields)})
    assert with_null.json() == (await post({"input": "a"})).json()


async def test_dimensions_reach_the_engine() -> None:
    engine = FakeEngine()
    body = (await post({"input": "a", "dimensions": 8}, engine)).json()
    assert engine.submitted[0].dimensions == 8 and len(body["data"][0]["embedding"]) == 8
    await post({"input": "a", "dimensions": 3}, engine)
    assert engine.submitted[0].dimensions == 3


async def test_truncation_is_visible() -> None:
    answer = await post({"input": ["a", "b"]}, FakeEngine(truncated_from=40))
    assert answer.json()["usage"]["truncated"] == 2 and answer.headers["x-truncated-inputs"] == "2"
    assert "x-truncated-inputs" not in (await post({"input": "a"})).headers


IDS = "a whole number from 0 to 2147483647"
BAD = [
    ({}, 400, "invalid_input", "input", "missing"),
    ({"input": None}, 400, "invalid_input", "input", "null"),
    ({"input": 5}, 400, "invalid_input", "input", "the number 5"),
    ({"input": True}, 400, "invalid_input", "input", "the boolean true"),
    ({"input": {"a": 1}}, 400, "invalid_input", "input", "an object"),
    ({"input": []}, 400, "empty_input", "input", "at least one"),
    ({"input": ""}, 400, "empty_input", "input", "empty string"),
    ({"input": ["a", ""]}, 400, "empty_input", "input[1]", "empty string"),
    ({"input": [[]]}, 400, "empty_input", "input[0]", "empty array"),
    ({"input": ["a", 3]}, 400, "invalid_input", "input[1]", "the number 3"),
    ({"input": ["a", None]}, 400, "invalid_input", "input[1]", "null"),
    ({"input": [["a"]]}, 400, "invalid_input", "input[0][0]", IDS),
    ({"input": [[1, -1]]}, 400, "invalid_input", "input[0][1]", "the number -1"),
    ({"input": [1, -1]}, 400, "invalid_input", "input[1]", "the number -1"),
    ({"input": [[1, True]]}, 400, "invalid_input", "input[0][1]", "the boolean true"),
    ({"input": [[1, 2**31]]}, 400, "invalid_input", "input[0][1]", IDS),
    ({"input": [1.5]}, 400, "invalid_input", "input[0]", "the number 1.5"),
    ({"input": ["a"] * 5}, 413, "batch_too_large", "input", "the limit of model 'm' is 4"),
    ({"input": "a", "model": "nope"}, 404, "model_not_found", "model", "served: m"),
    ({"input": "a", "model": 3}, 400, "invalid_input", "model", "a string"),
    ({"input": "a", "encoding_format": "hex"}, 400, "invalid_input", "encoding_format", '"float" or "base64"'),
    ({"input": "a", "encoding_format": ["float"]}, 400, "invalid_input", "encoding_format", "an array of 1"),
    ({"input": "a", "dimensions": 0}, 400, "invalid_input", "dimensions", "at least 1"),
    ({"input": "a", "dimensions": True}, 400, "invalid_input", "dimensions", "the boolean true"),
    ({"input": "a", "dimensions": 2.0}, 400, "invalid_input", "dimensions", "the number 2.0"),
    ({"input": "a", "dimensions": 9}, 400, "invalid_input", "dimensions", "from 1 to 8"),
    ({"input": ["a", "too long b"]}, 413, "input_too_long", "input[1]", "`input[1]`: The input has 99 tokens"),
    ({"input": "too long b"}, 413, "input_too_long", "input", "`input`: The input has 99 tokens"),
    ([1], 400, "invalid_input", None, "The body is an array"),
]


@pytest.mark.parametrize(("body", "status", "code", "param", "text"), BAD)
async def test_bad_input_is_refused_with_path_and_reason(
    body: Any, status: int, code: str, param: str | None, text: str
) -> None:
    answer = await post(body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert text in error["message"]


async def test_long_values_are_shown_short() -> None:
    answer = await post({"input": "a", "encoding_format": "x" * 5000})
    assert len(answer.json()["error"]["message"]) < 200


async def test_model_choice_among_several() -> None:
    engine = two_models()
    assert (await post({"input": "a", "model": "n"}, engine)).json()["model"] == "n"
    unnamed = await post({"input": "a"}, engine)
    assert unnamed.status_code == 400 and "m, n" in unnamed.json()["error"]["message"]
    wrong_task = await post({"input": "a", "model": "r"}, engine)
    assert wrong_task.status_code == 400 and wrong_task.json()["error"]["code"] == "unsupported_task"


@pytest.mark.parametrize(
    ("raised", "status", "kind", "retry_after"),
    [
        (Overloaded("Full; retry.", retry_after_seconds=7), 429, "rate_limit_error", "7"),
        (NotReady("Stopping; retry."), 503, "server_error", "1"),
        (InferenceError("The model gave NaN; report it."), 424, "server_error", None),
        (BatchTooLarge("Too many; split."), 413, "invalid_request_error", None),
    ],
)
async def test_engine_errors_keep_their_meaning(
    raised: Exception, status: int, kind: str, retry_after: str | None
) -> None:
    answer = await post({"input": "a"}, FakeEngine(raises=raised))
    assert answer.status_code == status and answer.json()["error"]["type"] == kind
    assert answer.json()["error"]["message"] == str(raised)
    assert answer.headers.get("retry-after") == retry_after


async def test_a_fault_of_the_server_tells_nothing_of_its_inside() -> None:
    answer = await post({"input": "a"}, FakeEngine(raises=RuntimeError("secret path /x")))
    assert answer.status_code == 500
    assert "secret" not in answer.text and answer.headers["x-request-id"] in answer.json()["error"]["message"]


async def test_loading_is_503() -> None:
    answer = await post({"input": "a"}, FakeEngine(state=LOADING))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"


@pytest.mark.parametrize("url", ["/v1/models", "/models"])
async def test_models_are_listed_with_tasks_and_limits(url: str) -> None:
    async with client_for(two_models()) as client:
        body = (await client.get(url)).json()
    assert body["object"] == "list" and [entry["id"] for entry in body["data"]] == ["m", "n", "r"]
    entry = body["data"][0]
    assert (entry["object"], entry["created"], entry["owned_by"]) == ("model", 1_700_000_000, "infinity-bento")
    assert entry["x_tasks"] == ["embed"] and entry["x_dimensions"] == 8 and entry["x_prompts"] == ["query"]
    assert entry["x_limits"]["max_input_length"] == 16


async def test_openai_python_client() -> None:
    import openai

    engine = FakeEngine()
    http_client = client_for(engine)
    async with openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="k", http_client=http_client, max_retries=0
    ) as client:
        default = await client.embeddings.create(model="m", input=["a", "b"])
        floats = await client.embeddings.create(model="m", input=["a", "b"], encoding_format="float")
        for packed, plain in zip(default.data, floats.data, strict=True):
            assert np.array_equal(np.float32(packed.embedding), np.float32(plain.embedding))
        assert [model.id async for model in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError, match="served: m"):
            await client.embeddings.create(model="nope", input="a")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="m", input=[])
        assert caught.value.code == "empty_input" and caught.value.param == "input"


async def test_width_unknown_leaves_dimensions_to_the_engine() -> None:
    engine = FakeEngine()
    engine.models = (replace(engine.models[0], dimensions=None),)
    assert (await post({"input": "a", "dimensions": 900}, engine)).status_code == 200
    assert engine.submitted[0].dimensions == 900
