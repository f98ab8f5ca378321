"""A decision request that fits no batch is refused before it is queued: the model never runs, the next one is fine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infinity_bento.batching.packing import computed_tokens, pack
from infinity_bento.core import Encoded, Item, Task
from infinity_bento.decisions import DecisionRequest, Option, Question, QuestionKind
from infinity_bento.engine import Engine
from infinity_bento.errors import InputTooLong, InvalidInput
from infinity_bento.inputs.decisions import DecisionTokenizer
from infinity_bento.runners.runner import Runner
from infinity_bento.settings import resolve
from tests import tiny_clef, tiny_laya, tiny_readouts
from tests.api.fakes import client_for

OPTIONS = (Option("false"), Option("true"))
BUDGET = 1200


def request(questions: int) -> Item:
    asked = tuple(Question(f"q{n}", QuestionKind.NOUL, OPTIONS, f"question {n}?") for n in range(questions))
    return Item(Task.DECIDE, decision=DecisionRequest("state", asked))


def write(asked: DecisionRequest) -> Encoded:
    """Eight tokens of state and two of its own for each question."""
    parts = [Encoded([*range(1, 9), 20 + n, 30 + n]) for n in range(len(asked.questions))]
    return Encoded([], parts=parts)


def tokenizer(budget: int, *, causal: bool) -> DecisionTokenizer:
    def computed(sequences: Any) -> int:
        return computed_tokens(sequences, causal=causal)

    return DecisionTokenizer(None, write, budget=budget, computed=computed)  # type: ignore[arg-type]


@pytest.mark.parametrize(("causal", "most"), [(False, 5), (True, 21)])
def test_what_is_shared_does_not_count(causal: bool, most: int) -> None:
    """Of 50 tokens: five times ten, or once eight and 21 times two."""
    fits, not_quite = tokenizer(50, causal=causal).encode([request(most), request(most + 1)])
    assert isinstance(fits, Encoded) and len(fits) == 10 * most
    assert isinstance(not_quite, InputTooLong) and not_quite.param == "state"
    assert [int(word) for word in re.findall(r"\d+", not_quite.message)] == [60 if not causal else 52, most + 1, 50]


def test_it_counts_what_packing_makes_of_it() -> None:
    sequences = write(request(6).decision).parts  # type: ignore[arg-type]
    assert sequences is not None
    for causal in (False, True):
        assert computed_tokens(sequences, causal=causal) == pack(sequences, causal=causal).rows


def test_an_item_without_questions_gets_its_error() -> None:
    (error,) = tokenizer(50, causal=True).encode([Item(Task.EMBED, text="a")])
    assert isinstance(error, InvalidInput)


MODELS: dict[str, Callable[[], Path]] = {
    "causal": lambda: tiny_readouts.readout("d3"),
    "noncausal": lambda: tiny_readouts.readout("pplx", "noncausal_full_attention"),
    "laya": tiny_laya.folder,
    "clef": tiny_clef.folder,
}


@pytest.fixture(scope="module", params=list(MODELS))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    given = {"model-id": str(MODELS[request.param]()), "served-model-name": "m", "warmup": "false"}
    with Engine.from_settings(resolve(given | {"max-batch-tokens": str(BUDGET)})) as engine:
        yield request.param, engine


async def post(engine: Engine, state: str, questions: int) -> httpx.Response:
    asked = {f"q{n}": {"type": "noul", "instructions": f"question {n}?"} for n in range(questions)}
    async with client_for(engine) as client:  # type: ignore[arg-type]
        return await client.post("/v1/systemone", json={"model": "m", "state": state, "questions": asked})


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each batch that a model runs."""
    runs: list[int] = []
    run = Runner.run

    def noting(self: Runner, batch: Any, items: Any) -> Any:
        runs.append(batch.rows)
        return run(self, batch, items)

    monkeypatch.setattr(Runner, "run", noting)
    return runs


# What each family cannot take: many questions about a middling state, or one about a long one. Laya cuts long states.
TOO_MUCH = {
    "causal": [("word " * 2000, 1), ("word " * 100, 60)],
    "noncausal": [("word " * 2000, 1), ("word " * 100, 20)],
    "laya": [("word " * 2000, 4), ("word " * 100, 20)],
    "clef": [("word " * 2000, 1), ("word " * 100, 60)],
}


async def test_too_much_is_refused_and_the_next_request_works(
    served: tuple[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, engine = served
    runs = counting(monkeypatch)
    for state, questions in TOO_MUCH[name]:
        response = await post(engine, state, questions)
        answer = response.json()
        assert (response.status_code, answer["error_type"]) == (422, "max_tokens_exceeded"), answer
        assert answer["detail"]["loc"] == ["body", "state"]
        counts = [int(word) for word in re.findall(r"(?<![\w-])\d+", answer["error"])]
        limits = {BUDGET, engine.infos()[0].max_input_length}
        assert limits & set(counts) and max(counts) > min(limits), answer["error"]
    assert not runs
    good = await post(engine, "word", 2)
    assert good.status_code == 200 and len(good.json()["answers"]) == 2 and len(runs) == 1


async def test_a_shared_state_is_counted_once(served: tuple[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    name, engine = served
    runs = counting(monkeypatch)
    response = await post(engine, "word " * 100, 10)
    if name == "causal":
        assert response.status_code == 200, response.text
        assert runs and max(runs) <= BUDGET < response.json()["usage"]["input_tokens"]
    else:
        assert response.status_code == 422 and not runs, response.text
