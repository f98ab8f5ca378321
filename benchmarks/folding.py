"""Shared prefixes computed once: a causal model's batches folded against packed plainly, interleaved, states compared.

``python -m benchmarks.folding``. Models have the shapes of published ones and random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import BenchmarkError
from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.checkpoints.families import BY_MODEL_TYPE
from infinity_bento.checkpoints.weights import WeightReport
from infinity_bento.core import Encoded
from infinity_bento.models.backbone import Backbone, interface, rebuilt, teach_packing, transformers_builder
from infinity_bento.models.linears import LinearPlan
from infinity_bento.runners.allocator import keep_freed_memory

VOCABULARY = 5000
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}
# name, tokens shared, shortest and longest rest, sequences
CASES = (
    ("query of 60 tokens, documents of 64-256", 60, 64, 256, 32),
    ("template of 100 tokens, documents of 64-256", 100, 64, 256, 32),
    ("state of 512 tokens, options of 8-40", 512, 8, 40, 32),
)
STATE, QUESTION, QUESTIONS = 1500, 40, 10


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the process with a usage text if it is not understood."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.folding", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="default: 5")
    add("--threads", type=int, default=1, help="default: 1, as a lane of a busy server has")
    add("--rerank-layers", type=int, default=2, help="of the Qwen3-0.6B-shaped reranker (default: 2)")
    add("--only", choices=["rerank", "decide"], help="one of the two measurements (default: both)")
    add("--decide-layers", type=int, default=8, help="of the Qwen3.5-like decider (default: 8)")
    add("--seed", type=int, default=7, help="of weights and tokens (default: 7)")
    add("--out", type=Path, default=common.RESULTS, metavar="FOLDER", help="for the report (benchmarks/results)")
    options = parser.parse_args(argv)
    if min(options.rounds, options.threads, options.rerank_layers, options.decide_layers) < 1:
        parser.error("--rounds, --threads and the numbers of layers must be at least 1")
    return options


def random_model(shape: str, layers: int, seed: int) -> Backbone:
    """A backbone of a published shape with random weights, as the CPU serves it."""
    model_type, sizes = SHAPES[shape]
    family = BY_MODEL_TYPE[model_type]
    config = {**sizes, "num_hidden_layers": layers, "vocab_size": VOCABULARY, "max_position_embeddings": 8192}
    interface.register()
    torch.manual_seed(seed)
    module = transformers_builder(family, {"model_type": model_type, **config})().eval().requires_grad_(False)
    full = teach_packing(module, family)
    report = WeightReport((), 0, 0, 0.0, "random")
    return rebuilt(Backbone(module, family, full, report), LinearPlan(), native=False)


def prompts(count: int, shared: int, shortest: int, longest: int, seed: int) -> list[Encoded]:
    """Random sequences with one random prefix."""
    generator = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [generator.randrange(VOCABULARY) for _ in range(length)]

    prefix = tokens(shared)
    return [Encoded(prefix + tokens(generator.randint(shortest, longest))) for _ in range(count)]


@torch.inference_mode()
def last_states(model: Backbone, batch: PackedBatch) -> torch.Tensor:
    """States of each sequence's last token, in the caller's order."""
    rows = model.forward(batch)[batch.ends()]
    return torch.stack(batch.unsort(list(rows)))


def seconds(run: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def rounds_of(runs: dict[str, Callable[[], object]], count: int, seed: int) -> dict[str, list[float]]:
    """Each way once per round, in an order shuffled anew, after one round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(count + 1):
        order = list(runs)
        random.Random(f"{seed} {number}").shuffle(order)
        for name in order:
            took = seconds(runs[name])
            if number:
                found[name].append(took)
    return found


def rerank(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prefixes of several sizes: plainly packed against folded."""
    model, results = random_model("qwen3", options.rerank_layers, options.seed), []
    for name, shared, shortest, longest, count in CASES:
        encoded = prompts(count, shared, shortest, longest, options.seed)
        plain, tree = (pack(encoded, causal=causal) for causal in (False, True))
        assert tree.fold is not None
        difference = (last_states(model, plain) - last_states(model, tree)).abs().max().item()
        times = rounds_of(
            {
                # Packing is part of it: the tree must be made for every batch.
                "plain": lambda encoded=encoded: last_states(model, pack(encoded)),
                "folded": lambda encoded=encoded: last_states(model, pack(encoded, causal=True)),
            },
            options.rounds,
            options.seed,
        )
        speedups = [a / b for a, b in zip(times["plain"], times["folded"], strict=True)]
        ratio = plain.tokens / tree.rows
        results.append(
            {
                "case": name,
                "tokens": plain.tokens,
                "unique": tree.rows,
                "ratio": ratio,
                "seconds": times,
                "speedup": statistics.median(speedups),
                "of_ratio": statistics.median(speedups) / ratio,
                "max_abs_diff": difference,
            }
        )
        print(
            f"{name}: {plain.tokens} tokens / {tree.rows} unique = {ratio:.2f}; folding is "
            f"{statistics.median(speedups):.2f}x as fast ({statistics.median(speedups) / ratio:.2f} of the ratio), "
            f"largest difference {difference:.1e}",
            flush=True,
        )
    return results


def decide(options: argparse.Namespace) -> dict[str, Any]:
    """Ten questions over one state: at once, one alone, and ten one after the other."""
    model = random_model("qwen3.5", options.decide_layers, options.seed)
    encoded = prompts(QUESTIONS, STATE, QUESTION, QUESTION, options.seed)
    together = last_states(model, pack(encoded, causal=True))
    apart = torch.cat([last_states(model, pack([one], causal=True)) for one in encoded])
    times = rounds_of(
        {
            "ten at once": lambda: last_states(model, pack(encoded, causal=True)),
            "one": lambda: last_states(model, pack(encoded[:1], causal=True)),
            "ten apart": lambda: [last_states(model, pack([one], causal=True)) for one in encoded],
        },
        options.rounds,
        options.seed,
    )
    cost = statistics.median(a / b for a, b in zip(times["ten at once"], times["one"], strict=True))
    gain = statistics.median(a / b for a, b in zip(times["ten apart"], times["ten at once"], strict=True))
    difference = (together - apart).abs().max().item()
    print(
        f"{QUESTIONS} questions over {STATE} tokens, {options.decide_layers} layers: {cost:.2f}x the time of one, "
        f"{gain:.2f}x as fast as {QUESTIONS} requests, largest difference {difference:.1e}",
        flush=True,
    )
    return {"seconds": times, "times_of_one": cost, "faster_than_apart": gain, "max_abs_diff": difference}


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 0 if states agree, 1 if they do not, 2 if the report cannot be written."""
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    machine = common.machine()
    report = {
        "command": common.published_command("benchmarks.folding", argv),
        "commit": common.commit(),
        "machine": machine,
        "versions": common.versions(),
        "settings": {k: v for k, v in vars(options).items() if k != "out"},
        "rerank": rerank(options) if options.only != "decide" else [],
        "decide": decide(options) if options.only != "rerank" else None,
    }
    try:
        print(f"report: {common.write_report(options.out, 'folding', report).name}")
    except BenchmarkError as error:
        print(f"benchmarks.folding: {error}", file=sys.stderr)
        return 2
    cases = [*report["rerank"], *([report["decide"]] if report["decide"] else [])]
    return 0 if max(case["max_abs_diff"] for case in cases) < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
