"""A built Bento for CPUs: the size of what its image build gets, and the time from `bentoml serve` to the first answer.

Run: ``python -m benchmarks.bento [--rounds 5] [--model ID]``. Needs no container engine and no network; the model must
be on this machine. Prints the figures and writes a dated report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import common

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
CONTEXT = """
import json, pathlib, sys, bentoml
from bentoml._internal.container import construct_containerfile
with construct_containerfile(bentoml.get(sys.argv[1])) as (folder, _):
    root = pathlib.Path(folder)
    sizes = {"models": 0, "src": 0, "rest": 0}
    for file in root.rglob("*"):
        if file.is_file():
            top = file.relative_to(root).parts[0]
            sizes[top if top in sizes else "rest"] += file.stat().st_size
    print(json.dumps(sizes))
"""


def output_of(environment: dict[str, str], *command: str) -> str:
    """Run a command of this Python; its standard output.

    Raises:
        BenchmarkError: If it fails.
    """
    done = subprocess.run(
        [sys.executable, *command], cwd=common.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise common.BenchmarkError(f"{' '.join(command[:4])} failed: {done.stderr[-2000:]}")
    return done.stdout


def request(url: str, body: bytes | None = None) -> bool:
    """Whether the server answers with 200."""
    try:
        message = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(message, timeout=5) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def cold_start(tag: str, environment: dict[str, str], folder: Path, port: int) -> dict[str, float]:
    """Seconds from starting a server to ready, and to its first embedding.

    Raises:
        BenchmarkError: If it ends before, or takes longer than two minutes.
    """
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "bentoml", "serve", tag, "--host", "127.0.0.1", "--port", str(port)]
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not request(f"{url}/readyz"):
            if process.poll() is not None or time.perf_counter() - begun > 120:
                raise common.BenchmarkError(f"the server of {tag} did not become ready")
            time.sleep(0.02)
        ready = time.perf_counter() - begun
        if not request(f"{url}/embed", json.dumps({"inputs": "hello"}).encode()):
            raise common.BenchmarkError("the first embedding was refused")
        return {"ready": ready, "first_embedding": time.perf_counter() - begun}
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)


def measure(model: str, rounds: int, port: int) -> dict[str, Any]:
    """Import, build, look at the image's context, start."""
    with tempfile.TemporaryDirectory() as temporary:
        home, empty = Path(temporary) / "home", Path(temporary) / "empty"
        empty.mkdir()
        environment = {**os.environ, "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True", "HF_HUB_OFFLINE": "1"}
        output_of(environment, "-m", "infinity_bento.cli", "import", model)
        begun = time.perf_counter()
        arguments = ("-f", "configs/images/cpu.yaml", "--arg", f"model_id={model}", "--output", "tag")
        built = output_of(environment, "-m", "bentoml", "build", *arguments)
        build_seconds = time.perf_counter() - begun
        tag = built.split("__tag__:")[1].split()[0]
        context = json.loads(output_of(environment, "-c", CONTEXT, tag).splitlines()[-1])
        starts = [cold_start(tag, environment, empty, port) for _ in range(rounds)]
    seconds = {name: round(statistics.median(start[name] for start in starts), 2) for name in starts[0]}
    return {
        "model": model,
        "context_bytes": {**context, "total": sum(context.values())},
        "build_seconds": round(build_seconds, 2),
        "median_seconds_to": seconds,
        "rounds": rounds,
    }


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bento", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="starts (default: 5)")
    parser.add_argument("--model", default=MODEL, help=f"default: {MODEL}")
    parser.add_argument("--port", type=int, default=3199, help="to serve on (default: 3199)")
    parser.add_argument("--out", type=Path, default=common.RESULTS, metavar="FOLDER", help="for the report")
    options = parser.parse_args()
    figures = measure(options.model, options.rounds, options.port)
    print(json.dumps(figures, indent=2))
    body = {
        "command": common.published_command("benchmarks.bento", sys.argv[1:]),
        "commit": common.commit(),
        "machine": common.machine(),
        "versions": common.versions(),
        **figures,
    }
    print("report:", common.write_report(options.out, "bento", body))


if __name__ == "__main__":
    main()
