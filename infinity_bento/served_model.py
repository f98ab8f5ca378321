"""One loaded model as the engine sees it: admission, its queue and threads, and what its metrics are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from infinity_bento.batching.batcher import Batcher
from infinity_bento.batching.permits import Permits, Waiter
from infinity_bento.batching.ticket import Entry, PartsTicket, Ticket
from infinity_bento.core import Item, ModelInfo, Outcome, Result, Task, Timing
from infinity_bento.errors import (
    BatchTooLarge,
    CapacityError,
    DeadlineExceeded,
    InfinityError,
    NotReady,
    Overloaded,
)
from infinity_bento.inputs.pool import Encodings, TokenizerPool

if TYPE_CHECKING:
    from infinity_bento.runners.lane import BatchFacts, Lane
    from infinity_bento.telemetry.metrics import Metrics

# A full queue is worth at most this much waiting; beyond it the client should go elsewhere.
MAX_RETRY_AFTER_SECONDS = 60


class ServedModel:
    """One loaded model: its limits, tokenizer workers, queue and lanes. Built by ``loading.load_model``."""

    def __init__(
        self,
        info: ModelInfo,
        pool: TokenizerPool,
        batcher: Batcher,
        lanes: Sequence[Lane],
        metrics: Metrics | None = None,
    ) -> None:
        self.info = info
        self.pool = pool
        self.batcher = batcher
        self.lanes = list(lanes)
        self.metrics = metrics
        self._permits = Permits(info.max_concurrent_requests)
        self._tokens_per_second = 0.0  # moving average over batches, all lanes together

    @property
    def in_flight(self) -> int:
        """Inputs admitted and not answered yet."""
        return self._permits.taken

    @property
    def alive(self) -> bool:
        """Whether every device thread still runs."""
        return all(lane.is_alive() for lane in self.lanes)

    def admit(self, inputs: int) -> int:
        """Take permits for a request, at once or not at all; returns how many to ``release``.

        A request larger than the whole limit is admitted when nothing else is in flight, so that it is not refused
        for ever.

        Raises:
            BatchTooLarge: If the request has more inputs than ``max_client_batch_size``.
            Overloaded: If the permits are taken.
        """
        permits, limit = self._needed(inputs), self._permits.limit
        if not self._permits.take(permits):
            raise Overloaded(
                f"{self.in_flight} inputs are in flight and this request adds {inputs}, more than the limit of "
                f"{limit} (max-concurrent-requests): retry later.",
                retry_after_seconds=self.retry_after_seconds(),
            )
        return permits

    def admit_or_wait(self, inputs: int, on_granted: Callable[[], None]) -> Waiter:
        """``admit``, but in its turn instead of at once; the waiter's ``count`` is what to ``release``.

        Args:
            inputs: Of the request.
            on_granted: Called from any thread, if the permits come later than this call returns.

        Raises:
            BatchTooLarge: As ``admit``.
        """
        return self._permits.take_or_wait(self._needed(inputs), on_granted)

    def give_up(self, waiter: Waiter) -> None:
        """A caller that waited has gone, with or without its permits."""
        self._permits.give_up(waiter)

    def release(self, permits: int) -> None:
        """Give permits back."""
        self._permits.release(permits)

    def _needed(self, inputs: int) -> int:
        """The permits of a request: one for each input, at most all there are."""
        most = self.info.max_client_batch_size
        if inputs > most:
            raise BatchTooLarge(
                f"The request has {inputs} inputs, more than the limit of {most} (max-client-batch-size): split it."
            )
        return min(inputs, self._permits.limit)

    def retry_after_seconds(self) -> int:
        """Seconds until what waits now should be done, from the recent token rate; between 1 and 60."""
        if self._tokens_per_second <= 0:
            return 1
        return max(1, min(MAX_RETRY_AFTER_SECONDS, round(self.batcher.queued_tokens / self._tokens_per_second)))

    def observe_batch(self, facts: BatchFacts) -> None:
        """A batch ran: feed the token rate and the metrics."""
        rate = len(self.lanes) * facts.tokens / max(facts.seconds, 1e-6)
        self._tokens_per_second += 0.2 * (rate - self._tokens_per_second)
        if self.metrics is not None:
            self.metrics.observe_batch(self.info.name, facts.inputs, facts.tokens)
            self.metrics.count_shared(self.info.name, facts.tokens - facts.rows)
            self.observe_queue()

    def observe_queue(self) -> None:
        """The queue changed."""
        if self.metrics is not None:
            self.metrics.set_queue(self.info.name, len(self.batcher), self.batcher.queued_tokens)

    def observe_dropped(self, inputs: int) -> None:
        """Inputs will not be computed, because their caller has gone."""
        if self.metrics is not None:
            self.metrics.count_dropped(self.info.name, inputs)

    def observe_retried(self, inputs: int) -> None:
        """A batch raised, and its inputs run again one by one."""
        if self.metrics is not None:
            self.metrics.count_retried(self.info.name)

    def observe_request(self, items: Sequence[Item]) -> None:
        """A request was understood and asks for admission."""
        if self.metrics is not None:
            self.metrics.count_request(items[0].task, len(items))

    def _observe_answer(self, task: Task, outcomes: Sequence[Outcome], seconds: float) -> None:
        """A request was answered, with results or errors of its items: the one place where all doors are counted."""
        results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
        if self.metrics is None or not results:
            return
        self.metrics.observe_request(
            task,
            self.info.name,
            seconds,
            Timing.mean([result.timing for result in results]),
            [result.usage.tokens for result in results],
            failed=len(outcomes) - len(results),
        )
        truncated = sum(result.usage.truncated_from is not None for result in results)
        if truncated:
            self.metrics.count_truncated(self.info.name, truncated)

    def finished(self, ticket: Ticket, started: float) -> list[Outcome]:
        """The outcomes of a resolved ticket.

        Args:
            ticket: Every item of it has its outcome.
            started: When the request came, by ``time.perf_counter``.

        Raises:
            CapacityError: If one is about the server's state: that concerns the request as a whole.
        """
        outcomes = ticket.outcomes()
        for outcome in outcomes:
            if isinstance(outcome, CapacityError):
                raise outcome
        self._observe_answer(ticket.items[0].task, outcomes, time.perf_counter() - started)
        return outcomes

    def start(self, ticket: Ticket) -> None:
        """Send a ticket's items on their way; they resolve it."""

        def on_encoded(encodings: Encodings, seconds: float) -> None:
            self._enqueue(ticket, encodings, seconds)

        self.pool.submit(ticket.items, on_encoded)

    def _enqueue(self, ticket: Ticket, encodings: Encodings, seconds: float) -> None:
        """In a tokenizer worker: queue what could be tokenised, answer what could not."""
        if ticket.abandoned:
            self.observe_dropped(len(ticket.items))
            ticket.resolve_rest(DeadlineExceeded("The caller went away before the input was computed."))
            return
        now = time.perf_counter()
        entries: list[Entry] = []
        failed: list[tuple[Ticket, int, InfinityError]] = []
        for index, encoding in enumerate(encodings):
            if isinstance(encoding, InfinityError):
                failed.append((ticket, index, encoding))
            elif encoding.merge is not None:
                parts = PartsTicket(ticket, index, encoding)
                entries += [Entry(parts, i, part, seconds, now) for i, part in enumerate(encoding.sequences)]
            else:
                entries.append(Entry(ticket, index, encoding, seconds, now))
        if entries:
            try:
                self.batcher.put(entries)
            except CapacityError as error:
                failed += [(entry.ticket, entry.index, error) for entry in entries]
            self.observe_queue()
        for owner, index, reason in failed:
            owner.resolve(index, reason)

    def close(self) -> None:
        """Finish the running batches, refuse the waiting entries, end all threads."""
        self.pool.close()
        for entry in self.batcher.close():
            entry.resolve(NotReady("The server is stopping: retry on another replica."))
        for lane in self.lanes:
            lane.join()
