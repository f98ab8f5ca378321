from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from infinity_bento.core import Task
from infinity_bento.errors import InferenceError, Overloaded
from tests.api.fakes import BROKEN, INFO, LOADING, FakeEngine, client_for, two_models, vector_of


async def post(body: Any, engine: FakeEngine | None = None) -> httpx.Response:
    async with client_for(engine or FakeEngine()) as client:
        return await client.post("/embed", json=body)


@pytest.mark.parametrize("given", ["a", ["a"], [5, 6], [[5, 6], [7]], ["a", [5]]])
async def test_answers_a_list_of_vectors(given: Any) -> None:
    engine = FakeEngine()
    answer = await post({"inputs": given}, engine)
    assert answer.status_code == 200
    rows = np.array(answer.json(), dtype=np.float32)
    assert np.array_equal(rows, np.stack([vector_of(item, 8) for item in engine.submitted]))


async def test_options_reach_the_items() -> None:
    engine = FakeEngine()
    options = {"truncate": False, "truncation_direction": "Left", "prompt_name": "query", "normalize": False}
    assert (await post({"inputs": ["a", "b"], "dimensions": 4, "model": "m", **options}, engine)).status_code == 200
    assert len(engine.submitted) == 2
    for item in engine.submitted:
        assert item.task is Task.EMBED and item.truncate is False and item.truncation_direction == "left"
        assert item.prompt_name == "query" and item.normalize is False and item.dimensions == 4


async def test_defaults_and_null_are_the_same() -> None:
    engine = FakeEngine()
    names = ("truncate", "truncation_direction", "prompt_name", "normalize", "dimensions", "model")
    await post({"inputs": "a", **dict.fromkeys(names)}, engine)
    with_null = engine.submitted
    await post({"inputs": "a"}, engine)
    assert with_null == engine.submitted
    item = with_null[0]
    assert item.normalize is True and item.truncate is None and item.truncation_direction == "right"


async def test_compute_headers() -> None:
    answer = await post({"inputs": ["ab cd", "e"]})
    headers = answer.headers
    assert headers["x-compute-type"] == "cpu"
    assert headers["x-compute-characters"] == "6" and headers["x-compute-tokens"] == "3"
    assert headers["x-tokenization-time"] == "1" and headers["x-queue-time"] == "2"
    assert headers["x-inference-time"] == "3"
    assert headers["x-total-time"] == headers["x-compute-time"] and headers["x-total-time"].isdigit()
    assert "tokenize;dur=1.000, queue;dur=2.000, inference;dur=3.000" in headers["server-timing"]
    on_gpu = await post({"inputs": "a"}, FakeEngine(models=(replace(INFO, device="cuda:0"),)))
    assert on_gpu.headers["x-compute-type"] == "gpu"


async def test_truncation_header() -> None:
    assert (await post({"inputs": ["a", "b"]}, FakeEngine(truncated_from=99))).headers["x-truncated-inputs"] == "2"


BAD = [
    ({}, 422, "Validation", "`inputs` is missing"),
    ({"inputs": None}, 422, "Validation", "`inputs` is null"),
    ({"inputs": 1.5}, 422, "Validation", "the number 1.5"),
    ({"inputs": []}, 400, "Empty", "`inputs` is an empty array"),
    ({"inputs": ""}, 400, "Empty", "`inputs` is an empty string"),
    ({"inputs": ["a", ""]}, 400, "Empty", "`inputs[1]` is an empty string"),
    ({"inputs": [["a"], ["b"]]}, 422, "Validation", "`inputs[0][0]`"),
    ({"inputs": [[1.0]]}, 422, "Validation", "`inputs[0][0]`"),
    ({"inputs": ["a"] * 5}, 422, "Validation", "`inputs` has 5 inputs; the limit of model 'm' is 4"),
    ({"inputs": "a", "truncate": "yes"}, 422, "Validation", "`truncate` is the string"),
    ({"inputs": "a", "truncate": 1}, 422, "Validation", "`truncate` is the number 1; it must be true or false"),
    ({"inputs": "a", "truncation_direction": "up"}, 422, "Validation", '"right" or "left"'),
    ({"inputs": "a", "truncation_direction": {}}, 422, "Validation", "an object"),
    ({"inputs": "a", "prompt_name": "nope"}, 422, "Validation", "'query'"),
    ({"inputs": "a", "prompt_name": 1}, 422, "Validation", "a string"),
    ({"inputs": "a", "normalize": 0}, 422, "Validation", "true or false"),
    ({"inputs": "a", "dimensions": 0}, 422, "Validation", "at least 1"),
    ({"inputs": "a", "dimensions": 9}, 422, "Validation", "from 1 to 8"),
    ({"inputs": "a", "model": "nope"}, 404, "Validation", "served: m"),
    ({"inputs": ["a", "too long b"]}, 422, "Validation", "`inputs[1]`: The input has 99 tokens"),
    ({"inputs": "too long b"}, 422, "Validation", "`inputs`: The input has 99 tokens"),
    ("a", 422, "Validation", "The body is a string"),
    (None, 422, "Validation", "The body is null"),
]


@pytest.mark.parametrize(("body", "status", "kind", "text"), BAD)
async def test_bad_input_is_refused_with_path_and_reason(body: Any, status: int, kind: str, text: str) -> None:
    async with client_for(FakeEngine()) as client:
        import orjson

        answer = await client.post("/embed", content=orjson.dumps(body))
    assert answer.status_code == status
    assert set(answer.json()) == {"error", "error_type"}
    assert answer.json()["error_type"] == kind and text in answer.json()["error"]


@pytest.mark.parametrize(
    ("engine", "model", "status", "kind"),
    [
        (FakeEngine(raises=Overloaded("Full; retry.")), None, 429, "Overloaded"),
        (FakeEngine(raises=InferenceError("NaN; report it.")), None, 424, "Backend"),
        (FakeEngine(state=LOADING), None, 503, "Unhealthy"),
        (two_models(), "r", 424, "Backend"),
        (two_models(), None, 422, "Validation"),
    ],
)
async def test_statuses_of_teis_contract(engine: FakeEngine, model: str | None, status: int, kind: str) -> None:
    answer = await post({"inputs": "a", "model": model}, engine)
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind)
    assert ("retry-after" in answer.headers) == (status in (429, 503))


TEI_FIELDS = [
    "model_id",
    "model_sha",
    "model_dtype",
    "served_model_name",
    "model_type",
    "max_concurrent_requests",
    "max_input_length",
    "max_batch_tokens",
    "max_batch_requests",
    "max_client_batch_size",
    "auto_truncate",
    "tokenization_workers",
    "version",
    "sha",
    "docker_label",
]


async def test_info_has_teis_fields_then_every_model() -> None:
    async with client_for(two_models()) as client:
        body = (await client.get("/info")).json()
    assert list(body) == [*TEI_FIELDS, "models"]
    assert body["model_id"] == "org/m" and body["served_model_name"] == "m" and body["version"] == "9.9"
    assert body["model_type"] == {"embedding": {"pooling": "last_token"}}
    assert [model["name"] for model in body["models"]] == ["m", "n", "r"]
    assert body["models"][0]["id2label"] == {"0": "no", "1": "yes"} and body["models"][0]["tasks"] == ["embed"]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Task.EMBED_SPARSE, {"embedding": {"pooling": "splade"}}),
        (Task.RERANK, {"reranker": {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}}),
        (Task.CLASSIFY, {"classifier": {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}}),
    ],
)
async def test_info_names_the_kind_of_model(task: Task, expected: dict[str, Any]) -> None:
    async with client_for(FakeEngine(models=(replace(INFO, tasks=(task,)),))) as client:
        assert (await client.get("/info")).json()["model_type"] == expected


@pytest.mark.parametrize(("state", "text"), [(LOADING, "stage 2 of 6 (read weights)"), (BROKEN, "no tensor 'x'")])
async def test_info_while_not_ready_tells_the_stage(state: Any, text: str) -> None:
    async with client_for(FakeEngine(state=state)) as client:
        answer = await client.get("/info")
    assert answer.status_code == 503 and text in answer.json()["error"]
