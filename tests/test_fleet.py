"""What workers of one server know of each other."""

from __future__ import annotations

import inspect
from pathlib import Path

import bentoml.serving
import pytest

from infinity_bento.fleet import RUN_FOLDER_VARIABLE, Fleet, choose_gpu
from infinity_bento.serving import replace_dead_workers


def test_ready_means_all_workers_and_a_later_one_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    first, second = Fleet.of_this_run(2), Fleet.of_this_run(2)
    assert not first.complete and not first.replacing
    first.announce_ready(1)
    first.announce_ready(1)
    assert not first.complete and not second.complete
    second.announce_ready(2)
    assert first.complete and second.complete
    assert Fleet.of_this_run(2).replacing


def test_a_single_process_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_FOLDER_VARIABLE, raising=False)
    alone = Fleet.of_this_run(1)
    alone.announce_ready(1)
    assert alone.complete and not alone.replacing
    assert Fleet(tmp_path, 1).complete and not Fleet(tmp_path, 1).replacing
    assert Fleet.of_this_run(2).complete, "without a supervisor there is one process, whatever the option says"


@pytest.mark.parametrize(
    ("given", "count", "chosen"),
    [
        (None, 2, ["0", "1", "0"]),
        ("0,1", 2, ["0", "1", "0"]),
        ("3, 5", 8, ["3", "5", "3"]),
        ("GPU-a,GPU-b", 2, ["GPU-a", "GPU-b", "GPU-a"]),
        ("4", 8, ["4", "4", "4"]),
        ("", 2, ["", "", ""]),
        (None, 0, [None, None, None]),
    ],
)
def test_each_worker_sees_one_gpu(given: str | None, count: int, chosen: list[str | None]) -> None:
    for worker, expected in enumerate(chosen, start=1):
        environ = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
        choose_gpu(environ, worker, count)
        assert environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_dead_workers_are_replaced_in_a_container_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENTOML_CONTAINERIZED", "true")
    bentoml.serving.running_inside_container.cache_clear()
    assert bentoml.serving.running_inside_container()
    replace_dead_workers()
    assert not bentoml.serving.running_inside_container()
    assert "respawn=not running_inside_container()" in inspect.getsource(bentoml.serving.create_watcher)
