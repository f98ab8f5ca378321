"""The tokenizer of a decision model: its protocol writes the requests. Used by ``pool``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from infinity_bento.core import Encoded, Item
from infinity_bento.decisions import DecisionRequest
from infinity_bento.errors import InfinityError, InvalidInput
from infinity_bento.inputs.tokenization import TextTokenizer


class DecisionTokenizer(TextTokenizer):
    """A text tokenizer that also writes decision requests. Thread-safe, as both its parts are.

    Args:
        text: For texts, and for whatever asks about tokens.
        write: The protocol's ``encode``.
    """

    def __init__(self, text: TextTokenizer, write: Callable[[DecisionRequest], Encoded]) -> None:
        self._inner = text
        self._write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, items: Sequence[Item]) -> list[Encoded | InfinityError]:
        """See ``TextTokenizer.encode``; a request that cannot be written gets its error as its value."""
        return [self._one(item) for item in items]

    def _one(self, item: Item) -> Encoded | InfinityError:
        if item.decision is None:
            return InvalidInput("A decision model answers questions about a state, and this item has none.")
        try:
            return self._write(item.decision)
        except InfinityError as error:
            return error
