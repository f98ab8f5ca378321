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
        pattern: Finds any of them in a trusted text, with the blanks that it swallows; its one group that matched is
            the token.
    """

    def __init__(self, backend: Any, guarded: Iterable[str] = ()) -> None:
        content = json.loads(backend.to_str())
        content.update(truncation=None, padding=None, post_processor=None)
        names = set(guarded)
        marks = []
        for token in content["added_tokens"]:
            if token["special"] or token["content"] in names or _CONTROL.fullmatch(token["content"]):
                token["special"] = True
                marks.append(token)
        self._first = _text_only(content)
        # Some tokenizers put a blank before a text, but not behind a special token inside of it.
        continued = _without_prefix(content["pre_tokenizer"])
        self._continued = self._first if continued is None else _text_only(content | {"pre_tokenizer": continued})
        unknown = _unknown_token(content["model"])
        self._forbidden = frozenset(token["id"] for token in marks if token["content"] != unknown)
        marks.sort(key=lambda token: len(token["content"]), reverse=True)
        self.marks = tuple(token["content"] for token in marks)
        self._marks = marks
        self.pattern = re.compile("|".join(map(_as_pattern, marks)) or r"(?!)()")

    def encode(self, texts: Sequence[str], *, continued: bool = False) -> list[list[int]]:
        """The ids of each text, without special tokens around it.

        Args:
            texts: Of callers.
            continued: They stand behind a special token, instead of at the beginning.
        """
        backend = self._continued if continued else self._first
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            self._without_marks(text, backend) if self._forbidden.intersection(encoding.ids) else list(encoding.ids)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def swallows(self, found: re.Match[str], *, after: bool) -> bool:
        """Whether a token that ``pattern`` found swallows the blanks behind it, or those before it."""
        token = self._marks[found.lastindex - 1] if found.lastindex else {}
        return bool(token.get("rstrip" if after else "lstrip"))

    def _without_marks(self, text: str, backend: Any) -> list[int]:
        """For vocabularies that hold the marks as ordinary pieces: they become blanks, at last one by one."""
        for mark in self.marks:
            text = text.replace(mark, " ")
        ids = backend.encode(text, add_special_tokens=False).ids
        return [token for token in ids if token not in self._forbidden]


def _text_only(content: dict[str, Any]) -> Any:
    """A ``tokenizers.Tokenizer`` to which special tokens are text."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(json.dumps(content))
    backend.encode_special_tokens = True
    return backend


def _without_prefix(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """A pre-tokenizer that puts nothing before a text, for one that does so at the beginning only; None for others."""
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "Sequence":
        parts = [_without_prefix(part) or part for part in pre_tokenizer["pretokenizers"]]
        return pre_tokenizer | {"pretokenizers": parts} if parts != pre_tokenizer["pretokenizers"] else None
    if pre_tokenizer["type"] == "Metaspace" and pre_tokenizer.get("prepend_scheme") == "first":
        return pre_tokenizer | {"prepend_scheme": "never"}
    return None


def _as_pattern(token: dict[str, Any]) -> str:
    before, after = (r"\s*" if token[side] else "" for side in ("lstrip", "rstrip"))
    return f"{before}({re.escape(token['content'])}){after}"


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
        found = list(plain.pattern.finditer(before))
        last = found[-1].end() if found else 0
        # The blanks that a token swallows may be the caller's.
        self._strips_first = bool(found) and last == len(before) and plain.swallows(found[-1], after=True)
        behind = next(plain.pattern.finditer(after), None)
        first = len(after) if behind is None else behind.start()
        self._strips_last = behind is not None and first == 0 and plain.swallows(behind, after=False)
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
        if self._strips_first:
            texts[0] = texts[0].lstrip()
        if self._strips_last:
            texts[-1] = texts[-1].rstrip()
        texts[0] = self._before + texts[0]
        texts[-1] += self._after
        ids = self._plain.encode(texts, continued=bool(self._head))
        if not self._head:  # only the first one is at the beginning
            ids[1:] = self._plain.encode(texts[1:], continued=True)
        ids[0] = [*self._head, *ids[0]]
        ids[-1] = [*ids[-1], *self._tail]
        return ids
