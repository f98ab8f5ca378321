"""The allocator's setting, in a process of its own: it is for the whole process and cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource
import numpy
from infinity_bento.runners.allocator import keep_freed_memory
kept = {keep}() if {call} else False
for _ in range(3):
    numpy.ones(5_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    numpy.ones(5_000_000)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call: bool) -> tuple[str, int]:
    """Page faults of twenty arrays of 40 MB, more than glibc ever keeps by itself."""
    script = FAULTS.format(keep="keep_freed_memory", call=call)
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    return shown[0], int(shown[1])


def test_freed_blocks_keep_their_pages() -> None:
    (kept, few), (_, many) = faults(True), faults(False)
    assert kept == "True"
    assert few < 200 < many  # pages may be huge ones, of 2 MB
