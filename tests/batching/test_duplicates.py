"""Equal sequences are found, and only equal ones."""

from __future__ import annotations

import numpy as np
import pytest

from infinity_bento.batching.duplicates import distinct
from infinity_bento.core import Encoded, TokenSpans

BASE = Encoded([1, 2, 3], token_type_ids=[0, 0, 1], prompt_length=1, attended=2, kept=np.array([True, True, False]))


def test_copies_point_at_their_first_appearance() -> None:
    sequences = [Encoded([1, 2]), Encoded([3]), Encoded([1, 2]), Encoded([3]), Encoded([1])]
    kept, copies = distinct(sequences)
    assert [one.input_ids for one in kept] == [[1, 2], [3], [1]]
    assert copies == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": [1, 2, 4]},
        {"token_type_ids": [0, 1, 1]},
        {"token_type_ids": None},
        {"prompt_length": 0},
        {"attended": None},
        {"kept": np.array([True, False, False])},
        {"kept": None},
        {"static": True},
        {"readout": object()},
        {"blocks": np.array([0, 0, 1], dtype=np.int32)},
        {"position_ids": [0, 1, 1]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_the_model_sees_tells_them_apart(change: dict[str, object]) -> None:
    fields = {name: getattr(BASE, name) for name in BASE.__slots__}
    same, other = Encoded(**fields), Encoded(**(fields | change))  # type: ignore[arg-type]
    assert distinct([BASE, same, other])[1] == [0, 0, 1]


def test_equal_texts_are_labelled_once_and_others_of_equal_tokens_are_not() -> None:
    def labelled(word: str, start: int) -> Encoded:
        return Encoded([7], readout=TokenSpans([word], [(start, start + 1)], [False], [False]))

    sequences = [labelled("a", 0), labelled("a", 0), labelled("A", 0), labelled("a", 1), Encoded([7])]
    assert distinct(sequences)[1] == [0, 0, 1, 2, 3]


def test_marks_tell_them_apart() -> None:
    assert distinct([BASE, BASE, BASE], ["a", "b", "a"])[1] == [0, 1, 0]
