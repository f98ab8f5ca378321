"""A deterministic engine behind the ``EngineLike`` protocol, and helpers to call an application without a socket."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
from starlette.types import ASGIApp

from infinity_bento.api.app import create_app
from infinity_bento.api.protocol import ApiSettings, TokenRow
from infinity_bento.core import (
    EngineStatus,
    FloatArray,
    Item,
    ModelInfo,
    Outcome,
    Result,
    SparseRow,
    Task,
    Timing,
    TokenLabel,
    Usage,
)
from infinity_bento.decisions import Decision, Question
from infinity_bento.errors import InfinityError, InputTooLong, InvalidInput, NotReady, UnknownModel, UnsupportedTask

INFO = ModelInfo(
    name="m",
    model_id="org/m",
    revision=None,
    source="local path",
    architecture="bert",
    tasks=(Task.EMBED,),
    device="cpu",
    dtype="float32",
    max_input_length=16,
    max_batch_tokens=1024,
    max_batch_requests=None,
    max_client_batch_size=4,
    max_concurrent_requests=512,
    auto_truncate=True,
    tokenization_workers=2,
    dimensions=8,
    pooling="lasttoken",
    prompts={"query": "query: "},
    id2label={0: "no", 1: "yes"},
    created=1_700_000_000,
)
READY = EngineStatus(True, "ready", 6, 6, 2.5)
LOADING = EngineStatus(False, "read weights", 2, 6, 3.25)
BROKEN = EngineStatus(False, "read weights", 2, 6, 3.25, error="model.safetensors has no tensor 'x'.")


def vector_of(item: Item, width: int) -> FloatArray:
    """What the fake answers for an item: a function of its content and options only."""
    key = repr((item.text, item.token_ids, item.prompt_name, item.truncate, item.truncation_direction))
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    row = np.random.default_rng(seed).standard_normal(width).astype(np.float32)[: item.dimensions]
    return row / np.linalg.norm(row) if item.normalize else row


def matrix_of(item: Item, width: int) -> FloatArray:
    """A row per word, of unit length."""
    words = (item.text or "").split() or [""]
    rows = np.stack([vector_of(replace(item, text=word, normalize=True), width) for word in words])
    return rows.astype(np.float32)


def sparse_of(item: Item) -> SparseRow:
    """Each character of the text is a vocabulary id, weighted by how often it occurs."""
    codes, counts = np.unique([ord(letter) for letter in item.text or "a"], return_counts=True)
    return SparseRow(codes.astype(np.int32), (counts / np.float32(3)).astype(np.float32))


def logits_of(item: Item, labels: int) -> FloatArray:
    """A function of the item's texts, the same for equal texts; the number in ``score 0.5`` for a rerank document."""
    text = item.text_pair if item.text_pair is not None else item.text or ""
    if text.startswith("score "):
        return np.array([float(text.split()[1])], dtype=np.float32)
    seed = int.from_bytes(hashlib.sha256(repr((item.text, item.text_pair)).encode()).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(labels).astype(np.float32)


def scores_of(item: Item, labels: int) -> FloatArray:
    """The logits, or softmax (of several) or sigmoid (of one) of them."""
    logits = logits_of(item, labels)
    if item.raw_scores:
        return logits
    powers = np.exp(logits)
    return powers / powers.sum() if labels > 1 else powers / (1 + powers)


def entities_of(item: Item) -> list[TokenLabel]:
    """Every word is an entity."""
    found, start = [], 0
    for word in (item.text or "").split():
        start = (item.text or "").index(word, start)
        found.append(TokenLabel("WORD", 0.75, start, start + len(word), word))
        start += len(word)
    return found


def decision_of(question: Question) -> Decision:
    """Option i has the share i + 1."""
    shares = range(1, len(question.options) + 1)
    probabilities = tuple(share / sum(shares) for share in shares)
    return Decision(probabilities, native_confidence=max(probabilities), extras={"act_probability": 0.25})


@dataclass
class FakeEngine:
    """One token per word; a text that starts with ``too long`` fails alone; knobs for waiting and failing."""

    models: tuple[ModelInfo, ...] = (INFO,)
    state: EngineStatus = READY
    wait: asyncio.Event | None = None  # submit answers when it is set
    raises: Exception | None = None
    truncated_from: int | None = None
    submitted: list[Item] = field(default_factory=list)
    waits: bool = False  # whether the last submit waits for its turn
    asked: int = 0  # items of all submits
    cancelled: int = 0
    dead: bool = False  # a device thread has died
    width: int = 8
    labels: int = 2

    def status(self) -> EngineStatus:
        return self.state

    @property
    def alive(self) -> bool:
        return self.state.error is None and not self.dead

    def infos(self) -> Sequence[ModelInfo]:
        return self.models if self.state.ready else ()

    def resolve(self, name: str | None, task: Task) -> ModelInfo:
        if not self.state.ready:
            raise NotReady("Loading; retry later.")
        able = [model for model in self.models if task in model.tasks]
        if not name:
            if not able:
                raise UnsupportedTask(f"No served model can {task}; serve one.", param="model")
            if len(able) != 1:
                names = ", ".join(model.name for model in able)
                raise InvalidInput(f"`model` is missing; name one of {names}.", param="model")
            return able[0]
        for model in self.models:
            if model.name == name:
                if model not in able:
                    raise UnsupportedTask(f"Model {name!r} cannot {task}; ask a model that can.", param="model")
                return model
        served = ", ".join(model.name for model in self.models)
        raise UnknownModel(f"No model {name!r}; served: {served}.", param="model")

    async def submit(self, name: str, items: list[Item], *, wait: bool = False) -> list[Outcome]:
        self.submitted, self.waits = items, wait
        self.asked += len(items)
        try:
            if self.wait is not None:
                await self.wait.wait()
        except asyncio.CancelledError:
            self.cancelled += len(items)
            raise
        if self.raises is not None:
            raise self.raises
        return [self._outcome(item) for item in items]

    def _outcome(self, item: Item) -> Result | InfinityError:
        text = " ".join(part for part in (item.text, item.text_pair) if part)
        if "too long" in text:
            return InputTooLong("The input has 99 tokens; the limit is 16. Shorten it.")
        words = len(item.token_ids) if item.token_ids is not None else len(text.split())
        characters = len(item.text or "") + len(item.text_pair or "") or words
        truncated_from = 99 if "very long" in text else self.truncated_from
        return Result(self._output(item), Usage(words, characters, truncated_from), Timing(0.001, 0.002, 0.003))

    def _output(self, item: Item) -> Any:
        if item.decision is not None:
            return [decision_of(question) for question in item.decision.questions]
        if item.task is Task.EMBED_ALL:
            return matrix_of(item, self.width)
        if item.task is Task.EMBED_SPARSE:
            return sparse_of(item)
        if item.task is Task.RERANK:
            return scores_of(item, 1)
        if item.task is Task.CLASSIFY:
            return scores_of(item, self.labels)
        return entities_of(item) if item.task is Task.CLASSIFY_TOKENS else vector_of(item, self.width)

    async def tokenize(
        self, name: str, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[TokenRow] | InfinityError]:
        """One token per character, whose id is its code point; ``<s>`` first."""
        prompt = INFO.prompts[prompt_name] if prompt_name else ""
        rows: list[list[TokenRow] | InfinityError] = []
        for text in texts:
            if text.startswith("too long"):
                rows.append(InvalidInput("The tokenizer cannot read this text; send another."))
                continue
            row: list[TokenRow] = [(0, "<s>", True, None, None)] if add_special_tokens else []
            position = 0
            for letter in prompt + text:
                row.append((ord(letter), letter, False, position, position + len(letter.encode())))
                position += len(letter.encode())
            rows.append(row)
        return rows

    async def decode(
        self, name: str, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str | InfinityError]:
        special = "" if skip_special_tokens else "<s>"
        return [
            InvalidInput("Token id beyond the vocabulary; 0 to 999 are known.")
            if max(row) > 999
            else "".join(special if token == 0 else chr(token) for token in row)
            for row in ids
        ]


LATE = replace(INFO, name="late", tasks=(Task.EMBED_ALL,), prompts={})
RERANKER = replace(INFO, name="r", tasks=(Task.RERANK, Task.CLASSIFY), id2label={0: "relevant"}, dimensions=None)
CLASSIFIER = replace(INFO, name="c", tasks=(Task.CLASSIFY,), dimensions=None)
TAGGER = replace(INFO, name="t", tasks=(Task.CLASSIFY_TOKENS,), dimensions=None)
SPLADE = replace(INFO, name="s", tasks=(Task.EMBED_SPARSE,), dimensions=None)
DECIDER = replace(INFO, name="d", tasks=(Task.DECIDE,), dimensions=None, decision_protocol="d3")
EMBEDDER = replace(INFO, tasks=(Task.EMBED, Task.EMBED_ALL))


def serving(*models: ModelInfo, **knobs: Any) -> FakeEngine:
    """An engine with these models."""
    return FakeEngine(models=models, **knobs)


def every_task(**knobs: Any) -> FakeEngine:
    """An engine that can do everything, the embedder being the default model."""
    return serving(EMBEDDER, SPLADE, RERANKER, CLASSIFIER, TAGGER, LATE, DECIDER, **knobs)


def two_models() -> FakeEngine:
    """An engine with two embedders and a reranker."""
    return FakeEngine(
        models=(INFO, replace(INFO, name="n"), replace(INFO, name="r", tasks=(Task.RERANK,), dimensions=None))
    )


def client_for(engine: FakeEngine, app: ASGIApp | None = None, **options: Any) -> httpx.AsyncClient:
    """An HTTP client whose server is the application in this process; ``options`` are fields of ``ApiSettings``."""
    app = app if app is not None else create_app(lambda: engine, ApiSettings(**{"version": "9.9", **options}))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
