"""A ticket collects the outcomes of one submit call and tells its caller once. Entries are its queued items.

Made by the engine, resolved by tokenizer workers and device lanes, from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity_bento.core import Encoded, Item, Outcome, Result, Timing, Usage
from infinity_bento.errors import InfinityError


class Ticket:
    """The outcomes of one submit call, in the order of its items.

    Args:
        items: What was asked; at least one.
        on_done: Called once, in the thread that resolves the last item, with nothing held.
    """

    __slots__ = ("_abandoned", "_lock", "_on_done", "_outcomes", "_remaining", "items")

    def __init__(self, items: Sequence[Item], on_done: Callable[[], None]) -> None:
        self.items = items
        self._abandoned = False
        self._outcomes: list[Outcome | None] = [None] * len(items)
        self._remaining = len(items)
        self._on_done = on_done
        self._lock = threading.Lock()

    @property
    def abandoned(self) -> bool:
        """The caller is gone: nothing of this ticket needs computing any more."""
        return self._abandoned

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
        self._abandoned = True

    def outcomes(self) -> list[Outcome]:
        """All outcomes; only valid after ``on_done`` was called."""
        return [outcome for outcome in self._outcomes if outcome is not None]


class PartsTicket(Ticket):
    """The outcomes of the parts of one item, which run as entries of their own and are merged into its outcome.

    Args:
        whole: The ticket of the item.
        index: Of the item.
        encoded: The item, with ``parts`` and ``merge``.
    """

    __slots__ = ("_encoded", "_index", "_whole")

    def __init__(self, whole: Ticket, index: int, encoded: Encoded) -> None:
        super().__init__([whole.items[index]] * len(encoded.sequences), self._finish)
        self._whole, self._index, self._encoded = whole, index, encoded

    @property
    def abandoned(self) -> bool:
        """As the whole is."""
        return self._whole.abandoned

    def _finish(self) -> None:
        results: list[Result] = []
        for outcome in self.outcomes():
            if isinstance(outcome, InfinityError):
                return self._whole.resolve(self._index, outcome)
            results.append(outcome)
        encoded = self._encoded
        assert encoded.merge is not None
        output = encoded.merge([result.output for result in results])
        usage = Usage(len(encoded), encoded.characters, encoded.truncated_from)
        timing = Timing.mean([result.timing for result in results])
        return self._whole.resolve(self._index, Result(output, usage, timing))


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
