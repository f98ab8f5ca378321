from __future__ import annotations

import numpy as np
import pytest
import torch

from infinity_bento.batching.packing import pack
from infinity_bento.core import Aggregation, Encoded, Item, Task, TokenLabel, TokenSpans
from infinity_bento.errors import InferenceError
from infinity_bento.heads.token_labels import Labeller
from infinity_bento.heads.tokens_classify import TokenClassifierHead

NAMES = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
LABELLER = Labeller(NAMES, " ".join)
# [CLS] Ann Lee Rome ##ford sees [SEP]
SPANS = TokenSpans(
    tokens=["[CLS]", "Ann", "Lee", "Rome", "##ford", "sees", "[SEP]"],
    offsets=[(0, 0), (0, 3), (4, 7), (8, 12), (12, 16), (17, 21), (0, 0)],
    special=[True, False, False, False, False, False, True],
    continues_word=[False, False, False, False, True, False, False],
)


def scores(*rows: dict[int, float]) -> np.ndarray:
    """One row for each token; what is not named is shared out."""
    made = np.zeros((len(rows), len(NAMES)), dtype=np.float32)
    for index, row in enumerate(rows):
        for label, score in row.items():
            made[index, label] = score
    return made


SENTENCE = scores({1: 0.9}, {1: 0.9}, {2: 0.7}, {3: 0.6, 2: 0.4}, {2: 0.9, 3: 0.1}, {0: 0.8}, {1: 0.9})


def told(labels: list[TokenLabel]) -> list[tuple[str, str, int | None, int | None]]:
    return [(label.label, label.word, label.start, label.end) for label in labels]


def labels(aggregation: Aggregation, ignored: tuple[str, ...] = ("O",)) -> list[TokenLabel]:
    return LABELLER.label(SENTENCE, SPANS, aggregation, ignored)


def test_each_token_has_its_label_and_special_tokens_have_none() -> None:
    assert told(labels(Aggregation.NONE)) == [
        ("B-PER", "Ann", 0, 3),
        ("I-PER", "Lee", 4, 7),
        ("B-LOC", "Rome", 8, 12),
        ("I-PER", "##ford", 12, 16),
    ]
    assert [label.label for label in labels(Aggregation.NONE, ())][-1] == "O"
    assert [label.word for label in labels(Aggregation.NONE, ("O", "B-PER"))] == ["Lee", "Rome", "##ford"]


def test_neighbours_of_one_kind_are_one_entity() -> None:
    found = labels(Aggregation.SIMPLE)
    assert told(found) == [("PER", "Ann Lee", 0, 7), ("LOC", "Rome", 8, 12), ("PER", "##ford", 12, 16)]
    assert found[0].score == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("aggregation", "label", "score"),
    [(Aggregation.FIRST, "LOC", 0.6), (Aggregation.MAX, "PER", 0.9), (Aggregation.AVERAGE, "PER", 0.65)],
)
def test_words_have_one_label(aggregation: Aggregation, label: str, score: float) -> None:
    found = labels(aggregation)
    if label == "LOC":
        assert told(found)[1] == ("LOC", "Rome ##ford", 8, 16)
        assert found[1].score == pytest.approx(score)
    else:  # the word joins the person before it
        assert told(found) == [("PER", "Ann Lee Rome ##ford", 0, 16)]
        assert found[0].score == pytest.approx((0.9 + 0.7 + score) / 3)


def test_a_beginning_starts_a_new_entity() -> None:
    spans = TokenSpans(["Ann", "Lee"], [(0, 3), (4, 7)], [False] * 2, [False] * 2)
    found = LABELLER.label(scores({1: 0.9}, {1: 0.9}), spans, Aggregation.SIMPLE, ())
    assert [label.word for label in found] == ["Ann", "Lee"]


def test_labels_without_prefixes_and_with_dashes() -> None:
    plain = Labeller({0: "NOUN", 1: "I-WORK-OF-ART"}, " ".join)
    spans = TokenSpans(["a", "b", "c"], None, [False] * 3, [False] * 3)
    found = plain.label(np.array([[1, 0], [1, 0], [0, 1]], dtype=np.float32), spans, Aggregation.SIMPLE, ())
    assert told(found) == [("NOUN", "a b", None, None), ("WORK-OF-ART", "c", None, None)]


class Reader:
    """Joins words by blanks."""

    def join(self, tokens: list[str]) -> str:
        return " ".join(tokens)


def of_words(text: str) -> Encoded:
    """A text with one token a word, and the places of these."""
    words = text.split()
    spans = TokenSpans(words, [(0, 1)] * len(words), [False] * len(words), [False] * len(words))
    return Encoded([ord(word) for word in words], readout=spans)


def test_the_head_gives_each_item_its_own_rows() -> None:
    head = TokenClassifierHead(lambda hidden, batch: hidden, {0: "O", 1: "X"}, Reader())
    batch = pack([of_words("a b c"), of_words("d")])
    assert batch.order == [1, 0]
    logits = torch.tensor([[0.0, 5.0], [2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    items = [Item(Task.CLASSIFY_TOKENS, text="a b c", ignore_labels=()), Item(Task.CLASSIFY_TOKENS, text="d")]
    rows = head.run(logits, batch)
    long, short = head.collect(rows, [1, 0], items)
    assert isinstance(long, list) and [label.label for label in long] == ["O", "X", "O"]
    assert isinstance(short, list) and [label.word for label in short] == ["d"]
    assert short[0].score == pytest.approx(1 / (1 + np.exp(-5)), abs=1e-6)
    (raw,) = head.collect(rows, [0], [Item(Task.CLASSIFY_TOKENS, text="d", raw_scores=True)])
    assert isinstance(raw, list) and raw[0].score == pytest.approx(5.0)


def test_a_token_that_is_not_finite_concerns_its_item_only() -> None:
    head = TokenClassifierHead(lambda hidden, batch: hidden, {0: "O", 1: "X"}, Reader())
    batch = pack([of_words("a"), of_words("b")])
    rows = head.run(torch.tensor([[float("nan"), 0.0], [0.0, 1.0]]), batch)
    items = [Item(Task.CLASSIFY_TOKENS, text="a"), Item(Task.CLASSIFY_TOKENS, text="b")]
    bad, good = head.collect(rows, [0, 1], items)
    assert isinstance(bad, InferenceError)
    assert isinstance(good, list) and good[0].label == "X"


def test_tokens_without_places_are_an_error() -> None:
    head = TokenClassifierHead(lambda hidden, batch: hidden, {0: "O", 1: "X"}, Reader())
    rows = head.run(torch.zeros(3, 2), pack([Encoded([1, 2, 3])]))
    (error,) = head.collect(rows, [0], [Item(Task.CLASSIFY_TOKENS, text="a b")])
    assert isinstance(error, InferenceError)
