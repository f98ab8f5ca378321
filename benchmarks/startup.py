"""Time from starting the engine to ready, by stage, each start in a fresh process: MiniLM, a random ModernBERT-base.

Run: ``python -m benchmarks.startup [--rounds 5] [--model FOLDER ...]``. Prints medians and writes a dated report.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import common

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
START = """
import logging, sys, time
begun = time.perf_counter()
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from infinity_bento.engine import Engine
from infinity_bento.settings import resolve
with Engine.from_settings(resolve({"model_id": sys.argv[1], "served_model_name": "model"})):
    print(f"process to ready ... {time.perf_counter() - begun:.2f} s")
"""
LINE = re.compile(r"^(?:\[\d+/\d+\] )?(?P<stage>[a-z][a-z0-9 ,-]*) (?:\.\.\.|after) (?P<seconds>[0-9.]+) s")


def random_modernbert_base(folder: Path, tokenizer_from: Path) -> Path:
    """A checkpoint of ModernBERT-base's shape with random weights, 149 million parameters.

    The vocabulary keeps its size; the tokenizer is MiniLM's, whose ids all lie within it.
    """
    import torch
    from transformers import AutoModel, ModernBertConfig

    torch.manual_seed(0)
    config = ModernBertConfig(pad_token_id=0, cls_token_id=101, sep_token_id=102, bos_token_id=101, eos_token_id=102)
    AutoModel.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (tokenizer_from / name).is_file():
            shutil.copy(tokenizer_from / name, folder / name)
    return folder


def one_start(model: str) -> dict[str, float]:
    """Seconds by stage of one start in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", START, model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks.startup: {model} did not start: {done.stderr.strip().splitlines()[-1]}")
    matches = (LINE.match(line) for line in done.stdout.splitlines())
    return {match["stage"]: float(match["seconds"]) for match in matches if match}


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="starts of each model, interleaved (default: 5)")
    parser.add_argument("--model", action="append", default=[], help="instead of the two default models; repeatable")
    parser.add_argument("--out", type=Path, default=common.RESULTS, metavar="FOLDER", help="for the report")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        models = {name: name for name in options.model}
        if not models:
            from infinity_bento.checkpoints.resolve import resolve

            base = random_modernbert_base(Path(temporary) / "modernbert-base", resolve(MINILM, offline=True).path)
            models = {MINILM: MINILM, "random ModernBERT-base": str(base)}
        starts: dict[str, list[dict[str, float]]] = {name: [] for name in models}
        for _ in range(options.rounds):
            for name, model in models.items():
                starts[name].append(one_start(model))
    medians = {
        name: {stage: round(statistics.median(run[stage] for run in runs), 2) for stage in runs[0]}
        for name, runs in starts.items()
    }
    print(json.dumps(medians, indent=2))
    body = {
        "command": common.published_command("benchmarks.startup", sys.argv[1:]),
        "commit": common.commit(),
        "machine": common.machine(),
        "versions": common.versions(),
        "rounds": options.rounds,
        "median_seconds": medians,
    }
    print("report:", common.write_report(options.out, "startup", body))


if __name__ == "__main__":
    main()
