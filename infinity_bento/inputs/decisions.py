"""The tokenizer of a decision model: its protocol writes the requests. Used by ``pool``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from infinity_bento.core import Encoded, Item
from infinity_bento.decisions import DecisionRequest
from infinity_bento.errors import InfinityError, InputTooLong, InvalidInput
from infinity_bento.inputs.tokenization import TextTokenizer


class DecisionTokenizer(TextTokenizer):
    """A text tokenizer that also writes decision requests. Thread-safe, as both its parts are.

    Args:
        text: For texts, and for whatever asks about tokens.
        write: The protocol's ``encode``.
        budget: Tokens of one batch.
        computed: How many tokens of some sequences run through the model; less than all where it shares prefixes.
    """

    def __init__(
        self,
        text: TextTokenizer,
        write: Callable[[DecisionRequest], Encoded],
        *,
        budget: int,
        computed: Callable[[Sequence[Encoded]], int],
    ) -> None:
        self._inner = text
        self._write = write
        self._budget = budget
        self._computed = computed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, items: Sequence[Item]) -> list[Encoded | InfinityError]:
        """See ``TextTokenizer.encode``; one that cannot be written, or fits no batch, has its error as its value."""
        return [self._one(item) for item in items]

    def _one(self, item: Item) -> Encoded | InfinityError:
        if item.decision is None:
            return InvalidInput("A decision model answers questions about a state, and this item has none.")
        try:
            encoded = self._write(item.decision)
        except InfinityError as error:
            return error
        return encoded if len(encoded) <= self._budget else self._weighed(encoded)

    def _weighed(self, encoded: Encoded) -> Encoded | InputTooLong:
        """A request whose sequences are more tokens than a batch takes, which need not mean that all are computed."""
        computed, sequences = self._computed(encoded.sequences), len(encoded.sequences)
        if computed <= self._budget:
            return encoded
        return InputTooLong(
            f"State and questions are {computed} tokens to compute in {sequences} sequences, more than the "
            f"{self._budget} of a batch (max-batch-tokens); a request is not split: shorten the state, or ask fewer "
            "questions at once.",
            param="state",
        )
