"""From validated items to results: the one place where the routes call ``Engine.submit``. Used by every dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity_bento.api.envelopes import located
from infinity_bento.api.exchange import Call, Headers
from infinity_bento.core import Item, ModelInfo, Result, Timing
from infinity_bento.errors import InfinityError

_LISTED_INDICES = 100  # in one header


async def run(call: Call, info: ModelInfo, items: list[Item], path: Callable[[int], str] | None) -> list[Result]:
    """The results of all items, in order; records their timing.

    Args:
        call: The request; its timing is set here.
        info: The model that answers.
        items: At least one, all of one task.
        path: How an error names the field that item ``index`` came from; None: it knows that itself.

    Raises:
        InfinityError: Whatever the engine raises, or the error of the first item that failed.
    """
    results: list[Result] = []
    for index, outcome in enumerate(await call.engine.submit(info.name, items)):
        if isinstance(outcome, InfinityError):
            if path is None:
                raise outcome
            raise located(outcome, path(index)) from outcome
        results.append(outcome)
    call.state.timing = Timing.mean([result.timing for result in results])
    return results


def usage_of(results: Sequence[Result]) -> dict[str, int]:
    """OpenAI's ``usage``, and under ``truncated`` how many inputs were cut, if any was."""
    tokens = sum(result.usage.tokens for result in results)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    truncated = truncated_count(results)
    if truncated:
        usage["truncated"] = truncated
    return usage


def truncated_count(results: Sequence[Result]) -> int:
    """How many inputs were cut to the length limit."""
    return sum(result.usage.truncated_from is not None for result in results)


def truncation_of(result: Result) -> dict[str, int]:
    """What became of an input that was cut: tokens before and after."""
    assert result.usage.truncated_from is not None, "asked only of truncated inputs"
    return {"from": result.usage.truncated_from, "to": result.usage.tokens}


def truncation_headers(results: Sequence[Result]) -> Headers:
    """How many inputs were cut, and which; empty if none was."""
    cut = [index for index, result in enumerate(results) if result.usage.truncated_from is not None]
    if not cut:
        return []
    listed = ",".join(map(str, cut[:_LISTED_INDICES])) + (",..." if len(cut) > _LISTED_INDICES else "")
    return [(b"x-truncated-inputs", b"%d" % len(cut)), (b"x-truncated-indices", listed.encode("ascii"))]
