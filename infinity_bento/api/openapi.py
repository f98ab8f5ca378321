"""The OpenAPI 3.1 document, generated from the route table, the schemas of the dialects and the error classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infinity_bento.api.choosing import is_late_interaction
from infinity_bento.api.envelopes import TEI, ErrorClass, wire_errors
from infinity_bento.api.native_table import NativeMethod, native_schemas
from infinity_bento.api.routes import Route
from infinity_bento.api.schemas import array
from infinity_bento.core import ModelInfo
from infinity_bento.errors import NotReady, ServerError, Unauthorized

Schemas = Mapping[str, Mapping[str, Any]]

MODEL_PLACEHOLDER = "$MODEL"
NATIVE_TAG = "BentoML"
_SECURITY_SCHEME = "bearer"
_ANSWER_HEADERS = {
    "x-request-id": {"description": "The caller's id if it sent one, else a new one.", "schema": {"type": "string"}},
    "server-timing": {
        "description": "Milliseconds: total; for inference also tokenize, queue and inference (mean over the inputs).",
        "schema": {"type": "string"},
    },
}
_TRUNCATION_HEADERS = {
    "x-truncated-inputs": {"description": "How many inputs were cut; absent if none.", "schema": {"type": "integer"}},
    "x-truncated-indices": {"description": "Which ones, the first hundred.", "schema": {"type": "string"}},
}
_RETRY_HEADER = {"description": "Whole seconds to wait.", "schema": {"type": "integer", "minimum": 1}}


def build_document(
    routes: Iterable[Route],
    schemas: Schemas,
    models: Sequence[ModelInfo],
    *,
    version: str,
    with_key: bool,
    native: Sequence[NativeMethod] = (),
) -> dict[str, Any]:
    """The document of this server.

    Args:
        routes: The route table; aliases become paths of their own, marked as such.
        schemas: Schema name -> JSON schema, for bodies and answers.
        models: The loaded models; their names replace ``$MODEL`` in the examples.
        version: Version of this package.
        with_key: Inference routes need an API key.
        native: BentoML's methods, where they are served.
    """
    rows = list(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in rows:
        for path in route.paths:
            paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, models, with_key=with_key)
    for method in native:
        paths[method.path] = {"post": _native_operation(method, models, with_key=with_key)}
    components: dict[str, Any] = {"schemas": {**schemas, **_error_schemas(rows), **native_schemas(native)}}
    if with_key:
        components["securitySchemes"] = {_SECURITY_SCHEME: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "infinity-bento",
            "version": version,
            "description": "Inference without padding.",
        },
        "paths": paths,
        "components": components,
    }


def example_body(route: Route | NativeMethod, models: Sequence[ModelInfo]) -> Any:
    """The example of a route for a loaded model, whose name is in it; None if the route has none."""
    model = next((model for model in models if _can(model, route)), None)
    example = route.example(model) if callable(route.example) else route.example
    return _substitute(example, model.name if model is not None else None)


def _operation(route: Route, path: str, models: Sequence[ModelInfo], *, with_key: bool) -> dict[str, Any]:
    alias = "" if path == route.paths[0] else f" (alias of {route.paths[0]})"
    name = path.strip("/").replace("/", "_").replace("-", "_").replace(".", "_") or "root"
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{name}",
        "summary": route.summary + alias,
        "tags": [route.dialect.name if route.request or not route.is_open else "Server"],
        "responses": _responses(route, with_key=with_key),
    }
    if route.request is not None:
        content: dict[str, Any] = {"schema": _ref(route.request)}
        if route.example is not None:
            content["example"] = example_body(route, models)
        # The same fields in either form; gzip and zstd are accepted as Content-Encoding.
        binary = {"schema": _ref(route.request)}
        bodies = {"application/json": content, "application/msgpack": binary}
        if route.forms:
            form = {"required": ["request"], "properties": {"request": _ref(route.request)}}
            bodies["multipart/form-data"] = {"schema": {"type": "object", **form}}
        operation["requestBody"] = {"required": True, "content": bodies}
    _mark_needs(operation, route, models)
    if with_key and not route.is_open:
        operation["security"] = [{_SECURITY_SCHEME: []}]
    return operation


def _native_operation(method: NativeMethod, models: Sequence[ModelInfo], *, with_key: bool) -> dict[str, Any]:
    """A BentoML method: a list of items in, a list of results out; refused as a whole, it answers as TEI does."""
    whole = "The call as a whole is refused"
    items = {"type": "object", "required": ["items"], "properties": {"items": array(_ref(method.item.__name__))}}
    example = {"items": [example_body(method, models)]}
    answer = {"application/json": {"schema": array(_ref(method.result.__name__))}}
    refused = {"application/json": {"schema": _ref(f"{TEI.name}Error")}}
    operation: dict[str, Any] = {
        "operationId": f"bento_{method.name}",
        "summary": method.summary,
        "tags": [NATIVE_TAG],
        "requestBody": {"required": True, "content": {"application/json": {"schema": items, "example": example}}},
        "responses": {
            "200": {"description": "One result per item, in order", "headers": _ANSWER_HEADERS, "content": answer},
            "default": {"description": whole, "headers": _ANSWER_HEADERS, "content": refused},
        },
    }
    _mark_needs(operation, method, models)
    if with_key:
        operation["security"] = [{_SECURITY_SCHEME: []}]
    return operation


def _mark_needs(operation: dict[str, Any], route: Route | NativeMethod, models: Sequence[ModelInfo]) -> None:
    """Say of a route that no loaded model can answer what it would take."""
    if route.tasks and not any(_can(model, route) for model in models):
        operation["x-needs"] = [task.value for task in route.tasks]
        operation["summary"] += f" (needs {needed_model(operation['x-needs'])})"


def needed_model(tasks: Sequence[str]) -> str:
    """``a rerank model``, ``an embed or embed_all model``."""
    return f"{'an' if tasks[0][0] in 'aeiou' else 'a'} {' or '.join(tasks)} model"


def _responses(route: Route, *, with_key: bool) -> dict[str, Any]:
    """The 200, then one entry per status that this route's errors have in its dialect."""
    ok = {"schema": _ref(route.response)}
    content, headers = {route.media: ok}, dict(_ANSWER_HEADERS)
    if route.request is not None:
        content["application/msgpack"] = ok
        headers |= _TRUNCATION_HEADERS
    responses: dict[str, Any] = {"200": {"description": "OK", "headers": headers, "content": content}}
    by_status: dict[int, list[ErrorClass]] = {}
    for error_class in _errors_of(route, with_key=with_key):
        by_status.setdefault(route.dialect.status_of(error_class), []).append(error_class)
    for status, classes in sorted(by_status.items()):
        text = "\n".join(f"- `{cls.code}`: {_first_line(cls)}" for cls in classes)
        headers = dict(_ANSWER_HEADERS)
        if status in (429, 503, 504):
            headers["retry-after"] = _RETRY_HEADER
        content = {"application/json": {"schema": _ref(_error_schema_name(route))}}
        responses[str(status)] = {"description": text, "headers": headers, "content": content}
    for status, schema in (route.statuses or {}).items():
        content = {"application/json": {"schema": _ref(schema)}}
        responses[str(status)] = {"description": "Not ready", "headers": _ANSWER_HEADERS, "content": content}
    return responses


def _errors_of(route: Route, *, with_key: bool) -> list[ErrorClass]:
    """All of them where a model runs; elsewhere the few that can happen."""
    possible = wire_errors() if route.request is not None else (ServerError, NotReady, Unauthorized)
    keyed = with_key and not route.is_open
    return [error_class for error_class in possible if keyed or error_class is not Unauthorized]


def _error_schemas(routes: Iterable[Route]) -> dict[str, Any]:
    return {_error_schema_name(route): dict(route.dialect.schema) for route in routes}


def _error_schema_name(route: Route) -> str:
    return f"{route.dialect.name}Error"


def _first_line(error_class: ErrorClass) -> str:
    return (inspect.getdoc(error_class) or error_class.__name__).splitlines()[0]


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _can(model: ModelInfo, route: Route | NativeMethod) -> bool:
    """Whether a model can do what the route is for."""
    if not route.tasks or set(route.tasks) & set(model.tasks):
        return True
    return route.late_interaction and is_late_interaction(model)


def _substitute(value: Any, name: str | None) -> Any:
    """``value`` with the model's name in its place; without a name the place goes, since null would not help."""
    if isinstance(value, Mapping):
        kept = {key: inner for key, inner in value.items() if name is not None or inner != MODEL_PLACEHOLDER}
        return {key: _substitute(inner, name) for key, inner in kept.items()}
    if isinstance(value, (list, tuple)):
        return [_substitute(inner, name) for inner in value]
    return name if value == MODEL_PLACEHOLDER else value
