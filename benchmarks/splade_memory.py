"""How much memory learned sparse vectors need: ``python -m benchmarks.splade_memory``; prints JSON.

Random hidden states go through the sparse head; counted is what is allocated besides them and the weights. Next to it
stands the plain way, all logits at once, as arithmetic.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    # Run as a script, Python searches this folder first, and http.py in it would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence

import torch

from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.checkpoints.st_modules import SpladePoolingSpec
from infinity_bento.core import Encoded, Item, Task
from infinity_bento.heads.masked_lm import MaskedLM
from infinity_bento.heads.sparse import SparseHead


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the process with a usage text if it is not understood."""
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.splade_memory", description=summary)
    add = parser.add_argument
    add("--sequences", type=int, default=32)
    add("--length", type=int, default=512, help="tokens of each (default: 512)")
    add("--vocabulary", type=int, default=30522)
    add("--width", type=int, default=768, help="of the hidden states (default: 768)")
    add("--strategy", choices=("max", "sum"), default="max")
    add("--device", default="cpu")
    add("--limit-mb", type=float, default=300.0, help="exit 1 above (default: 300, of 10^6 bytes)")
    return parser.parse_args(argv)


def masked_lm(width: int, vocabulary: int, device: str) -> MaskedLM:
    """Random layers of BERT's shape; about every second logit is positive, which is the worst case for the output."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(device)

    ones = torch.ones(width, device=device)
    return MaskedLM(
        random(vocabulary, width),
        random(vocabulary),
        dense=(random(width, width), random(width)),
        norm=(ones, random(width)),
    )


def peak_allocated(call: Callable[[], object], device: str) -> int:
    """Most bytes of tensors that a call holds at once, beyond those that are there already."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return int(max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure once; the exit status says whether the limit held."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    head = SparseHead(
        masked_lm(options.width, options.vocabulary, options.device), SpladePoolingSpec(strategy=options.strategy)
    )
    batch: PackedBatch = pack([Encoded([0] * options.length)] * options.sequences, device=options.device)
    hidden_TD = torch.randn((batch.tokens, options.width), generator=torch.Generator().manual_seed(1)).to(
        options.device
    )
    items = [Item(Task.EMBED_SPARSE, token_ids=[0])] * options.sequences

    @torch.inference_mode()
    def vectors() -> list[object]:
        return list(head.collect(head.run(hidden_TD, batch), range(options.sequences), items))

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.perf_counter()
    vectors()
    seconds = time.perf_counter() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
    peak = peak_allocated(vectors, options.device)
    report = {
        **vars(options),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 3),
        "extra_tensor_mb": round(peak / 1e6, 1),
        "extra_resident_mb": round(grown / 1e6, 1),
        "all_logits_mb": round(batch.tokens * options.vocabulary * 4 / 1e6, 1),
    }
    print(json.dumps(report, indent=2))
    return 0 if max(peak, grown) <= options.limit_mb * 1e6 else 1


if __name__ == "__main__":
    sys.exit(main())
