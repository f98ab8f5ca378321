"""The engines that users would pick instead, beside this server, in one interleaved run; and README's table of it.

``python -m benchmarks.peers --bench FOLDER --envs FOLDER``: ``--bench`` holds ``bench.py``, which runs one process per
engine on the same texts, asks each once per round in an order shuffled anew, and compares vectors; ``--envs`` holds one
environment per engine. This program starts infinity-emb and this project as servers for it, and dates the result.
``--table`` writes the newest result into README.md instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import BenchmarkError
from benchmarks.servers import free_port, our_command, running

OURS = "http:ours"
RIVAL = "http:infinity"
README = common.ROOT / "README.md"
START, END = "<!-- peers: python -m benchmarks.peers --table -->", "<!-- /peers -->"
NAMES = {
    OURS: "**infinity-bento**, over HTTP",
    RIVAL: "infinity-emb (torch), over HTTP",
    "st:b32": "sentence-transformers, in process",
    "ort:fp32": "ONNX Runtime, in process",
    "ov:f32": "OpenVINO, in process",
    "ct2:f32": "CTranslate2, in process",
    "ov:bf16": "OpenVINO bf16, in process",
}
WORKLOADS = {
    "A": "short texts",
    "B": "mixed lengths",
    "C": "one short text at a time",
    "D": "reranked documents",
    "E": "long texts",
}


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the process with a usage text if it is not understood."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--bench", type=Path, help="folder of bench.py")
    add("--envs", type=Path, help="folder of the engines' environments and converted models")
    add("--engines", default="st:b32,ort:fp32,ov:f32,ct2:f32", help="in process, comma-separated")
    add("--workloads", default="ABCDE", help="any of ABCDE (default: all)")
    add("--rounds", type=int, default=5, help="default: 5")
    add("--n", default='{"B": 96, "E": 8}', help='first n texts of a workload (default: {"B": 96, "E": 8})')
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="of our server")
    add("--no-infinity-emb", action="store_true", help="leave infinity-emb's server out")
    add("--out", type=Path, default=common.RESULTS, metavar="FOLDER", help="for the report (benchmarks/results)")
    add("--table", action="store_true", help="write the newest result into README.md, and measure nothing")
    options = parser.parse_args(argv)
    if not options.table and (options.bench is None or options.envs is None):
        parser.error("--bench and --envs are needed to measure; --table needs neither")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What bench.py reports, our server and infinity-emb's among the engines.

    Raises:
        BenchmarkError: If a server does not start or bench.py fails.
    """
    models = options.envs / "models"
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        http = [OURS, _ours(stack, models, options.option)]
        if not options.no_infinity_emb:
            http += [RIVAL, _rival(stack, options.envs, models)]
        out = Path(folder) / "peers.json"
        command = [str(options.envs / "st/bin/python"), str(options.bench / "bench.py"), "--envs", str(options.envs)]
        command += ["--wl", options.workloads, "--engines", options.engines, "--rounds", str(options.rounds)]
        command += ["--n", options.n, "--out", str(out)]
        for name, target in zip(http[::2], http[1::2], strict=True):
            command += ["--http", f"{name.removeprefix('http:')}={target}"]
        if subprocess.run(command, check=False).returncode or not out.is_file():
            raise BenchmarkError("bench.py failed; what it printed says why.")
        measured: dict[str, Any] = json.loads(out.read_text())
    return measured


def _ours(stack: ExitStack, models: Path, options: Sequence[str]) -> str:
    """Start our server; what bench.py is told of it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    asked = [("model-id", str(models / "minilm")), ("model-id", str(models / "minilm_ce"))]
    asked += [("served-model-name", "minilm"), ("served-model-name", "scorer")]
    for option in options:
        name, _, value = option.partition("=")
        asked.append((name, value))
    stack.enter_context(running(our_command(port, asked), f"{url}/readyz"))
    return f"{url}/v1/embeddings,minilm,openai-base64,32,8,{url}/v1/rerank,scorer"


def _rival(stack: ExitStack, envs: Path, models: Path) -> str:
    """Start infinity-emb's server, with the options that are best for it on the CPU; what bench.py is told of it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(envs / "inf/bin/infinity_emb"), "v2", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model-id", str(models / "minilm"), "--served-model-name", "minilm"]
    command += ["--model-id", str(models / "minilm_ce"), "--served-model-name", "scorer"]
    command += ["--engine", "torch", "--device", "cpu", "--dtype", "float32", "--no-bettertransformer"]
    environ = {"INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HUB_OFFLINE": "1"}
    stack.enter_context(running(command, f"{url}/health", environ))
    return f"{url}/embeddings,minilm,openai,32,8,{url}/rerank,scorer"


# README's table ------------------------------------------------------------------------------------------------------


def newest(folder: Path) -> dict[str, Any]:
    """The newest report of this program.

    Raises:
        BenchmarkError: If there is none.
    """
    reports = sorted(folder.glob("*-peers.json"))
    if not reports:
        raise BenchmarkError(f"there is no report *-peers.json in {folder.name}: measure first.")
    report: dict[str, Any] = json.loads(reports[-1].read_text())
    return report | {"file": reports[-1].name}


def table(report: Mapping[str, Any]) -> str:
    """Markdown: one row per engine, one column per workload, the speed of ours over the engine's in each."""
    results = report["results"]
    engines = [name for name in NAMES if any(name in rows for rows in results.values())]
    texts = report["texts"]
    titles = [f"{texts[key]['texts']} {WORKLOADS[key]}" for key in results]
    lines = [f"| engine, float32 | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name in engines:
        cells = [_cell(name, rows) for rows in results.values()]
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    machine = report["machine"]
    flags = ", ".join(flag.upper() for flag in machine["flags"]) or "no vector extensions named"
    lines.append("")
    lines.append(
        f"Median of {report['rounds']} interleaved rounds on {machine['cores']} cores ({machine['cpu']}, {flags}), "
        f"{report['date']}; in brackets our speed over the engine's in the same rounds, and the worst cosine "
        f"(reranking: correlation) against {NAMES[report['base']].split(',')[0]}. Report: "
        f"[{report['file']}](benchmarks/results/{report['file']})."
    )
    return "\n".join(lines)


def _cell(name: str, rows: Mapping[str, Any]) -> str:
    row = rows.get(name)
    if row is None:
        return "-"
    speed = f"{row['p50_ms']:.1f} ms" if "p50_ms" in row else f"{row['median_s']:.2f} s"
    notes = [] if name == OURS or "x_ours" not in row else [f"{row['x_ours']:.2f}x"]
    if "cos" in row:
        notes.append(f"{row['cos']:.5f}")
    return f"{speed} ({', '.join(notes)})" if notes else speed


def with_ours(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with ``x_ours`` in each row: median over rounds of the engine's time over ours."""
    for rows in report["results"].values():
        ours = rows.get(OURS)
        if ours is None:
            continue
        for row in rows.values():
            pairs = zip(row["all_s"], ours["all_s"], strict=True)
            ratios = sorted(theirs / mine for theirs, mine in pairs)
            middle = len(ratios) // 2
            row["x_ours"] = (ratios[middle] + ratios[~middle]) / 2
    return dict(report)


def write_table(report: Mapping[str, Any], readme: Path) -> None:
    """Put the table between README's two marks.

    Raises:
        BenchmarkError: If the marks are not there.
    """
    text = readme.read_text()
    marked = re.compile(re.escape(START) + ".*?" + re.escape(END), re.DOTALL)
    if not marked.search(text):
        raise BenchmarkError(f"{readme.name} has no {START} ... {END}: put the two marks where the table belongs.")
    readme.write_text(marked.sub(lambda _: f"{START}\n{table(report)}\n{END}", text))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or write the table; 0 if all is well, 2 if not."""
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    try:
        if options.table:
            write_table(newest(common.RESULTS), README)
            return 0
        os.environ.setdefault("BENTOML_DO_NOT_TRACK", "True")
        report = with_ours(measure(options))
        report["commit"] = common.commit()
        report["command"] = common.published_command("benchmarks.peers", argv)
        report["versions"] = common.versions()
        name = common.write_report(options.out, "peers", report).name
    except BenchmarkError as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 2
    print(table(report | {"file": name}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
