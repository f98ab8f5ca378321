"""Permits: at once or in turn, never more than the limit, and none lost by whoever leaves the line."""

from __future__ import annotations

import random
import threading

from infinity_bento.batching.permits import Permits, Waiter


def unheard() -> None:
    raise AssertionError("nobody had to be told")


def test_taking_is_at_once_or_not_at_all() -> None:
    permits = Permits(3)
    assert permits.take(2) and not permits.take(2) and permits.take(1)
    permits.release(3)
    assert permits.taken == 0
    assert permits.take_or_wait(3, unheard).granted


def test_whoever_waits_is_served_in_order_and_before_newcomers() -> None:
    permits = Permits(3)
    order: list[str] = []
    assert permits.take(3)
    large = permits.take_or_wait(2, lambda: order.append("large"))
    small = permits.take_or_wait(1, lambda: order.append("small"))
    permits.release(1)
    assert not large.granted and not small.granted, "the small one would fit, but it came later"
    assert not permits.take(1), "a newcomer does not overtake"
    permits.release(2)
    assert order == ["large", "small"] and permits.taken == 3


def test_leaving_the_line_lets_the_next_one_in_and_loses_no_permit() -> None:
    permits = Permits(2)
    told: list[str] = []
    assert permits.take(1)
    large = permits.take_or_wait(2, unheard)
    small = permits.take_or_wait(1, lambda: told.append("small"))
    permits.give_up(large)
    assert told == ["small"] and small.granted and permits.taken == 2
    permits.give_up(small)
    permits.release(1)
    assert permits.taken == 0


def test_many_threads_never_exceed_the_limit_and_give_all_back() -> None:
    permits, out, most = Permits(5), [0], [0]
    lock = threading.Lock()

    def hold(waiter: Waiter) -> None:
        with lock:
            out[0] += waiter.count
            most[0] = max(most[0], out[0])
        with lock:
            out[0] -= waiter.count
        permits.release(waiter.count)

    def client(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(200):
            came = threading.Event()
            waiter = permits.take_or_wait(generator.randint(1, 5), came.set)
            if not waiter.granted and generator.random() < 0.2:
                permits.give_up(waiter)
                continue
            assert waiter.granted or came.wait(10)
            hold(waiter)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert permits.taken == 0 and 0 < most[0] <= 5
