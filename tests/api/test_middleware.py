from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from infinity_bento.api.app import StraightWay, create_app, harden
from infinity_bento.api.guard import LOOK_SECONDS
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.telemetry.metrics import Metrics
from tests.api.fakes import FakeEngine, client_for
from tests.api.raw import Connection

OPENAI_BODY = b'{"input": "a"}'


def app_for(engine: FakeEngine, metrics: Metrics | None = None, **options: Any) -> Starlette:
    return create_app(lambda: engine, ApiSettings(**options), metrics=metrics)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


def other_tasks() -> set[Any]:
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("\xe4", False), ("", False)],
)
async def test_request_id_is_kept_if_sane(given: str, kept: bool) -> None:
    connection = Connection("/livez", method="GET", headers=[(b"x-request-id", given.encode("latin-1"))])
    await connection.run(app_for(FakeEngine()))
    assert (connection.headers["x-request-id"] == given) is kept
    assert re.fullmatch(r"[!-~]{1,128}", connection.headers["x-request-id"])


@pytest.mark.parametrize("path", ["/livez", "/nowhere", "/v1/embeddings", "/metrics", "/docs"])
async def test_every_answer_has_id_and_timing(path: str) -> None:
    async with client_for(FakeEngine()) as client:
        first, second = await client.get(path), await client.get(path)
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert re.fullmatch(r"total;dur=\d+\.\d{3}", first.headers["server-timing"])


async def test_server_timing_has_the_stages_of_inference() -> None:
    async with client_for(FakeEngine()) as client:
        answer = await client.post("/v1/embeddings", json={"input": "a"})
    assert answer.headers["server-timing"].endswith(", tokenize;dur=1.000, queue;dur=2.000, inference;dur=3.000")


async def test_unknown_path_names_close_ones() -> None:
    async with client_for(FakeEngine()) as client:
        openai, tei = await client.post("/v1/embedding", json={}), await client.get("/embd/")
        nothing = await client.get("/qqqqqqqq")
    assert openai.status_code == 404 and openai.json()["error"]["code"] == "route_not_found"
    assert "POST /v1/embedding;" in openai.json()["error"]["message"]
    assert "/v1/embeddings" in openai.json()["error"]["message"]
    assert tei.status_code == 404 and "/embd/" in tei.json()["error"] and "/embed" in tei.json()["error"]
    assert nothing.status_code == 404 and "did you mean" not in nothing.json()["error"]


async def test_very_long_unknown_path_is_answered_short() -> None:
    async with client_for(FakeEngine()) as client:
        answer = await client.get("/" + "a" * 20000)
    assert answer.status_code == 404 and len(answer.content) < 600


async def test_wrong_method_names_the_right_one() -> None:
    async with client_for(FakeEngine()) as client:
        answer = await client.get("/v1/embeddings")
        other = await client.post("/info", json={})
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["message"] == "GET is not allowed on /v1/embeddings; use POST."
    assert other.status_code == 405 and "GET or HEAD" in other.json()["error"]


def foreign_app() -> Starlette:
    """Stands for a framework's own application, with its own errors."""

    async def boom(request: Request) -> PlainTextResponse:
        raise RuntimeError("secret")

    async def busy(request: Request) -> PlainTextResponse:
        return PlainTextResponse("come back", 503, headers={"x-own": "1"})

    async def own(request: Request) -> JSONResponse:
        return JSONResponse([{"error": "mine"}], 400)

    async def stream(request: Request) -> StreamingResponse:
        async def chunks() -> Any:
            for _ in range(3):
                await asyncio.sleep(0.01)
                yield b"x"

        return StreamingResponse(chunks(), media_type="text/plain")

    routes = [Route("/boom", boom), Route("/busy", busy), Route("/own", own), Route("/stream", stream)]
    return Starlette(routes=routes)


async def test_foreign_application_gets_json_errors(caplog: pytest.LogCaptureFixture) -> None:
    app = harden(foreign_app(), ApiSettings(), Metrics())
    async with client_for(FakeEngine(), app) as client:
        unknown, wrong = await client.get("/nope"), await client.post("/busy")
        busy, own = await client.get("/busy"), await client.get("/own")
        with caplog.at_level(logging.ERROR):
            boom = await client.get("/boom")
        stream = await client.get("/stream")
    assert unknown.status_code == 404 and set(unknown.json()) == {"error", "error_type"}
    assert wrong.status_code == 405 and set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert busy.status_code == 503 and busy.json()["error"] == "come back" and busy.headers["x-own"] == "1"
    assert int(busy.headers["content-length"]) == len(busy.content)
    assert own.json() == [{"error": "mine"}]  # JSON of its own is left alone
    assert boom.status_code == 500 and "secret" not in boom.text and set(boom.json()) == {"error", "error_type"}
    assert "secret" in caplog.text and boom.headers["x-request-id"] in caplog.text
    assert stream.status_code == 200 and stream.text == "xxx"
    for answer in (unknown, wrong, busy, own, boom, stream):
        assert answer.headers["x-request-id"] and answer.headers["server-timing"]


async def test_application_that_raises_before_answering_gives_500() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("inside")

    connection = await Connection("/v1/x").run(harden(broken, ApiSettings(), Metrics()))
    assert connection.status == 500 and connection.headers["x-request-id"] in connection.json["error"]["message"]


async def test_hanging_up_cancels_the_engine_call() -> None:
    metrics = Metrics()
    engine = FakeEngine(wait=asyncio.Event())
    connection = Connection("/v1/embeddings", OPENAI_BODY)
    request = asyncio.create_task(connection.run(app_for(engine, metrics)))
    await until(lambda: engine.submitted)
    connection.hang_up()
    await asyncio.wait_for(request, 5)
    assert engine.cancelled == 1 and connection.sent == []
    assert not other_tasks()
    assert 'infinity_errors_total{code="client_gone"} 1.0' in metrics.render().decode()


async def test_hanging_up_after_the_answer_cancels_nothing() -> None:
    done: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        await asyncio.sleep(0.03)  # a background task of the response
        done.append("background")

    connection = Connection("/v1/x")
    connection.hang_up()
    await connection.run(harden(app, ApiSettings(), Metrics()))
    assert done == ["background"]


async def test_cancelling_from_outside_goes_through() -> None:
    engine = FakeEngine(wait=asyncio.Event())
    connection = Connection("/v1/embeddings", OPENAI_BODY)
    request = asyncio.create_task(connection.run(app_for(engine)))
    await until(lambda: engine.submitted)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert engine.cancelled == 1
    await until(lambda: not other_tasks())


async def test_too_slow_is_504_and_cancelled() -> None:
    engine = FakeEngine(wait=asyncio.Event())
    connection = Connection("/v1/embeddings", OPENAI_BODY)
    await asyncio.wait_for(connection.run(app_for(engine, request_timeout_seconds=0.05)), 5)
    assert connection.status == 504 and connection.json["error"]["code"] == "deadline_exceeded"
    assert "0.05 s" in connection.json["error"]["message"] and connection.headers["retry-after"] == "1"
    assert engine.cancelled == 1
    await until(lambda: not other_tasks())


async def test_slow_upload_is_504() -> None:
    connection = Connection("/embed")
    connection._pending = [{"type": "http.request", "body": b"{", "more_body": True}]
    await asyncio.wait_for(connection.run(app_for(FakeEngine(), request_timeout_seconds=0.05)), 5)
    assert connection.status == 504 and connection.json["error_type"] == "Overloaded"


async def test_application_that_swallows_the_cancellation_is_answered_too() -> None:
    async def stubborn(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise KeyError("while cleaning up") from None

    connection = Connection("/v1/x")
    await connection.run(harden(stubborn, ApiSettings(request_timeout_seconds=0.02), Metrics()))
    assert connection.status == 504
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_foreign_routes_have_the_payload_limit_too() -> None:
    read: list[bytes] = []

    async def foreign(scope: Any, receive: Any, send: Any) -> None:
        try:
            while (message := await receive()).get("more_body"):
                read.append(message["body"])
        except Exception:
            read.append(b"swallowed")
        await PlainTextResponse("ok")(scope, receive, send)

    app = harden(foreign, ApiSettings(payload_limit=10), Metrics())
    counted = Connection("/native", b"x" * 6)
    counted._pending.insert(0, {"type": "http.request", "body": b"x" * 6, "more_body": True})
    await counted.run(app)
    assert counted.status == 413 and "limit is 10 bytes" in counted.json["error"] and read == [b"x" * 6]
    declared = await Connection("/native", b"x" * 11, headers=[(b"content-length", b"11")]).run(app)
    assert declared.status == 413 and "11 bytes" in declared.json["error"] and declared.receive_calls == 0
    assert (await Connection("/native", b"x" * 10).run(app)).status == 200
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


@pytest.mark.parametrize("limit", [0.05, 0])
async def test_an_inner_task_that_its_framework_forgets_is_ended_too(limit: float) -> None:
    engine = FakeEngine(wait=asyncio.Event())
    inner = create_app(lambda: engine, ApiSettings(), hardened=False)

    async def framework(scope: Any, receive: Any, send: Any) -> None:
        task = asyncio.ensure_future(inner(scope, receive, send))
        waiter = asyncio.get_running_loop().create_future()
        task.add_done_callback(lambda _: waiter.done() or waiter.set_result(None))
        await waiter  # cancelling this await does not reach the task

    connection = Connection("/v1/embeddings", OPENAI_BODY)
    app = harden(framework, ApiSettings(request_timeout_seconds=limit), Metrics())
    request = asyncio.create_task(connection.run(app))
    await until(lambda: engine.submitted)
    if not limit:
        connection.hang_up()
    await asyncio.wait_for(request, 5)
    await until(lambda: engine.cancelled == 1 and not other_tasks())
    assert [message["type"] for message in connection.sent] == (
        ["http.response.start", "http.response.body"] if limit else []
    )


async def test_open_paths_have_no_time_limit() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        await PlainTextResponse("ok")(scope, receive, send)

    app = harden(slow, ApiSettings(request_timeout_seconds=0.01), Metrics())
    assert (await Connection("/metrics", method="GET").run(app)).status == 200
    assert (await Connection("/embed").run(app)).status == 504


async def test_no_limit_means_none() -> None:
    engine = FakeEngine(wait=asyncio.Event())
    request = asyncio.create_task(
        Connection("/v1/embeddings", OPENAI_BODY).run(app_for(engine, request_timeout_seconds=0))
    )
    await asyncio.sleep(0.05)
    assert engine.wait is not None and not request.done()
    engine.wait.set()
    assert (await request).status == 200


@pytest.fixture
async def looks(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.TimerHandle]:
    """The looks at requests in flight that this loop is asked for, from now on."""
    loop = asyncio.get_running_loop()
    handles: list[asyncio.TimerHandle] = []
    call_later = loop.call_later

    def recording(delay: float, callback: Any, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        handle = call_later(delay, callback, *args, **kwargs)
        if "_InFlight" in repr(callback):
            handles.append(handle)
        return handle

    monkeypatch.setattr(loop, "call_later", recording)
    return handles


async def test_immediate_answers_cost_no_task_and_share_one_timer_which_ends(looks: list[Any]) -> None:
    app = app_for(FakeEngine())
    connections = [Connection("/v1/embeddings", OPENAI_BODY) for _ in range(20)]
    await asyncio.gather(*(connection.run(app) for connection in connections))
    assert all(connection.status == 200 and connection.receive_calls == 1 for connection in connections)
    assert not other_tasks() and len(looks) == 1
    await asyncio.sleep(3 * LOOK_SECONDS)
    assert len(looks) == 1  # it found nothing in flight


async def test_slow_answers_share_one_timer_too(looks: list[Any]) -> None:
    engine = FakeEngine(wait=asyncio.Event())
    assert engine.wait is not None
    loop = asyncio.get_running_loop()
    started = loop.time()
    loop.call_at(started + 2.5 * LOOK_SECONDS, engine.wait.set)
    app = app_for(engine)
    answers = await asyncio.gather(*(Connection("/v1/embeddings", OPENAI_BODY).run(app) for _ in range(20)))
    assert {connection.status for connection in answers} == {200}
    assert 2 <= len(looks) <= (loop.time() - started) / LOOK_SECONDS + 1  # one after the other, for all twenty
    await until(lambda: not other_tasks())
    await asyncio.sleep(3 * LOOK_SECONDS)
    assert looks[-1].when() < loop.time()  # and no further one


KEY = {"api_key": "s3cret"}


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz", "/health", "/ping", "/metrics", "/docs", "/info"])
async def test_open_paths_need_no_key(path: str) -> None:
    async with client_for(FakeEngine(), **KEY) as client:
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer nope", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret", "Bearer \xe4"],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/v1/models", "/nowhere", "//embed"])
async def test_wrong_key_is_401(path: str, value: str | None) -> None:
    headers = [] if value is None else [(b"authorization", value.encode("latin-1"))]
    engine = FakeEngine()
    connection = await Connection(path, b'{"input": "a", "inputs": "a"}', headers=headers).run(app_for(engine, **KEY))
    assert connection.status == 401 and connection.headers["www-authenticate"] == "Bearer"
    assert "error" in connection.json and "s3cret" not in str(connection.json) and not engine.submitted


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_right_key_is_admitted(scheme: str) -> None:
    async with client_for(FakeEngine(), **KEY) as client:
        headers = {"authorization": f"{scheme} s3cret"}
        assert (await client.post("/embed", json={"inputs": "a"}, headers=headers)).status_code == 200


async def test_without_a_key_any_authorization_is_accepted() -> None:
    async with client_for(FakeEngine()) as client:
        answer = await client.post("/embed", json={"inputs": "a"}, headers={"authorization": "Bearer whatever"})
    assert answer.status_code == 200


def test_the_key_is_not_shown() -> None:
    assert "s3cret" not in repr(ApiSettings(**KEY))


async def test_cors_preflight_and_answers() -> None:
    preflight = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    options = {"cors_allow_origin": ("https://a.example",), **KEY}
    async with client_for(FakeEngine(), **options) as client:
        asked = await client.options("/v1/embeddings", headers=preflight)
        refused = await client.post("/embed", json={}, headers={"origin": "https://a.example"})
        foreign = await client.options("/embed", headers={**preflight, "origin": "https://b.example"})
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert asked.headers["x-request-id"]
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in foreign.headers


async def test_no_cors_headers_unless_configured() -> None:
    async with client_for(FakeEngine()) as client:
        answer = await client.get("/livez", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


async def test_inference_goes_straight_and_everything_else_through_the_framework() -> None:
    passed: list[str] = []

    async def framework(scope: Any, receive: Any, send: Any) -> None:
        passed.append(f"{scope['method']} {scope['path']}")
        await PlainTextResponse("the framework's")(scope, receive, send)

    engine, settings, metrics = FakeEngine(), ApiSettings(), Metrics()
    app = harden(StraightWay(framework, lambda: engine, settings, metrics), settings, metrics)
    async with client_for(engine, app) as client:
        answer = await client.post("/v1/embeddings", content=OPENAI_BODY)
        assert answer.json()["object"] == "list" and answer.headers["x-request-id"]
        assert (await client.post("/v1/embeddings", content=b"{")).status_code == 400
        assert not passed
        for method, path in (
            ("GET", "/readyz"),
            ("GET", "/metrics"),
            ("GET", "/v1/embeddings"),
            ("POST", "/bento/embed"),
        ):
            assert (await client.request(method, path)).text == "the framework's"
            assert passed.pop() == f"{method} {path}"


async def test_the_page_at_the_root_is_open_and_the_route_there_is_not() -> None:
    async with client_for(FakeEngine(), api_key="k") as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.head("/")).status_code == 200
        assert (await client.post("/", json={"inputs": "a"})).status_code == 401
        keyed = await client.post("/", json={"inputs": "a"}, headers={"authorization": "Bearer k"})
        assert keyed.status_code == 200
