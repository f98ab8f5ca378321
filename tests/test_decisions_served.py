"""Decision models behind the real server: the published conformance suite and SDK, and BentoML's client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bentoml
import httpx
import openai
import pytest
from typesafe_sdk import (
    AsyncTypeSafeClient,
    Choice,
    Image,
    Noul,
    Score,
    TypeSafeClient,
    TypeSafeUnprocessableEntityError,
)

from tests import tiny_laya, tiny_readouts
from tests.bentos import ROOT, Served, environment, serve

MODELS: dict[str, tuple[Callable[[], Path], dict[str, str]]] = {
    "d3": (lambda: tiny_readouts.readout("d3"), {}),
    "onejev": (tiny_readouts.onejev, {"INFINITY_DECISION_PROTOCOL": "onejev"}),
}
LONG_STATE = {"text": "I was charged twice for one order. " * 40}  # more than 1,024 bytes: sent as zstd
QUESTIONS: dict[str, Any] = {
    "refund": Noul(instructions="Does the customer ask for money back?"),
    "team": Choice(instructions="Whose is it?", criteria={"pay": "Billing", "it": None}),
    "mood": Score(instructions="How upset?", criteria=["calm", "annoyed", "furious"]),
}


@pytest.fixture(scope="module", params=list(MODELS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, options = MODELS[request.param]
    home = tmp_path_factory.mktemp("home")
    environ = environment(home, INFINITY_MODEL_ID=str(folder()), INFINITY_SERVED_MODEL_NAME="decider", **options)
    with serve([str(ROOT)], home, environ, tmp_path_factory.mktemp("log") / "server.log") as made:
        yield made


def conformance(url: str) -> str:
    """What the suite prints."""
    script = Path(sys.executable).with_name("jevcompat")
    done = subprocess.run(
        [script, "test", url], capture_output=True, text=True, timeout=240, env=dict(os.environ), check=False
    )
    return done.stdout


def test_the_conformance_suite_passes_whole(served: Served) -> None:
    found = conformance(served.url)
    assert "MUST 32/32, SHOULD 13/13" in found, found[-3000:]


# Laya has no answer to a question without instructions: docs/decisions.md.
OTHERS: dict[str, tuple[Callable[[], Path], str]] = {
    "pplx": (lambda: tiny_readouts.readout("pplx"), "MUST 32/32, SHOULD 13/13"),
    "laya": (tiny_laya.long_folder, "MUST 32/32, SHOULD 12/13"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_conform_but_for_what_their_design_forces(name: str, tmp_path: Path) -> None:
    folder, expected = OTHERS[name]
    environ = environment(tmp_path, INFINITY_MODEL_ID=str(folder()), INFINITY_SERVED_MODEL_NAME="decider")
    with serve([str(ROOT)], tmp_path, environ, tmp_path / "server.log") as made:
        found = conformance(made.url)
    assert expected in found, found[-3000:]


def checked(answers: Any) -> None:
    assert 0 <= answers["refund"].noul <= 1
    assert answers["team"].choice in ("pay", "it")
    assert set(answers["team"].probabilities) == {"pay", "it"}
    assert 0 <= answers["mood"].score <= 2


def test_the_sdk_sync_and_async_with_a_compressed_body(served: Served) -> None:
    with TypeSafeClient(api_key="any", base_url=served.url) as client:
        answer = client.system_one(state=LONG_STATE, questions=QUESTIONS)
        checked(answer.answers)
        assert [model.name for model in client.models.list().models] == ["decider"]

    async def ask() -> Any:
        async with AsyncTypeSafeClient(api_key="any", base_url=served.url) as client:
            return await client.system_one(state=LONG_STATE, questions=QUESTIONS)

    checked(asyncio.run(ask()).answers)


PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8  # enough that the form is sent as zstd


def total(url: str, name: str, **labels: str) -> float:
    """The sum of a counter over the series with these labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(name + "{") and all(text in line for text in wanted)
    )


def test_the_sdk_sends_an_image_once_and_goes_on(served: Served) -> None:
    """As a multipart form, refused for want of a vision tower; what is refused is neither repeated nor computed."""

    def refusals() -> float:
        return total(served.url, "infinity_errors_total", code="invalid_input")

    def batches() -> float:
        return total(served.url, "infinity_batch_inputs_count")

    before, computed = refusals(), batches()
    with TypeSafeClient(api_key="any", base_url=served.url) as client:
        with pytest.raises(TypeSafeUnprocessableEntityError, match="vision tower") as caught:
            client.system_one(state={"photo": Image(PICTURE), "note": "it is broken"}, questions=QUESTIONS)
        assert caught.value.request_id
        assert (refusals(), batches()) == (before + 1, computed)
        checked(client.system_one(state="It is broken.", questions=QUESTIONS).answers)
    assert (refusals(), batches()) == (before + 1, computed + 1)


def test_the_openai_client(served: Served) -> None:
    questions: Any = [
        {"type": "predicate", "instructions": "Does the customer ask for money back?", "name": "refund"},
        {"type": "choice", "instructions": "Is it ours?", "choices": [{"value": True}, {"value": "no"}]},
        {"type": "score", "instructions": "How upset?", "levels": [{"label": "calm"}, {"label": "furious"}]},
    ]
    messages: Any = [{"role": "user", "content": [{"type": "input_text", "text": "I was charged twice."}]}]
    with openai.OpenAI(api_key="any", base_url=f"{served.url}/v1") as client:
        decision = client.decisions.create(model="jev-latest", input=messages, questions=questions)
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            client.decisions.create(model="jev-latest", input=messages, questions=[])
    refund, ours, upset = decision.answers
    assert refund.type == "predicate" and refund.name == "refund" and 0 <= refund.probability <= 1
    assert ours.type == "choice" and ours.choice in (True, "no")
    assert sum(share.probability for share in ours.probabilities) == pytest.approx(1)
    assert upset.type == "score" and 0 <= upset.score <= 1 and upset.probabilities[1].label == "furious"
    assert decision.model == "decider" and decision.usage.total_tokens == decision.usage.input_tokens > 0
    assert caught.value.param == "questions"


def test_the_bentoml_client(served: Served) -> None:
    asked = {"refund": {"type": "noul", "instructions": "refund?"}}
    with bentoml.SyncHTTPClient(served.url, server_ready_timeout=30) as client:
        good, bad = client.decide(items=[{"state": {"a": 1}, "questions": asked}, {"state": None, "questions": asked}])
    assert good["error"] is None and 0 <= good["answers"]["refund"]["noul"] <= 1 and good["tokens"] > 0
    assert bad["error"]["code"] == "invalid_input" and "state" in bad["error"]["message"]


def test_the_metrics_count_what_was_shared(served: Served) -> None:
    body = {
        "model": "decider",
        "state": "word " * 300,
        "questions": {str(i): {"type": "noul", "instructions": f"question {i}?"} for i in range(10)},
    }
    answer = httpx.post(
        f"{served.url}/v1/systemone", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200
    assert total(served.url, "infinity_shared_tokens_total") > 0.7 * answer.json()["usage"]["input_tokens"]
