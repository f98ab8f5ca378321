"""POST /v1/systemone: the published contract, and bad requests, for which the model is never called."""

from __future__ import annotations

import base64
import copy
import json
import math
from dataclasses import replace
from typing import Any

import httpx
import msgpack
import pytest
import zstandard

from infinity_bento.core import Task
from infinity_bento.decisions import DecisionRules, QuestionKind
from infinity_bento.errors import InputTooLong, Overloaded
from tests.api.fakes import INFO, FakeEngine, client_for, serving

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
MANY = {str(i): {"type": "choice", "criteria": dict.fromkeys(map(str, range(200)))} for i in range(3)}
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]


def asset(name: str = "charged", **fields: Any) -> dict[str, Any]:
    return changed("assets", value={name: {"type": "image", "format": "png", "data_base64": PNG} | fields})


SEEN = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
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
    (changed("questions", "a", "criteria", value={"maybe": "x"}), "questions.a.criteria.maybe"),
    (changed("questions", "b", "criteria", value=...), "questions.b.criteria"),
    (changed("questions", "b", "criteria", value={}), "questions.b.criteria"),
    (changed("questions", "b", "criteria", value=["x", "y"]), "questions.b.criteria"),
    (changed("questions", "b", "criteria", value={str(i): None for i in range(256)}), "questions.b.criteria"),
    (changed("questions", "b", "criteria", "z", value=1.5), "questions.b.criteria.z"),
    (changed("questions", "c", "criteria", value={}), "questions.c.criteria"),
    (changed("questions", "c", "criteria", value={"0": "lo"}), "questions.c.criteria"),
    (changed("questions", "c", "criteria", value=["lo", None]), "questions.c.criteria.1"),
    (changed("questions", "c", "criteria", value=[str(i) for i in range(11)]), "questions.c.criteria"),
    (changed("questions", value=MANY), "questions"),
    (changed("questions", value={"": ASKED}), "questions."),
    (changed("questions", value={"dots.in.it": {"type": "box"}}), "questions.dots.in.it.type"),
    (changed("questions", value={"7": {"type": 7}}), "questions.7.type"),
    (changed("questions", "a", "instructions", value=DEEP), "questions.a.instructions"),
    (changed("state", value=DEEP), "state"),
    (changed("state", value={"messages": [{"content": "hi"}, SEEN]}), "state.messages.1.content.0"),
    (changed("state", value=[SEEN]), "state.0.content.0"),
    (changed("assets", value={}), "assets"),
    (changed("assets", value={f"charge{i}": {} for i in range(5)}), "assets"),
    (changed("assets", value={"charged": "x"}), "assets.charged"),
    (asset(type="video"), "assets.charged"),
    (asset("unused"), "assets.unused"),
    (asset("msg"), "assets.msg"),  # a key is no text
    (asset("question's"), "assets.question's"),
    (asset(format="gif"), "assets.charged.format"),
    (asset(format=None), "assets.charged.format"),
    (asset(data_base64="not base64!"), "assets.charged.data_base64"),
    (asset(data_base64="\u00fc"), "assets.charged.data_base64"),
    (asset(data_base64=None), "assets.charged.data_base64"),
    (asset(data_base64=base64.b64encode(b"GIF89a").decode()), "assets.charged"),
    (asset(part="asset-0"), "assets.charged.part"),
    (asset(), "assets"),
]  # fmt: skip


def location(path: str) -> list[str | int]:
    """The path as the published service has it: indices of arrays are numbers, keys of objects are not."""
    if path == "questions.":
        return ["questions", ""]
    if path.startswith("questions.dots"):
        return ["questions", "dots.in.it", "type"]
    in_array = path.startswith("state.") or path.startswith("questions.c.criteria.")
    return [int(part) if in_array and part.isdecimal() else part for part in path.split(".")]


@pytest.mark.parametrize(("body", "path"), BAD)
async def test_bad_requests_name_the_field_and_never_reach_the_model(body: dict[str, Any], path: str) -> None:
    made = engine()
    response = await post(body, made)
    assert response.status_code == 422
    answer = response.json()
    assert f"`{path}`" in answer["error"] and answer["error_type"] == "validation_error"
    (detail,) = answer["detail"]
    assert detail["loc"] == ["body", *location(path)]
    assert detail["msg"] == answer["error"] and detail["type"]
    assert response.headers["x-typesafe-request-id"] == response.headers["x-request-id"]
    assert not made.submitted


REPEATED = [
    (b'{"model": "decider", "model": "x", "state": "s", "questions": {}}', ["model"]),
    (
        b'{"model": "decider", "state": "s", "questions": {"b": {"type": "choice", "criteria": {"x": "1", "y": "2", '
        b'"x": "3"}}}}',
        ["questions", "b", "criteria", "x"],
    ),
    (b'{"model": "decider", "state": [1, {"k": 1, "\\u006b": 2}], "questions": {}}', ["state", 1, "k"]),
]


@pytest.mark.parametrize(("content", "path"), REPEATED)
async def test_a_key_that_is_there_twice_is_refused(content: bytes, path: list[Any]) -> None:
    made = engine()
    async with client_for(made) as client:
        response = await client.post("/v1/systemone", content=content)
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", *path] and "twice" in response.json()["error"]
    assert not made.submitted


PACKED = [
    (BODY | {"state": {"a": b"bytes"}}, "state"),
    (BODY | {"state": {"a": [math.nan]}}, "state"),
    (BODY | {"state": {b"k": 1}}, "state"),
    (BODY | {"state": {"a": msgpack.ExtType(1, b"x")}}, "state"),
]


@pytest.mark.parametrize(("body", "path"), PACKED)
async def test_what_json_cannot_hold_is_refused(body: dict[str, Any], path: str) -> None:
    made = engine()
    async with client_for(made) as client:
        headers = {"content-type": "application/msgpack"}
        response = await client.post("/v1/systemone", content=msgpack.packb(body), headers=headers)
    assert response.status_code == 422 and response.json()["detail"][0]["loc"] == ["body", path]
    assert not made.submitted


async def test_packed_bodies_and_their_repeated_keys() -> None:
    good = msgpack.packb(BODY)
    twice = b"\x82\xa5state\xa1x\xa5state\xa1y"
    async with client_for(engine()) as client:
        headers = {"content-type": "application/msgpack"}
        assert (await client.post("/v1/systemone", content=good, headers=headers)).status_code == 200
        response = await client.post("/v1/systemone", content=twice, headers=headers)
    assert (response.status_code, response.json()["detail"][0]["loc"]) == (422, ["body", "state"])


LIMITS = [
    (DecisionRules(questions=2), BODY, "questions", "decision_max_questions"),
    (DecisionRules(options=2), changed("questions", "b", "criteria", "third", value=None), "questions.b.criteria",
     "decision_max_options"),
    (DecisionRules(levels=2), BODY, "questions.c.criteria", "decision_max_levels"),
    (DecisionRules(total_options=6), BODY, "questions", "decision_max_total_options"),
    (DecisionRules(images=1), changed("assets", value={"charged": {}, "twice": {}}), "assets", "decision_max_images"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "body", "path", "option"), LIMITS)
async def test_limits_are_options(rules: DecisionRules, body: dict[str, Any], path: str, option: str) -> None:
    made = engine()
    async with client_for(made, decisions=rules) as client:
        response = await client.post("/v1/systemone", json=body)
    assert response.status_code == 422 and not made.submitted
    assert response.json()["detail"][0]["loc"] == ["body", *path.split(".")] and option in response.json()["error"]


async def test_limits_can_be_raised() -> None:
    body = changed("questions", "c", "criteria", value=[str(i) for i in range(32)])
    async with client_for(engine(), decisions=DecisionRules(levels=32)) as client:
        response = await client.post("/v1/systemone", json=body)
    assert response.status_code == 200 and len(response.json()["answers"]["c"]["legend"]) == 32


async def test_neutral_ids_change_the_prompt_and_not_the_answer() -> None:
    made = engine()
    async with client_for(made, decisions=DecisionRules(neutral_ids=True)) as client:
        response = await client.post("/v1/systemone", json=BODY)
    (item,) = made.submitted
    assert item.decision is not None
    assert [question.shown_id for question in item.decision.questions] == ["q1", "q2", "q3"]
    assert list(response.json()["answers"]) == ["a", "b", "c"]


async def test_other_refusals_have_statuses_that_no_sdk_repeats() -> None:
    unknown = await post(BODY | {"model": "nobody"})
    assert (unknown.status_code, unknown.json()["detail"]["error_type"]) == (400, "api_usage_error")
    async with client_for(engine()) as client:
        broken = await client.post("/v1/systemone", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 422 and broken.json()["detail"][0]["loc"] == ["body"]
    long = await post(BODY, engine(raises=InputTooLong("Too long.", param="state")))
    assert (long.status_code, long.json()["error_type"]) == (422, "max_tokens_exceeded")
    assert long.json()["detail"] == {
        "error_type": "max_tokens_exceeded",
        "message": "Too long.",
        "loc": ["body", "state"],
    }
    async with client_for(engine(), api_key="k") as client:
        locked = await client.post("/v1/systemone", json=BODY)
        assert (locked.status_code, locked.json()["detail"]["error_type"]) == (401, "authentication_error")
        assert locked.headers["x-typesafe-request-id"]
        wrong = await client.get("/v1/systemone", headers={"authorization": "Bearer k"})
        assert (wrong.status_code, wrong.json()["error_type"]) == (405, "api_usage_error")
    async with client_for(engine(), payload_limit=100) as client:
        large = await client.post("/v1/systemone", json=BODY)
        bomb = zstandard.compress(b" " * 100_000)
        blown = await client.post("/v1/systemone", content=bomb, headers={"content-encoding": "zstd"})
    assert (large.status_code, blown.status_code) == (413, 413)
    full = await post(BODY, engine(raises=Overloaded("Full.", retry_after_seconds=3)))
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    assert full.json()["error_type"] == "rate_limit_error"


@pytest.mark.parametrize("alias", ["jev-latest", "jev-preview"])
async def test_an_alias_means_the_only_decision_model(alias: str) -> None:
    response = await post(BODY | {"model": alias})
    assert response.json()["model"] == "decider"


async def test_of_several_decision_models_an_alias_must_be_configured() -> None:
    made = serving(replace(MODEL, name="one"), replace(MODEL, name="two"))
    async with client_for(made) as client:
        unclear = await client.post("/v1/systemone", json=BODY | {"model": "jev-latest"})
    assert unclear.status_code == 422 and "one" in unclear.json()["error"] and not made.submitted
    rules = DecisionRules(aliases={"jev-latest": "two", "house-judge": "one"})
    async with client_for(made, decisions=rules) as client:
        for alias, name in (("jev-latest", "two"), ("house-judge", "one"), ("one", "one")):
            answer = (await client.post("/v1/systemone", json=BODY | {"model": alias})).json()
            assert answer["model"] == name


async def test_other_models_do_not_decide() -> None:
    async with client_for(serving(INFO, MODEL)) as client:
        response = await client.post("/v1/systemone", json=BODY | {"model": INFO.name})
        assert (response.status_code, response.json()["detail"]["error_type"]) == (400, "api_usage_error")
        assert (await client.post("/v1/systemone", json=BODY | {"model": "jev-latest"})).status_code == 200


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
        for kind in ("boundary=x", "x=y", "boundary=", "boundary=x; charset=nonsense"):
            headers = {"content-type": f"multipart/form-data; {kind}"}
            broken = await client.post("/v1/systemone", content=b"--x\r\nnonsense", headers=headers)
            assert broken.status_code == 422


async def test_a_form_may_hold_all_that_the_payload_limit_allows() -> None:
    made = engine()
    body = BODY | {"state": "\u00fc" * 1_500_000}
    async with client_for(made) as client:
        assert (await client.post("/v1/systemone", **form(request_part(body)))).status_code == 200
    (item,) = made.submitted
    assert item.decision is not None and item.decision.state == body["state"]
