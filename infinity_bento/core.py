"""The vocabulary shared by all layers: Task, Item, Encoded, Result, Usage. Numpy only; no torch, no server.

One request: the wire layer makes ``Item``s, the tokenizer turns each into an ``Encoded``, the batcher packs those, the
head makes one output per item, and the caller gets a ``Result`` or an ``InfinityError`` per item, in request order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity_bento.decisions import DecisionRequest
from infinity_bento.errors import InfinityError

FloatArray = NDArray[np.float32]
TruncationDirection = Literal["right", "left"]


class Task(enum.StrEnum):
    """What a caller wants of a model. The value is the public name, as in ``/v1/models`` and in error texts."""

    EMBED = "embed"
    EMBED_ALL = "embed_all"
    EMBED_SPARSE = "embed_sparse"
    RERANK = "rerank"
    CLASSIFY = "classify"
    CLASSIFY_TOKENS = "classify_tokens"
    DECIDE = "decide"


class Pooling(enum.StrEnum):
    """How token vectors become one vector; the values are sentence-transformers' names.

    Several modes concatenate in the order of this class.
    """

    CLS = "cls"
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    LAST_TOKEN = "lasttoken"
    SPLADE = "splade"  # as an option only: vocabulary logits of a masked language model, one weight per token id


class InputType(enum.StrEnum):
    """Which side of a retrieval pair a text is."""

    QUERY = "query"
    DOCUMENT = "document"


class Aggregation(enum.StrEnum):
    """How labels of tokens become labels of words and entities; the values are those of transformers' pipeline."""

    NONE = "none"  # one label per token
    SIMPLE = "simple"  # neighbours of one label become one entity
    FIRST = "first"  # as simple, after each word took the label of its first token
    AVERAGE = "average"  # ... the label with the highest mean score over its tokens
    MAX = "max"  # ... the label of its most certain token


@dataclass(slots=True)
class Item:
    """One input of one task. Set by the wire layer; nobody changes it afterwards.

    Exactly one of ``text``, ``token_ids`` and ``decision`` is set. ``text_pair`` makes a pair (rerank, predict).
    """

    task: Task
    text: str | None = None
    text_pair: str | None = None
    documents: list[str] | None = None  # RERANK with a listwise model: all documents of the query ``text``
    token_ids: list[int] | None = None  # used as given: no prompt, no special tokens added
    decision: DecisionRequest | None = None  # DECIDE: all questions of one request
    # Text handling. None means the default of the served model.
    prompt_name: str | None = None
    prompt: str | None = None  # a literal prefix; wins over prompt_name
    input_type: InputType | None = None
    truncate: bool | None = None
    truncation_direction: TruncationDirection = "right"
    instruction: str | None = None  # of a pair, for rerankers whose template has a place for one
    # Output.
    normalize: bool | None = None  # None: as the checkpoint says
    dimensions: int | None = None  # keep the first n values, then normalize again if normalized
    raw_scores: bool = False
    aggregation: Aggregation = Aggregation.NONE  # CLASSIFY_TOKENS
    ignore_labels: tuple[str, ...] = ("O",)  # CLASSIFY_TOKENS: labels left out of the answer


class BlockMask(enum.StrEnum):
    """Who sees whom among the blocks of one sequence, both directions; block 0 is common ground."""

    SHARED_APART = "shared_apart"  # block 0 sees itself alone; another block sees block 0 and itself
    SHARED_SEES_ALL = "shared_sees_all"  # block 0 sees everything; another block sees block 0 and itself


@dataclass(slots=True)
class Encoded:
    """The tokens of one item, or of each sequence of an item that is several. Set by the tokenizer."""

    input_ids: list[int]
    token_type_ids: list[int] | None = None  # None: all zero
    prompt_length: int = 0  # leading tokens that pooling leaves out where the checkpoint says include_prompt=false
    truncated_from: int | None = None  # tokens before truncation, of a far longer text at least; None: nothing was cut
    characters: int = 0  # Unicode scalars of the caller's text, prompt excluded; ids count one each
    # Late interaction and learned sparse vectors.
    attended: int | None = None  # leading tokens that may be attended to; the others only ask. None: all
    kept: NDArray[np.bool_] | None = None  # tokens whose vectors are part of a token matrix; None: all
    static: bool = False  # answered from a table of token weights: no model runs
    # Decisions.
    parts: list[Encoded] | None = None  # the sequences of an item that is several; its own ``input_ids`` is empty then
    # How the outputs of the parts become that of the item, where each may run in a batch of its own. None: all are
    # computed together, and the head has them all.
    merge: Callable[[Sequence[Any]], Any] | None = None
    position_ids: list[int] | None = None  # from 0; None: 0, 1, 2 ...
    blocks: NDArray[np.int32] | None = None  # the block of each token; None: all one
    block_mask: BlockMask = BlockMask.SHARED_APART  # how ``blocks`` are read
    readout: Any = None  # what the head must know of this sequence: where to read, which rows, or its ``TokenSpans``

    def __len__(self) -> int:
        return len(self.input_ids) if self.parts is None else sum(map(len, self.parts))

    @property
    def sequences(self) -> list[Encoded]:
        """What is packed for this item: its parts, or itself."""
        return [self] if self.parts is None else self.parts


@dataclass(slots=True)
class TokenSpans:
    """Where the tokens of one input, special ones included, lie in its text. Set by the tokenizer."""

    tokens: list[str]  # as in the vocabulary; the text itself for an unknown token
    offsets: list[tuple[int, int]] | None  # characters of the caller's text; None: the input was token ids
    special: list[bool]  # added by the tokenizer, or part of a prompt: no label
    continues_word: list[bool]  # belongs to the word of the token before

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TokenLabel:
    """The label of a token, or of several that make an entity."""

    label: str
    score: float  # probability of the label; its logit where raw scores were asked for
    start: int | None  # characters of the caller's text, end excluded; None: the input was token ids
    end: int | None
    word: str  # the tokens as text


class SparseRow(NamedTuple):
    """A learned sparse vector: ascending vocabulary ids and their positive weights."""

    indices: NDArray[np.int32]
    values: FloatArray


@dataclass(slots=True)
class Usage:
    """What one item cost and what happened to it. Set by the tokenizer."""

    tokens: int  # after prompt, special tokens and truncation
    characters: int = 0
    truncated_from: int | None = None  # tokens before truncation, of a far longer text at least; None: nothing was cut


@dataclass(slots=True)
class Timing:
    """Seconds one item spent in each stage. Set by the engine."""

    tokenize_seconds: float = 0.0
    queue_seconds: float = 0.0
    inference_seconds: float = 0.0

    @classmethod
    def mean(cls, timings: Sequence[Timing]) -> Timing:
        """The mean of each stage, as TEI reports it; of at least one item."""
        count = len(timings)
        if count == 1:
            return timings[0]
        return cls(
            sum(timing.tokenize_seconds for timing in timings) / count,
            sum(timing.queue_seconds for timing in timings) / count,
            sum(timing.inference_seconds for timing in timings) / count,
        )


@dataclass(slots=True)
class Result:
    """The answer to one item.

    ``output`` by task: EMBED ``[D]`` float32; EMBED_ALL ``[n, D]`` float32; EMBED_SPARSE ``SparseRow``;
    RERANK ``[1]`` and CLASSIFY ``[labels]`` float32 scores (activated unless ``raw_scores``);
    CLASSIFY_TOKENS a list of ``TokenLabel``; DECIDE a ``Decision`` per question, in the order of the request.
    """

    output: Any
    usage: Usage
    timing: Timing = field(default_factory=Timing)


# Errors are values: one bad item harms nobody else.
Outcome = Result | InfinityError


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is and can do; the source of ``/info`` and ``/v1/models``. Set by the engine at load."""

    name: str  # the public name, as in request bodies
    model_id: str  # as the user named the checkpoint
    revision: str | None
    source: str  # where the files came from: "local path", "Bento model store", "Hugging Face cache", ...
    architecture: str  # config.json's model_type
    tasks: tuple[Task, ...]
    device: str
    dtype: str
    max_input_length: int  # tokens of one input, prompt and special tokens included
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    max_concurrent_requests: int
    auto_truncate: bool
    tokenization_workers: int
    dimensions: int | None = None  # width of a dense vector, or of a token vector
    pooling: str | None = None
    normalize: bool = False  # the checkpoint ends in a Normalize module
    similarity: str | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the literal prefix in force, however it was chosen
    id2label: dict[int, str] | None = None
    decision_protocol: str | None = None  # of a decision model
    listwise: bool = False  # a reranker that reads all documents of a query together
    attention: str = ""  # the attention backend in use
    notes: tuple[str, ...] = ()  # fallbacks, clamped options: nothing is silent
    created: int = 0  # Unix seconds when the model became ready


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How far the engine is. ``ready`` and ``error`` exclude each other."""

    ready: bool
    stage: str  # name of the current or last stage
    stage_number: int  # 1-based
    stage_count: int
    elapsed_seconds: float  # since the engine started loading
    error: str | None = None  # one sentence, when loading failed
