"""A server as a process of its own, for as long as a benchmark needs it. Called by ``door`` and ``peers``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx

from benchmarks.common import BenchmarkError

START_SECONDS = 120.0


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def our_command(port: int, options: Sequence[tuple[str, str]]) -> list[str]:
    """The command line that serves this project on loopback."""
    command = [sys.executable, "-m", "infinity_bento.cli", "serve", "--hostname", "127.0.0.1", "--port", str(port)]
    return command + [part for name, value in options for part in (f"--{name}", value)]


@contextmanager
def running(command: Sequence[str], probe: str, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """A server, once ``probe`` answers 200; ended afterwards.

    Raises:
        BenchmarkError: If it ends by itself, or is not ready in time.
    """
    environ = {**os.environ, **(environment or {})}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ) as process,
    ):
        try:
            wait_until_ready(probe, process)
            yield
        except BenchmarkError as error:
            log.seek(0)
            raise BenchmarkError(f"{error} Its last words: {log.read()[-600:].decode('utf-8', 'replace')}") from error
        finally:
            process.terminate()
            process.wait(30)


def wait_until_ready(probe: str, process: subprocess.Popen[bytes]) -> None:
    """Return once the URL ``probe`` answers 200.

    Raises:
        BenchmarkError: If the server ends first, or takes too long.
    """
    deadline = time.perf_counter() + START_SECONDS
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise BenchmarkError(f"the server ended with status {process.returncode}.")
        try:
            if httpx.get(probe, timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise BenchmarkError(f"the server was not ready within {START_SECONDS:.0f} s.")
