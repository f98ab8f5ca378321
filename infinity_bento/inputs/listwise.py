"""A query and many documents as few sequences, for jina-reranker-v3. The tokenizer of such a model.

The prompt is that of the published code, byte for byte; the texts of callers are encoded so that nothing in them can
pass for a marker of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infinity_bento.core import Encoded, Item
from infinity_bento.errors import EmptyInput, InfinityError, InputTooLong, InvalidInput, LoadError
from infinity_bento.inputs.plain_text import Envelope, PlainText
from infinity_bento.inputs.shortening import Shortener
from infinity_bento.inputs.tokenization import TextRules, TextTokenizer
from infinity_bento.listwise import Cut, listwise_scores, pair_scores

# Of the published code.
DOCUMENT_MARK, QUERY_MARK = "<|embed_token|>", "<|rerank_token|>"
MOST_DOCUMENTS = 125  # of one sequence
DOCUMENT_TOKENS = 2048
QUERY_TOKENS = 512
SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking."
)
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
AFTER = "\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
GUARDED = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", DOCUMENT_MARK, QUERY_MARK)
# Tokens of the prompt around the texts of one document; kept free where the limit is small.
PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Marks:
    """Where a sequence is read. ``Encoded.readout`` of a listwise reranker."""

    documents: tuple[int, ...]  # tokens, in order
    query: int
    cuts: tuple[Cut | None, ...]  # of each document


class _Text(NamedTuple):
    text: str
    tokens: int
    cut: Cut | None = None


class ListwiseTokenizer(TextTokenizer):
    """Writes rerank items that carry all documents of their query; for other purposes a ``TextTokenizer``.

    Args:
        backend: A ``tokenizers.Tokenizer``.
        rules: Of the model; ``max_input_length`` bounds a sequence, so more documents are more sequences.
        **options: As for ``TextTokenizer``.

    Raises:
        LoadError: If the tokenizer lacks a mark of the prompt.
    """

    def __init__(self, backend: Any, rules: TextRules, *args: Any, **options: Any) -> None:
        super().__init__(backend, rules, *args, **options)
        ids = {mark: backend.token_to_id(mark) for mark in (DOCUMENT_MARK, QUERY_MARK)}
        missing = [mark for mark, token in ids.items() if token is None]
        if missing:
            raise LoadError(
                f"The tokenizer has no token {' and no token '.join(missing)}, which this reranker reads at: use the "
                "tokenizer that belongs to these weights."
            )
        self._document_mark, self._query_mark = ids[DOCUMENT_MARK], ids[QUERY_MARK]
        plain = PlainText(backend, GUARDED)
        self._plain = plain
        self._envelope = Envelope(backend, plain, BEFORE, AFTER)
        self._shorten = Shortener(backend)

    def encode(self, items: Sequence[Item]) -> list[Encoded | InfinityError]:
        """See ``TextTokenizer.encode``; ``parts`` of an item are its sequences, each with ``Marks`` as readout."""
        return [self._one(item) for item in items]

    def _one(self, item: Item) -> Encoded | InfinityError:
        documents = item.documents if item.documents is not None else [item.text_pair]
        if item.text is None or any(document is None for document in documents):
            return InvalidInput("This reranker reads a query and a list of documents: send both as text.")
        if not item.text:
            return EmptyInput("The query is empty: send at least one character.")
        try:
            return self._write(item, item.text, [document or "" for document in documents])
        except InfinityError as error:
            return error

    def _write(self, item: Item, query: str, documents: Sequence[str]) -> Encoded:
        limit = self.rules.max_input_length
        asked = self._bounded(item, query, min(QUERY_TOKENS, limit))
        # The query stands in the prompt twice.
        room = limit - 2 * asked.tokens
        if room < PROMPT_TOKENS:
            raise InputTooLong(
                f"The query takes {asked.tokens} tokens, twice in the model's prompt, which leaves {max(room, 0)} of "
                f"the limit of {limit} for a document: shorten the query, or raise max-sequence-length."
            )
        most = max(1, min(DOCUMENT_TOKENS, room - PROMPT_TOKENS))
        texts = [self._bounded(item, document, most) for document in documents]
        parts = [part for block in blocks(texts, room, most) for part in self._sequences(item, asked.text, block)]
        lost = sum(text.cut.tokens - text.cut.kept for text in (asked, *texts) if text.cut is not None)
        return Encoded(
            [],
            parts=parts,
            merge=listwise_scores if item.documents is not None else pair_scores,
            truncated_from=sum(map(len, parts)) + lost if lost else None,
            characters=len(query) + sum(map(len, documents)),
        )

    def _bounded(self, item: Item, text: str, limit: int) -> _Text:
        """A text without the marks and within its limit, as the published code cuts it."""
        for mark in (DOCUMENT_MARK, QUERY_MARK):
            text = text.replace(mark, "")
        if self._truncates(item) and item.truncation_direction == "right":
            text = self._shorten.shortened(text, limit)
        (ids,) = self._plain.encode([text])
        if len(ids) <= limit:
            return _Text(text, len(ids))
        if not self._truncates(item):
            raise InputTooLong(
                f"A text has {len(ids)} tokens, more than the limit of {limit} for this side of the prompt: shorten "
                "it, or set truncate to true."
            )
        kept = ids[:limit] if item.truncation_direction == "right" else ids[len(ids) - limit :]
        return _Text(self._backend.decode(kept, skip_special_tokens=False), limit, Cut(len(ids), limit))

    def _sequences(self, item: Item, query: str, block: Sequence[_Text]) -> list[Encoded]:
        """The sequence of a block; two or more if it is longer than the estimate that divided the list."""
        encoded = self._sequence(item, query, block)
        if len(encoded) <= self.rules.max_input_length:
            return [encoded]
        if len(block) == 1:
            raise InputTooLong(
                f"The query and one document take {len(encoded)} tokens with the model's prompt, more than the limit "
                f"of {self.rules.max_input_length}: shorten them, or raise max-sequence-length."
            )
        half = len(block) // 2
        return self._sequences(item, query, block[:half]) + self._sequences(item, query, block[half:])

    def _sequence(self, item: Item, query: str, block: Sequence[_Text]) -> Encoded:
        pieces = self._envelope.encode(prompt(query, [text.text for text in block], item.instruction))
        ids: list[int] = []
        places: list[int] = []
        for number, piece in enumerate(pieces[:-1]):
            ids += piece
            places.append(len(ids))
            ids.append(self._document_mark if number < len(block) else self._query_mark)
        marks = Marks(tuple(places[:-1]), places[-1], tuple(text.cut for text in block))
        return Encoded([*ids, *pieces[-1]], readout=marks)


def prompt(query: str, documents: Sequence[str], instruction: str | None) -> list[str]:
    """The prompt between ``BEFORE`` and ``AFTER``, divided where a mark stands: behind each document and the query."""
    head = (
        f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. Rank the "
        f"passages based on their relevance to query: {query}\n"
    )
    if instruction:
        head += f"<instruct>\n{instruction}\n</instruct>\n"
    pieces = [f'<passage id="{number}">\n{document}' for number, document in enumerate(documents)]
    pieces = [head + pieces[0], *("\n</passage>\n" + piece for piece in pieces[1:])]
    return [*pieces, f"\n</passage>\n<query>\n{query}", ""]


def blocks(texts: Sequence[_Text], room: int, most: int) -> list[list[_Text]]:
    """The documents by sequence, divided as the published code does: a block ends once another might not fit."""
    found: list[list[_Text]] = [[]]
    left = room
    for text in texts:
        found[-1].append(text)
        left -= text.tokens
        if len(found[-1]) >= MOST_DOCUMENTS or left <= most:
            found.append([])
            left = room
    return [block for block in found if block]
