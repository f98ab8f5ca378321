"""README's table of the peer benchmark: made from the newest report, and current."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, peers
from benchmarks.common import BenchmarkError
from benchmarks.servers import free_port, running


def report() -> dict[str, Any]:
    row = {"median_s": 2.0, "all_s": [1.0, 2.0, 4.0], "cos": 0.9999999}
    return {
        "base": "st:b32",
        "rounds": 3,
        "date": "2026-01-02",
        "file": "x-peers.json",
        "machine": {"cpu": "CPU", "cores": 2, "flags": ["avx2"]},
        "texts": {"A": {"texts": 512}, "C": {"texts": 64}},
        "results": {
            "A": {"st:b32": row, "http:ours": {**row, "median_s": 1.0, "all_s": [1.0, 1.0, 1.0]}},
            "C": {
                "st:b32": {**row, "p50_ms": 12.34},
                "ort:fp32": {**row, "p50_ms": 5.0, "all_s": [0.5, 1.0, 2.0]},
                "http:ours": {**row, "p50_ms": 6.0},
            },
        },
    }


def test_the_table_shows_each_engine_beside_ours() -> None:
    lines = peers.table(peers.with_ours(report())).splitlines()
    assert lines[0] == "| engine, float32 | 512 short texts | 64 one short text at a time |"
    assert lines[2] == "| **infinity-bento**, over HTTP | 1.00 s (1.00000) | 6.0 ms (1.00000) |"
    assert lines[3] == "| sentence-transformers, in process | 2.00 s (2.00x, 1.00000) | 12.3 ms (1.00x, 1.00000) |"
    assert lines[4] == "| ONNX Runtime, in process | - | 5.0 ms (0.50x, 1.00000) |"
    assert lines[-1].startswith("Median of 3 interleaved rounds on 2 cores (CPU, AVX2), 2026-01-02;")
    assert "[x-peers.json](benchmarks/results/x-peers.json)" in lines[-1]


def test_readmes_table_is_that_of_the_newest_report(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(peers.README.read_text())
    peers.write_table(peers.newest(common.RESULTS), copy)
    assert copy.read_text() == peers.README.read_text(), "run: python -m benchmarks.peers --table"
    assert "**infinity-bento**" in copy.read_text()


def test_a_readme_without_marks_and_a_folder_without_reports_are_told(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(BenchmarkError, match="put the two marks"):
        peers.write_table(peers.with_ours(report()), tmp_path / "README.md")
    with pytest.raises(BenchmarkError, match="measure first"):
        peers.newest(tmp_path)


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words() -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with (
        pytest.raises(BenchmarkError, match=r"status 3.*no such model"),
        running(command, f"http://127.0.0.1:{free_port()}/health"),
    ):
        raise AssertionError("it is not running")


def test_what_is_needed_to_measure_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.arguments(["--rounds", "1"])
    assert "--bench and --envs are needed" in capsys.readouterr().err
