"""POST /v1/systemone: the published contract, and bad requests, for which the model is never called."""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
import zstandard

from infinity_bento.core import Task
from infinity_bento.decisions import QuestionKind
from infinity_bento.errors import InputTooLong, Overloaded
from tests.api.fakes import INFO, FakeEngine, client_for

MODEL = replace(INFO, name="decider", tasks=(Task.DECIDE,), decision_protocol="d3")
BODY: dict[str, Any] = {
    "model": "decider",
    "state": {"msg": "charged twice"},
    "questions": {
        "a": {"type": "noul", "instructions": "refund?"},
        "b": {"type": "choice", "instructions": "team", "criteria": {"z": None, "a": "pay"}},
        "c": {"type": "score", "instructions": "mad?", "criteria": ["lo", {"x": 1}, "hi"]},
    },
}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n rest").decode()


def engine(**knobs: Any) -> FakeEngine:
    return FakeEngine(models=(MODEL,), **knobs)


async def post(body: Any, made: FakeEngine | None = None, **options: Any) -> httpx.Response:
    async with client_for(made or engine()) as client:
        return await client.post("/v1/systemone", json=body, **options)


async def test_answers_as_published() -> None:
    made = engine()
    response = await post(BODY, made)
    assert response.status_code == 200
    assert response.headers["x-typesafe-request-id"] == response.headers["x-request-id"]
    answer = response.json()
    assert answer["model"] == "decider" and answer["x_family"] == "d3"
    assert answer["usage"] == {"input_tokens": 0, "output_tokens": 0}
    assert list(answer["answers"]) == ["a", "b", "c"]
    assert answer["answers"]["a"] == {
        "type": "noul",
        "noul": pytest.approx(2 / 3),
        "x_native_confidence": pytest.approx(2 / 3),
        "x_act_probability": 0.25,
    }
    assert answer["answers"]["b"] | {} == {
        "type": "choice",
        "choice": "a",
        "confidence": pytest.approx((2 / 3 - 1 / 2) / (1 / 2)),
        "probabilities": {"z": pytest.approx(1 / 3), "a": pytest.approx(2 / 3)},
        "x_native_confidence": pytest.approx(2 / 3),
        "x_act_probability": 0.25,
    }
    score = answer["answers"]["c"]
    assert score["score"] == pytest.approx((2 * 1 + 3 * 2) / 6)
    assert score["legend"] == {"0": "lo", "1": {"x": 1}, "2": "hi"}
    # Mass 1/6 lies two levels from the mode and 1/3 one; a uniform answer is 2/3 of a level from its middle.
    assert score["confidence"] == pytest.approx(max(0.0, 1 - (2 / 6 + 1 / 3) / (2 / 3)))
    (item,) = made.submitted
    assert item.decision is not None and item.decision.state == BODY["state"]
    kinds = [question.kind for question in item.decision.questions]
    assert kinds == [QuestionKind.NOUL, QuestionKind.CHOICE, QuestionKind.SCORE]
    assert [option.name for option in item.decision.questions[0].options] == ["false", "true"]


def changed(*path: str, value: Any) -> dict[str, Any]:
    """The body with one field replaced; ``...`` removes it."""
    body = copy.deepcopy(BODY)
    place = body
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return body


ASKED = {"type": "noul", "instructions": "?"}
BAD: list[tuple[dict[str, Any], str]] = [
    (changed("model", value=...), "model"),
    (changed("model", value=7), "model"),
    (changed("state", value=...), "state"),
    (changed("state", value=None), "state"),
    (changed("state", value=5), "state"),
    (changed("questions", value=...), "questions"),
    (changed("questions", value={}), "questions"),
    (changed("questions", value=[ASKED]), "questions"),
    (changed("questions", value={str(i): ASKED for i in range(65)}), "questions"),
    (changed("questions", "a", value=None), "questions.a"),
    (changed("questions", "a", "type", value="guess"), "questions.a.type"),
    (changed("questions", "a", "type", value="box"), "questions.a.type"),
    (changed("questions", "a", "type", value=...), "questions.a.type"),
    (changed("questions", "a", "instructions", value=...), "questions.a.instructions"),
    (changed("questions", "a", "instructions", value=3), "questions.a.instructions"),
    (changed("questions", "a", "criteria", value=["x"]), "questions.a.criteria"),
    (changed("questions", "a", "criteria", value={"maybe": "x"}), "questions.a.criteria"),
    (changed("questions", "b", "criteria", value=...), "questions.b.criteria"),
    (changed("questions", "b", "criteria", value={}), "questions.b.criteria"),
    (changed("questions", "b", "criteria", value=["x", "y"]), "questions.b.criteria"),
    (changed("questions", "b", "criteria", value={str(i): None for i in range(256)}), "questions.b.criteria"),
    (changed("questions", "b", "criteria", "z", value=1.5), "questions.b.criteria.z"),
    (changed("questions", "c", "criteria", value={}), "questions.c.criteria"),
    (changed("questions", "c", "criteria", value={"0": "lo"}), "questions.c.criteria"),
    (changed("questions", "c", "criteria", value=["lo", None]), "questions.c.criteria.1"),
    (changed("questions", "c", "criteria", value=[str(i) for i in range(11)]), "questions.c.criteria"),
    (
        changed("questions", value={str(i): BODY["questions"]["b"] | {"criteria": dict.fromkeys(map(str, range(200)))}
                                    for i in range(3)}),
        "questions",
    ),
    (changed("assets", value={}), "assets"),
    (changed("assets", value={"unused": {"data_base64": PNG}}), "assets.unused"),
    (changed("assets", value={"charged": {"data_base64": "not base64!"}}), "assets.charged.data_base64"),
    (changed("assets", value={"charged": {"data_base64": base64.b64encode(b"GIF89a").decode()}}), "assets.charged"),
    (changed("assets", value={"charged": {"part": "asset-0"}}), "assets.charged.part"),
    (changed("assets", value={"charged": {"data_base64": PNG}}), "assets"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "path"), BAD)
async def test_bad_requests_name_the_field_and_never_reach_the_model(body: dict[str, Any], path: str) -> None:
    made = engine()
    response = await post(body, made)
    assert response.status_code == 422
    answer = response.json()
    assert path in answer["error"] and answer["error_type"] == "validation_error"
    (detail,) = answer["detail"]
    assert detail["loc"] == ["body", *(int(part) if part.isdecimal() else part for part in path.split("."))]
    assert detail["msg"] == answer["error"] and detail["type"]
    assert not made.submitted


async def test_other_refusals_have_statuses_that_no_sdk_repeats() -> None:
    unknown = await post(BODY | {"model": "nobody"})
    assert (unknown.status_code, unknown.json()["detail"]["error_type"]) == (400, "api_usage_error")
    async with client_for(engine()) as client:
        broken = await client.post("/v1/systemone", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 422 and broken.json()["detail"][0]["loc"] == ["body"]
    long = await post(BODY, engine(raises=InputTooLong("Too long.", param="state")))
    assert (long.status_code, long.json()["error_type"]) == (422, "max_tokens_exceeded")
    full = await post(BODY, engine(raises=Overloaded("Full.", retry_after_seconds=3)))
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    assert full.json()["error_type"] == "rate_limit_error"


@pytest.mark.parametrize("alias", ["jev-latest", "jev-preview"])
async def test_an_alias_means_the_only_decision_model(alias: str) -> None:
    response = await post(BODY | {"model": alias})
    assert response.json()["model"] == "decider"


async def test_unknown_fields_are_ignored_and_one_option_is_certain() -> None:
    body = changed("questions", "b", "criteria", value={"only": None}) | {"extra": 1}
    answer = (await post(body)).json()["answers"]["b"]
    assert (answer["choice"], answer["confidence"]) == ("only", 1.0)


async def test_models_for_both_kinds_of_clients() -> None:
    async with client_for(engine()) as client:
        listed = (await client.get("/v1/models")).json()
    assert [entry["id"] for entry in listed["data"]] == ["decider"]
    (entry,) = listed["models"]
    assert entry["name"] == "decider" and set(entry) == {"name", "description", "release_date"}


async def test_zstd_bodies_and_both_paths() -> None:
    content = zstandard.compress(json.dumps(BODY).encode())
    async with client_for(engine()) as client:
        for path in ("/v1/systemone", "/v1/decisions"):
            headers = {"content-encoding": "zstd", "content-type": "application/json"}
            assert (await client.post(path, content=content, headers=headers)).status_code == 200


def form(*parts: tuple[str, tuple[str | None, bytes, str]]) -> dict[str, Any]:
    return {"files": list(parts)}


def request_part(body: dict[str, Any]) -> tuple[str, tuple[str | None, bytes, str]]:
    return "request", (None, json.dumps(body).encode(), "application/json")


IMAGE = ("asset-0", ("a.png", b"\x89PNG\r\n\x1a\n rest", "image/png"))


async def test_multipart_forms() -> None:
    claimed = BODY | {"assets": {"charged": {"type": "image", "part": "asset-0"}}}
    async with client_for(engine()) as client:
        plain = await client.post("/v1/systemone", **form(request_part(BODY)))
        assert plain.status_code == 200
        image = await client.post("/v1/systemone", **form(request_part(claimed), IMAGE))
        assert image.status_code == 422 and "vision tower" in image.json()["error"]
        for parts in ([IMAGE], [request_part(BODY), IMAGE], [request_part(BODY), request_part(BODY)]):
            refused = await client.post("/v1/systemone", **form(*parts))
            assert refused.status_code == 422 and "vision tower" not in refused.json()["error"]
        broken = await client.post(
            "/v1/systemone", content=b"--x\r\nnonsense", headers={"content-type": "multipart/form-data; boundary=x"}
        )
        assert broken.status_code == 422
