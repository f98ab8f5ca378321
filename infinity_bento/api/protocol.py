"""What the wire layer asks of the engine, and the settings it is built with. Used by every file of ``api``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from infinity_bento.core import EngineStatus, Item, ModelInfo, Outcome, Task
from infinity_bento.decisions import DecisionRules
from infinity_bento.errors import InfinityError

# One token as /tokenize shows it: id, text, whether it is special, and start and end of its text in the prompted input,
# in UTF-8 bytes. Special tokens have their name in the vocabulary as text and no offsets.
TokenRow = tuple[int, str, bool, int | None, int | None]


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

    async def submit(self, name: str, items: list[Item], *, wait: bool = False) -> Sequence[Outcome]:
        """One outcome per item, in order. Cancelling the call drops the items that still wait.

        ``wait``: if the model is full, wait for a turn instead of being refused.

        Raises:
            Overloaded: The queue is full, and ``wait`` is false.
            NotReady: Models are still loading, or the server is stopping.
            BatchTooLarge: More items than the model's ``max_client_batch_size``.
            DeadlineExceeded: Not answered within the time limit.
            EmptyInput: No items.
        """
        ...

    async def tokenize(
        self, name: str, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> Sequence[Sequence[TokenRow] | InfinityError]:
        """The tokens of each text, in order and untruncated, its prompt included; an error for a text that has none.

        Args:
            name: A served model's name.
            texts: At least one, none of them empty.
            add_special_tokens: As when the model runs.
            prompt_name: A key of the checkpoint's prompts; None for its default prompt.
        """
        ...

    async def decode(
        self, name: str, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> Sequence[str | InfinityError]:
        """The text of each list of token ids, in order; ``InvalidInput`` for a list with an id outside the vocabulary.

        Args:
            name: A served model's name.
            ids: At least one list, none of them empty.
            skip_special_tokens: Leave special tokens out of the text.
        """
        ...


GetEngine = Callable[[], EngineLike]


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Options of the wire layer. Set from the resolved settings at start."""

    payload_limit: int = 16_000_000  # bytes of one request body
    compression_min_bytes: int = 1_048_576  # smaller answers leave sooner as they are than compressed
    request_timeout_seconds: float = 60.0  # 0: no limit
    api_key: str | None = field(default=None, repr=False)
    cors_allow_origin: tuple[str, ...] = ()  # "*": any
    decisions: DecisionRules = field(default_factory=DecisionRules)
    version: str = ""
    revision: str | None = None  # commit of this build, shown by /info
    docker_label: str | None = None
