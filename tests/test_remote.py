"""The line between front and runner, without processes: what crosses it, and what happens when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import numpy as np
import pytest

from infinity_bento.core import EngineStatus, Item, Result, Task
from infinity_bento.engine import Engine
from infinity_bento.errors import InvalidInput, NotReady, Overloaded, ServerError, UnknownModel, UnsupportedTask
from infinity_bento.remote import RETRY_PAUSES_SECONDS, RUNNER_CONNECTION, Parcel, RemoteEngine, RunnerEnd
from tests.conftest import MINILM, embed_items, mixed_texts, vectors

Ask = Callable[[Parcel], Awaitable[Parcel]]


async def connected(ask: Ask) -> RemoteEngine:
    remote = RemoteEngine(ask)
    remote.start()
    await asyncio.sleep(0.05)
    return remote


async def test_it_answers_as_the_engine_itself(engine: Engine) -> None:
    remote = await connected(RunnerEnd(engine).answer)
    assert remote.alive and remote.status().ready
    assert list(remote.infos()) == engine.infos()
    items = embed_items(mixed_texts(20, seed=3))
    got, expected = await remote.submit(MINILM, items), await engine.submit(MINILM, items)
    assert np.abs(vectors(list(got)) - vectors(expected)).max() < 1e-6
    mixed = await remote.submit(MINILM, [*embed_items(["fine"]), Item(Task.EMBED, text="")])
    assert isinstance(mixed[0], Result)
    assert type(mixed[1]).__name__ == "EmptyInput" and mixed[1].message
    assert await remote.tokenize(MINILM, ["hello"]) == await engine.tokenize(MINILM, ["hello"])
    assert await remote.decode(MINILM, [[7592]]) == ["hello"]
    assert remote.resolve(None, Task.EMBED).name == MINILM
    for name, task, error in ((None, Task.RERANK, UnsupportedTask), ("nope", Task.EMBED, UnknownModel)):
        with pytest.raises(error) as remote_error:
            remote.resolve(name, task)
        with pytest.raises(error) as own_error:
            engine.resolve(name, task)
        assert remote_error.value.message == own_error.value.message
    with pytest.raises(UnknownModel):
        await remote.submit("nope", items)
    await remote.stop()


async def test_errors_keep_what_they_know() -> None:
    for error in (Overloaded("full: retry", retry_after_seconds=7), InvalidInput("wrong: fix", param="text")):
        with pytest.raises(type(error)) as caught:
            Parcel.of(error).value()
        assert caught.value.message == error.message and vars(caught.value) == vars(error)


async def test_a_runner_answers_only_what_it_is_for(engine: Engine) -> None:
    answer = await RunnerEnd(engine).answer(Parcel.of(("close", (), {})))
    with pytest.raises(ServerError, match="not 'close'"):
        answer.value()


async def test_lost_connections_are_tried_again_but_not_for_ever(engine: Engine) -> None:
    lost: list[bool] = []
    end = RunnerEnd(engine)

    async def ask(question: Parcel) -> Parcel:
        if lost and lost.pop():
            raise aiohttp.ServerDisconnectedError
        return await end.answer(question)

    remote = await connected(ask)
    for times in range(1, 1 + len(RETRY_PAUSES_SECONDS)):
        lost += [True] * times
        assert isinstance((await remote.submit(MINILM, embed_items(["again"])))[0], Result)
    lost += [True] * (1 + len(RETRY_PAUSES_SECONDS))
    with pytest.raises(NotReady, match="does not answer"):
        await remote.submit(MINILM, embed_items(["again"]))
    await remote.stop()


async def test_a_runner_that_is_away_makes_the_front_wait() -> None:
    async def nobody(question: Parcel) -> Parcel:
        raise ConnectionRefusedError

    remote = await connected(nobody)
    assert not remote.status().ready and remote.alive
    with pytest.raises(NotReady, match="wait for the runner"):
        remote.resolve(None, Task.EMBED)
    await remote.stop()


async def test_a_loading_runner_is_followed() -> None:
    status = EngineStatus(False, "load weights", 3, 6, 1.0)

    class Loading:
        alive = True

        def status(self) -> EngineStatus:
            return status

        def infos(self) -> list[object]:
            return []

    remote = await connected(RunnerEnd(Loading()).answer)  # type: ignore[arg-type]
    assert remote.status() == status
    with pytest.raises(NotReady, match="load weights"):
        remote.resolve(None, Task.EMBED)
    await remote.stop()


def test_bentoml_takes_the_connection_settings() -> None:
    from _bentoml_impl.client.proxy2 import SessionManager

    manager = SessionManager("http://x", 1.0, {}, **RUNNER_CONNECTION)  # type: ignore[arg-type]
    manager._created_at, manager._request_count = 0.0, 10_000_000
    assert not manager._should_refresh(), "its client would close sessions with requests in flight"
