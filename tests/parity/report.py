"""Writes ``results.json``: the largest difference to the reference of every family, as ``docs/models.md`` shows it.

Run as ``python -m tests.parity.report``; minutes on two cores. What must hold is checked by ``test_families.py``.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from infinity_bento.checkpoints.families import TABLE
from tests.parity.measure import LENGTHS, NAMES, Differences, backbone, measure, tolerance

FILE = Path(__file__).with_name("results.json")


def main() -> int:
    """Measure, write, and report; 1 if a difference exceeds its tolerance."""
    torch.set_num_threads(1)  # sums over several threads may differ in the last bits
    found: dict[str, Differences] = {}
    for name in NAMES:
        found[name] = measure(name)
        print(f"{name:24} {found[name].largest:.1e} of {tolerance(name):.0e}", flush=True)
    FILE.write_text(json.dumps(document(found), indent=2) + "\n")
    print(f"written: {FILE.name}")
    return int(any(measured.largest >= tolerance(name) for name, measured in found.items()))


def document(found: dict[str, Differences]) -> dict[str, Any]:
    """The content of the file: conditions, and one entry for each family in the order of the table."""
    return {
        "command": "python -m tests.parity.report",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "device": "cpu",
        "dtype": "float32",
        "lengths": list(LENGTHS),
        "families": {family.model_type: entry(family.model_type, found) for family in TABLE},
    }


def entry(model_type: str, found: dict[str, Differences]) -> dict[str, Any]:
    """What was measured of one family; its variants are the tiny checkpoints of its layouts and settings."""
    variants = {name: found[name].rounded() for name in found if backbone(name).family.model_type == model_type}
    return {
        "tolerance": min(map(tolerance, variants)),
        "largest_difference": max(max(row["alone"], row["batched"], row["shuffled"]) for row in variants.values()),
        "variants": variants,
    }


if __name__ == "__main__":
    sys.exit(main())
