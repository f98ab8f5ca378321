from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from infinity_bento.batching.batcher import Batcher
from infinity_bento.batching.packing import PackedBatch
from infinity_bento.batching.ticket import Entry, Ticket
from infinity_bento.core import Encoded, Item, Outcome, Result, Task
from infinity_bento.errors import InferenceError, OutOfMemory
from infinity_bento.runners.lane import BusyLanes, Lane, LanePlan
from infinity_bento.runners.runner import Runner
from tests.runners.fakes import POISON, FakeBackbone, FirstAndLast

ONE_LANE = LanePlan(lanes=1, threads_per_lane=0, lone_threads=0, batch_tokens=1000, prefetch=False)


class Rig:
    """A queue, lanes and a fake model."""

    def __init__(
        self,
        plan: LanePlan = ONE_LANE,
        *,
        runner: Runner | None = None,
        error: Callable[[], Exception] = lambda: RuntimeError("poisoned"),
    ) -> None:
        self.backbone = FakeBackbone(error)
        self.runner = runner or Runner(self.backbone, {Task.EMBED: FirstAndLast()})
        self.in_flight = 0
        self.dropped: list[int] = []
        self.retried: list[int] = []
        self.seen: list[tuple[int, int]] = []
        self.batcher = Batcher(1000, max_queue_tokens=10**6, on_dropped=self.dropped.append)
        self.lanes = [
            Lane(
                f"lane-{number}",
                batcher=self.batcher,
                runner=self.runner,
                plan=plan,
                busy=BusyLanes(),
                in_flight=lambda: self.in_flight,
                on_batch=lambda facts: self.seen.append((facts.inputs, facts.tokens)),
                on_retry=self.retried.append,
            )
            for number in range(plan.lanes)
        ]

    def __enter__(self) -> Rig:
        for lane in self.lanes:
            lane.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.batcher.close()
        for lane in self.lanes:
            lane.join(20)
            assert not lane.is_alive()

    def put(self, *sequences: list[int]) -> tuple[Ticket, Callable[[], list[Outcome]]]:
        done = threading.Event()
        ticket = Ticket([Item(Task.EMBED, token_ids=ids) for ids in sequences], done.set)
        now = time.perf_counter()
        self.batcher.put([Entry(ticket, index, Encoded(ids), 0.25, now) for index, ids in enumerate(sequences)])

        def outcomes() -> list[Outcome]:
            assert done.wait(20)
            return ticket.outcomes()

        return ticket, outcomes


def output(outcome: Outcome) -> list[float]:
    assert isinstance(outcome, Result), outcome
    return [float(value) for value in np.asarray(outcome.output)]


def test_a_batch_is_answered_with_usage_and_timing() -> None:
    with Rig() as rig:
        first, second = rig.put([1, 2, 3], [4])[1]()
    assert output(first) == [1, 3]
    assert output(second) == [4, 4]
    assert isinstance(first, Result)
    assert first.usage.tokens == 3
    assert first.timing.tokenize_seconds == 0.25
    assert first.timing.queue_seconds >= 0
    assert first.timing.inference_seconds > 0
    assert rig.seen == [(2, 4)]


def test_a_raising_batch_is_retried_one_by_one_and_only_the_bad_item_fails() -> None:
    with Rig() as rig:
        good, bad, other = rig.put([1], [2, POISON], [3])[1]()
        (after,) = rig.put([9])[1]()
    assert output(good) == [1, 1]
    assert output(other) == [3, 3]
    assert isinstance(bad, InferenceError)
    assert "RuntimeError" in bad.message
    assert output(after) == [9, 9]
    assert rig.retried == [3]
    assert sorted(rig.backbone.batches[1:4]) == [[[1]], [[2, POISON]], [[3]]]


@pytest.mark.parametrize("error", [MemoryError, lambda: torch.OutOfMemoryError("CUDA out of memory")])
def test_out_of_memory_on_a_single_item_says_what_to_do(error: Callable[[], Exception]) -> None:
    with Rig(error=error) as rig:
        bad, good = rig.put([POISON], [5])[1]()
    assert isinstance(bad, OutOfMemory)
    assert "max-sequence-length" in bad.message
    assert output(good) == [5, 5]


def test_an_abandoned_entry_that_waits_is_not_computed() -> None:
    with Rig() as rig:
        rig.backbone.gate = threading.Event()
        _, first = rig.put([1])
        assert rig.backbone.entered.wait(20)
        gone, _ = rig.put([2])
        _, last = rig.put([3])
        gone.abandon()
        rig.backbone.gate.set()
        assert output(first()[0]) == [1, 1]
        assert output(last()[0]) == [3, 3]
    assert [2] not in [row for batch in rig.backbone.batches for row in batch]
    assert sum(rig.dropped) == 1


def test_what_waits_while_a_batch_runs_forms_the_next_batch() -> None:
    with Rig() as rig:
        rig.backbone.gate = threading.Event()
        _, first = rig.put([1])
        assert rig.backbone.entered.wait(20)
        others = [rig.put([number])[1] for number in range(2, 12)]
        rig.backbone.gate.set()
        first()
        assert [output(one()[0]) for one in others] == [[number, number] for number in range(2, 12)]
    assert [len(batch) for batch in rig.backbone.batches] == [1, 10]


def test_several_lanes_share_one_queue() -> None:
    plan = LanePlan(lanes=3, threads_per_lane=1, lone_threads=2, batch_tokens=4, prefetch=False)
    with Rig(plan) as rig:
        answers = [rig.put([number, number + 1])[1] for number in range(300)]
        assert [output(one()[0]) for one in answers] == [[number, number + 1] for number in range(300)]
    assert all(sum(map(len, batch)) <= 4 for batch in rig.backbone.batches)


class AsyncRunner(Runner):
    """Like a CUDA runner: ``run`` returns at once, ``collect`` is where a failure shows."""

    def __init__(self, backbone: FakeBackbone) -> None:
        super().__init__(backbone, {Task.EMBED: FirstAndLast()})
        self.events: list[str] = []

    def run(self, batch: PackedBatch, items: Sequence[Item]) -> dict[Task, Any]:
        ids = batch.input_ids.tolist()
        self.events.append(f"launch {ids}")
        return {Task.EMBED: ids}

    def collect(self, rows: Any, batch: PackedBatch, items: Sequence[Item]) -> list[Any]:
        self.events.append(f"collect {rows[Task.EMBED]}")
        return super().collect(super().run(batch, items), batch, items)


PREFETCH = LanePlan(lanes=1, threads_per_lane=0, lone_threads=0, batch_tokens=1, prefetch=True)


def test_with_prefetch_the_next_batch_is_launched_before_the_last_is_collected() -> None:
    backbone = FakeBackbone()
    runner = AsyncRunner(backbone)
    rig = Rig(PREFETCH, runner=runner)
    answers = [rig.put([number])[1] for number in (1, 2, 3)]
    with rig:
        assert [output(one()[0]) for one in answers] == [[1, 1], [2, 2], [3, 3]]
    assert runner.events == [
        "launch [1]",
        "launch [2]",
        "collect [1]",
        "launch [3]",
        "collect [2]",
        "collect [3]",
    ]


def test_with_prefetch_a_failure_that_shows_on_collect_is_isolated_too() -> None:
    backbone = FakeBackbone()
    rig = Rig(
        LanePlan(lanes=1, threads_per_lane=0, lone_threads=0, batch_tokens=100, prefetch=True),
        runner=AsyncRunner(backbone),
    )
    _, answer = rig.put([1], [POISON], [2])
    with rig:
        good, bad, other = answer()
    assert output(good) == [1, 1]
    assert isinstance(bad, InferenceError)
    assert output(other) == [2, 2]


def test_a_batch_that_is_all_in_flight_gets_all_threads() -> None:
    plan = LanePlan(lanes=1, threads_per_lane=1, lone_threads=2, batch_tokens=1, prefetch=False)
    rig = Rig(plan)
    threads: list[int] = []
    forward = rig.backbone.forward

    def recording(batch: PackedBatch, **kwargs: Any) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return forward(batch, **kwargs)

    rig.backbone.forward = recording  # type: ignore[method-assign]
    with rig:
        for rig.in_flight in (2, 1):
            rig.put([1])[1]()
    assert threads == [1, 2]
