"""From validated items to results: the one place where the routes call ``Engine.submit``. Used by every dialect."""

from __future__ import annotations

from collections.abc import Sequence

from infinity_bento.api.envelopes import located
from infinity_bento.api.exchange import Call, Headers
from infinity_bento.api.fields import Inputs
from infinity_bento.core import Item, ModelInfo, Result, Timing
from infinity_bento.errors import InfinityError


def embed_items(inputs: Inputs, template: Item) -> list[Item]:
    """One item per input, with the options of ``template``."""
    return [
        Item(
            task=template.task,
            text=value if isinstance(value, str) else None,
            token_ids=value if isinstance(value, list) else None,
            prompt_name=template.prompt_name,
            truncate=template.truncate,
            truncation_direction=template.truncation_direction,
            normalize=template.normalize,
            dimensions=template.dimensions,
        )
        for value in inputs.values
    ]


async def run(call: Call, info: ModelInfo, items: list[Item], field: str, *, single: bool) -> list[Result]:
    """The results of all items, in order; records timing and metrics.

    Args:
        call: The request; its timing is set here.
        info: The model that answers.
        items: At least one, all of one task.
        field: The field the items came from; errors of one item name ``field[index]``.
        single: The item did not come in a list, so errors name ``field`` alone.

    Raises:
        InfinityError: Whatever the engine raises, or the error of the first item that failed.
    """
    metrics = call.context.metrics
    task = items[0].task
    metrics.count_request(task, len(items))
    results: list[Result] = []
    for index, outcome in enumerate(await call.engine.submit(info.name, items)):
        if isinstance(outcome, InfinityError):
            raise located(outcome, field if single else f"{field}[{index}]") from outcome
        results.append(outcome)
    timing = call.state.timing = mean_timing(results)
    tokens = [result.usage.tokens for result in results]
    metrics.observe_request(task, info.name, call.state.elapsed_seconds(), timing, tokens)
    return results


def mean_timing(results: Sequence[Result]) -> Timing:
    """The mean of each stage over the inputs, as TEI reports it."""
    if len(results) == 1:
        return results[0].timing
    count = len(results)
    return Timing(
        sum(result.timing.tokenize_seconds for result in results) / count,
        sum(result.timing.queue_seconds for result in results) / count,
        sum(result.timing.inference_seconds for result in results) / count,
    )


def truncated_count(results: Sequence[Result]) -> int:
    """How many inputs were cut to the length limit."""
    return sum(result.usage.truncated_from is not None for result in results)


def truncation_header(truncated: int) -> Headers:
    """``x-truncated-inputs``, only if something was cut."""
    return [(b"x-truncated-inputs", b"%d" % truncated)] if truncated else []
