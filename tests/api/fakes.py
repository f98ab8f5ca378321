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
from infinity_bento.api.protocol import ApiSettings
from infinity_bento.core import EngineStatus, FloatArray, Item, ModelInfo, Outcome, Result, Task, Timing, Usage
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


@dataclass
class FakeEngine:
    """One token per word; a text that starts with ``too long`` fails alone; knobs for waiting and failing."""

    models: tuple[ModelInfo, ...] = (INFO,)
    state: EngineStatus = READY
    wait: asyncio.Event | None = None  # submit answers when it is set
    raises: Exception | None = None
    truncated_from: int | None = None
    submitted: list[Item] = field(default_factory=list)
    cancelled: int = 0
    dead: bool = False  # a device thread has died
    width: int = 8

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
        if name is None:
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

    async def submit(self, name: str, items: list[Item]) -> list[Outcome]:
        self.submitted = items
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
        text = item.text or ""
        if text.startswith("too long"):
            return InputTooLong("The input has 99 tokens; the limit is 16. Shorten it.")
        words = len(item.token_ids) if item.token_ids is not None else len(text.split())
        usage = Usage(words, len(text) or words, self.truncated_from)
        return Result(vector_of(item, self.width), usage, Timing(0.001, 0.002, 0.003))


def two_models() -> FakeEngine:
    """An engine with two embedders and a reranker."""
    return FakeEngine(
        models=(INFO, replace(INFO, name="n"), replace(INFO, name="r", tasks=(Task.RERANK,), dimensions=None))
    )


def client_for(engine: FakeEngine, app: ASGIApp | None = None, **options: Any) -> httpx.AsyncClient:
    """An HTTP client whose server is the application in this process; ``options`` are fields of ``ApiSettings``."""
    app = app if app is not None else create_app(lambda: engine, ApiSettings(**{"version": "9.9", **options}))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
