"""What happened and is not in the client library's metrics yet: noted in a microsecond, booked a moment later together.

Counting one request takes the library some twenty locked updates, while the next batch waits for its requests. Called
by ``metrics``.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter, Histogram

# How old a figure may be that another process reports; the own process books before it reports.
BOOK_AFTER_SECONDS = 0.25


class Ledger:
    """Notes of one process. Thread-safe.

    Args:
        also: Called at every booking, for what is not a sum.
    """

    def __init__(self, also: Callable[[], None] = lambda: None) -> None:
        self._also = also
        self._lock = threading.Lock()
        self._sums: dict[Counter, float] = {}
        self._values: dict[Histogram, list[float]] = {}
        self._timer: threading.Timer | None = None

    def add(self, counter: Counter, amount: float) -> None:
        """Note that a counter grew."""
        with self._lock:
            self._sums[counter] = self._sums.get(counter, 0.0) + amount
            if self._timer is None:
                self._book_soon()

    def observe(self, values: list[tuple[Histogram, float]]) -> None:
        """Note values of histograms."""
        with self._lock:
            for histogram, value in values:
                self._values.setdefault(histogram, []).append(value)
            if self._timer is None:
                self._book_soon()

    def touch(self) -> None:
        """Have ``also`` called soon."""
        if self._timer is None:
            with self._lock:
                if self._timer is None:
                    self._book_soon()

    def book(self) -> None:
        """Hand everything noted to the client library, now."""
        with self._lock:
            sums, self._sums = self._sums, {}
            values, self._values = self._values, {}
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for counter, amount in sums.items():
            counter.inc(amount)
        for histogram, observed in values.items():
            observe_all(histogram, observed)
        self._also()

    def _book_soon(self) -> None:
        self._timer = threading.Timer(BOOK_AFTER_SECONDS, self.book)
        self._timer.daemon = True
        self._timer.start()


def observe_all(histogram: Any, values: list[float]) -> None:
    """``histogram.observe`` of each value, with one update for each bucket that grows.

    The library has no such method; these are its own fields, and one by one is the way where they are missing.
    """
    bounds, buckets, total = (getattr(histogram, name, None) for name in ("_upper_bounds", "_buckets", "_sum"))
    if not bounds or not buckets or total is None:
        for value in values:
            histogram.observe(value)
        return
    counts: dict[int, int] = {}
    for value in values:
        place = bisect_left(bounds, value)
        counts[place] = counts.get(place, 0) + 1
    total.inc(sum(values))
    for place, count in counts.items():
        buckets[place].inc(count)
