"""Serves models while a command runs: ``python -m tests.clients.serve COMMAND ...``.

An embedder, a reranker and a classifier at one address, and at another an embedder whose vocabulary the clients know.
The command gets as its last arguments the first address, the second, and the tokenizer file of the model there; its
exit status is this program's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tests import tiny
from tests.bentos import ROOT, environment, serve
from tests.conftest import MINILM


def served(stack: ExitStack, models: Mapping[str, str]) -> str:
    """The address of a server of these models, by public name."""
    home = Path(tempfile.mkdtemp())
    environ = environment(
        home,
        INFINITY_MODEL_ID=";".join(models.values()),
        INFINITY_SERVED_MODEL_NAME=";".join(models),
        HF_HUB_OFFLINE="1",
    )
    return stack.enter_context(serve([str(ROOT)], home, environ, home / "server.log")).url


def main() -> int:
    """Serve, run the command, stop."""
    scorers = {
        "reranker": str(tiny.checkpoint("bert", head="cls")),
        "classifier": str(tiny.checkpoint("roberta", head="cls")),
    }
    decoder = tiny.checkpoint("qwen3-noeos")
    with ExitStack() as stack:
        urls = [served(stack, {"embedder": MINILM, **scorers}), served(stack, {"decoder": str(decoder)})]
        # The Hugging Face client calls nobody, this server included, where it is told to stay offline.
        online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        command = [*sys.argv[1:], *urls, str(decoder / "tokenizer.json")]
        return subprocess.run(command, env=online, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
