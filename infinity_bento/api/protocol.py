"""What the wire layer asks of the engine, and the settings it is built with. Used by every file of ``api``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from infinity_bento.core import EngineStatus, Item, ModelInfo, Outcome, Task


class EngineLike(Protocol):
    """The part of the engine that the routes use; tests put a small fake here."""

    def status(self) -> EngineStatus:
        """How far loading is."""
        ...

    @property
    def alive(self) -> bool:
        """False once loading has failed or a device thread has died: only a restart helps."""
        ...

    def infos(self) -> Sequence[ModelInfo]:
        """The loaded models, the default one first; while loading, those that are loaded so far."""
        ...

    def resolve(self, name: str | None, task: Task) -> ModelInfo:
        """The model that answers ``task``.

        Raises:
            NotReady: Models are still loading.
            UnknownModel: No served model has this name.
            UnsupportedTask: The named model cannot do this task.
            InvalidInput: No name was given and several models could answer.
        """
        ...

    async def submit(self, name: str, items: list[Item]) -> Sequence[Outcome]:
        """One outcome per item, in order. Cancelling the call drops the items that still wait.

        Raises:
            Overloaded: The queue is full.
            NotReady: Models are still loading, or the server is stopping.
            BatchTooLarge: More items than the model's ``max_client_batch_size``.
            DeadlineExceeded: Not answered within the time limit.
            EmptyInput: No items.
        """
        ...


GetEngine = Callable[[], EngineLike]


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Options of the wire layer. Set from the resolved settings at start."""

    payload_limit: int = 16_000_000  # bytes of one request body
    compression_min_bytes: int = 262_144  # answers from this size are compressed for clients that allow it
    request_timeout_seconds: float = 60.0  # 0: no limit
    api_key: str | None = field(default=None, repr=False)
    cors_allow_origin: tuple[str, ...] = ()  # "*": any
    version: str = ""
    revision: str | None = None  # commit of this build, shown by /info
    docker_label: str | None = None
