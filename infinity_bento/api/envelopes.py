"""One error value, three published shapes: the envelopes of OpenAI, TEI and Cohere, with the statuses of each contract.

Routes and middleware turn every ``InfinityError`` into a ``Reply`` here; the OpenAPI document is generated from the
same tables.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from infinity_bento.api.exchange import Headers, Reply
from infinity_bento.decisions import FieldPath
from infinity_bento.errors import (
    BatchTooLarge,
    CapacityError,
    ClientError,
    ConfigError,
    DeadlineExceeded,
    EmptyInput,
    InfinityError,
    InputTooLong,
    InvalidInput,
    LoadError,
    MalformedBody,
    MethodNotAllowed,
    NotReady,
    Overloaded,
    PayloadTooLarge,
    ServerError,
    Unauthorized,
    UnknownModel,
    UnknownRoute,
    UnsupportedMedia,
    UnsupportedTask,
)

ErrorClass = type[InfinityError]

# Raised while starting, never on the wire.
START_ONLY: tuple[ErrorClass, ...] = (ConfigError, LoadError)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one published contract reports errors.

    Args:
        name: Shown in the API document.
        statuses: Where the contract fixes another status than the error class; subclasses inherit.
        envelope: Error value -> JSON body.
        schema: JSON schema of that body.
        request_id: A further name for the header ``x-request-id`` of every answer.
    """

    name: str
    statuses: Mapping[ErrorClass, int]
    envelope: Callable[[InfinityError], dict[str, Any]]
    schema: Mapping[str, Any]
    request_id: bytes | None = None

    def status_of(self, error_class: ErrorClass) -> int:
        """The HTTP status of this class in this dialect."""
        return int(_nearest(self.statuses, error_class, error_class.status))

    def reply(self, error: InfinityError, *, status: int | None = None) -> Reply:
        """The complete answer, with ``Retry-After`` or ``WWW-Authenticate`` where the error calls for it."""
        headers: Headers = []
        if isinstance(error, CapacityError):
            headers.append((b"retry-after", b"%d" % error.retry_after_seconds))
        if isinstance(error, Unauthorized):
            headers.append((b"www-authenticate", b"Bearer"))
        return Reply.of_json(self.envelope(error), status or self.status_of(type(error)), headers)


def located(error: InfinityError, path: str) -> InfinityError:
    """A copy of ``error`` whose text and ``param`` name the field it belongs to, such as ``input[3]``."""
    clone = copy.copy(error)
    clone.message = f"`{path}`: {error.message}"
    clone.param = path
    return clone


@contextmanager
def inside(path: str) -> Iterator[None]:
    """Errors raised in this block name fields of the object at ``path``: ``path.dimensions`` for ``dimensions``."""
    try:
        yield
    except InfinityError as error:
        raise moved(error, path) from None


def moved(error: InfinityError, path: str) -> InfinityError:
    """A copy of ``error`` about a field of the object at ``path``."""
    if error.param is None or not error.message.startswith("`"):
        return located(error, path)
    clone = copy.copy(error)
    clone.message = f"`{path}.{error.message[1:]}"
    clone.param = f"{path}.{error.param}"
    return clone


def wire_errors() -> Iterator[ErrorClass]:
    """Every error class that a documented route can answer with, parents first."""
    pending: list[ErrorClass] = [InfinityError]
    while pending:
        for child in pending.pop(0).__subclasses__():
            # Subclasses that tests or users define elsewhere are no part of the published document.
            if child.__module__ != InfinityError.__module__ or issubclass(child, START_ONLY):
                continue
            pending.append(child)
            if child not in (ClientError, CapacityError, UnknownRoute, MethodNotAllowed):
                yield child


def from_status(status: int, message: str) -> InfinityError:
    """The error class that fits an answer of which only status and text are known."""
    by_status: dict[int, ErrorClass] = {
        401: Unauthorized,
        404: UnknownRoute,
        405: MethodNotAllowed,
        413: PayloadTooLarge,
        415: UnsupportedMedia,
        422: InvalidInput,
        429: Overloaded,
        503: NotReady,
        504: DeadlineExceeded,
    }
    return by_status.get(status, ClientError if status < 500 else ServerError)(message)


def _nearest(table: Mapping[ErrorClass, Any], error_class: ErrorClass, default: Any) -> Any:
    """The entry of the class itself or of its closest parent."""
    for parent in error_class.__mro__:
        if parent in table:
            return table[parent]
    return default


# OpenAI: a bad value is a 400. The words in ``type`` are the ones its client libraries know.
_OPENAI_TYPES: dict[ErrorClass, str] = {
    ClientError: "invalid_request_error",
    Unauthorized: "authentication_error",
    Overloaded: "rate_limit_error",
    CapacityError: "server_error",
    ServerError: "server_error",
}


def _openai_envelope(error: InfinityError) -> dict[str, Any]:
    kind = _nearest(_OPENAI_TYPES, type(error), "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


OPENAI = Dialect(
    name="OpenAI",
    statuses={InvalidInput: 400},
    envelope=_openai_envelope,
    schema={
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string", "description": "What is wrong, what is allowed, what to do."},
                    "type": {"type": "string", "enum": sorted(set(_OPENAI_TYPES.values()))},
                    "param": {"type": ["string", "null"], "description": "The field at fault, such as `input[3]`."},
                    "code": {"type": "string", "description": "Stable name of the error."},
                },
            }
        },
    },
)

# TEI: its server answers 422 to too-long inputs and too-large batches although its document says 413; clients see the
# server. A task that the model cannot do is "Backend" 424, as is its failure everywhere.
_TEI_TYPES: dict[ErrorClass, str] = {
    ClientError: "Validation",
    EmptyInput: "Empty",
    UnsupportedTask: "Backend",
    CapacityError: "Unhealthy",
    Overloaded: "Overloaded",
    DeadlineExceeded: "Overloaded",
    ServerError: "Backend",
}


def _tei_envelope(error: InfinityError) -> dict[str, Any]:
    return {"error": error.message, "error_type": _nearest(_TEI_TYPES, type(error), "Backend")}


TEI = Dialect(
    name="TEI",
    statuses={InputTooLong: 422, BatchTooLarge: 422, UnsupportedTask: 424},
    envelope=_tei_envelope,
    schema={
        "type": "object",
        "required": ["error", "error_type"],
        "properties": {
            "error": {"type": "string", "description": "What is wrong, what is allowed, what to do."},
            "error_type": {"type": "string", "enum": sorted(set(_TEI_TYPES.values()))},
        },
    },
)

# Cohere's clients turn 400, 401, 404, 429, 500, 503 and 504 into classes of their own; all of them show ``message``.


def _cohere_envelope(error: InfinityError) -> dict[str, Any]:
    return {"message": error.message, "code": error.code, "param": error.param}


COHERE = Dialect(
    name="Cohere",
    statuses={InvalidInput: 400},
    envelope=_cohere_envelope,
    schema={
        "type": "object",
        "required": ["message", "code", "param"],
        "properties": {
            "message": {"type": "string", "description": "What is wrong, what is allowed, what to do."},
            "code": {"type": "string", "description": "Stable name of the error."},
            "param": {"type": ["string", "null"], "description": "The field at fault, such as `documents[3]`."},
        },
    },
)


# System One: its SDK repeats 408, 429 and every 5xx, so nothing that a client can mend has one of these. It looks at
# ``error`` first; other clients look at ``detail``, as the published service has it.
_SYSTEMONE_TYPES: dict[ErrorClass, str] = {
    ClientError: "api_usage_error",
    MalformedBody: "validation_error",
    InvalidInput: "validation_error",
    InputTooLong: "max_tokens_exceeded",
    Unauthorized: "authentication_error",
    UnknownRoute: "not_found",
    Overloaded: "rate_limit_error",
    CapacityError: "overloaded",
    ServerError: "server_error",
}


def _systemone_envelope(error: InfinityError) -> dict[str, Any]:
    kind, given = _nearest(_SYSTEMONE_TYPES, type(error), "server_error"), error.param
    path = ["body", *(given.parts if isinstance(given, FieldPath) else (given,) if given else ())]
    detail: Any = {"error_type": kind, "message": error.message}
    if isinstance(error, InvalidInput | MalformedBody):
        detail = [{"loc": path, "msg": error.message, "type": "value_error"}]
    elif given:
        detail["loc"] = path
    return {"error": error.message, "error_type": kind, "detail": detail}


SYSTEMONE = Dialect(
    name="SystemOne",
    statuses={
        UnknownModel: 400,
        UnsupportedTask: 400,
        MalformedBody: 422,
        InputTooLong: 422,
        EmptyInput: 422,
        BatchTooLarge: 422,
    },
    envelope=_systemone_envelope,
    schema={
        "type": "object",
        "required": ["error", "error_type", "detail"],
        "properties": {
            "error": {"type": "string", "description": "What is wrong, what is allowed, what to do."},
            "error_type": {"type": "string", "enum": sorted(set(_SYSTEMONE_TYPES.values()))},
            "detail": {"description": "The same as the published service has it; for a bad field with its path."},
        },
    },
    request_id=b"x-typesafe-request-id",
)


# At /v1/decisions OpenAI's client looks for ``error.message`` and the typesafe SDK finds it there too.


def _decisions_envelope(error: InfinityError) -> dict[str, Any]:
    return _systemone_envelope(error) | _openai_envelope(error)


DECISIONS = Dialect(
    name="Decisions",
    statuses=SYSTEMONE.statuses,
    envelope=_decisions_envelope,
    schema={
        "type": "object",
        "required": ["error", "error_type", "detail"],
        "properties": {**SYSTEMONE.schema["properties"], **OPENAI.schema["properties"]},
    },
    request_id=SYSTEMONE.request_id,
)


def dialect_of_unknown(path: str) -> Dialect:
    """The error shape for a path that no route has: of the clients that use such paths."""
    if path.startswith("/v1/"):
        return OPENAI
    return COHERE if path.startswith("/v2/") else TEI
