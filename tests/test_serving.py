"""The seam to BentoML: the contract of the private API it uses, and what it makes of it, in process."""

from __future__ import annotations

import ast
import asyncio
import gzip
import html
import inspect
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from _bentoml_impl.server.app import ServiceAppFactory
from _bentoml_sdk import Service
from openapi_spec_validator import OpenAPIV31SpecValidator

from infinity_bento.serving import EngineAppFactory, EngineDispatcher, EngineService
from infinity_bento.telemetry.metrics import Metrics
from service import InfinityBento

ROOT = Path(__file__).parent.parent


class TestContract:
    """What we use of BentoML's internals still means what it meant in 1.4.40."""

    def test_the_service_makes_its_app_through_to_asgi(self) -> None:
        assert list(inspect.signature(Service.to_asgi).parameters) == ["self", "is_main"]
        assert "ServiceAppFactory(self, is_main=is_main)" in inspect.getsource(Service.to_asgi)

    def test_the_factory_has_the_parts_we_replace(self) -> None:
        assert isinstance(inspect.getattr_static(ServiceAppFactory, "middlewares"), property)
        for name in ("livez", "readyz", "metrics", "api_endpoint"):
            assert inspect.iscoroutinefunction(getattr(ServiceAppFactory, name))
        assert "self.dispatchers" in inspect.getsource(ServiceAppFactory.__init__)

    def test_dispatchers_are_called_as_ours_is(self) -> None:
        source = inspect.getsource(ServiceAppFactory.batch_infer)
        assert "await self.dispatchers[name](" in source
        assert ")(value)" in source

    def test_our_service_uses_our_dispatcher(self) -> None:
        assert isinstance(InfinityBento, EngineService)
        InfinityBento.inject_config()
        factory = EngineAppFactory(InfinityBento, is_main=True)
        assert set(factory.dispatchers) == {name for name, api in InfinityBento.apis.items() if api.batchable}
        assert all(isinstance(dispatcher, EngineDispatcher) for dispatcher in factory.dispatchers.values())

    async def test_the_dispatcher_calls_once_per_value(self) -> None:
        calls: list[object] = []

        async def callback(values: tuple[object, ...]) -> list[object]:
            calls.append(values)
            return [[str(value).upper() for value in values[0]]]  # type: ignore[attr-defined]

        run = EngineDispatcher(Metrics())(callback)  # type: ignore[arg-type]
        assert await asyncio.gather(run(["a", "b"]), run([])) == [["A", "B"], []]
        assert calls == [(["a", "b"],), ([],)]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """BentoML's whole server in this process, with the real model."""
    app = InfinityBento.to_asgi()
    started, stop, stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, str]:
        if not started.is_set():
            return {"type": "lifespan.startup"}
        await stop.wait()
        return {"type": "lifespan.shutdown"}

    async def send(message: dict[str, str]) -> None:
        assert not message["type"].endswith("failed"), message
        (stopped if started.is_set() else started).set()

    lifespan = asyncio.create_task(app({"type": "lifespan", "state": {}}, receive, send))
    await asyncio.wait_for(started.wait(), 30)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as made:
        yield made
    stop.set()
    await asyncio.wait_for(stopped.wait(), 30)
    await lifespan


async def until_ready(client: httpx.AsyncClient) -> list[dict[str, object]]:
    """Poll /readyz; returns the bodies of its 503s."""
    waiting: list[dict[str, object]] = []
    for _ in range(3000):
        answer = await client.get("/readyz")
        if answer.status_code == 200:
            return waiting
        assert answer.status_code == 503
        waiting.append(answer.json())
        await asyncio.sleep(0.02)
    raise AssertionError(f"not ready: {waiting[-1]}")


async def test_the_whole_server_in_process(client: httpx.AsyncClient) -> None:
    early = await client.post("/v1/embeddings", json={"input": "too early"})
    assert early.status_code == 503
    assert early.headers["retry-after"]
    early = await client.post("/bento/embed", json={"items": [{"text": "too early"}]})
    assert early.status_code == 503
    assert early.headers["retry-after"]
    assert (await client.get("/livez")).status_code == 200
    waiting = await until_ready(client)
    assert all(body["stage_count"] == 6 and body["error"] is None for body in waiting)

    openai = (await client.post("/v1/embeddings", json={"input": ["hello", "world"]})).json()
    tei = (await client.post("/embed", json={"inputs": ["hello", "world"]})).json()
    native = (await client.post("/bento/embed", json={"items": [{"text": "hello"}, {"text": "world"}]})).json()
    vectors = np.array([row["embedding"] for row in openai["data"]])
    assert vectors.shape == (2, 384)
    assert np.abs(vectors - np.array(tei)).max() == 0
    assert np.abs(vectors - np.array([row["embedding"] for row in native])).max() < 1e-7

    for method, path, status in [
        ("GET", "/info", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/health", 200),
        ("GET", "/metrics", 200),
        ("GET", "/openapi.json", 200),
        ("GET", "/docs", 200),
        ("GET", "/docs.json", 200),
        ("GET", "/", 200),
        ("GET", "/schema.json", 200),
        ("GET", "/nope", 404),
        ("GET", "/v1/embeddings", 405),
        ("GET", "/bento/embed", 405),
    ]:
        answer = await client.request(method, path)
        assert answer.status_code == status, path
        assert answer.headers["x-request-id"]
        assert answer.headers["server-timing"].startswith("total;dur=")
        if status >= 400:
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]

    typo = await client.post("/bento/embd", json={"items": []})
    assert typo.status_code == 404 and "did you mean /bento/embed" in typo.json()["error"]
    assert "infinity_batch_tokens" in (await client.get("/metrics")).text
    # BentoML's own page and document know neither our routes nor our errors, and load scripts from elsewhere.
    assert (await client.get("/")).text == (await client.get("/docs")).text
    document = (await client.get("/docs.json")).json()
    assert document == (await client.get("/openapi.json")).json()
    assert {"/v1/embeddings", "/bento/embed"} <= set(document["paths"])


async def test_native_items_are_answered_one_by_one(client: httpx.AsyncClient) -> None:
    await until_ready(client)
    items = [
        {"text": "fine"},
        {"text": ""},
        {"text": "a", "token_ids": [1]},
        {},
        {"text": "a", "model": "nope"},
        {"text": "a", "dimensions": 4},
        {"token_ids": [101, 7592, 102], "model": None},
        {"text": "word " * 300, "truncate": False},
        {"text": "word " * 300},
    ]
    results = (await client.post("/bento/embed", json={"items": items})).json()
    codes = [result["error"] and result["error"]["code"] for result in results]
    assert codes == [
        None,
        "empty_input",
        "invalid_input",
        "invalid_input",
        "model_not_found",
        None,
        None,
        "input_too_long",
        None,
    ]
    assert len(results[5]["embedding"]) == 4
    assert results[8]["tokens"] == 256
    assert results[8]["truncated_from"] == 302
    assert (await client.post("/bento/embed", json={"items": []})).json() == []

    body, headers = gzip.compress(b'{"items": [{"text": "fine"}]}'), {"content-type": "application/json"}
    packed = await client.post("/bento/embed", content=body, headers={**headers, "content-encoding": "gzip"})
    assert packed.json()[0]["embedding"] == pytest.approx(results[0]["embedding"], abs=1e-6)
    tokens = {"items": [{"text": "word " * 200}]}
    large = await client.post("/bento/embed_all", json=tokens, headers={"accept-encoding": "gzip"})
    assert large.headers["content-encoding"] == "gzip" and len(large.json()[0]["embeddings"]) == 202

    bad = await client.post("/bento/embed", json={"items": [{"text": 5}]})
    assert bad.status_code == 400
    assert bad.json()["error"] == "`items[0].text` is the number 5; input should be a valid string."
    unknown = await client.post("/bento/embed", json={"items": [{"text": "a", "normalise": True}]})
    assert unknown.status_code == 400
    assert "`items[0].normalise` is no field of this method" in unknown.json()["error"]
    missing = await client.post("/bento/embed", json={"itms": []})
    assert (missing.status_code, missing.json()["error"]) == (400, "`items` is missing; it is required.")
    broken = await client.post("/bento/embed", content=b'{"items":', headers={"content-type": "application/json"})
    assert broken.status_code == 400 and broken.json()["error"].startswith("The body is not JSON: EOF while")
    form = await client.post("/bento/embed", data={"items": "x"})
    assert form.status_code == 400 and "Content-Type: application/json" in form.json()["error"]
    many = await client.post("/bento/embed", json={"items": [{"text": "a"}] * 2049})
    assert many.status_code == 422
    assert "limit of 2048" in many.json()["error"]


async def counted(client: httpx.AsyncClient) -> dict[str, float]:
    """Every sample of /metrics but the times."""
    lines = [line for line in (await client.get("/metrics")).text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if "duration" not in name}


async def test_every_request_is_counted_once_whichever_door_it_came_by(client: httpx.AsyncClient) -> None:
    await until_ready(client)
    before = await counted(client)
    await client.post("/v1/embeddings", json={"input": "one two"})
    by_route = await counted(client)
    await client.post("/bento/embed", json={"items": [{"text": "one two"}]})
    by_method = await counted(client)

    def grown(new: dict[str, float], old: dict[str, float]) -> dict[str, float]:
        return {name: value - old.get(name, 0) for name, value in new.items() if value != old.get(name, 0)}

    assert grown(by_route, before) == grown(by_method, by_route)
    assert grown(by_method, by_route)['te_request_count{method="single"}'] == 1
    assert grown(by_method, by_route)['te_request_success{method="single"}'] == 1

    await client.post("/bento/embed", json={"items": [{"text": "a"}, {"text": ""}, {"text": "b", "model": "nope"}]})
    await client.post("/bento/embed", json={"items": 5})
    failed = grown(await counted(client), by_method)
    assert failed['infinity_errors_total{code="empty_input"}'] == 1
    assert failed['infinity_errors_total{code="model_not_found"}'] == 1
    assert failed['infinity_errors_total{code="invalid_input"}'] == 1
    assert 'te_request_success{method="batch"}' not in failed and failed["te_embed_success"] == 1


async def test_the_documents_examples_of_the_methods_work(client: httpx.AsyncClient) -> None:
    await until_ready(client)
    document = (await client.get("/openapi.json")).json()
    OpenAPIV31SpecValidator(document).validate()
    native = {path: row["post"] for path, row in document["paths"].items() if path.startswith("/bento/")}
    assert {path.removeprefix("/bento/") for path in native} == set(InfinityBento.apis)
    for path, operation in native.items():
        example = operation["requestBody"]["content"]["application/json"]["example"]
        answer = await client.post(path, json=example)
        assert answer.status_code == 200, path
        (result,) = answer.json()
        assert (result["error"] is None) == ("x-needs" not in operation), (path, result)
    page = html.unescape((await client.get("/docs")).text)
    (snippet,) = re.findall(r'<pre class="python">(.*?)</pre>', page, re.DOTALL)
    calls = ast.parse(snippet).body[-1]
    assert isinstance(calls, ast.With) and len(calls.body) == sum("x-needs" not in row for row in native.values())


def refused(*options: str) -> str:
    """Run ``infinity-bento serve`` with options that cannot be served; returns its whole output."""
    command = [sys.executable, "-m", "infinity_bento.cli", "serve", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    return done.stdout + done.stderr


class TestRefusalToStart:
    """One sentence, an exit code, no stack trace; found by the supervisor before any worker starts."""

    def test_an_unknown_checkpoint(self, tmp_path: Path) -> None:
        output = refused("--model-id", str(tmp_path / "missing"), "--port", "3991")
        assert "missing" in output
        assert output.count("\n") == 1, "nothing above the error looks as if it served"

    def test_an_unsupported_architecture(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "t5"}')
        output = refused("--model-id", str(tmp_path), "--port", "3991")
        assert "'t5' is not supported" in output
        assert "Traceback" not in output

    def test_a_bad_option(self) -> None:
        output = refused("--dtype", "int3")
        assert "dtype" in output
        assert "float32" in output
        assert "Traceback" not in output

    def test_a_failure_in_the_worker_ends_the_server(self, tmp_path: Path) -> None:
        output = refused("--torch-device", "cuda:7", "--port", "3992")
        assert output.count("torch-device cuda:7 is not there") == 1
        assert "torch-device cuda:7 is not there" in output.splitlines()[-1]
        assert "Traceback" not in output and "Starting production" not in output
