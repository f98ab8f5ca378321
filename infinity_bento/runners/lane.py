"""A lane is a device thread: it takes batches from a model's queue, drives the runner and answers the entries.

On CUDA one lane keeps the device busy by preparing and launching the next batch before it collects the last. On the CPU
several lanes of one thread each share the weights: an OpenMP team would wait for its slowest core at every operation,
and a server always has a neighbour on some core (its own event loop).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from infinity_bento.batching.batcher import Batcher, Patience
from infinity_bento.batching.packing import PackedBatch
from infinity_bento.batching.ticket import Entry
from infinity_bento.core import Outcome, Result, Task, Timing, Usage
from infinity_bento.errors import InferenceError, InfinityError, OutOfMemory
from infinity_bento.runners.runner import Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LanePlan:
    """How a model's batches are executed on its device. Chosen at load; shown in the start-up report."""

    lanes: int
    threads_per_lane: int  # torch threads while several lanes are busy
    lone_threads: int  # torch threads of a batch that finds the machine idle
    batch_tokens: int  # tokens at which a lane stops filling a batch
    prefetch: bool = False  # launch the next batch before collecting the last; pays where launching is asynchronous
    patience_tokens: int = 0  # a smaller batch wastes the device: a lane with company waits a moment for more
    patience_seconds: float = 0.0
    patience_gap_seconds: float = 0.0  # and gives up once nobody came for so long


class BusyLanes:
    """How many lanes of the process are computing now; shared by all models."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def enter(self) -> int:
        """Count one more; returns how many are busy, this one included."""
        with self._lock:
            self._count += 1
            return self._count

    def leave(self) -> None:
        """Count one less."""
        with self._lock:
            self._count -= 1

    def any(self) -> bool:
        """Whether a lane is computing now."""
        return self._count > 0


@dataclass(slots=True)
class _Launched:
    """A batch whose forward pass was started."""

    entries: list[Entry]
    batch: PackedBatch
    rows: dict[Task, Any]
    started: float


class BatchFacts(NamedTuple):
    """What a batch was, for metrics."""

    inputs: int
    tokens: int  # of all inputs
    rows: int  # of these, run through the model: less copies and shared prefixes
    seconds: float


OnBatch = Callable[[BatchFacts], None]


class Lane(threading.Thread):
    """One device thread of one model.

    Args:
        name: Thread name.
        batcher: The model's queue.
        runner: The model.
        plan: Threads, batch size, prefetch.
        busy: Shared count of busy lanes.
        in_flight: Inputs of this model that were admitted and not answered yet.
        on_batch: Called for each batch that ran.
        on_retry: Called with the number of entries that run again alone because their batch raised.
    """

    def __init__(
        self,
        name: str,
        *,
        batcher: Batcher,
        runner: Runner,
        plan: LanePlan,
        busy: BusyLanes,
        in_flight: Callable[[], int] = lambda: 0,
        on_batch: OnBatch = lambda facts: None,
        on_retry: Callable[[int], None] = lambda count: None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._batcher = batcher
        self._runner = runner
        self._plan = plan
        self._busy = busy
        self._in_flight = in_flight
        self._on_batch = on_batch
        self._on_retry = on_retry
        self._threads = 0
        self._patience = Patience(
            plan.patience_seconds, plan.patience_gap_seconds, plan.patience_tokens, worthwhile=busy.any
        )

    def run(self) -> None:
        """Until the queue is closed: take, launch, collect."""
        pending: _Launched | None = None
        while True:
            entries = self._batcher.take(
                self._plan.batch_tokens, block=pending is None, patience=self._patience, sharers=self._plan.lanes
            )
            if entries is None:
                break
            launched = None
            if entries:
                busy = self._busy.enter()
                try:
                    self._set_threads(alone=busy == 1 and self._in_flight() <= len(entries))
                    launched = self._launch(entries)
                    if launched is None:  # answered one by one
                        self._batcher.finished(entries)
                    elif not self._plan.prefetch:
                        self._collect(launched)
                        launched = None
                finally:
                    self._busy.leave()
            if pending is not None:
                self._collect(pending)
            pending = launched
        if pending is not None:
            self._collect(pending)

    def _set_threads(self, *, alone: bool) -> None:
        """A batch that is all there is gets all cores; with more on its way each lane keeps to its own.

        A team of threads that shares its cores with another lane waits for the slowest at every operation.
        """
        threads = self._plan.lone_threads if alone else self._plan.threads_per_lane
        if threads and threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads

    def _launch(self, entries: list[Entry]) -> _Launched | None:
        """Start the forward pass; if it raises, the entries are answered one by one instead."""
        started = time.perf_counter()
        try:
            items = [entry.item for entry in entries]
            batch = self._runner.prepare([entry.encoded for entry in entries], items)
            rows = self._runner.run(batch, items)
        except Exception as error:
            self._isolate(entries, error)
            return None
        return _Launched(entries, batch, rows, started)

    def _collect(self, launched: _Launched) -> None:
        """Answer the entries of a launched batch."""
        self._batcher.finished(launched.entries)  # before its callers come back
        self._resolve(launched)

    def _resolve(self, launched: _Launched) -> None:
        try:
            outputs = self._runner.collect(launched.rows, launched.batch, [entry.item for entry in launched.entries])
            seconds = time.perf_counter() - launched.started
            tokens = sum(entry.tokens for entry in launched.entries)
            self._on_batch(BatchFacts(len(outputs), tokens, launched.batch.rows, seconds))
        except Exception as error:  # CUDA reports a failed kernel here
            self._isolate(launched.entries, error)
            return
        for entry, output in zip(launched.entries, outputs, strict=True):
            entry.resolve(_outcome(entry, output, launched.started, seconds))

    def _isolate(self, entries: Sequence[Entry], error: Exception) -> None:
        """Run each entry of a failed batch alone, so that one bad item harms nobody else."""
        if len(entries) == 1:
            entries[0].resolve(_failure(error))
            return
        logger.warning("a batch of %d failed (%s: %s); running its items one by one", len(entries), *_describe(error))
        self._on_retry(len(entries))
        for entry in entries:
            if entry.ticket.abandoned:
                continue
            launched = self._launch([entry])
            if launched is not None:
                self._resolve(launched)


def _outcome(entry: Entry, output: Any, started: float, seconds: float) -> Outcome:
    if isinstance(output, InfinityError):
        return output
    encoded = entry.encoded
    return Result(
        output,
        Usage(len(encoded), encoded.characters, encoded.truncated_from),
        Timing(entry.tokenize_seconds, started - entry.queued_at, seconds),
    )


def _failure(error: Exception) -> InfinityError:
    """What a caller is told when its item fails alone."""
    if isinstance(error, InfinityError):
        return error
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        logger.error("out of memory on a single item: %s", error)
        return OutOfMemory(
            "The device ran out of memory on this input even alone: send a shorter one, or lower max-sequence-length."
        )
    logger.error("inference failed on a single item", exc_info=error)
    return InferenceError(f"The model failed on this input ({type(error).__name__}): the server log has the details.")


def _describe(error: Exception) -> tuple[str, str]:
    text = str(error).strip()
    return type(error).__name__, text.split("\n", 1)[0][:200]
