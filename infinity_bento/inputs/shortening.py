"""How much of an overlong text has to be tokenised: a bound that never changes the tokens that are kept.

Called by the tokenizer before it encodes. Tokenisers split a text into words first and then each word by itself, so a
text cut somewhere differs from the whole only around the cut; what lies clearly before it is the same.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Tried first; real text has three to six characters a token.
CHARACTERS_PER_TOKEN = 8
# Characters before the cut that are not relied on: combining marks, and half of a special token that the cut divided.
MARGIN = 64
# Pre-tokenizers that decide by the characters next to each other; a regex does if it neither looks back nor far ahead.
_LOCAL = {
    "BertPreTokenizer",
    "ByteLevel",
    "Digits",
    "Metaspace",
    "Punctuation",
    "Split",
    "Whitespace",
    "WhitespaceSplit",
}
_FAR_LOOKING = re.compile(r"\(\?<|\\[1-9AGzZb]|(?<![\[\\])\^|(?<!\\)\$|(?<!\\)\.")


class Shortener:
    """Cuts texts for one tokenizer. Thread-safe: nothing changes after construction.

    Args:
        backend: A ``tokenizers.Tokenizer`` without truncation and padding.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._applies = _splits_locally(backend)
        longest = max((len(token.content) for token in backend.get_added_tokens_decoder().values()), default=0)
        self._margin = MARGIN + longest

    def shortened(self, text: str, tokens: int) -> str:
        """A start of ``text`` with at least ``tokens`` tokens (special ones aside), the first of which are the text's.

        Args:
            text: As the tokenizer sees it, prompt included.
            tokens: How many of its first tokens are wanted.

        Returns:
            The text itself where it is not much longer, or where this tokenizer does not allow a cut.
        """
        size = tokens * CHARACTERS_PER_TOKEN + self._margin
        while self._applies and size < len(text) // 2:
            start = text[:size]
            sure = self._sure_tokens(start)
            if sure >= tokens:
                return start
            if sure == 0:  # one endless word, which a longer start would not divide
                break
            size *= 4
        return text

    def count(self, text: str) -> int:
        """Tokens of a text, without special ones."""
        return len(self._backend.encode(text, add_special_tokens=False).ids)

    def _sure_tokens(self, start: str) -> int:
        """Leading tokens of ``start`` that any text which begins so has, too."""
        encoding = self._backend.encode(start, add_special_tokens=False)
        sure = sum(1 for _, end in encoding.offsets if end <= len(start) - self._margin)
        words = encoding.word_ids
        while sure > 0 and words[sure - 1] == words[-1]:
            sure -= 1
        return sure


def _splits_locally(backend: Any) -> bool:
    """Whether the pre-tokenizer divides a text into words by looking at neighbouring characters."""
    if backend.pre_tokenizer is None:
        return False
    return _is_local(json.loads(backend.pre_tokenizer.__getstate__()))


def _is_local(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    if kind == "Sequence":
        # Only a split of some kind makes words; the others of a sequence may leave the text as it is.
        return all(_is_local(each) or _leaves_whole(each) for each in part["pretokenizers"]) and any(
            _is_local(each) for each in part["pretokenizers"]
        )
    if kind == "ByteLevel":
        return bool(part.get("use_regex", True))
    if kind == "Metaspace":
        return bool(part.get("split", True))
    if kind == "Split":
        pattern = part["pattern"]
        return "Regex" in pattern and not _FAR_LOOKING.search(pattern["Regex"])
    return kind in _LOCAL


def _leaves_whole(part: dict[str, Any]) -> bool:
    return part.get("type") == "ByteLevel" and not part.get("use_regex", True)
