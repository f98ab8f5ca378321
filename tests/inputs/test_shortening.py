"""A text that is cut before tokenising keeps exactly the tokens that the whole text would keep."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from infinity_bento.core import Encoded, Item, Task
from infinity_bento.inputs.shortening import Shortener
from infinity_bento.inputs.tokenization import TextRules, TextTokenizer, load_text_tokenizer
from tests import tiny_tokenizers

KINDS: list[Callable[[], Any]] = [
    tiny_tokenizers.bert,
    tiny_tokenizers.mpnet,
    tiny_tokenizers.roberta,
    tiny_tokenizers.modernbert,
    tiny_tokenizers.xlmr,
    tiny_tokenizers.deberta,
    tiny_tokenizers.qwen,
    tiny_tokenizers.gemma,
    tiny_tokenizers.llama,
]
# What tokenizers treat in a way of their own: runs of blanks, newlines after points, digits, accents in two forms,
# special tokens written out, letters without blanks, signs outside the first plane, a word that is longer than a bound.
PIECES = [
    "Deep learning,",
    "is",
    "machine-learning.",
    "1234567",
    "cats\u2019",
    "caf\u00e9 cafe\u0301",
    "   ",
    ".\n\n",
    "\t",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\U0001f600\U0001f468\u200d\U0001f469",
    "[SEP]",
    "<|im_end|>",
    "<mask>",
    "x" * 150,
    "\ufdfa",
    "don't",
    "A\u0301\u0323",
]
LIMIT = 16


def long_text(rng: random.Random, characters: int = 4000) -> str:
    text = ""
    while len(text) < characters:
        text += rng.choice(PIECES) + rng.choice([" ", " ", " ", "", "  ", "\n"])
    return text


def whole_and_cut(backend: Any, item: Item) -> tuple[Encoded, Encoded]:
    """The tokens of an item without and with the cut."""
    made = TextTokenizer(backend, TextRules(LIMIT, vocabulary_size=10**6))
    (cut,) = made.encode([item])
    made._shortener._applies = False
    (whole,) = made.encode([item])
    assert isinstance(whole, Encoded) and isinstance(cut, Encoded)
    return whole, cut


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_kept_tokens_are_those_of_the_whole_text(kind: Callable[[], Any]) -> None:
    backend, rng = kind().backend_tokenizer, random.Random(kind.__name__)
    shorter = 0
    for _ in range(40):
        whole, cut = whole_and_cut(backend, Item(Task.EMBED, text=long_text(rng)))
        assert cut.input_ids == whole.input_ids and len(cut) == LIMIT
        assert cut.characters == whole.characters
        assert whole.truncated_from is not None and cut.truncated_from is not None
        assert LIMIT < cut.truncated_from <= whole.truncated_from
        shorter += cut.truncated_from < whole.truncated_from
    # BPE over a whole text has no words that could be told apart: there is no safe cut.
    assert (shorter > 30) is (kind not in (tiny_tokenizers.gemma, tiny_tokenizers.llama))


@pytest.mark.parametrize("kind", [tiny_tokenizers.bert, tiny_tokenizers.xlmr, tiny_tokenizers.roberta])
@pytest.mark.parametrize("query", ["what?", "a b c d e f g h i j k l", "x y z " * 2000])
def test_both_sides_of_a_pair_keep_what_they_would(kind: Callable[[], Any], query: str) -> None:
    rng = random.Random(query)
    for _ in range(10):
        item = Item(Task.RERANK, text=query, text_pair=long_text(rng))
        whole, cut = whole_and_cut(kind().backend_tokenizer, item)
        assert cut.input_ids == whole.input_ids and cut.token_type_ids == whole.token_type_ids


def test_real_weights_tokenizer_reads_a_small_part_of_a_megabyte(minilm_path: Path) -> None:
    made = load_text_tokenizer(minilm_path, TextRules(512, vocabulary_size=30522))
    text = long_text(random.Random(3), 1_000_000)
    start = made._shortener.shortened(text, 512)
    assert len(start) < 20_000 and text.startswith(start)
    whole, cut = whole_and_cut(made.backend, Item(Task.EMBED, text=text))
    assert cut.input_ids == whole.input_ids


@pytest.mark.parametrize("text", [" " * 50_000 + "a b", "x" * 50_000, "x" * 50_000 + " a b", "\u0301" * 50_000 + "a"])
def test_texts_with_few_tokens_are_read_whole(text: str) -> None:
    backend = tiny_tokenizers.bert().backend_tokenizer
    assert Shortener(backend).shortened(text, LIMIT) == text


def test_nothing_is_cut_where_the_caller_is_told_the_length_or_keeps_the_end() -> None:
    made = TextTokenizer(tiny_tokenizers.bert().backend_tokenizer, TextRules(LIMIT, vocabulary_size=10**6))
    text = "a " * 5000
    (refused,) = made.encode([Item(Task.EMBED, text=text, truncate=False)])
    assert "has 5002 tokens" in str(refused)
    (left,) = made.encode([Item(Task.EMBED, text=text + "z", truncation_direction="left")])
    assert isinstance(left, Encoded) and left.truncated_from == 5003


@pytest.mark.parametrize("pattern", [r"(?<=a)b|.", r"\w+$", r"^\w+", r"(a)\1", r".+"])
def test_a_pattern_that_looks_far_allows_no_cut(pattern: str) -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    text = "a " * 5000
    assert Shortener(backend).shortened(text, LIMIT) == text
