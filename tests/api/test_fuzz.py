"""Requests made from our own OpenAPI document, valid and not: no 5xx, no undeclared status, shape or content type."""

from __future__ import annotations

from typing import Any

import msgpack
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from infinity_bento.api.app import create_app
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.api.table import route_table
from tests.api.fakes import every_task

# One path of each row: the others have the same handler.
PATHS = [route.paths[0] for route in route_table() if route.paths[0] != "/openapi.json"]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

app = create_app(every_task, ApiSettings(version="9.9"))
schema = schemathesis.openapi.from_asgi("/openapi.json", app).include(path=PATHS)


@schemathesis.serializer("application/msgpack")
def as_msgpack(context: Any, value: Any) -> bytes:
    """Bodies of the second content type; JSON's large numbers have no place in it."""
    return bytes(msgpack.packb(value, default=str)) if _fits(value) else b""


def _fits(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_fits(inner) for inner in value.values())
    if isinstance(value, list):
        return all(_fits(inner) for inner in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**64


@schema.parametrize()
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_document_and_server_agree(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


def test_every_route_is_fuzzed() -> None:
    assert {operation.ok().path for operation in schema.get_all_operations()} == set(PATHS)
