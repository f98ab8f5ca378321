from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_bento.batching.batcher import Batcher, Patience
from infinity_bento.batching.ticket import Entry, Ticket
from infinity_bento.core import Encoded, Item, Task
from infinity_bento.errors import Overloaded


def entry(tokens: int, ticket: Ticket | None = None) -> Entry:
    ticket = ticket or Ticket([Item(Task.EMBED, text="x")], lambda: None)
    return Entry(ticket, 0, Encoded([1] * tokens), 0.0, 0.0)


def sizes(batch: list[Entry] | None) -> list[int]:
    assert batch is not None
    return [one.tokens for one in batch]


@given(
    st.lists(st.integers(1, 50), max_size=60),
    st.integers(50, 200),
    st.one_of(st.none(), st.integers(1, 9)),
    st.one_of(st.none(), st.integers(1, 100)),
)
def test_batches_are_fifo_and_within_the_budget(
    lengths: list[int], budget: int, most: int | None, limit: int | None
) -> None:
    batcher = Batcher(budget, max_requests=most, max_queue_tokens=10**6)
    entries = [entry(length) for length in lengths]
    batcher.put(entries)
    taken: list[Entry] = []
    while batch := batcher.take(limit, block=False):
        total = sum(sizes(batch))
        room = budget if limit is None else min(limit, budget)
        assert total <= room or len(batch) == 1
        assert most is None or len(batch) <= most
        following = entries[len(taken) + len(batch)].tokens if len(taken) + len(batch) < len(entries) else None
        full = following is None or total + following > room or len(batch) == most
        assert full, "a batch stops only when the next entry does not fit"
        taken += batch
    assert [id(one) for one in taken] == [id(one) for one in entries]
    assert batcher.queued_tokens == 0
    assert len(batcher) == 0


@pytest.mark.parametrize(("third", "expected"), [(4, [3, 3, 4]), (5, [3, 3])])
def test_the_budget_is_inclusive(third: int, expected: list[int]) -> None:
    batcher = Batcher(10, max_queue_tokens=100)
    batcher.put([entry(3), entry(3), entry(third)])
    assert sizes(batcher.take()) == expected


def test_abandoned_entries_are_dropped_and_counted() -> None:
    dropped: list[int] = []
    batcher = Batcher(100, max_queue_tokens=1000, on_dropped=dropped.append)
    gone = Ticket([Item(Task.EMBED, text="x")], lambda: None)
    batcher.put([entry(1, gone), entry(2), entry(3, gone), entry(4)])
    gone.abandon()
    assert sizes(batcher.take()) == [2, 4]
    assert sum(dropped) == 2
    assert batcher.queued_tokens == 0


def test_a_full_queue_refuses_all_or_nothing() -> None:
    batcher = Batcher(10, max_queue_tokens=10)
    batcher.put([entry(6)])
    with pytest.raises(Overloaded, match=r"holds 6 tokens and this request adds 7, more than the limit of 10"):
        batcher.put([entry(3), entry(4)])
    assert batcher.queued_tokens == 6
    batcher.put([entry(4)])
    assert sizes(batcher.take()) == [6, 4]


def test_an_empty_queue_takes_any_request() -> None:
    batcher = Batcher(10, max_queue_tokens=10)
    batcher.put([entry(9), entry(9)])
    assert batcher.queued_tokens == 18


def test_take_waits_for_an_entry_and_close_wakes_it() -> None:
    batcher = Batcher(10, max_queue_tokens=10)
    taken: list[list[Entry] | None] = []

    def taker() -> None:
        while True:
            batch = batcher.take()
            taken.append(batch)
            if batch is None:
                return

    thread = threading.Thread(target=taker)
    thread.start()
    batcher.put([entry(2)])
    deadline = time.monotonic() + 5
    while not taken and time.monotonic() < deadline:
        time.sleep(0.001)
    batcher.close()
    thread.join(5)
    assert not thread.is_alive()
    assert sizes(taken[0]) == [2]
    assert taken[1] is None


def test_every_waiting_taker_gets_work_from_one_put() -> None:
    batcher = Batcher(4, max_queue_tokens=100)
    results: list[list[int]] = []
    barrier = threading.Barrier(4)

    def taker() -> None:
        barrier.wait(5)
        results.append(sizes(batcher.take()))

    threads = [threading.Thread(target=taker) for _ in range(3)]
    for thread in threads:
        thread.start()
    barrier.wait(5)
    batcher.put([entry(4), entry(4), entry(4)])
    for thread in threads:
        thread.join(5)
    assert results == [[4], [4], [4]]


def test_a_full_queue_lets_go_of_what_nobody_waits_for() -> None:
    dropped: list[int] = []
    batcher = Batcher(10, max_queue_tokens=10, on_dropped=dropped.append)
    first, second = entry(6), entry(4)
    batcher.put([first, second])
    with pytest.raises(Overloaded):
        batcher.put([entry(5)])
    first.ticket.abandon()
    batcher.put([entry(5)])
    assert dropped == [1] and batcher.queued_tokens == 9
    assert sizes(batcher.take()) == [4, 5]


def test_close_hands_back_what_waits() -> None:
    batcher = Batcher(10, max_queue_tokens=100)
    batcher.put([entry(1), entry(2)])
    assert sizes(batcher.close()) == [1, 2]
    assert batcher.take() is None


def test_takers_share_the_end_of_a_queue() -> None:
    batcher = Batcher(4096, max_queue_tokens=10**6)
    batcher.put([entry(300) for _ in range(8)])
    taken = [sizes(batcher.take(1024, sharers=2)) for _ in range(4)]
    # 2400 left: a full batch each; then the rest in two, and no piece below the least share unless it is the last.
    assert [len(batch) for batch in taken] == [3, 2, 1, 1]
    assert sizes(batcher.take(1024, sharers=2)) == [300]


def test_a_short_queue_is_not_shared() -> None:
    batcher = Batcher(4096, max_queue_tokens=10**6)
    batcher.put([entry(20) for _ in range(20)])
    assert len(sizes(batcher.take(1024, sharers=2))) == 20


def test_many_callers_are_served_in_shares_that_leave_something_for_the_next_taker() -> None:
    batcher = Batcher(16384, max_queue_tokens=10**6)
    batcher.put([entry(20) for _ in range(60)])
    first = batcher.take(1024, sharers=2)
    assert first is not None and sum(sizes(first)) == 600  # nothing is known of them yet
    batcher.finished(first)
    taken = batcher.take(1024, sharers=2)
    assert taken is not None and sum(sizes(taken)) == 400  # a third of the 1,200 seen in flight
    batcher.put([entry(20) for _ in range(30)])  # the first callers are back
    other = batcher.take(1024, sharers=2)
    assert other is not None and sum(sizes(other)) == 400
    assert batcher.queued_tokens == 400


def test_the_shares_of_few_callers_and_of_large_requests_are_those_of_the_takers_alone() -> None:
    request = Ticket([Item(Task.EMBED, text="x")] * 60, lambda: None)
    for entries in ([entry(20) for _ in range(8)], [entry(20, request) for _ in range(60)]):
        batcher = Batcher(16384, max_queue_tokens=10**6)
        for _ in range(2):
            batcher.put(entries)
            taken = batcher.take(1024, sharers=2)
            assert taken is not None and sum(sizes(taken)) == min(600, 20 * len(entries))
            batcher.finished(taken)
            while batcher.queued_tokens:
                batcher.finished(batcher.take(1024, sharers=2) or [])


def test_what_was_seen_in_flight_fades() -> None:
    batcher = Batcher(16384, max_queue_tokens=10**6)
    batcher.put([entry(20) for _ in range(60)])
    batcher.finished(batcher.take(2048) or [])
    for _ in range(10):  # one caller after the other
        batcher.put([entry(20)])
        batcher.finished(batcher.take(1024, sharers=2) or [])
    batcher.put([entry(20) for _ in range(40)])
    taken = batcher.take(1024, sharers=2)
    assert taken is not None and sum(sizes(taken)) == 500  # the least share, as for takers alone


def test_callers_who_go_are_counted_no_more() -> None:
    batcher = Batcher(16384, max_queue_tokens=10**6)
    entries = [entry(20) for _ in range(30)]
    batcher.put(entries)
    for gone in entries[:29]:
        gone.ticket.abandon()
    assert batcher.take(1024, sharers=2) == entries[29:]
    batcher.finished(entries[29:])
    assert (batcher._callers, batcher._out, batcher._most_callers) == (0, 0, 1)


def taken_in_thread(batcher: Batcher, patience: Patience) -> tuple[threading.Thread, list[list[int]]]:
    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(sizes(batcher.take(patience=patience))), daemon=True)
    thread.start()
    return thread, results


def test_a_patient_taker_waits_while_more_come() -> None:
    batcher = Batcher(4096, max_queue_tokens=10**6)
    batcher.put([entry(10)])
    thread, results = taken_in_thread(batcher, Patience(60.0, 60.0, 30, worthwhile=lambda: True))
    for _ in range(2):
        time.sleep(0.02)
        assert not results
        batcher.put([entry(10)])
    thread.join(10)
    assert results == [[10, 10, 10]]


@pytest.mark.parametrize(
    "patience",
    [
        Patience(60.0, 0.01, 30, worthwhile=lambda: True),  # nobody came for a while
        Patience(0.01, 60.0, 30, worthwhile=lambda: True),  # long enough
        Patience(60.0, 60.0, 30, worthwhile=lambda: False),  # nobody else is computing
        Patience(60.0, 60.0, 10, worthwhile=lambda: True),  # enough
    ],
)
def test_patience_ends(patience: Patience) -> None:
    batcher = Batcher(4096, max_queue_tokens=10**6)
    batcher.put([entry(10)])
    thread, results = taken_in_thread(batcher, patience)
    thread.join(10)
    assert results == [[10]]


def test_the_taker_that_came_last_is_woken_first() -> None:
    batcher = Batcher(4096, max_queue_tokens=10**6)
    order: list[str] = []

    def take(name: str) -> None:
        if batcher.take() is not None:
            order.append(name)

    threads = {name: threading.Thread(target=take, args=(name,), daemon=True) for name in ("first", "second")}
    for thread in threads.values():
        thread.start()
        time.sleep(0.05)
    batcher.put([entry(1)])
    threads["second"].join(10)
    assert order == ["second"]
    batcher.close()
    threads["first"].join(10)
    assert not threads["first"].is_alive()
