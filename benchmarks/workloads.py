"""The texts of a benchmark: the same shape, count, seed and tokenizer give the same texts everywhere.

Called by traffic.py and inprocess.py.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError

# Used when no tokenizer is given: frequent enough to be one token each in the usual vocabularies.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education run move live believe hold bring happen write provide sit "
    "stand lose pay meet include continue set learn lead understand watch follow stop create speak read allow add "
    "spend grow open walk win offer remember love consider appear buy wait serve die send expect build stay fall cut"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """The texts of one run. Set by ``make_workload``."""

    shape: str  # "short", "mixed" or "fixed-N"
    seed: int
    texts: tuple[str, ...]
    tokens: tuple[int, ...] | None  # of each text, special tokens included; None without a tokenizer

    def describe(self) -> dict[str, Any]:
        """Counts and a digest, as they go into the report: the same digest means the same texts."""
        about: dict[str, Any] = {"shape": self.shape, "seed": self.seed, "texts": len(self.texts)}
        if self.tokens is not None:
            about.update(tokens=sum(self.tokens), shortest=min(self.tokens), longest=max(self.tokens))
        return about | {"sha256": hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()}


def draw_lengths(shape: str, count: int, seed: int) -> list[int]:
    """Token counts of ``count`` texts, special tokens included.

    Args:
        shape: ``short`` (6 to 40, mean near 18), ``mixed`` (lognormal, 8 to 512, mean near 105) or ``fixed-N``.
        count: How many.
        seed: The same seed gives the same lengths everywhere.

    Raises:
        BenchmarkError: If ``shape`` is none of these.
    """
    rng = random.Random(f"{shape} {seed}")
    if shape == "short":
        return [min(40, max(6, round(rng.gammavariate(4.5, 3.4) + 3))) for _ in range(count)]
    if shape == "mixed":
        return [min(512, max(8, round(rng.lognormvariate(4.25, 0.95)))) for _ in range(count)]
    kind, _, number = shape.partition("-")
    if kind == "fixed" and number.isdecimal() and int(number) >= 3:
        return [int(number)] * count
    raise BenchmarkError(f"lengths {shape!r} are unknown: use short, mixed or fixed-N with N >= 3, such as fixed-128.")


def make_workload(
    shape: str, count: int, seed: int, tokenizer_file: Path | None = None, max_length: int = 512
) -> Workload:
    """Texts of random words with the lengths of ``draw_lengths``.

    Args:
        shape: As in ``draw_lengths``.
        count: Number of texts.
        seed: Of lengths and words.
        tokenizer_file: A ``tokenizer.json``; lengths are then exact for it, and tokens are counted. Without one a
            text has its length minus two (the special tokens) in frequent English words.
        max_length: Tokens above this are not counted: the models cut there.

    Raises:
        BenchmarkError: If the shape is unknown or the tokenizer has no whole words.
    """
    lengths = draw_lengths(shape, count, seed)
    rng = random.Random(f"words {shape} {seed}")
    if tokenizer_file is None:
        frequent = WORDS.split()
        texts = [" ".join(rng.choice(frequent) for _ in range(n - 2)) for n in lengths]
        return Workload(shape, seed, tuple(texts), None)
    tokenizer, words, specials = _open_tokenizer(tokenizer_file)
    texts = [_text_of(n - specials, words, rng) for n in lengths]
    counts = tuple(min(max_length, len(e.ids)) for e in tokenizer.encode_batch(texts))
    return Workload(shape, seed, tuple(texts), counts)


def _open_tokenizer(file: Path) -> tuple[Any, dict[int, list[str]], int]:
    """The tokenizer, its ASCII words by token count (1: plain entries, 2 and 3: with an ending), its special tokens."""
    from tokenizers import Tokenizer

    if not file.is_file():
        raise BenchmarkError(f"--tokenizer {file} is not a file: give the path of a tokenizer.json.")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    entries = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    marked = [t[1:] for t in entries if t[:1] in ("\u0120", "\u2581")]  # byte-level BPE and SentencePiece word starts
    plain = [t for t in (marked or entries) if t.isascii() and t.isalpha() and len(t) > 1][:12000]
    specials = len(tokenizer.encode("").ids)
    before = len(tokenizer.encode("a").ids)
    words: dict[int, list[str]] = {1: [], 2: [], 3: []}
    candidates = plain + [word + ending for word in plain[::8] for ending in ("ness", "ing")]
    for word, encoded in zip(candidates, tokenizer.encode_batch([f"a {word}" for word in candidates]), strict=True):
        words.get(len(encoded.ids) - before, []).append(word)
    if len(words[1]) < 100:
        raise BenchmarkError(
            f"{file} has only {len(words[1])} plain ASCII words: leave --tokenizer out for this model."
        )
    return tokenizer, words, specials


def _text_of(tokens: int, words: Mapping[int, list[str]], rng: random.Random) -> str:
    """Words that sum to ``tokens``; one in eight is of two or three tokens, as in real text."""
    out: list[str] = []
    left = max(1, tokens)
    while left:
        size = min(left, rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3)))
        size = size if words[size] else 1
        out.append(rng.choice(words[size]))
        left -= size
    return " ".join(out)
