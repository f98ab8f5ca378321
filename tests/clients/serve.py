"""Serves an embedder, a reranker and a classifier while a command runs: ``python -m tests.clients.serve COMMAND ...``.

The command gets the server's address as its last argument; its exit status is this program's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import tiny
from tests.bentos import ROOT, environment, serve
from tests.conftest import MINILM

MODELS = {"embedder": MINILM, "reranker": "", "classifier": ""}


def main() -> int:
    """Serve, run the command, stop."""
    models = MODELS | {
        "reranker": str(tiny.checkpoint("bert", head="cls")),
        "classifier": str(tiny.checkpoint("roberta", head="cls")),
    }
    home = Path(tempfile.mkdtemp())
    environ = environment(
        home,
        INFINITY_MODEL_ID=";".join(models.values()),
        INFINITY_SERVED_MODEL_NAME=";".join(models),
        HF_HUB_OFFLINE="1",
    )
    with serve([str(ROOT)], home, environ, home / "server.log") as served:
        # The Hugging Face client calls nobody, this server included, where it is told to stay offline.
        online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        return subprocess.run([*sys.argv[1:], served.url], env=online, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
