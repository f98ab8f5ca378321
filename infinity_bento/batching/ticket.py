"""A ticket collects the outcomes of one submit call and tells its caller once. Entries are its queued items.

Made by the engine, resolved by tokenizer workers and device lanes, from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity_bento.core import Encoded, Item, Outcome


class Ticket:
    """The outcomes of one submit call, in the order of its items.

    Args:
        items: What was asked; at least one.
        on_done: Called once, in the thread that resolves the last item, with nothing held.
    """

    __slots__ = ("_lock", "_on_done", "_outcomes", "_remaining", "abandoned", "items")

    def __init__(self, items: Sequence[Item], on_done: Callable[[], None]) -> None:
        self.items = items
        self.abandoned = False  # the caller is gone: nothing of this ticket needs computing any more
        self._outcomes: list[Outcome | None] = [None] * len(items)
        self._remaining = len(items)
        self._on_done = on_done
        self._lock = threading.Lock()

    def resolve(self, index: int, outcome: Outcome) -> None:
        """Set the outcome of item ``index``; the first outcome wins, later ones are ignored."""
        with self._lock:
            if self._outcomes[index] is not None:
                return
            self._outcomes[index] = outcome
            self._remaining -= 1
            if self._remaining:
                return
        self._on_done()

    def resolve_rest(self, outcome: Outcome) -> None:
        """Give every item that has no outcome yet this one."""
        for index in range(len(self.items)):
            self.resolve(index, outcome)

    def abandon(self) -> None:
        """The caller no longer wants the answers; queued entries are skipped when their turn comes."""
        self.abandoned = True

    def outcomes(self) -> list[Outcome]:
        """All outcomes; only valid after ``on_done`` was called."""
        return [outcome for outcome in self._outcomes if outcome is not None]


@dataclass(slots=True)
class Entry:
    """One tokenised item in the queue. Times are ``time.perf_counter()`` seconds."""

    ticket: Ticket
    index: int  # within the ticket
    encoded: Encoded
    tokenize_seconds: float
    queued_at: float

    @property
    def item(self) -> Item:
        """What was asked."""
        return self.ticket.items[self.index]

    @property
    def tokens(self) -> int:
        """Cost of the entry against the token budget."""
        return len(self.encoded)

    def resolve(self, outcome: Outcome) -> None:
        """Answer this item."""
        self.ticket.resolve(self.index, outcome)
