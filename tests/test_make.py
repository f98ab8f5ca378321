"""The Makefile: what a target installs, that every step says what it does, and that the help is complete."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def make(*words: str) -> list[str]:
    """What a make of its own prints: the one these tests may run under hands its flags and level down."""
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", *words], cwd=ROOT, env=own, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.splitlines()


@pytest.fixture
def empty(tmp_path: Path) -> str:
    """Where there is no environment yet."""
    return f"VENV={tmp_path / 'venv'}"


def test_serving_installs_what_serving_needs(empty: str) -> None:
    lines = make("-n", "serve", empty)
    installed = [line for line in lines if "pip install" in line]
    assert [re.sub(r".* -c constraints.txt ", "", line) for line in installed] == ["torch", "-e '.[demo]'"]
    assert lines[-1].split()[-2:] == ["infinity-bento", "serve"] or "infinity-bento serve" in lines[-1]


def test_testing_installs_the_rest(empty: str) -> None:
    installed = [line for line in make("-n", "test", empty) if "pip install" in line]
    assert len(installed) == 3 and installed[-1].endswith("-e '.[demo,dev]'")


def test_every_slow_step_says_what_it_does_first(empty: str) -> None:
    lines = make("-n", "test", empty)
    for number, line in enumerate(lines):
        if "pip install" in line or "-m venv" in line:
            assert lines[number - 1].startswith("echo "), line


def test_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    listed = [line.split()[1] for line in make("help")]
    assert sorted(listed) == sorted(phony[1].split())
