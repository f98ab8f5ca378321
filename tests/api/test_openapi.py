from __future__ import annotations

import re
import shlex
from typing import Any

import orjson
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from infinity_bento.api.app import create_app
from infinity_bento.api.envelopes import OPENAI, TEI, wire_errors
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.api.table import SCHEMAS, route_table
from infinity_bento.errors import ConfigError, InfinityError, LoadError, WeightMismatch
from tests.api.fakes import LOADING, FakeEngine, client_for, every_task, two_models


async def document(engine: FakeEngine | None = None, path: str = "/openapi.json", **options: Any) -> dict[str, Any]:
    async with client_for(engine or FakeEngine(), **options) as client:
        answer = await client.get(path)
        assert answer.status_code == 200
        return dict(answer.json())


@pytest.mark.parametrize("options", [{}, {"api_key": "k"}])
@pytest.mark.parametrize("engine", [FakeEngine(), two_models(), FakeEngine(state=LOADING)])
async def test_document_is_valid_openapi(engine: FakeEngine, options: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(await document(engine, **options)).validate()


async def test_both_paths_give_the_same_document() -> None:
    assert await document() == await document(path="/api-doc/openapi.json")


async def test_every_route_of_the_application_is_documented() -> None:
    app = create_app(FakeEngine, ApiSettings())
    served = {(route.path, method.lower()) for route in app.routes for method in route.methods - {"HEAD"}}
    paths = (await document())["paths"]
    assert served == {(path, method) for path, operations in paths.items() for method in operations}
    assert len(served) == sum(len(route.paths) for route in route_table())


async def test_every_error_of_a_dialect_is_listed_under_its_status() -> None:
    paths = (await document(api_key="k"))["paths"]
    for path, dialect in (("/v1/embeddings", OPENAI), ("/embed", TEI)):
        responses = paths[path]["post"]["responses"]
        for error_class in wire_errors():
            entry = responses[str(dialect.status_of(error_class))]
            assert f"`{error_class.code}`" in entry["description"]
            schema = entry["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{dialect.name}Error"}
    assert "retry-after" in paths["/embed"]["post"]["responses"]["429"]["headers"]


def test_errors_of_the_start_are_not_on_the_wire() -> None:
    listed = set(wire_errors())
    assert not listed & {ConfigError, LoadError, WeightMismatch, InfinityError}
    assert len(listed) >= 14


async def test_401_and_security_only_with_a_key() -> None:
    without, with_key = await document(), await document(api_key="k")
    assert "401" not in without["paths"]["/embed"]["post"]["responses"]
    assert with_key["paths"]["/embed"]["post"]["security"] == [{"bearer": []}]
    assert "401" in with_key["paths"]["/v1/models"]["get"]["responses"]
    assert "security" not in with_key["paths"]["/readyz"]["get"]


def test_every_schema_named_by_a_route_exists() -> None:
    for route in route_table():
        assert {route.response, route.request or route.response, *(route.statuses or {}).values()} <= set(SCHEMAS)


async def test_examples_are_answered_as_their_schemas_say() -> None:
    from openapi_schema_validator import OAS31Validator

    engine = every_task(truncated_from=99)
    whole = await document(engine)

    def check(schema: dict[str, Any], value: Any) -> None:
        OAS31Validator({**schema, "components": whole["components"]}).validate(value)

    async with client_for(engine) as client:
        for path, operations in whole["paths"].items():
            for method, operation in operations.items():
                content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
                example = content.get("example")
                if example is not None:
                    check(content["schema"], example)
                answer = await client.request(method, path, json=example)
                assert answer.status_code == 200, (path, answer.text)
                if answer.headers["content-type"] == "application/json":
                    check(operation["responses"]["200"]["content"]["application/json"]["schema"], answer.json())
                if example is not None:
                    refused = await client.request(method, path, json={})
                    shape = operation["responses"][str(refused.status_code)]["content"]["application/json"]["schema"]
                    check(shape, refused.json())


@pytest.mark.parametrize("engine", [every_task()])
async def test_curl_lines_of_the_page_run_as_they_are(engine: FakeEngine) -> None:
    import html

    async with client_for(engine, api_key="k") as client:
        page = await client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        lines = [html.unescape(line) for line in re.findall(r"<pre>(.*?)</pre>", page.text, re.DOTALL)]
        assert len(lines) == sum(len(route.paths) for route in route_table())
        for line in lines:
            words = shlex.split(line.replace("$INFINITY_API_KEY", "k"))
            assert words[:2] == ["curl", "-sS"]
            headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
            body = words[words.index("-d") + 1] if "-d" in words else None
            answer = await client.request("POST" if body else "GET", words[2], content=body, headers=headers)
            assert answer.status_code == 200, line


async def test_page_names_loaded_models_and_needs_nothing_from_outside() -> None:
    async with client_for(two_models()) as client:
        page = await client.get("/docs")
    assert "<code>r</code>" in page.text and '"model":"m"' in page.text.replace("&quot;", '"')
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(", page.text)
    assert not [url for url in re.findall(r"https?://[^\s\"'<]+", page.text) if not url.startswith("http://test")]
    assert "default-src 'none'" in page.headers["content-security-policy"]


async def test_page_before_any_model_is_loaded() -> None:
    async with client_for(FakeEngine(state=LOADING)) as client:
        page = await client.get("/docs")
    assert page.status_code == 200 and "No model is loaded yet" in page.text


async def test_a_hostile_host_header_is_not_repeated() -> None:
    async with client_for(FakeEngine()) as client:
        page = await client.get("/docs", headers={"host": "x'><script>alert(1)</script>"})
    assert "script" not in page.text and "127.0.0.1:3000" in page.text


async def test_examples_in_the_document_are_bodies() -> None:
    paths = (await document())["paths"]
    example = paths["/embed"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert orjson.loads(orjson.dumps(example))["model"] == "m"


async def test_page_says_what_no_loaded_model_can_do() -> None:
    async with client_for(FakeEngine()) as client:
        page = (await client.get("/docs")).text
    served, _, others = page.partition("Not with the loaded models")
    assert "POST /rerank</code>: Rank texts (TEI) or documents (Infinity) (needs a rerank model)" in others
    assert "curl" not in others and "/embed</code>" in served and "/rerank" not in served
