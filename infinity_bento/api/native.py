"""The BentoML door: item and result schemas of the batchable methods, and the way from them to the engine and back.

Called by ``service.py``. A method takes a list of items and answers each in its place, with an output or an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from infinity_bento.api.protocol import EngineLike
from infinity_bento.core import InputType, Item, Outcome, Task
from infinity_bento.errors import InfinityError, InvalidInput


class EmbedItem(BaseModel):
    """One text, or one list of token ids, to turn into a vector. null means the default everywhere."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = Field(None, description="The text; exactly one of text and token_ids is given.")
    token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="Token ids, used as given: no prompt, no special tokens."
    )
    model: str | None = Field(None, description="A served model; needed only where several can embed.")
    prompt_name: str | None = Field(None, description="A prompt of the checkpoint, put before the text.")
    prompt: str | None = Field(None, description="A literal prefix; wins over prompt_name.")
    input_type: Literal["query", "document"] | None = Field(None, description="Picks the checkpoint's prompt.")
    truncate: bool | None = Field(None, description="Cut an input that is too long; default: the server's option.")
    truncation_direction: Literal["left", "right"] | None = Field(None, description="Which end is cut; default right.")
    normalize: bool | None = Field(None, description="Scale to length 1; default: as the checkpoint says.")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(None, description="Keep the first n values.")

    def to_item(self) -> Item:
        """The engine's item.

        Raises:
            InvalidInput: Unless exactly one of ``text`` and ``token_ids`` is given.
        """
        if (self.text is None) == (self.token_ids is None):
            given = "neither" if self.text is None else "both"
            raise InvalidInput(f"an item needs exactly one of text and token_ids; {given} were given", param="text")
        return Item(
            Task.EMBED,
            text=self.text,
            token_ids=self.token_ids,
            prompt_name=self.prompt_name,
            prompt=self.prompt,
            input_type=InputType(self.input_type) if self.input_type else None,
            truncate=self.truncate,
            truncation_direction=self.truncation_direction or "right",
            normalize=self.normalize,
            dimensions=self.dimensions,
        )


class ItemError(BaseModel):
    """Why one item has no output."""

    code: str = Field(description="Stable name of the kind of error, such as input_too_long.")
    message: str
    status: int = Field(description="The HTTP status this error has on its own.")


class EmbedResult(BaseModel):
    """The answer to one item: an embedding or an error."""

    embedding: list[float] | None = None
    tokens: int | None = Field(None, description="Tokens of the input after truncation.")
    truncated_from: int | None = Field(None, description="Tokens before truncation; null: nothing was cut.")
    error: ItemError | None = None


async def embed(engine: EngineLike, items: Sequence[EmbedItem]) -> list[EmbedResult]:
    """Embed items, each on the model it names; one result per item, in order.

    Raises:
        Overloaded, NotReady, BatchTooLarge: If the call as a whole is refused.
    """
    results: list[EmbedResult] = [EmbedResult() for _ in items]
    by_model: dict[str, list[int]] = {}
    ready: dict[int, Item] = {}
    for index, item in enumerate(items):
        try:
            ready[index] = item.to_item()
            by_model.setdefault(engine.resolve(item.model, Task.EMBED).name, []).append(index)
        except InfinityError as error:
            if error.status in (429, 503):
                raise
            results[index] = EmbedResult(error=_error(error))
    answers = await asyncio.gather(
        *(engine.submit(name, [ready[index] for index in indices]) for name, indices in by_model.items())
    )
    for indices, outcomes in zip(by_model.values(), answers, strict=True):
        for index, outcome in zip(indices, outcomes, strict=True):
            results[index] = _result(outcome)
    return results


def _result(outcome: Outcome) -> EmbedResult:
    if isinstance(outcome, InfinityError):
        return EmbedResult(error=_error(outcome))
    return EmbedResult.model_construct(
        embedding=outcome.output.tolist(),
        tokens=outcome.usage.tokens,
        truncated_from=outcome.usage.truncated_from,
        error=None,
    )


def _error(error: InfinityError) -> ItemError:
    return ItemError(code=error.code, message=error.message, status=error.status)
