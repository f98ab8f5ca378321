from __future__ import annotations

import orjson
import pytest

from infinity_bento.api.envelopes import COHERE, OPENAI, TEI, Dialect, from_status, located, wire_errors
from infinity_bento.errors import (
    CapacityError,
    ClientError,
    InfinityError,
    MethodNotAllowed,
    Overloaded,
    ServerError,
    Unauthorized,
    UnknownRoute,
)


@pytest.mark.parametrize("error_class", [*wire_errors(), UnknownRoute, MethodNotAllowed])
@pytest.mark.parametrize("dialect", [OPENAI, TEI, COHERE])
def test_every_error_has_a_status_and_text_in_every_dialect(dialect: Dialect, error_class: type[InfinityError]) -> None:
    reply = dialect.reply(error_class("What, allowed, do.", param="input[1]"))
    body = orjson.loads(reply.body)
    assert "What, allowed, do." in orjson.dumps(body).decode()
    assert reply.status == dialect.status_of(error_class)
    assert 400 <= reply.status < 500 if issubclass(error_class, ClientError) else reply.status >= 424
    headers = dict(reply.headers)
    assert (b"retry-after" in headers) == issubclass(error_class, CapacityError)
    assert (b"www-authenticate" in headers) == (error_class is Unauthorized)


def test_subclasses_inherit_the_status_of_their_parent() -> None:
    class Worse(Overloaded):
        """A kind of overload."""

    assert OPENAI.status_of(Worse) == 429 and Worse not in set(wire_errors())


def test_located_keeps_class_and_retry_after() -> None:
    original = Overloaded("Full.", retry_after_seconds=9)
    error = located(original, "input[2]")
    assert isinstance(error, Overloaded) and error.retry_after_seconds == 9
    assert str(error) == "`input[2]`: Full." and error.param == "input[2]"
    assert str(original) == "Full." and original.param is None


@pytest.mark.parametrize(
    ("status", "code"), [(404, "route_not_found"), (418, "bad_request"), (429, "overloaded"), (502, "internal")]
)
def test_a_bare_status_becomes_the_fitting_error(status: int, code: str) -> None:
    error = from_status(status, "x")
    assert error.code == code and isinstance(error, (ClientError, CapacityError, ServerError))
