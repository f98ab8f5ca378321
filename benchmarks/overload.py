"""More requests at once than the server admits: who is refused, how, and whether the rest are right.

``python -m benchmarks.overload --url http://127.0.0.1:3000 --limit 512``
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    # Run as a script, Python searches this folder first, and http.py in it would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.common import BenchmarkError
from benchmarks.traffic import Record, add_server_options, make_sender, reference_vectors, run_benchmark
from benchmarks.workloads import Workload


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the process with a usage text if it is not understood."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=(__doc__ or "").split("\n")[0])
    add_server_options(parser)
    add = parser.add_argument
    add("--lengths", default="mixed", help="short (6-40 tokens), mixed (8-512) or fixed-N (default: mixed)")
    add("--texts", type=int, default=64, help="distinct texts (default: 64)")
    add("--at-once", type=int, default=600, help="requests sent together, one text each (default: 600)")
    add("--limit", type=int, help="the server's limit; fails if requests above it are never refused")
    options = parser.parse_args(argv)
    if options.at_once <= 0 or options.texts <= 0:
        parser.error(f"--at-once {options.at_once} and --texts {options.texts} must be above 0")
    return options


async def measure(options: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """One burst, then one request alone to see that the server recovered."""
    sender = make_sender(options)
    try:
        reference = await reference_vectors(options.reference, workload, sender, options.max_length)
        shots = sender.shots(workload, 1, reference)
        await sender.client.connect(options.at_once)  # first, so that all requests arrive together
        record, afterwards = Record(), Record()
        burst = (sender.shoot(shots[i % len(shots)], record) for i in range(options.at_once))
        answers = await asyncio.gather(*burst)
        await sender.shoot(shots[0], afterwards)
    finally:
        await sender.client.close()
    refused = [answer for answer in answers if answer is not None and answer.status in (429, 503)]
    waits = Counter(answer.header("retry-after") or "none" for answer in refused)
    figures = {
        "outcomes": dict(sorted(record.outcomes.items())),
        "examples": record.examples,
        "retry_after": dict(sorted(waits.items())),
        "recovered": afterwards.outcomes["200"] == 1,
        **common.latency_summary(record.latencies),
    }
    check = None
    if reference is not None:
        passed = record.comparison.passes(options.min_cosine, options.max_abs_diff)
        check = record.comparison.summary() | {"passed": passed}
    return {"results": figures, "check": check, "problems": problems(figures, check, options)}


def problems(results: dict[str, Any], check: dict[str, Any] | None, options: argparse.Namespace) -> list[str]:
    """What is wrong with the answers, one sentence each."""
    found = []
    outcomes, waits = results["outcomes"], results["retry_after"]
    if not outcomes.get("200"):
        found.append("no request was answered with vectors")
    if unexpected := {kind: n for kind, n in outcomes.items() if kind not in ("200", "429")}:
        found.append(f"answers other than 200 and 429: {unexpected}")
    if bad := {wait: n for wait, n in waits.items() if not (wait.isdecimal() and int(wait) >= 1)}:
        found.append(f"refusals without a Retry-After of whole seconds: {bad}")
    if options.limit is not None and options.at_once > options.limit and not outcomes.get("429"):
        found.append(f"{options.at_once} requests at once were never refused although the limit is {options.limit}")
    if check is not None and not check["passed"]:
        found.append(f"vectors are out of tolerance: {check}")
    if not results["recovered"]:
        found.append("the server did not answer the request after the burst")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 0 if all is well, 1 if there are problems, 2 if the run could not start."""
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    try:
        report = run_benchmark("overload", argv, options, measure)
    except BenchmarkError as error:
        print(f"benchmarks.overload: {error}", file=sys.stderr)
        return 2
    results = report["results"]
    print(f"{options.at_once} at once: {results['outcomes']}, Retry-After {results['retry_after']}")
    print(f"vectors: {report['check'] or 'not checked'}")
    for problem in report["problems"]:
        print(f"PROBLEM {problem}")
    print(f"report: {report['file']}")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
