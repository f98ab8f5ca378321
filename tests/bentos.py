"""Bentos for tests: a model store with small models, builds in it, and servers as separate processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests import tiny, tiny_readouts, tiny_retrieval
from tests.conftest import MINILM

ROOT = Path(__file__).parent.parent
# Nothing answers there: whoever asks a hub is refused at once.
NO_HUB = "http://127.0.0.1:9"

# Served name -> name in the store. One model for each task that some model alone can do.
MODELS = {
    "embedder": MINILM,
    "reranker": "tiny-reranker",
    "classifier": "tiny-classifier",
    "sparse": "tiny-sparse",
    "tokens": "tiny-tokens",
    "decider": "tiny-decider",
}
MODEL_ARGUMENTS = (
    "--arg",
    f"model_id={';'.join(MODELS.values())}",
    "--arg",
    f"served_model_name={';'.join(MODELS)}",
)


def environment(home: Path, **changes: str) -> dict[str, str]:
    """The environment of a process with its own BentoML home and no hub."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("INFINITY_", "HF_"))}
    return {
        **inherited,
        "BENTOML_HOME": str(home),
        "BENTOML_DO_NOT_TRACK": "True",
        "HF_ENDPOINT": NO_HUB,
        "HF_HUB_CACHE": str(home / "hub-cache"),
        **changes,
    }


def import_models(home: Path) -> None:
    """Fill the model store of a home with ``MODELS``."""
    folders = {
        MINILM: None,
        "tiny-reranker": tiny.checkpoint("bert", head="cls"),
        "tiny-classifier": tiny.checkpoint("roberta", head="cls"),
        "tiny-sparse": tiny_retrieval.splade(),
        "tiny-tokens": tiny.checkpoint("bert", head="token-cls"),
        "tiny-decider": tiny_readouts.readout("d3"),
    }
    code = (
        "import sys; from infinity_bento.cli import main\nfor words in sys.argv[1:]: assert main(words.split('|')) == 0"
    )
    words = [
        "|".join(["import", name] if f is None else ["import", str(f), "--name", name]) for name, f in folders.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def run_build(home: Path, config: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """``bentoml build -f CONFIG``, without a network."""
    command = [sys.executable, "-m", "bentoml", "build", "-f", config, *arguments, "--output", "tag"]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment(home, **changes),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def build(home: Path, config: str, *arguments: str, **changes: str) -> Path:
    """Build a Bento; its folder in the store."""
    done = run_build(home, config, *arguments, **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    name, version = done.stdout.split("__tag__:")[1].split()[0].split(":")
    return home / "bentos" / name / version


def tag_of(bento: Path) -> str:
    return f"{bento.parent.name}:{bento.name}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    seconds_to_ready: float = 0.0

    def workers(self) -> list[psutil.Process]:
        """The worker processes, by age."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [child for child in children if "_bentoml_impl.worker.service" in " ".join(_command(child))]
        return sorted(found, key=lambda child: child.create_time())


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextlib.contextmanager
def serve(
    arguments: Sequence[str], folder: Path, environ: Mapping[str, str], log: Path, *, seconds: float = 90
) -> Iterator[Served]:
    """``bentoml serve ARGUMENTS`` in a folder, once it is ready; stopped at the end."""
    port = free_port()
    command = [sys.executable, "-m", "bentoml", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    started = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(environ), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    served = Served(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until_ready(served, seconds)
        served.seconds_to_ready = time.perf_counter() - started
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(served: Served, seconds: float) -> None:
    """Poll /readyz until it answers 200."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert served.process.poll() is None, served.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{served.url}/readyz", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(served.log.read_text())
