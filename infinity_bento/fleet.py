"""What the worker processes of one server know of each other, through files in the folder of its run.

Readiness waits for all workers at first, since any of them may get the next request. A worker that replaces a dead one
loads before it accepts connections: meanwhile the others answer.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

# Names the folder of one running server, which the supervisor makes and its workers inherit.
RUN_FOLDER_VARIABLE = "INFINITY_BENTO_RUN_FOLDER"

_COMPLETE = "complete"


@dataclass(slots=True)
class Fleet:
    """The workers of one server, seen from one of them.

    Args:
        folder: Of this run; None without a supervisor, where there is one process.
        workers: How many there should be.
    """

    folder: Path | None
    workers: int
    _complete: bool = field(default=False, init=False)

    @classmethod
    def of_this_run(cls, workers: int) -> Fleet:
        """As the supervisor named its folder to this process."""
        folder = os.environ.get(RUN_FOLDER_VARIABLE)
        return cls(Path(folder) if folder else None, workers)

    def announce_ready(self, worker_index: int) -> bool:
        """Tell the others that this worker answers now; returns whether it is the last of several."""
        if self.folder is None:
            return False
        (self.folder / f"ready-{worker_index}").touch()
        if len(list(self.folder.glob("ready-*"))) < self.workers:
            return False
        (self.folder / _COMPLETE).touch()
        return self.workers > 1

    @property
    def complete(self) -> bool:
        """Whether every worker has been ready once since the server started."""
        if not self._complete:
            alone = self.folder is None or self.workers == 1
            self._complete = alone or (self.folder is not None and (self.folder / _COMPLETE).exists())
        return self._complete

    @property
    def replacing(self) -> bool:
        """Whether this process, while it starts, takes the place of one that has died beside others."""
        return self.workers > 1 and self.complete


def choose_gpu(environ: MutableMapping[str, str], worker_index: int, gpu_count: int) -> None:
    """Show one GPU only to this worker, the next one to the next; must run before anything touches CUDA.

    Args:
        environ: Of this process; ``CUDA_VISIBLE_DEVICES`` is narrowed down or set.
        worker_index: From 1.
        gpu_count: GPUs that the driver has.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    devices = [part.strip() for part in given.split(",")] if given is not None else list(map(str, range(gpu_count)))
    if devices and devices != [""]:
        environ["CUDA_VISIBLE_DEVICES"] = devices[(worker_index - 1) % len(devices)]
