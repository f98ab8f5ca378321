"""Load on an embeddings server over HTTP, its vectors checked while measuring: ``python -m benchmarks.http --help``.

Closed loop (N clients, one request in flight each) or open loop (Poisson arrivals).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    # Run as a script, Python searches this folder first, and http.py in it would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.client import Client
from benchmarks.common import BenchmarkError
from benchmarks.traffic import (
    Record,
    Sender,
    Shot,
    add_server_options,
    arrivals,
    closed_loop,
    make_sender,
    open_loop,
    reference_vectors,
    run_benchmark,
    until,
)
from benchmarks.workloads import Workload

BATCH_SIZE, BATCH_TOKENS = "te_batch_next_size", "te_batch_next_tokens"  # histograms of the server, if it has them


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the process with a usage text if it is not understood."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http", description=(__doc__ or "").split("\n")[0])
    add_server_options(parser)
    add = parser.add_argument
    add("--lengths", default="short", help="short (6-40 tokens), mixed (8-512) or fixed-N (default: short)")
    add("--texts", type=int, default=512, help="distinct texts (default: 512)")
    add("--batch-size", type=int, default=1, help="texts per request (default: 1)")
    add("--clients", type=int, default=8, help="closed loop: requests in flight (default: 8)")
    add("--rate", type=float, help="open loop instead: requests per second")
    add("--max-in-flight", type=int, default=512, help="open loop: later arrivals wait in the client (default: 512)")
    add("--requests", type=int, help="end after this many")
    add("--seconds", type=float, help="end after this time (default: 10, if --requests is not given)")
    add("--warmup", type=int, default=32, help="requests before measuring (default: 32)")
    add("--slo-ms", type=float, help="also report the requests answered within this time")
    add("--save-reference", metavar="FILE.npy", help="keep the reference vectors")
    add("--allow-errors", action="store_true", help="answers other than 200 do not fail the run")
    options = parser.parse_args(argv)
    for name in ("texts", "batch_size", "clients", "max_in_flight", "requests", "seconds", "rate", "timeout"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value} must be above 0")
    if options.requests is None and options.seconds is None:
        options.seconds = 10.0
    return options


async def measure(options: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """Reference, warm-up, then the measured loop; the report without date and machine.

    Raises:
        BenchmarkError: If the run cannot start.
    """
    sender = make_sender(options)
    client = sender.client
    try:
        reference = await reference_vectors(options.reference, workload, sender, options.max_length)
        if reference is not None and options.save_reference:
            np.save(options.save_reference, reference)
        shots = sender.shots(workload, options.batch_size, reference)
        await closed_loop(until(shots, options.warmup, 60.0), options.clients, _into(sender, Record()))
        record, before = Record(), await client.get_text("/metrics")
        busy = time.process_time()
        await run_loop(options, sender, shots, record)
        busy = time.process_time() - busy
        after = await client.get_text("/metrics")
        server = await server_facts(client)
    finally:
        await client.close()
    figures = summarize(record, busy, options.slo_ms)
    figures["mean_batch_size"] = mean_between(before, after, BATCH_SIZE)
    figures["mean_batch_tokens"] = mean_between(before, after, BATCH_TOKENS)
    check = None if reference is None else record.comparison.summary() | {"passed": judge(record, options)}
    return {"server": server, "results": figures, "check": check}


def _into(sender: Sender, record: Record) -> Callable[[Shot], Coroutine[Any, Any, object]]:
    return functools.partial(sender.shoot, record=record)


async def run_loop(options: argparse.Namespace, sender: Sender, shots: Sequence[Shot], record: Record) -> None:
    """The closed or the open loop, as the options say."""
    supply = until(shots, options.requests, options.seconds)
    if options.rate is None:
        return await closed_loop(supply, options.clients, _into(sender, record))

    async def send(shot: Shot, scheduled: float) -> object:
        return await sender.shoot(shot, record, scheduled)

    times = arrivals(options.rate, options.seed)
    return await open_loop(supply, times, options.max_in_flight, send, record.lags)


def judge(record: Record, options: argparse.Namespace) -> bool:
    """Whether the vectors are within both limits."""
    return record.comparison.passes(options.min_cosine, options.max_abs_diff)


# --- figures ----------------------------------------------------------------------------------------------------------
def summarize(record: Record, client_seconds: float, slo_ms: float | None) -> dict[str, Any]:
    """Rates, latencies and errors; rates count only answers with vectors, over the time from first to last."""
    seconds = max(record.last - record.first, 1e-9) if record.latencies else None
    total = record.outcomes.total()

    def per_second(count: float | None) -> float | None:
        return None if seconds is None or count is None else count / seconds

    figures: dict[str, Any] = {
        "seconds": seconds,
        "requests": total,
        "texts_per_s": per_second(record.texts),
        "tokens_per_s": per_second(record.tokens),
        "requests_per_s": per_second(len(record.latencies)),
        **common.latency_summary(record.latencies),
        "outcomes": dict(sorted(record.outcomes.items())),
        "examples": record.examples,
        "client_cpu_ms_per_request": client_seconds * 1e3 / total if total else None,
    }
    if record.lags:
        figures["arrival_lag_p50_ms"] = common.percentile(record.lags, 50) * 1e3
        figures["arrival_lag_max_ms"] = max(record.lags) * 1e3
    if slo_ms is not None:
        within = sum(latency * 1e3 <= slo_ms for latency in record.latencies)
        figures |= {"slo_ms": slo_ms, "within_slo": within / total if total else None}
        figures["goodput_requests_per_s"] = per_second(within)
    return figures


def histogram(metrics: str | None, name: str) -> tuple[float, float] | None:
    """``(sum, count)`` over all labels of a Prometheus histogram, or None where the text does not have it."""
    found = {"_sum": 0.0, "_count": 0.0}
    seen = False
    for line in (metrics or "").splitlines():
        for suffix in found:
            if line.startswith((f"{name}{suffix} ", f"{name}{suffix}{{")):
                value = line.rpartition("}")[2] if "}" in line else line.partition(" ")[2]
                found[suffix] += float(value.split()[0])
                seen = True
    return (found["_sum"], found["_count"]) if seen else None


def mean_between(before: str | None, after: str | None, name: str) -> float | None:
    """Mean of a histogram's observations between two readings of ``/metrics``."""
    first, second = histogram(before, name) or (0.0, 0.0), histogram(after, name)
    if second is None or second[1] <= first[1]:
        return None
    return (second[0] - first[0]) / (second[1] - first[1])


async def server_facts(client: Client) -> dict[str, Any]:
    """What the server says of itself in ``/info``: plain values only, and no paths, for reports are published."""
    info = await client.get_json("/info")
    plain = {k: v for k, v in info.items() if isinstance(v, str | int | float)} if isinstance(info, dict) else {}
    return {k: v for k, v in plain.items() if not str(v).startswith(("/", "~"))}


# --- report -----------------------------------------------------------------------------------------------------------
def table(report: dict[str, Any]) -> str:
    """The report for people, one figure a line."""
    settings, results, check = report["settings"], report["results"], report["check"]
    rate = settings["rate"]
    loop = f"{settings['clients']} clients" if rate is None else f"Poisson arrivals, {rate:g} requests/s"
    lines = [
        f"{settings['dialect']}, {loop}, {settings['batch_size']} texts per request, {report['workload']['shape']}"
    ]
    shown = {
        "texts/s": results["texts_per_s"],
        "tokens/s": results["tokens_per_s"],
        "p50 ms": results["p50_ms"],
        "p95 ms": results["p95_ms"],
        "p99 ms": results["p99_ms"],
        "mean batch size": results["mean_batch_size"],
        "mean batch tokens": results["mean_batch_tokens"],
        "arrival lag p50 ms": results.get("arrival_lag_p50_ms"),
        "goodput requests/s": results.get("goodput_requests_per_s"),
        "client cpu ms/request": results["client_cpu_ms_per_request"],
    }
    lines += [f"  {name:<22}{'-' if value is None else format(value, ',.2f')}" for name, value in shown.items()]
    lines.append(f"  {'outcomes':<22}" + ", ".join(f"{kind}: {n}" for kind, n in results["outcomes"].items()))
    lines += [f"  first {kind}: {text}" for kind, text in results["examples"].items()]
    if check is None:
        lines.append("  vectors               not checked (--reference none)")
    else:
        verdict = "within tolerance" if check["passed"] else "OUT OF TOLERANCE"
        lines.append(
            f"  {'vectors':<22}{verdict}: {check['rows']} rows, worst cosine {check['worst_cosine']:.7f}, "
            f"largest difference {check['max_abs_diff']:.1e}, answers not finite {check['answers_not_finite']}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 0 if all is well, 1 if vectors or answers are not, 2 if the run could not start."""
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    try:
        report = run_benchmark("http", argv, options, measure)
    except BenchmarkError as error:
        print(f"benchmarks.http: {error}", file=sys.stderr)
        return 2
    print(table(report))
    print(f"  report                {report['file']}")
    failed = report["results"]["requests"] - report["results"]["outcomes"].get("200", 0)
    answered = report["results"]["outcomes"].get("200", 0) > 0
    vectors_ok = report["check"] is None or report["check"]["passed"]
    return 0 if answered and vectors_ok and (options.allow_errors or not failed) else 1


if __name__ == "__main__":
    sys.exit(main())
