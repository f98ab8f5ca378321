"""Notes arrive in the client library as if each had been counted there, at once when asked and soon without."""

from __future__ import annotations

import random
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from infinity_bento.telemetry.ledger import BOOK_AFTER_SECONDS, Ledger, observe_all


def histogram(registry: CollectorRegistry) -> Histogram:
    return Histogram("h", "text", registry=registry, buckets=(1.0, 2.0, 4.0))


def shown(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@pytest.mark.parametrize("values", [[], [1.0], [0.5, 1.0, 1.5, 2.0, 4.0, 4.5, 100.0], [-1.0, 0.0]])
def test_many_values_at_once_are_as_one_by_one(values: list[float]) -> None:
    together, apart = CollectorRegistry(), CollectorRegistry()
    observe_all(histogram(together), values)
    one_by_one = histogram(apart)
    for value in values:
        one_by_one.observe(value)
    assert shown(together) == shown(apart)


def test_a_histogram_of_another_make_is_fed_one_by_one() -> None:
    class Other:
        def __init__(self) -> None:
            self.seen: list[float] = []

        def observe(self, value: float) -> None:
            self.seen.append(value)

    other = Other()
    observe_all(other, [1.0, 3.0])
    assert other.seen == [1.0, 3.0]


def test_nothing_of_several_threads_is_lost() -> None:
    registry = CollectorRegistry()
    counter, lengths, ledger = Counter("c", "text", registry=registry), histogram(registry), Ledger()

    def note() -> None:
        rng = random.Random(0)
        for _ in range(500):
            ledger.add(counter, 2)
            ledger.observe([(lengths, rng.random() * 5), (lengths, 1.0)])

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ledger.book()
    for thread in threads:
        thread.join()
    ledger.book()
    assert registry.get_sample_value("c_total") == 4 * 500 * 2
    assert registry.get_sample_value("h_count") == 4 * 500 * 2


def test_notes_are_booked_soon_without_being_asked_for_and_again_after_that() -> None:
    registry, calls = CollectorRegistry(), threading.Semaphore(0)
    counter = Counter("c", "text", registry=registry)
    ledger = Ledger(calls.release)
    for amount in (1.0, 2.0):
        ledger.add(counter, amount)
        assert calls.acquire(timeout=20 * BOOK_AFTER_SECONDS)
    assert registry.get_sample_value("c_total") == 3.0
    ledger.touch()
    assert calls.acquire(timeout=20 * BOOK_AFTER_SECONDS)
    time.sleep(2 * BOOK_AFTER_SECONDS)
    assert not calls.acquire(blocking=False)  # nothing noted, nothing booked
