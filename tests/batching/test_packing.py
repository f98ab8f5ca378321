from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity_bento.batching.packing import length_groups, pack
from infinity_bento.core import Encoded

sequences = st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), min_size=1, max_size=12)


@given(sequences, st.integers(0, 3))
def test_every_token_lands_at_its_place(rows: list[list[int]], offset: int) -> None:
    batch = pack([Encoded(row) for row in rows], position_offset=offset)
    bounds = batch.cu_seqlens.tolist()
    assert batch.tokens == sum(map(len, rows)) == bounds[-1]
    assert bounds[0] == 0
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == max(map(len, rows))
    for packed, (start, end) in enumerate(pairwise(bounds)):
        assert batch.input_ids[start:end].tolist() == rows[batch.order[packed]]
        assert batch.position_ids[start:end].tolist() == list(range(offset, offset + end - start))
        assert set(batch.sequence_ids()[start:end].tolist()) == {packed}
    assert batch.lengths == sorted(batch.lengths)
    assert sorted(batch.order) == list(range(len(rows)))
    assert batch.unsort([rows[index] for index in batch.order]) == rows


@given(sequences)
def test_groups_cover_the_tokens_in_order(rows: list[list[int]]) -> None:
    batch = pack([Encoded(row) for row in rows])
    position = 0
    for group in batch.groups:
        assert group.start == position
        position += group.size * group.length
    assert position == batch.tokens
    assert [group.length for group in batch.groups] == sorted({len(row) for row in rows})


def test_equal_lengths_keep_their_order_of_arrival() -> None:
    batch = pack([Encoded([1, 2]), Encoded([3]), Encoded([4, 5]), Encoded([6])])
    assert batch.order == [1, 3, 0, 2]


def test_starts_and_ends_are_the_first_and_last_tokens() -> None:
    batch = pack([Encoded([7, 8, 9]), Encoded([5])])
    assert batch.input_ids[batch.starts()].tolist() == [5, 7]
    assert batch.input_ids[batch.ends()].tolist() == [5, 9]


def test_token_types_are_filled_with_zero_where_a_sequence_has_none() -> None:
    batch = pack([Encoded([1, 2, 3], token_type_ids=[0, 1, 1]), Encoded([4])])
    assert batch.token_type_ids is not None
    assert batch.token_type_ids.tolist() == [0, 0, 1, 1]
    assert pack([Encoded([1])]).token_type_ids is None


def test_prompt_lengths_follow_the_packed_order() -> None:
    batch = pack([Encoded([1, 2, 3], prompt_length=2), Encoded([4])])
    assert batch.prompt_lengths == [0, 2]
    assert pack([Encoded([1])]).prompt_lengths is None


@pytest.mark.parametrize("rows", [[], [[1], []]])
def test_nothing_to_pack_is_a_bug(rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="bug"):
        pack([Encoded(row) for row in rows])


def test_length_groups_of_unsorted_lengths_are_runs() -> None:
    assert [tuple(group) for group in length_groups([2, 2, 1, 2])] == [(0, 2, 2), (4, 1, 1), (5, 1, 2)]
