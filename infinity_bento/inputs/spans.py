"""Where tokens lie in the caller's text, for labels of tokens. Called by the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinity_bento.core import TokenSpans


class SpanReader:
    """Spans of one tokenizer.

    Args:
        backend: A ``tokenizers.Tokenizer``.
        special_ids: Ids of special tokens.
        unknown_id: Of the token for what is in no vocabulary; None: there is none.
    """

    def __init__(self, backend: Any, special_ids: frozenset[int], unknown_id: int | None) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._unknown_id = unknown_id
        # WordPiece marks the tokens that continue a word; for others a word is what blanks set apart.
        self._marks_words = bool(getattr(backend.model, "continuing_subword_prefix", None))

    def of_text(self, encoding: Any, kept: Sequence[int], text: str, prompt: str) -> TokenSpans:
        """The spans of the tokens that are left of a text.

        Args:
            encoding: Of prompt and text, with special tokens.
            kept: Indices of its tokens that were not cut off.
            text: Without the prompt.
            prompt: Text put before; its tokens count as special.
        """
        offsets: list[tuple[int, int]] = []
        spans = TokenSpans([], offsets, [], [])
        shift = len(prompt)
        for index in kept:
            start, end = (place - shift for place in encoding.offsets[index])
            token, source = encoding.tokens[index], text[max(start, 0) : max(end, 0)]
            unknown = encoding.ids[index] == self._unknown_id
            spans.tokens.append(source if unknown else token)
            offsets.append((start, end))
            spans.special.append(bool(encoding.special_tokens_mask[index]) or end <= 0 < shift)
            spans.continues_word.append(not unknown and self._continues(token, source, text, start))
        return spans

    def of_ids(self, ids: Sequence[int]) -> TokenSpans:
        """The spans of token ids without a text: none, but special tokens are known."""
        return TokenSpans(
            [self._backend.id_to_token(token) or "" for token in ids],
            None,
            [token in self._special_ids for token in ids],
            [False] * len(ids),
        )

    def join(self, tokens: Sequence[str]) -> str:
        """Tokens as text."""
        decoder = self._backend.decoder
        return str(decoder.decode(list(tokens))) if decoder is not None else " ".join(tokens)

    def _continues(self, token: str, source: str, text: str, start: int) -> bool:
        if self._marks_words:
            return len(token) != len(source)
        return start > 0 and " " not in text[start - 1 : start + 1]
