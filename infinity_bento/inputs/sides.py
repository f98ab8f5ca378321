"""Queries and documents that are tokenised by different rules, behind the interface of one tokenizer.

Base of the late-interaction tokenizer, and of models that answer queries from a table of token weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinity_bento.core import Encoded, InputType, Item
from infinity_bento.errors import InfinityError
from infinity_bento.inputs.tokenization import TextRules, TextTokenizer

SIDES = {"query": InputType.QUERY, "document": InputType.DOCUMENT, "passage": InputType.DOCUMENT}


class SidedTokenizer(TextTokenizer):
    """Tokenises each item by the rules of its side.

    As a ``TextTokenizer`` it has the rules of documents. The side is the item's ``input_type``, or what its
    ``prompt_name`` names, or ``default``.

    Args:
        backend: Of the documents.
        rules: Of the documents.
        query: Tokenises queries.
        default: The side of items that do not say.
        **options: Of the documents, as for ``TextTokenizer``.
    """

    def __init__(
        self,
        backend: Any,
        rules: TextRules,
        *,
        query: TextTokenizer,
        default: InputType = InputType.DOCUMENT,
        **options: Any,
    ) -> None:
        super().__init__(backend, rules, **options)
        self.query = query
        self.default = default

    def side(self, item: Item) -> InputType:
        """Which side an item is on."""
        return item.input_type or SIDES.get(item.prompt_name or "", self.default)

    def prepared(self, item: Item, side: InputType) -> Item:
        """The item as the side's tokenizer gets it."""
        return item

    def finished(self, encoded: Encoded, side: InputType) -> Encoded:
        """The tokens of an item as the model gets them."""
        return encoded

    def encode(self, items: Sequence[Item]) -> list[Encoded | InfinityError]:
        """Tokenise items, in order; otherwise as ``TextTokenizer.encode``."""
        sides = [self.side(item) for item in items]
        by_index: dict[int, Encoded | InfinityError] = {}
        for side, encode in ((InputType.DOCUMENT, super().encode), (InputType.QUERY, self.query.encode)):
            indices = [index for index, own in enumerate(sides) if own is side]
            if not indices:
                continue
            outcomes = encode([self.prepared(items[index], side) for index in indices])
            for index, outcome in zip(indices, outcomes, strict=True):
                by_index[index] = outcome if isinstance(outcome, InfinityError) else self.finished(outcome, side)
        return [by_index[index] for index in range(len(items))]
