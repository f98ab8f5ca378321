"""Text of callers as tokens that nobody can mistake for a marker. Called by the decision protocols.

A prompt is written around the text of strangers. The pieces of the prompt are encoded as usual; theirs with this, so
that ``<|im_end|>`` or ``[MASK]`` in a state is a few ordinary tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

_CONTROL = re.compile(r"\s*<\|.*\|>\s*", re.DOTALL)


class PlainText:
    """Encodes text without ever making a special token. Thread-safe: nothing changes after construction.

    Besides the tokens that a tokenizer calls special, those that look like ``<|this|>`` are text; other added tokens,
    such as runs of spaces, stay tokens.

    Args:
        backend: A ``tokenizers.Tokenizer``; left as it is.
        guarded: More tokens that a prompt is made of.

    Attributes:
        marks: The tokens that stay text, longest first.
    """

    def __init__(self, backend: Any, guarded: Iterable[str] = ()) -> None:
        from tokenizers import Tokenizer

        content = json.loads(backend.to_str())
        content.update(truncation=None, padding=None, post_processor=None)
        names = set(guarded)
        marks = []
        for token in content["added_tokens"]:
            if token["special"] or token["content"] in names or _CONTROL.fullmatch(token["content"]):
                token["special"] = True
                marks.append(token)
        self._backend = Tokenizer.from_str(json.dumps(content))
        self._backend.encode_special_tokens = True
        unknown = _unknown_token(content["model"])
        self._forbidden = frozenset(token["id"] for token in marks if token["content"] != unknown)
        self.marks = tuple(sorted((token["content"] for token in marks), key=len, reverse=True))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around it."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            self._without_marks(text) if self._forbidden.intersection(encoding.ids) else list(encoding.ids)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _without_marks(self, text: str) -> list[int]:
        """For vocabularies that hold the marks as ordinary pieces: they become blanks, at last one by one."""
        for mark in self.marks:
            text = text.replace(mark, " ")
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return [token for token in ids if token not in self._forbidden]


def _unknown_token(model: dict[str, Any]) -> str | None:
    """The token for what is in no vocabulary: ordinary text may well become it."""
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    unknown: str | None = model.get("unk_token")
    return unknown


class Envelope:
    """Encodes the text of callers inside a trusted text, as if both had been written in one.

    A tokenizer cuts a text at its special tokens and nowhere else. So does this, at those of the trusted text only.

    Args:
        backend: A ``tokenizers.Tokenizer``.
        plain: Of the same tokenizer.
        before: Trusted text before that of the caller.
        after: Trusted text behind it.
    """

    def __init__(self, backend: Any, plain: PlainText, before: str, after: str) -> None:
        mark = re.compile("|".join(map(re.escape, plain.marks)) or r"(?!)")
        last = max((found.end() for found in mark.finditer(before)), default=0)
        first = next((found.start() for found in mark.finditer(after)), len(after))
        self._plain = plain
        self._head: list[int] = backend.encode(before[:last], add_special_tokens=False).ids
        self._tail: list[int] = backend.encode(after[first:], add_special_tokens=False).ids
        self._before, self._after = before[last:], after[:first]

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        """The ids of each piece; the first has the trusted text before it, the last that behind it.

        Args:
            pieces: At least one; callers put special tokens between them.
        """
        texts = list(pieces)
        texts[0] = self._before + texts[0]
        texts[-1] += self._after
        ids = self._plain.encode(texts)
        ids[0] = [*self._head, *ids[0]]
        ids[-1] = [*ids[-1], *self._tail]
        return ids
