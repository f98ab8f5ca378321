"""What the BentoML methods take and give: one item class and one result class per method. ``native`` fills them.

null means the default everywhere. Unknown fields are refused: a typo would otherwise go unnoticed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from infinity_bento.core import Aggregation, InputType, Item, Task
from infinity_bento.errors import InvalidInput

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="A served model; needed only where several can answer.")


class _Cut(_Request):
    truncate: bool | None = Field(None, description="Cut an input that is too long; default: the server's option.")
    truncation_direction: Literal["left", "right"] | None = Field(None, description="Which end is cut; default right.")


class TextItem(_Cut):
    """One text, or one list of token ids."""

    text: str | None = Field(None, description="The text; exactly one of text and token_ids is given.")
    token_ids: list[TokenId] | None = Field(None, description="Used as given: no prompt, no special tokens.")
    prompt_name: str | None = Field(None, description="A prompt of the checkpoint, put before the text.")
    prompt: str | None = Field(None, description="A literal prefix; wins over prompt_name.")
    input_type: Literal["query", "document"] | None = Field(None, description="Picks the checkpoint's prompt.")

    def to_item(self, task: Task) -> Item:
        """The engine's item.

        Raises:
            InvalidInput: Unless exactly one of ``text`` and ``token_ids`` is given.
        """
        if (self.text is None) == (self.token_ids is None):
            given = "neither" if self.text is None else "both"
            raise InvalidInput(f"An item needs exactly one of text and token_ids; {given} were given.", param="text")
        return Item(
            task,
            text=self.text,
            token_ids=self.token_ids,
            prompt_name=self.prompt_name,
            prompt=self.prompt,
            input_type=InputType(self.input_type) if self.input_type else None,
            truncate=self.truncate,
            truncation_direction=self.truncation_direction or "right",
        )


class EmbedItem(TextItem):
    """One input to turn into a vector."""

    normalize: bool | None = Field(None, description="Scale to length 1; default: as the checkpoint says.")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(None, description="Keep the first n values.")

    def to_item(self, task: Task) -> Item:
        """The engine's item; raises as ``TextItem.to_item``."""
        item = super().to_item(task)
        item.normalize, item.dimensions = self.normalize, self.dimensions
        return item


class RerankItem(_Cut):
    """One query with the documents to rank."""

    query: Text
    documents: list[str] = Field(min_length=1)
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="Give only the n best.")
    raw_scores: bool = False
    instruction: str | None = Field(None, description="What to judge by, for rerankers that take one.")


class ClassifyItem(_Cut):
    """One text, or one pair of texts, to label."""

    text: Text
    text_pair: str | None = None
    raw_scores: bool = False
    aggregation: Literal["none", "simple", "first", "average", "max"] | None = Field(
        None, description="Of token classifiers; default simple."
    )

    def to_item(self, task: Task) -> Item:
        """The engine's item."""
        return Item(
            task,
            text=self.text,
            text_pair=self.text_pair,
            truncate=self.truncate,
            truncation_direction=self.truncation_direction or "right",
            raw_scores=self.raw_scores,
            aggregation=Aggregation(self.aggregation or "simple"),
        )


class SimilarityItem(_Cut):
    """One sentence to compare with others."""

    source_sentence: Text
    sentences: list[Text] = Field(min_length=1)
    prompt_name: str | None = Field(None, description="A prompt of the checkpoint, put before every sentence.")


class TokenizeItem(_Request):
    """One text to tokenize."""

    text: Text
    add_special_tokens: bool = True
    prompt_name: str | None = Field(None, description="A prompt of the checkpoint, put before the text.")


class ItemError(BaseModel):
    """Why one item has no output."""

    code: str = Field(description="Stable name of the kind of error, such as input_too_long.")
    message: str
    status: int = Field(description="The HTTP status this error has on its own.")


class _Result(BaseModel):
    error: ItemError | None = None


class _Counted(_Result):
    tokens: int | None = Field(None, description="Tokens computed, after truncation.")
    truncated_from: int | None = Field(
        None, description="Tokens before truncation (of a far longer text at least so many); null: nothing was cut."
    )


class EmbedResult(_Counted):
    """A vector, or an error."""

    embedding: list[float] | None = None


class EmbedAllResult(_Counted):
    """A matrix with a row per token, or an error."""

    embeddings: list[list[float]] | None = None


class EmbedSparseResult(_Counted):
    """A sparse vector with ascending indices, or an error."""

    indices: list[int] | None = None
    values: list[float] | None = None


class Ranked(BaseModel):
    """One document of a ranking."""

    index: int
    score: float
    truncated_from: int | None = Field(
        None, description="Tokens of the pair before truncation (of far longer texts at least so many); null: not cut."
    )


class RerankResult(_Result):
    """The documents of one query, best first, or an error."""

    results: list[Ranked] | None = None
    tokens: int | None = Field(None, description="Tokens of all pairs, after truncation.")


class Label(BaseModel):
    """One label; of token classifiers with its place in the text, in characters."""

    label: str
    score: float
    start: int | None = None
    end: int | None = None
    word: str | None = None


class ClassifyResult(_Counted):
    """All labels of a text, best first, or the labelled spans of it; or an error."""

    labels: list[Label] | None = None


class SimilarityResult(_Result):
    """The cosine with each sentence, or an error."""

    similarities: list[float] | None = None
    tokens: int | None = Field(None, description="Tokens of all sentences, after truncation.")
    truncated: int | None = Field(None, description="How many of the sentences were cut.")


class Token(BaseModel):
    """One token; start and stop are UTF-8 bytes of the text with its prompt."""

    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


class DecideItem(_Request):
    """Questions about one state, as in the body of POST /v1/systemone."""

    state: Any = Field(description="What the questions are about: a string, an object or an array.")
    questions: dict[str, Any] = Field(description="By their ids: type, instructions, criteria.")


class DecideResult(_Counted):
    """The answers by the ids of the questions, or an error."""

    answers: dict[str, Any] | None = None


class TokenizeResult(_Result):
    """The tokens of a text, or an error."""

    tokens: list[Token] | None = None
