"""Texts that a template wrote around those of callers, as tokens: marks of the template count, those of callers do not.

A template is a program, so nobody can say beforehand where it puts what. Every mark in a caller's text gets a hidden
sign before rendering, by which it is known behind it. Used by decision protocols with a template of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from infinity_bento.inputs.plain_text import PlainText

SIGN = "\ufdd0"  # a noncharacter, which no text is meant to hold


class MarkedText:
    """Signs texts of callers, and encodes what a template made of them. Thread-safe.

    Args:
        backend: A ``tokenizers.Tokenizer``.
        plain: Of the same tokenizer.
        signals: Further marks of the template that are no tokens; their places are reported.
    """

    def __init__(self, backend: Any, plain: PlainText, signals: Sequence[str] = ()) -> None:
        self._plain = plain
        self._ids = {mark: backend.token_to_id(mark) for mark in plain.marks}
        self._signals = tuple(signals)
        written = "|".join(f"({re.escape(signal)})" for signal in signals)
        self._pattern = re.compile(f"{written}|{plain.pattern.pattern}" if written else plain.pattern.pattern)
        marks = (*signals, *plain.marks)
        self._whole = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        # Parts of marks at an end, which could become whole beside another text.
        self._starts = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
        self._ends = frozenset(mark[size:] for mark in marks for size in range(1, len(mark)))
        self._longest = max(map(len, marks), default=0)

    def sign(self, value: Any) -> Any:
        """A JSON value whose texts, keys included, cannot be read as marks, alone or beside others."""
        if isinstance(value, str):
            return self._signed(value)
        if isinstance(value, Mapping):
            return {self._signed(key): self.sign(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.sign(item) for item in value]
        return value

    def encode(self, text: str) -> tuple[list[int], list[tuple[str, int]]]:
        """The tokens of a rendered text, and each signal in it with the number of tokens before it."""
        ids: list[int] = []
        signals: list[tuple[str, int]] = []
        start = 0
        for found in self._pattern.finditer(text):
            ids += self._piece(text[start : found.start()], continued=start > 0)
            mark = found[found.lastindex or 0]
            if mark in self._signals:
                signals.append((mark, len(ids)))
            else:
                ids.append(self._ids[mark])
            start = found.end()
        ids += self._piece(text[start:], continued=start > 0)
        return ids, signals

    def _piece(self, text: str, *, continued: bool) -> list[int]:
        bare = text.replace(SIGN, "")
        return self._plain.encode([bare], continued=continued)[0] if bare else []

    def _signed(self, text: str) -> str:
        text = self._whole.sub(lambda found: found[0][0] + SIGN + found[0][1:], text.replace(SIGN, ""))
        sizes = range(1, min(len(text), self._longest) + 1)
        before = SIGN if any(text[:size] in self._ends for size in sizes) else ""
        after = SIGN if any(text[-size:] in self._starts for size in sizes) else ""
        return before + text + after
