"""The queue of one model: first in, first out, bounded in tokens, taken in batches under a token budget.

Tokenizer workers put, device lanes take. A lane that is free takes what waits, so a lone request runs at once and a
busy device finds full batches. Only where other lanes are computing anyway may a taker have a moment's patience, so
that the answers of one batch do not come back as many small ones.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from infinity_bento.batching.ticket import Entry
from infinity_bento.errors import Overloaded

# Smaller pieces cost more per token than sharing them gains.
LEAST_SHARE = 512

# Where many callers wait for one input each, a batch of a size that costs little more per token is worth it, if it
# leaves something for the next taker: whoever is answered comes back a few milliseconds later, and a taker that finds
# nothing would stand idle for so long.
LEAST_TURN = 160
CALLERS_PER_SHARE = 4
# How much of the most that was seen in flight counts on, batch by batch.
_FADING = 0.8


class Patience(NamedTuple):
    """How a taker waits for a fuller batch: up to ``seconds`` until ``tokens`` wait, while ``worthwhile()``.

    The clients of a finished batch come back one after the other, so it also ends once nobody came for ``gap_seconds``.
    """

    seconds: float
    gap_seconds: float
    tokens: int
    worthwhile: Callable[[], bool]


class Batcher:
    """A FIFO of entries.

    Args:
        token_budget: Most tokens of one batch; no entry may be longer (the engine sees to that at start).
        max_requests: Most entries of one batch; None: no limit.
        max_queue_tokens: Most waiting tokens. An entry is always accepted while nothing waits.
        on_dropped: Called with the number of entries skipped because their caller had gone.
    """

    def __init__(
        self,
        token_budget: int,
        *,
        max_requests: int | None = None,
        max_queue_tokens: int,
        on_dropped: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.token_budget = token_budget
        self.max_requests = max_requests
        self.max_queue_tokens = max_queue_tokens
        self._on_dropped = on_dropped
        self._entries: deque[Entry] = deque()
        self._tokens = 0
        self._out = 0  # tokens taken and not finished
        self._callers = 0  # entries waiting or taken that are all their caller asked for
        self._most_tokens = self._most_callers = 0.0  # seen in flight lately
        self._closed = False
        self._lock = threading.Lock()
        self._waiting: list[threading.Condition] = []  # takers that sleep, the last one to come at the end

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait now."""
        return self._tokens

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entries: Sequence[Entry]) -> None:
        """Append all entries or none.

        Raises:
            Overloaded: If the queue would hold more than ``max_queue_tokens`` and something already waits.
        """
        tokens = sum(entry.tokens for entry in entries)
        with self._lock:
            if self._tokens + tokens > self.max_queue_tokens:
                self._drop_abandoned()
            if self._entries and self._tokens + tokens > self.max_queue_tokens:
                raise Overloaded(
                    f"The queue holds {self._tokens} tokens and this request adds {tokens}, more than the limit of "
                    f"{self.max_queue_tokens}: retry later, or send less at once."
                )
            self._entries.extend(entries)
            self._tokens += tokens
            self._callers += callers(entries)
            # One waiting lane is enough: it wakes the next one if it leaves something behind.
            self._wake()

    def take(
        self,
        limit: int | None = None,
        *,
        block: bool = True,
        patience: Patience | None = None,
        sharers: int = 1,
    ) -> list[Entry] | None:
        """The next batch.

        Args:
            limit: Stop at this many tokens, below the token budget; a longer entry still comes alone.
            block: Wait for an entry; otherwise return an empty list when nothing waits.
            patience: When, how long and for how much to wait beyond the first entry; None: not at all.
            sharers: Takers among which the last few batches of a queue are shared evenly, so that none is left with
                a full batch while the others have nothing; pieces stay above ``LEAST_SHARE`` tokens.

        Returns:
            At least one entry in order of arrival, an empty list (only without ``block``), or None once closed.
        """
        budget = self.token_budget if limit is None else min(limit, self.token_budget)
        batch: list[Entry] = []
        with self._lock:
            while True:
                if patience is not None:
                    self._wait_for_more(patience, self._share(sharers))
                dropped = self._fill(batch, budget if sharers == 1 else min(budget, self._share(sharers)))
                if dropped:
                    self._on_dropped(dropped)
                self._out += sum(entry.tokens for entry in batch)
                if batch or self._closed or not block:
                    break
                self._sleep()
            if self._entries:
                self._wake()
        return None if self._closed and not batch else batch

    def finished(self, entries: Sequence[Entry]) -> None:
        """What was taken is computed; to be said before it is answered."""
        with self._lock:
            self._most_tokens = max(self._tokens + self._out, _FADING * self._most_tokens)
            self._most_callers = max(self._callers, _FADING * self._most_callers)
            self._out -= sum(entry.tokens for entry in entries)
            self._callers -= callers(entries)

    def _share(self, sharers: int) -> int:
        """Tokens that one of several takers is to take."""
        if self._most_callers >= CALLERS_PER_SHARE * (sharers + 1):
            # One share is on its way back to its callers, or waits for the first taker that is done.
            return max(LEAST_TURN, int(max(self._most_tokens, self._tokens + self._out)) // (sharers + 1))
        return max(LEAST_SHARE, -(-self._tokens // sharers))

    def _wait_for_more(self, patience: Patience, share: int) -> None:
        """While something waits, but little, and others are computing: give it a moment to become more."""
        deadline = time.perf_counter() + patience.seconds
        while 0 < self._tokens < min(patience.tokens, share) and not self._closed and patience.worthwhile():
            before, left = self._tokens, deadline - time.perf_counter()
            if left <= 0:
                return
            self._sleep(min(left, patience.gap_seconds))
            if self._tokens == before:
                return

    def _sleep(self, seconds: float | None = None) -> None:
        """Let go of the lock until woken, or for so long."""
        condition = threading.Condition(self._lock)
        self._waiting.append(condition)
        condition.wait(seconds)
        if condition in self._waiting:
            self._waiting.remove(condition)

    def _wake(self) -> None:
        """Wake the taker that came last: its caches are warm, and so is the team of threads that it computes with."""
        if self._waiting:
            self._waiting.pop().notify()

    def _fill(self, batch: list[Entry], budget: int) -> int:
        """Move entries from the front into ``batch``; returns how many were skipped as abandoned."""
        tokens = dropped = 0
        while self._entries:
            entry = self._entries[0]
            if entry.ticket.abandoned:
                dropped += 1
                self._callers -= callers([entry])
            elif batch and (tokens + entry.tokens > budget or len(batch) == self.max_requests):
                break
            else:
                batch.append(entry)
                tokens += entry.tokens
            self._entries.popleft()
            self._tokens -= entry.tokens
        return dropped

    def _drop_abandoned(self) -> None:
        """Make room: nobody waits for these any more, and their turn may be far."""
        dropped = [entry for entry in self._entries if entry.ticket.abandoned]
        if dropped:
            self._entries = deque(entry for entry in self._entries if not entry.ticket.abandoned)
            self._tokens -= sum(entry.tokens for entry in dropped)
            self._callers -= callers(dropped)
            self._on_dropped(len(dropped))

    def close(self) -> list[Entry]:
        """Wake all takers for good; returns what was still waiting, for the caller to refuse."""
        with self._lock:
            self._closed = True
            left = list(self._entries)
            self._entries.clear()
            self._tokens = 0
            self._callers -= callers(left)
            while self._waiting:
                self._wake()
        return left


def callers(entries: Sequence[Entry]) -> int:
    """How many of these are all that their caller asked for."""
    return sum(len(entry.ticket.items) == 1 for entry in entries)
