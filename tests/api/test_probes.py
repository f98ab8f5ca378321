from __future__ import annotations

from typing import Any

import pytest

from infinity_bento.api.probes import health_reply, livez_reply, readyz_reply
from tests.api.fakes import BROKEN, LOADING, READY, FakeEngine, client_for


@pytest.mark.parametrize("path", ["/livez", "/healthz"])
@pytest.mark.parametrize(("state", "alive"), [(READY, True), (LOADING, True), (BROKEN, False)])
async def test_alive_unless_only_a_restart_helps(path: str, state: Any, alive: bool) -> None:
    async with client_for(FakeEngine(state=state)) as client:
        answer = await client.get(path)
    assert answer.status_code == (200 if alive else 503) and answer.json() == {"alive": alive}


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/info"])
async def test_a_dead_device_thread_shows_everywhere(path: str) -> None:
    async with client_for(FakeEngine(dead=True)) as client:
        answer = await client.get(path)
    assert answer.status_code == 503
    assert path == "/livez" or "device thread has died" in answer.text


@pytest.mark.parametrize(("state", "status"), [(READY, 200), (LOADING, 503), (BROKEN, 503)])
async def test_readyz_tells_stage_and_error(state: Any, status: int) -> None:
    async with client_for(FakeEngine(state=state)) as client:
        answer = await client.get("/readyz")
    assert answer.status_code == status
    assert answer.json() == {
        "ready": state.ready,
        "stage": state.stage,
        "stage_number": state.stage_number,
        "stage_count": state.stage_count,
        "elapsed_seconds": state.elapsed_seconds,
        "error": state.error,
    }
    assert ("retry-after" in answer.headers) == (status == 503)


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_is_teis(path: str) -> None:
    async with client_for(FakeEngine()) as client:
        assert (await client.get(path)).json() == {}
    async with client_for(FakeEngine(state=BROKEN)) as client:
        answer = await client.get(path)
    assert answer.status_code == 503 and answer.json()["error_type"] == "Unhealthy"
    assert "no tensor 'x'" in answer.json()["error"] and "restart" in answer.json()["error"]


async def test_replies_can_be_had_without_a_route() -> None:
    assert (await livez_reply(FakeEngine())).status == 200
    assert (await readyz_reply(FakeEngine(state=LOADING))).status == 503
    assert (await health_reply(FakeEngine())).status == 200


async def test_head_is_answered() -> None:
    async with client_for(FakeEngine()) as client:
        assert (await client.head("/readyz")).status_code == 200
