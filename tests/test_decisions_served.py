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
import pytest
from typesafe_sdk import AsyncTypeSafeClient, Choice, Noul, Score, TypeSafeClient

from tests import tiny_readouts
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


def test_the_conformance_suite_passes_whole(served: Served, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = Path(sys.executable).with_name("jevcompat")
    done = subprocess.run(
        [script, "test", served.url, "--json", report],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "MUST 32/32, SHOULD 13/13" in done.stdout


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


def test_the_bentoml_client(served: Served) -> None:
    asked = {"refund": {"type": "noul", "instructions": "refund?"}}
    with bentoml.SyncHTTPClient(served.url, server_ready_timeout=30) as client:
        good, bad = client.decide(items=[{"state": {"a": 1}, "questions": asked}, {"state": None, "questions": asked}])
    assert good["error"] is None and 0 <= good["answers"]["refund"]["noul"] <= 1 and good["tokens"] > 0
    assert bad["error"]["code"] == "invalid_input" and "state" in bad["error"]["message"]


def test_the_metrics_count_what_was_shared(served: Served) -> None:
    import httpx

    body = {
        "model": "decider",
        "state": "word " * 300,
        "questions": {str(i): {"type": "noul", "instructions": f"question {i}?"} for i in range(10)},
    }
    answer = httpx.post(
        f"{served.url}/v1/systemone", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    shared = sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("infinity_shared_tokens_total{"))
    assert shared > 0.7 * answer.json()["usage"]["input_tokens"]
