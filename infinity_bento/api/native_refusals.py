"""The errors of the BentoML door: what pydantic finds wrong with a body in one sentence, and the count of failed items.

Called by ``serving``, whose BentoML would answer with pydantic's list and write a stack trace into the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from infinity_bento.api.fields import describe
from infinity_bento.errors import ClientError, InvalidInput, MalformedBody, UnsupportedMedia
from infinity_bento.telemetry.metrics import Metrics

# BentoML answers 400 to a body that does not validate, and its client knows that status.
BAD_BODY = 400


def refusal(error: ValidationError, media_type: str) -> ClientError:
    """The first thing wrong with the body of a native call.

    Args:
        error: From BentoML's reading of the body.
        media_type: Of the request; a form, which is what ``curl -d`` sends unasked, holds no items.
    """
    if "json" not in media_type and "bentoml" not in media_type and "multipart" not in media_type:
        return UnsupportedMedia(
            f"Content-Type is {media_type}, which holds no items; send JSON with the header Content-Type: "
            "application/json."
        )
    first, more = error.errors(include_url=False, include_context=False)[0], error.error_count() - 1
    path, text = _path(first["loc"]), first["msg"]
    if first["type"] == "json_invalid":
        return MalformedBody(f"The body is not JSON: {text.removeprefix('Invalid JSON: ')}; correct it.")
    rest = f" ({more} more like it.)" if more else ""
    if first["type"] == "missing":
        return InvalidInput(f"`{path}` is missing; it is required.{rest}", param=path)
    if first["type"] == "extra_forbidden":
        return InvalidInput(f"`{path}` is no field of this method; correct its name or leave it out.{rest}", param=path)
    reason = text[:1].lower() + text[1:]
    return InvalidInput(f"`{path}` is {describe(first['input'])}; {reason}.{rest}", param=path)


def count_item_errors(metrics: Metrics, results: Iterable[Any]) -> None:
    """Count the items of a native call that were answered with an error."""
    for result in results:
        error = getattr(result, "error", None)
        if error is not None:
            metrics.count_error(error.code)


def _path(location: Sequence[str | int]) -> str:
    """``("items", 0, "text")`` as ``items[0].text``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).lstrip(".") or "body"
