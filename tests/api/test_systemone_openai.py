"""POST /v1/decisions in OpenAI's form: answers in order, typed choices, bad requests by the field that is wrong."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest

from infinity_bento.decisions import DecisionRules, FieldPath, QuestionKind
from infinity_bento.errors import InputTooLong, InvalidInput
from tests.api.fakes import FakeEngine, client_for
from tests.api.test_systemone import DEEP, MODEL, engine

BODY: dict[str, Any] = {
    "model": "decider",
    "input": "I was charged twice.",
    "questions": [
        {"type": "predicate", "instructions": "refund?", "name": "p"},
        {
            "type": "choice",
            "instructions": [
                {"type": "input_text", "text": "Whose is it?"},
                {"type": "input_json", "data": {"teams": 2}},
            ],
            "choices": [{"value": "true", "description": "ours"}, {"value": True}, {"value": "it"}],
        },
        {
            "type": "score",
            "instructions": [{"type": "input_text", "text": "How"}, {"type": "input_text", "text": "upset?"}],
            "levels": [{"label": "calm"}, {"label": "mad", "description": "shouts"}],
        },
    ],
}


async def post(body: Any, made: FakeEngine | None = None, **options: Any) -> httpx.Response:
    async with client_for(made or engine(), **options) as client:
        return await client.post("/v1/decisions", json=body)


async def test_answers_as_published() -> None:
    made = engine()
    response = await post(BODY, made)
    assert response.status_code == 200
    answer = response.json()
    assert answer["usage"] == {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    }
    predicate, choice, score = answer["answers"]
    assert (predicate["type"], predicate["name"], predicate["probability"]) == ("predicate", "p", pytest.approx(2 / 3))
    # A string and a boolean of the same text are two choices.
    assert [(entry["value"], entry["probability"]) for entry in choice["probabilities"]] == [
        ("true", pytest.approx(1 / 6)),
        (True, pytest.approx(2 / 6)),
        ("it", pytest.approx(3 / 6)),
    ]
    assert (choice["name"], choice["choice"]) == (None, "it")
    assert choice["confidence"] == pytest.approx((3 / 6 - 1 / 3) / (2 / 3))
    assert score["score"] == pytest.approx(2 / 3)
    assert [(entry["value"], entry["label"]) for entry in score["probabilities"]] == [(0, "calm"), (1, "mad")]
    assert predicate["x_act_probability"] == 0.25 and answer["x_family"] == "d3"

    (item,) = made.submitted
    assert item.decision is not None and item.decision.state == "I was charged twice."
    questions = item.decision.questions
    assert [question.id for question in questions] == ["p", "q2", "q3"]
    assert [question.kind for question in questions] == [QuestionKind.NOUL, QuestionKind.CHOICE, QuestionKind.SCORE]
    assert [question.instructions for question in questions] == [
        "refund?",
        ["Whose is it?", {"teams": 2}],
        "How\nupset?",
    ]
    assert [option.name for option in questions[1].options] == ["true", "true", "it"]
    assert [option.description for option in questions[2].options] == ["calm", "mad: shouts"]


async def test_messages_are_the_state_as_sent() -> None:
    made = engine()
    messages = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    assert (await post(BODY | {"input": messages, "model": "jev-latest"}, made)).status_code == 200
    assert made.submitted[0].decision is not None and made.submitted[0].decision.state == messages


async def test_equal_names_are_told_apart() -> None:
    made = engine()
    questions = [{"type": "predicate", "instructions": "?", "name": name} for name in ("same", "q4", "same", None)]
    response = await post(BODY | {"questions": questions}, made)
    assert [answer["name"] for answer in response.json()["answers"]] == ["same", "q4", "same", None]
    assert made.submitted[0].decision is not None
    ids = [question.id for question in made.submitted[0].decision.questions]
    assert len(set(ids)) == 4


def changed(*path: Any, value: Any) -> dict[str, Any]:
    """The body with one field replaced; ``...`` removes it."""
    body = copy.deepcopy(BODY)
    place: Any = body
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return body


PICTURE = {"type": "input_image", "image_url": "data:"}
BAD: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    (changed("model", value=...), ("model",)),
    (changed("input", value=...), ("input",)),
    (changed("input", value=""), ("input",)),
    (changed("input", value={"a": 1}), ("input",)),
    (changed("input", value=DEEP), ("input",)),
    (changed("input", value=[{"role": "user", "content": [PICTURE]}]), ("input", 0, "content", 0)),
    (
        changed("input", value=[{"type": "function_call_output", "call_id": "c", "output": [PICTURE]}]),
        ("input", 0, "output", 0),
    ),
    (changed("questions", value=...), ("questions",)),
    (changed("questions", value=[]), ("questions",)),
    (changed("questions", value={}), ("questions",)),
    (changed("questions", value=[BODY["questions"][0]] * 65), ("questions",)),
    (changed("questions", 0, value="?"), ("questions", 0)),
    (changed("questions", 0, "type", value="noul"), ("questions", 0, "type")),
    (changed("questions", 0, "type", value=[]), ("questions", 0, "type")),
    (changed("questions", 0, "name", value=7), ("questions", 0, "name")),
    (changed("questions", 0, "instructions", value=...), ("questions", 0, "instructions")),
    (changed("questions", 0, "instructions", value=""), ("questions", 0, "instructions")),
    (changed("questions", 1, "instructions", value=[PICTURE]), ("questions", 1, "instructions", 0)),
    (changed("questions", 1, "instructions", value=[{"type": "video"}]), ("questions", 1, "instructions", 0)),
    (changed("questions", 1, "instructions", 0, "text", value=None), ("questions", 1, "instructions", 0)),
    (changed("questions", 1, "instructions", 1, "data", value=DEEP), ("questions", 1, "instructions", 1)),
    (changed("questions", 1, "choices", value=...), ("questions", 1, "choices")),
    (changed("questions", 1, "choices", value=[{"value": "one"}]), ("questions", 1, "choices")),
    (changed("questions", 1, "choices", value=[{"value": str(i)} for i in range(256)]), ("questions", 1, "choices")),
    (changed("questions", 1, "choices", 2, "value", value=1), ("questions", 1, "choices", 2, "value")),
    (changed("questions", 1, "choices", 2, "value", value=True), ("questions", 1, "choices", 2, "value")),
    (changed("questions", 1, "choices", 2, "description", value=1), ("questions", 1, "choices", 2, "description")),
    (changed("questions", 2, "levels", value={}), ("questions", 2, "levels")),
    (changed("questions", 2, "levels", value=[{"label": str(i)} for i in range(11)]), ("questions", 2, "levels")),
    (changed("questions", 2, "levels", 0, value=None), ("questions", 2, "levels", 0, "label")),
    (changed("questions", 2, "levels", 0, "label", value=""), ("questions", 2, "levels", 0, "label")),
]


@pytest.mark.parametrize(("body", "path"), BAD)
async def test_bad_requests_name_the_field_and_never_reach_the_model(
    body: dict[str, Any], path: tuple[Any, ...]
) -> None:
    made = engine()
    response = await post(body, made)
    assert response.status_code == 422 and not made.submitted
    answer = response.json()
    assert answer["detail"][0]["loc"] == ["body", *path]
    assert answer["error"]["param"] == ".".join(map(str, path)) and answer["error"]["code"] == "invalid_input"
    assert f"`{answer['error']['param']}`" in answer["error"]["message"] == answer["detail"][0]["msg"]


async def test_errors_of_the_model_name_the_fields_of_this_form() -> None:
    refused = InvalidInput("Too many.", param=FieldPath("questions", "q2", "criteria"))
    response = await post(BODY, engine(raises=refused))
    assert response.json()["detail"][0]["loc"] == ["body", "questions", 1, "choices"]
    response = await post(BODY, engine(raises=InputTooLong("Too long.", param="state")))
    assert response.json()["detail"]["loc"] == ["body", "input"]


async def test_neutral_ids() -> None:
    made = engine()
    await post(BODY, made, decisions=DecisionRules(neutral_ids=True))
    assert made.submitted[0].decision is not None
    assert [question.shown_id for question in made.submitted[0].decision.questions] == ["q1", "q2", "q3"]


async def test_the_other_form_is_system_one() -> None:
    body = {"model": MODEL.name, "state": "x", "questions": {"a": {"type": "noul", "instructions": "?"}}}
    response = await post(body)
    assert response.status_code == 200 and set(response.json()["answers"]) == {"a"}
