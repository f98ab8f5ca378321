"""The permits of one model: how many inputs may be in flight, taken at once or waited for in order of arrival.

``served_model`` takes them for each request. Whoever waits is served before a newcomer, so that a stream that waits its
turn is not overtaken for ever by requests that do not wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits for ``count`` permits; ``granted`` is set, and ``on_granted`` called, when it has them."""

    count: int
    on_granted: Callable[[], None]
    granted: bool = False


class Permits:
    """A counted limit that threads and event loops share.

    Args:
        limit: Most permits that are out at a time, at least 1.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0
        self._waiters: deque[Waiter] = deque()
        self._lock = threading.Lock()

    @property
    def taken(self) -> int:
        """Permits that are out now."""
        return self._taken

    def take(self, count: int) -> bool:
        """Take permits now, or none: False if too few are left, or somebody waits already.

        ``count`` is at most ``limit``.
        """
        with self._lock:
            if self._waiters or self._taken + count > self.limit:
                return False
            self._taken += count
            return True

    def take_or_wait(self, count: int, on_granted: Callable[[], None]) -> Waiter:
        """Take permits now, or as soon as those before have theirs.

        Args:
            count: At most ``limit``.
            on_granted: Called once, from any thread and with nothing held, if the permits come later.

        Returns:
            The waiter; if it is ``granted`` already, ``on_granted`` is not called.
        """
        waiter = Waiter(count, on_granted)
        with self._lock:
            if self._waiters or self._taken + count > self.limit:
                self._waiters.append(waiter)
            else:
                self._taken += count
                waiter.granted = True
        return waiter

    def give_up(self, waiter: Waiter) -> None:
        """The waiter's caller has gone: it waits no longer, and gives back what it was granted meanwhile."""
        with self._lock:
            if not waiter.granted:
                self._waiters.remove(waiter)
        # The next one may need less than the one that left.
        self.release(waiter.count if waiter.granted else 0)

    def release(self, count: int) -> None:
        """Give permits back, and hand them to those who wait."""
        served: list[Waiter] = []
        with self._lock:
            self._taken -= count
            while self._waiters and self._taken + self._waiters[0].count <= self.limit:
                waiter = self._waiters.popleft()
                self._taken += waiter.count
                waiter.granted = True
                served.append(waiter)
        for waiter in served:
            waiter.on_granted()
