"""Requests made from a workload, the two loops that send them, and what comes back.

Called by http.py and overload.py.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks import common
from benchmarks.client import Answer, Client, parse_target
from benchmarks.common import BenchmarkError, Comparison, FloatArray
from benchmarks.dialects import DIALECTS, Dialect
from benchmarks.workloads import Workload, make_workload


@dataclass(frozen=True, slots=True)
class Shot:
    """One request, ready to send, and what its answer should be."""

    payload: bytes
    texts: int
    tokens: int | None  # by the tokenizer given
    reference_BD: FloatArray | None


@dataclass(slots=True)
class Record:
    """What the measured requests did. Filled by ``Sender``."""

    latencies: list[float] = field(default_factory=list)  # seconds, of the answers with vectors
    lags: list[float] = field(default_factory=list)  # seconds from scheduled arrival to sending (open loop)
    outcomes: Counter[str] = field(default_factory=Counter)  # HTTP status, "timeout", "connection" or "malformed"
    examples: dict[str, str] = field(default_factory=dict)  # the first failure of each kind
    texts: int = 0
    tokens: int | None = 0  # None once one answer's count is unknown
    comparison: Comparison = field(default_factory=Comparison)
    first: float = math.inf
    last: float = -math.inf

    def fail(self, kind: str, example: str) -> None:
        """Count a request that brought no vectors."""
        self.outcomes[kind] += 1
        self.examples.setdefault(kind, example[:300])


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends shots in one dialect; the only place that reads answers."""

    client: Client
    dialect: Dialect
    path: str
    model: str | None

    def shots(self, workload: Workload, batch_size: int, reference_BD: FloatArray | None = None) -> list[Shot]:
        """Requests that walk through all texts once, the last one filled up from the start."""
        count, made = len(workload.texts), []
        for start in range(0, count, batch_size):
            indices = [i % count for i in range(start, start + batch_size)]
            body = orjson.dumps(self.dialect.body([workload.texts[i] for i in indices], self.model))
            tokens = None if workload.tokens is None else sum(workload.tokens[i] for i in indices)
            expected = None if reference_BD is None else reference_BD[indices]
            made.append(Shot(self.client.target.payload("POST", self.path, body), batch_size, tokens, expected))
        return made

    async def shoot(self, shot: Shot, record: Record, scheduled: float | None = None) -> Answer | None:
        """Send one request and record its outcome; its latency counts from ``scheduled`` where given.

        Returns the answer, or None if there was none.
        """
        sent = time.perf_counter()
        record.first = min(record.first, sent if scheduled is None else scheduled)
        try:
            answer = await self.client.send(shot.payload)
        except OSError as error:  # a TimeoutError is one
            record.fail("timeout" if isinstance(error, TimeoutError) else "connection", str(error))
            await asyncio.sleep(0.05)  # a server that is gone is not called in a tight loop
            return None
        record.last = max(record.last, answer.finished)
        if answer.status != 200:
            record.fail(str(answer.status), answer.body.decode("utf-8", "replace"))
            return answer
        try:
            self._count(shot, answer, record)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            record.fail("malformed", f"{type(error).__name__}: {error}")
            return answer
        record.latencies.append(answer.finished - (sent if scheduled is None else scheduled))
        return answer

    def _count(self, shot: Shot, answer: Answer, record: Record) -> None:
        parsed = orjson.loads(answer.body)
        rows_BD = self.dialect.rows(parsed)
        if rows_BD.ndim != 2 or len(rows_BD) != shot.texts:
            raise ValueError(f"vectors of shape {rows_BD.shape} for {shot.texts} texts")
        if shot.reference_BD is not None:
            record.comparison.add(rows_BD, shot.reference_BD)
        tokens = self.dialect.tokens(answer, parsed) if shot.tokens is None else shot.tokens
        record.tokens = None if tokens is None or record.tokens is None else record.tokens + tokens
        record.texts += shot.texts
        record.outcomes["200"] += 1


# --- loops ------------------------------------------------------------------------------------------------------------
def until(shots: Sequence[Shot], requests: int | None, seconds: float | None) -> Iterator[Shot]:
    """Shots round and round, until ``requests`` are given out or ``seconds`` are over."""
    end = math.inf if seconds is None else time.perf_counter() + seconds
    number = 0
    while (requests is None or number < requests) and time.perf_counter() < end:
        yield shots[number % len(shots)]
        number += 1


async def closed_loop(supply: Iterator[Shot], clients: int, send: Callable[[Shot], Awaitable[object]]) -> None:
    """Each of ``clients`` sends its next request when its last one is answered."""

    async def one_client() -> None:
        for shot in supply:
            await send(shot)

    await asyncio.gather(*(one_client() for _ in range(clients)))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which a Poisson process of ``rate`` per second has its events; endless."""
    rng = random.Random(f"arrivals {seed}")
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


async def open_loop(
    supply: Iterator[Shot],
    times: Iterator[float],
    max_in_flight: int,
    send: Callable[[Shot, float], Awaitable[object]],
    lags: list[float],
) -> None:
    """Send each shot at its time, whatever the server does.

    At ``max_in_flight`` an arrival waits here; its latency still counts from its scheduled time. How late each request
    was sent, in seconds, goes to ``lags``.
    """
    room = asyncio.Semaphore(max_in_flight)
    start = time.perf_counter()

    async def one(shot: Shot, scheduled: float) -> None:
        try:
            await send(shot, scheduled)
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        for shot in supply:
            scheduled = start + next(times)
            await asyncio.sleep(max(0.0, scheduled - time.perf_counter()))
            await room.acquire()
            lags.append(max(0.0, time.perf_counter() - scheduled))  # a timer may wake a few microseconds early
            group.create_task(one(shot, scheduled))


# --- reference --------------------------------------------------------------------------------------------------------
async def reference_vectors(source: str, workload: Workload, sender: Sender, max_length: int) -> FloatArray | None:
    """``[len(texts), D]`` from ``none``, ``self``, ``st:MODEL`` or a ``.npy`` file.

    Raises:
        BenchmarkError: If the file does not fit the texts, or the server does not answer one by one.
    """
    if source == "none":
        return None
    if source == "self":
        return await _own_vectors(workload, sender)
    if source.startswith("st:"):
        # a process of its own: torch's memory and threads are gone before measuring
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            made = pool.submit(common.sentence_transformers_vectors, source[3:], workload.texts, max_length)
            return await asyncio.wrap_future(made)
    file = Path(source)
    if file.suffix != ".npy" or not file.is_file():
        raise BenchmarkError(f"--reference {source} is unknown: use self, none, st:MODEL or an existing .npy file.")
    rows: FloatArray = np.load(file, allow_pickle=False)
    if rows.ndim != 2 or len(rows) != len(workload.texts):
        raise BenchmarkError(
            f"--reference {source} has shape {rows.shape}, but there are {len(workload.texts)} texts: "
            "make it with --save-reference from the same --lengths, --texts, --seed and --tokenizer."
        )
    return rows.astype(np.float32)


async def _own_vectors(workload: Workload, sender: Sender) -> FloatArray:
    """The server's own vectors, each text alone with nothing beside it."""
    rows: list[FloatArray] = []
    for shot in sender.shots(workload, 1):
        answer = await sender.client.send(shot.payload)
        if answer.status != 200:
            text = answer.body.decode("utf-8", "replace")[:300]
            raise BenchmarkError(f"the server answers {answer.status} to a single text: {text}")
        try:
            rows.append(sender.dialect.rows(orjson.loads(answer.body)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            text = answer.body.decode("utf-8", "replace")[:100]
            raise BenchmarkError(f"the answer holds no vectors ({error!r}), check --dialect; it is {text}") from error
    return np.concatenate(rows)


# --- options that every HTTP benchmark has ----------------------------------------------------------------------------
def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Where the server is, how to speak to it, and how its vectors are judged."""
    add = parser.add_argument
    add("--url", required=True, help="base URL, such as http://127.0.0.1:3000")
    add("--dialect", choices=sorted(DIALECTS), default="openai", help="default: openai")
    add("--path", help="path after the base URL (default: the dialect's)")
    add("--model", help="model name in the body (default: none)")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    add("--allow-remote", action="store_true", help="allow a URL that is not this machine")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="per request (default: 60)")
    add("--reference", default="self", help="self (each text alone), st:MODEL, FILE.npy or none (default: self)")
    add("--min-cosine", type=float, default=0.99999, help="exit 1 below (default: 0.99999, for float32 models)")
    add("--max-abs-diff", type=float, default=1e-4, help="exit 1 above (default: 1e-4, for float32 models)")
    add("--seed", type=int, default=7, help="of texts and arrivals (default: 7)")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, for exact lengths and token counts")
    add("--max-length", type=int, default=512, help="tokens the model keeps of a text (default: 512)")
    add("--out", type=Path, default=common.RESULTS, metavar="FOLDER", help="for the report (benchmarks/results)")


def make_sender(options: argparse.Namespace) -> Sender:
    """The sender that ``add_server_options`` describes; call it inside a running event loop.

    Raises:
        BenchmarkError: If the URL or the API key's variable cannot be used.
    """
    key = None
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        if not key:
            raise BenchmarkError(f"--api-key-env {options.api_key_env} is not set: export the key under this name.")
    target = parse_target(options.url, allow_remote=options.allow_remote, authorization=key)
    dialect = DIALECTS[options.dialect]
    return Sender(Client(target, options.timeout), dialect, options.path or dialect.path, options.model)


def run_benchmark(
    name: str,
    argv: Sequence[str],
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Workload], Coroutine[Any, Any, dict[str, Any]]],
) -> dict[str, Any]:
    """Make the texts, run ``measure``, write the report and return it, its file name under ``file``.

    Raises:
        BenchmarkError: If the run cannot start, or the report cannot be written.
    """
    workload = make_workload(options.lengths, options.texts, options.seed, options.tokenizer, options.max_length)
    machine = common.machine()  # before, for the load
    try:
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            measured = runner.run(measure(options, workload))
    except OSError as error:
        raise BenchmarkError(f"the server at {options.url} cannot be used ({error}): start it first.") from error
    report = {
        "command": common.published_command(f"benchmarks.{name}", argv),
        "commit": common.commit(),
        "machine": machine,
        "versions": common.versions(),
        "workload": workload.describe(),
        "settings": _published_settings(options),
        **measured,
    }
    return report | {"file": common.write_report(options.out, name, report).name}


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed (its version is then in the report), else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _published_settings(options: argparse.Namespace) -> dict[str, Any]:
    """All options for the report, paths without their folders."""
    shown = {k: v.name if isinstance(v, Path) else v for k, v in vars(options).items() if k not in ("out", "url")}
    kind, colon, path = options.reference.rpartition(":")
    return shown | {"reference": kind + colon + os.path.basename(path.rstrip("/"))}
