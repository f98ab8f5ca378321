"""Errors as gRPC statuses: the code of TEI's contract, the sentence as details, the rest in the trailing metadata.

Called by ``rpc`` for everything that a method raises.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from infinity_bento.errors import (
    CapacityError,
    ClientError,
    DeadlineExceeded,
    InferenceError,
    InfinityError,
    NotReady,
    OutOfMemory,
    Overloaded,
    ServerError,
    Unauthorized,
    UnknownModel,
    UnsupportedTask,
)

# A header block of HTTP/2 has room for 8 KiB, and a character may take 12 bytes of it.
_DETAILS_CHARACTERS = 512

Trailer = tuple[tuple[str, str], ...]

# Subclasses inherit. TEI's "Backend" is FAILED_PRECONDITION: a task the model cannot do, an input it fails on.
STATUSES: Mapping[type[InfinityError], grpc.StatusCode] = {
    ClientError: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthorized: grpc.StatusCode.UNAUTHENTICATED,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    UnsupportedTask: grpc.StatusCode.FAILED_PRECONDITION,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    InferenceError: grpc.StatusCode.FAILED_PRECONDITION,
    OutOfMemory: grpc.StatusCode.UNAVAILABLE,
    ServerError: grpc.StatusCode.INTERNAL,
}


def status_of(error: InfinityError) -> grpc.StatusCode:
    """The code of an error."""
    return next(STATUSES[parent] for parent in type(error).__mro__ if parent in STATUSES)


def details_of(error: InfinityError) -> str:
    """The sentence of an error; an uncommonly long one is cut, since a header must hold it."""
    text = error.message
    return text if len(text) <= _DETAILS_CHARACTERS else text[: _DETAILS_CHARACTERS - 3] + "..."


def trailer_of(error: InfinityError) -> Trailer:
    """The stable code of an error, and when to come back, in words that gRPC's own retries understand as well."""
    trailer: Trailer = (("error-code", error.code),)
    if isinstance(error, CapacityError):
        seconds = error.retry_after_seconds
        trailer += (("retry-after", str(seconds)), ("grpc-retry-pushback-ms", str(1000 * seconds)))
    return trailer
