"""Published clients of System One, unmodified, over a socket: what they send is read, what they get is not repeated."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from typesafe_sdk import (
    AsyncTypeSafeClient,
    Choice,
    Image,
    Noul,
    Score,
    TypeSafeClient,
    TypeSafeError,
    TypeSafeRateLimitError,
    TypeSafeUnprocessableEntityError,
)

from infinity_bento.core import Item
from infinity_bento.errors import Overloaded
from tests.api.fakes import FakeEngine
from tests.api.test_real_server import serving
from tests.api.test_systemone import MODEL

QUESTIONS: dict[str, Any] = {
    "refund": Noul(instructions="Money back?"),
    "team": Choice(instructions="Whose is it?", criteria={"pay": "Billing", "it": None}),
    "mood": Score(instructions="How upset?", criteria=["calm", "furious"]),
}
PNG = b"\x89PNG\r\n\x1a\n" + b"pixels" * 400  # enough that the form is compressed


class Counting(FakeEngine):
    """Counts the calls, and the requests that were resolved."""

    def __init__(self, **knobs: Any) -> None:
        super().__init__(models=(MODEL,), **knobs)
        self.asked = 0
        self.computed = 0

    def resolve(self, name: str | None, task: Any) -> Any:
        self.asked += 1
        return super().resolve(name, task)

    async def submit(self, name: str, items: list[Item]) -> Any:
        self.computed += 1
        return await super().submit(name, items)


def address(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1"


def call(port: int, **fields: Any) -> Any:
    with TypeSafeClient(api_key="any", base_url=f"http://127.0.0.1:{port}") as client:
        return client.system_one(**{"state": {"t": "charged twice"}, "questions": QUESTIONS, **fields})


@pytest.mark.parametrize("words", [1, 500])
async def test_sync_and_async_plain_and_compressed(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, encodings = Counting(), []
    monkeypatch.setattr("infinity_bento.api.body.decompress", recording(encodings))
    state = {"t": "charged twice " * words}
    async with serving(engine) as port:
        first = await asyncio.to_thread(call, port, state=state)
        async with AsyncTypeSafeClient(api_key="any", base_url=f"http://127.0.0.1:{port}") as client:
            second = await client.system_one(state=state, questions=QUESTIONS)
            listed = await client.models.list()
    for answer in (first, second):
        assert answer.model == "decider"
        assert answer.answers["refund"].noul == pytest.approx(2 / 3)
        assert answer.answers["team"].choice == "it" and answer.answers["team"].confidence == pytest.approx(1 / 3)
        assert answer.answers["mood"].score == pytest.approx(2 / 3)
        assert answer.answers["mood"].legend[1] == "furious"
    assert [model.name for model in listed.models] == ["decider"]
    assert engine.submitted[0].decision is not None and engine.submitted[0].decision.state == state
    assert encodings == ([] if words == 1 else [b"zstd"] * 2)


def recording(encodings: list[bytes]) -> Any:
    """``decompress``, noting what it was asked to undo."""
    from infinity_bento.api.compression import decompress

    def noting(raw: bytes, coding: bytes, limit: int) -> bytes:
        encodings.append(coding)
        return decompress(raw, coding, limit)

    return noting


async def test_an_image_arrives_in_a_compressed_form_and_is_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, encodings = Counting(), []
    monkeypatch.setattr("infinity_bento.api.body.decompress", recording(encodings))
    async with serving(engine) as port:
        with pytest.raises(TypeSafeUnprocessableEntityError, match="vision tower") as caught:
            await asyncio.to_thread(call, port, state={"photo": Image(PNG), "t": "broken"})
        assert caught.value.request_id
        inline = {"<photo>": {"type": "image", "format": "png", "data_base64": base64.b64encode(PNG).decode()}}
        with pytest.raises(TypeSafeError, match=r"vision tower|asset"):
            await asyncio.to_thread(call, port, state="see <photo>", assets=inline)
    assert encodings and set(encodings) == {b"zstd"}
    assert engine.computed == 0


BAD: list[dict[str, Any]] = [
    {"model": "nobody"},
    {"questions": {str(index): QUESTIONS["refund"] for index in range(65)}},
    {"questions": {"q": Choice(instructions="?", criteria={str(index): None for index in range(256)})}},
    {"questions": {"q": Score(instructions="?", criteria=[str(index) for index in range(11)])}},
]


@pytest.mark.parametrize("fields", BAD)
async def test_a_bad_request_is_sent_once(fields: dict[str, Any]) -> None:
    engine = Counting()
    async with serving(engine) as port:
        with pytest.raises(TypeSafeError) as caught:
            await asyncio.to_thread(call, port, **fields)
    assert (engine.asked, engine.computed) == (1, 0)
    assert caught.value.status in (400, 422) and caught.value.request_id  # type: ignore[attr-defined]


async def test_a_full_server_is_asked_again() -> None:
    engine = Counting(raises=Overloaded("Full.", retry_after_seconds=0))
    async with serving(engine) as port:
        with pytest.raises(TypeSafeRateLimitError):
            await asyncio.to_thread(call, port)
    assert engine.computed == 3


async def test_the_openai_client_decides() -> None:
    engine = Counting()
    questions: Any = [
        {"type": "predicate", "instructions": "ok?", "name": "p"},
        {"type": "choice", "instructions": "?", "choices": [{"value": "a"}, {"value": False}]},
        {"type": "score", "instructions": "?", "levels": [{"label": "lo"}, {"label": "hi"}]},
    ]
    async with serving(engine) as port, openai.AsyncOpenAI(api_key="any", base_url=address(port)) as client:
        decision = await client.decisions.create(model="decider", input="hello", questions=questions)
        with pytest.raises(openai.UnprocessableEntityError, match="`input` is") as caught:
            await client.decisions.create(model="decider", input="", questions=questions)
    assert caught.value.param == "input" and caught.value.request_id
    first, second, third = decision.answers
    assert (first.type, first.name, first.probability) == ("predicate", "p", pytest.approx(2 / 3))  # type: ignore[union-attr]
    assert second.choice is False and third.probabilities[1].label == "hi"  # type: ignore[union-attr]
    assert decision.usage.total_tokens == 0
    assert engine.computed == 1


@pytest.mark.parametrize("key", [None, "sesame"])
async def test_the_conformance_suite_finds_nothing_in_the_contract(key: str | None, tmp_path: Path) -> None:
    engine = FakeEngine(models=(replace(MODEL, max_concurrent_requests=64),))
    script = Path(sys.executable).with_name("jevcompat")
    async with serving(engine, api_key=key) as port:
        arguments = ["test", f"http://127.0.0.1:{port}", "--json", str(tmp_path / "report.json")]
        process = await asyncio.create_subprocess_exec(
            str(script),
            *arguments,
            *(["--key-env", "JEV_TEST_KEY"] if key else []),
            env={**os.environ, "JEV_TEST_KEY": key or ""},
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    expected = b"MUST 32/32, SHOULD 15/15" if key else b"MUST 32/32, SHOULD 13/13"
    assert process.returncode == 0 and expected in output, output.decode()[-3000:]
