"""The error tree: class -> HTTP status, stable code, and what to do.

    InfinityError
    |-- ClientError
    |   |-- InvalidInput       422  a field has a wrong type, value or combination
    |   |-- EmptyInput         400  an empty list or an empty text
    |   |-- MalformedBody      400  the body is not the JSON (or MessagePack) it claims to be
    |   |-- InputTooLong       413  one input exceeds the length limit and may not be truncated
    |   |-- BatchTooLarge      413  more inputs in one request than the limit
    |   |-- PayloadTooLarge    413  the body exceeds the payload limit
    |   |-- UnsupportedMedia   415  a content type or encoding nobody here reads
    |   |-- UnknownModel       404  no served model has this name
    |   |-- UnknownRoute       404  no such path
    |   |-- MethodNotAllowed   405  the path exists, the method does not
    |   |-- UnsupportedTask    400  the model cannot do this task
    |   `-- Unauthorized       401  missing or wrong API key
    |-- CapacityError
    |   |-- Overloaded         429  limit of concurrent requests or queued tokens reached; carries Retry-After
    |   |-- NotReady           503  still loading, or stopping; carries Retry-After
    |   `-- DeadlineExceeded   504  not answered within the time limit
    `-- ServerError
        |-- ConfigError        (at start) an option has a value that cannot be honoured
        |-- LoadError          (at start) a checkpoint cannot be served
        |   `-- WeightMismatch (at start) tensors are missing, unexpected or have a wrong shape
        |-- OutOfMemory        503  the device ran out of memory on this input even alone
        `-- InferenceError     424  the model failed on this input, or made a non-finite number (as TEI; not retried)

Every text says what was wrong (name and value), what is allowed, and what to do. Dialects turn the one value into
their own envelope, and may fix another status where their published contract has one (see ``infinity_bento.api``).
"""

from __future__ import annotations

from typing import ClassVar


class InfinityError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: One sentence: what is wrong (name and value), what is allowed, what to do.
        param: The field or option at fault, in the dialect's own path syntax, if there is one.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class ClientError(InfinityError):
    """The caller can fix it."""

    status = 400
    code = "bad_request"


class InvalidInput(ClientError):
    """A field has a wrong type, value or combination."""

    status = 422
    code = "invalid_input"


class EmptyInput(ClientError):
    """An empty list or an empty text where at least one is needed."""

    status = 400
    code = "empty_input"


class MalformedBody(ClientError):
    """The body is not what its content type claims."""

    status = 400
    code = "malformed_body"


class InputTooLong(ClientError):
    """One input exceeds the length limit and truncation is off."""

    status = 413
    code = "input_too_long"


class BatchTooLarge(ClientError):
    """More inputs in one request than ``max_client_batch_size``."""

    status = 413
    code = "batch_too_large"


class PayloadTooLarge(ClientError):
    """The body exceeds ``payload_limit`` bytes."""

    status = 413
    code = "payload_too_large"


class UnsupportedMedia(ClientError):
    """A content type or content encoding that is not read here."""

    status = 415
    code = "unsupported_media_type"


class UnknownModel(ClientError):
    """No served model has this name."""

    status = 404
    code = "model_not_found"


class UnknownRoute(ClientError):
    """No such path."""

    status = 404
    code = "route_not_found"


class MethodNotAllowed(ClientError):
    """The path exists, but not for this method."""

    status = 405
    code = "method_not_allowed"


class UnsupportedTask(ClientError):
    """The named model cannot do this task."""

    status = 400
    code = "unsupported_task"


class Unauthorized(ClientError):
    """Missing or wrong API key."""

    status = 401
    code = "unauthorized"


class CapacityError(InfinityError):
    """Nothing is wrong with the request; the server cannot take it now.

    Args:
        message: As in ``InfinityError``.
        retry_after_seconds: Whole seconds after which a retry is worthwhile, at least 1.
    """

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_seconds: int = 1, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_seconds = max(1, int(retry_after_seconds))


class Overloaded(CapacityError):
    """The limit of concurrent inputs, or of queued tokens, is reached."""

    status = 429
    code = "overloaded"


class NotReady(CapacityError):
    """Models are still loading, or the server is stopping."""

    status = 503
    code = "not_ready"


class DeadlineExceeded(CapacityError):
    """The request was not answered within the time limit; its waiting items were dropped."""

    status = 504
    code = "deadline_exceeded"


class ServerError(InfinityError):
    """The server is at fault."""

    status = 500
    code = "internal"


class ConfigError(ServerError):
    """An option has a value that cannot be honoured; raised at start."""

    code = "config"


class LoadError(ServerError):
    """A checkpoint cannot be served; raised at start."""

    code = "load"


class WeightMismatch(LoadError):
    """Tensors are missing, unexpected or have a wrong shape; raised at start."""

    code = "weight_mismatch"


class OutOfMemory(ServerError):
    """The device ran out of memory on this input even when it ran alone."""

    status = 503
    code = "out_of_memory"


class InferenceError(ServerError):
    """The model failed on this input, or produced a non-finite number; a retry gives the same."""

    status = 424
    code = "inference"
