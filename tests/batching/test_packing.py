from __future__ import annotations

from itertools import pairwise

import numpy as np
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


def test_sequences_that_are_attended_to_in_part_form_groups_of_their_own() -> None:
    rows = [Encoded([1] * 4, attended=2), Encoded([2] * 4), Encoded([3] * 3), Encoded([4] * 4, attended=4)]
    batch = pack(rows)
    assert batch.order == [2, 1, 0, 3]
    assert [tuple(group) for group in batch.groups] == [(0, 1, 3), (3, 1, 4), (7, 2, 4)]
    assert batch.key_lengths == [3, 4, 2, 4]
    assert [batch.key_mask(group) is None for group in batch.groups] == [True, True, False]
    mask = batch.key_mask(batch.groups[2])
    assert mask is not None
    assert mask.shape == (2, 1, 1, 4)
    assert mask.flatten(1).sum(1).tolist() == [2, 4]
    assert mask is batch.key_mask(batch.groups[2])
    plain = pack(rows[1:3])
    assert plain.key_lengths is None
    assert plain.key_mask(plain.groups[0]) is None


def test_kept_tokens_follow_the_packed_order() -> None:
    batch = pack([Encoded([1, 2, 3], kept=np.array([True, False, True])), Encoded([4])])
    assert batch.kept is not None
    assert batch.kept.tolist() == [True, True, False, True]
    assert pack([Encoded([1])]).kept is None


def test_static_sequences_lie_last_and_can_be_left_out() -> None:
    rows = [
        Encoded([1], static=True),
        Encoded([2, 3], token_type_ids=[0, 1]),
        Encoded([4] * 5),
        Encoded([5, 6], static=True),
    ]
    batch = pack(rows, position_offset=2)
    assert batch.order == [1, 2, 0, 3]
    assert batch.static_count == 2
    assert batch.max_seqlen == 5
    part = batch.without_static()
    assert part is batch.without_static()
    alone = pack(rows[1:3], position_offset=2)
    for name in ("input_ids", "position_ids", "token_type_ids", "cu_seqlens"):
        assert torch.equal(getattr(part, name), getattr(alone, name)), name
    for name in ("lengths", "groups", "max_seqlen", "prompt_lengths", "key_lengths", "static_count"):
        assert getattr(part, name) == getattr(alone, name), name
    assert alone.without_static() is alone
    nothing = pack([rows[0]]).without_static()
    assert len(nothing) == nothing.tokens == 0
