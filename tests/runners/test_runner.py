from __future__ import annotations

import pytest

from infinity_bento.core import Encoded, Item, Task
from infinity_bento.runners.runner import Runner
from tests.runners.fakes import FakeBackbone, FirstAndLast


def runner() -> tuple[Runner, FakeBackbone]:
    backbone = FakeBackbone()
    return Runner(backbone, {Task.EMBED: FirstAndLast(), Task.EMBED_ALL: FirstAndLast()}), backbone


def test_rows_come_back_in_the_order_of_the_items() -> None:
    made, _ = runner()
    encoded = [Encoded([1, 2, 3]), Encoded([4]), Encoded([5, 6])]
    items = [Item(Task.EMBED, token_ids=one.input_ids) for one in encoded]
    batch = made.prepare(encoded)
    outputs = made.collect(made.run(batch, items), batch, items)
    assert [output.tolist() for output in outputs] == [[1, 3], [4, 4], [5, 6]]


def test_tasks_of_one_batch_share_one_forward_pass() -> None:
    made, backbone = runner()
    encoded = [Encoded([1, 2]), Encoded([3]), Encoded([4])]
    items = [Item(task, token_ids=[1]) for task in (Task.EMBED_ALL, Task.EMBED, Task.EMBED_ALL)]
    batch = made.prepare(encoded)
    outputs = made.collect(made.run(batch, items), batch, items)
    assert [output.tolist() for output in outputs] == [[1, 2], [3, 3], [4, 4]]
    assert len(backbone.batches) == 1


def test_adapters_follow_the_packed_order() -> None:
    made, backbone = runner()
    encoded = [Encoded([1, 2, 3]), Encoded([4]), Encoded([5, 6])]
    items = [Item(Task.EMBED, token_ids=[1], prompt_name=name) for name in ("a", "b", None)]
    made.run(made.prepare(encoded, items), items)
    assert backbone.chosen is None
    backbone.adapters = ("a", "b")
    made.run(made.prepare(encoded, items), items)
    assert backbone.chosen == ["b", None, "a"]


@pytest.mark.parametrize(
    ("tokens", "longest", "expected"), [(1024, 256, [[2], [256] * 4]), (100, 512, [[2], [100]]), (1, 8, [[2], [1]])]
)
def test_warm_up_runs_a_short_sequence_and_a_full_batch(tokens: int, longest: int, expected: list[list[int]]) -> None:
    made, backbone = runner()
    made.warm_up(tokens, longest)
    assert [[len(row) for row in batch] for batch in backbone.batches] == expected


def test_copies_run_once_and_every_item_gets_its_row() -> None:
    made, backbone = runner()
    encoded = [Encoded([5, 6, 7]), Encoded([8]), Encoded([5, 6, 7]), Encoded([9, 9])]
    items = [Item(Task.EMBED, token_ids=[1])] * len(encoded)
    batch = made.prepare(encoded, items)
    outputs = made.collect(made.run(batch, items), batch, items)
    assert [output.tolist() for output in outputs] == [[5, 7], [8, 8], [5, 7], [9, 9]]
    assert [len(one) for one in backbone.batches] == [3] and batch.rows == 6


def test_equal_texts_with_different_adapters_are_no_copies() -> None:
    made, backbone = runner()
    backbone.adapters = ("a", "b")
    items = [Item(Task.EMBED, token_ids=[1], prompt_name=name) for name in ("a", "b", "a")]
    batch = made.prepare([Encoded([7, 8])] * 3, items)
    made.run(batch, items)
    assert backbone.chosen == ["a", "b"]
