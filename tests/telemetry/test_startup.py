"""The settings block and the stages of a load."""

from __future__ import annotations

import re
import threading

import pytest

from infinity_bento.errors import LoadError
from infinity_bento.settings import resolve
from infinity_bento.telemetry.startup import Stages, settings_block


def test_block_shows_choices_with_origins_and_defaults_in_short():
    settings = resolve(
        {"model-id": ["org/a", "org/b"], "served-model-name": ["first", "second"], "max-batch-tokens": ["8", "9"]},
        {"INFINITY_PORT": "81", "INFINITY_PROT": "1"},
    )
    lines = settings_block(settings).splitlines()
    first, second = lines.index("  model 1 of 2: first"), lines.index("  model 2 of 2: second")
    assert "    port  81  environment INFINITY_PORT" in lines[:first]
    assert "    max-batch-tokens   8      command line" in lines[first:second]
    assert "    max-batch-tokens   9       command line" in lines[second:]
    server = " ".join(lines[:first])
    assert "defaults: hostname=0.0.0.0" in server and "api-key=-" in server and " port=" not in server
    assert "dtype=auto" in " ".join(lines[first:second])
    assert lines[-1] == "note: INFINITY_PROT is not an option and is ignored; did you mean INFINITY_PORT?"
    assert max(map(len, lines)) <= 120


def test_block_hides_secrets():
    block = settings_block(resolve({"api-key": "sesame-1"}, {"HF_TOKEN": "sesame-2"}))
    assert "sesame" not in block
    assert re.search(r"api-key +\*\*\* +command line", block)
    assert re.search(r"hf-token +\*\*\* +environment HF_TOKEN", block)


def test_a_value_cannot_forge_a_line():
    block = settings_block(resolve({"default-prompt": "x\n    port  1  command line"}))
    assert r"\n    port  1" in block
    assert not any(line.startswith("    port") for line in block.splitlines())


def test_stages_log_and_report_progress():
    lines: list[str] = []
    stages = Stages(["find files", "load weights", "warm up"], lines.append)
    assert stages.status().stage == "find files" and not stages.status().ready
    with stages.stage("find files"):
        pass
    with stages.stage("load weights"):
        stages.detail("2 of 7 files")
        status = stages.status()
        assert (status.stage, status.stage_number, status.stage_count) == ("load weights", 2, 3)
        assert not status.ready and status.error is None
    stages.skip("warm up", "--warmup=false")
    assert not stages.status().ready
    stages.ready()
    assert re.fullmatch(r"\[1/3\] find files \.\.\. \d+\.\d\d s", lines[0])
    assert re.fullmatch(r"\[2/3\] load weights \.\.\. \d+\.\d\d s \(2 of 7 files\)", lines[1])
    assert lines[2] == "[3/3] warm up ... skipped (--warmup=false)"
    assert re.fullmatch(r"ready after \d+\.\d\d s", lines[3])
    stages.ready("http://127.0.0.1:81")
    assert re.fullmatch(r"ready after \S+ s: http://127.0.0.1:81 \(.*: http://127.0.0.1:81/docs\)", lines[4])
    done = stages.status()
    assert done.ready and done.stage_number == 3
    assert stages.status().elapsed_seconds == done.elapsed_seconds  # the clock stops when the load is over


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (LoadError("config.json has no model_type."), "config.json has no model_type."),
        (RuntimeError("out of luck\nmore"), "Stage 'load weights' failed: RuntimeError: out of luck"),
        (KeyboardInterrupt(), "Stage 'load weights' failed: KeyboardInterrupt"),
    ],
)
def test_an_exception_fails_the_load_and_passes_on(raised, error):
    lines: list[str] = []
    stages = Stages(["load weights", "warm up"], lines.append)
    with pytest.raises(type(raised)), stages.stage("load weights"):
        raise raised
    status = stages.status()
    assert not status.ready and status.error == error and status.stage_number == 1
    assert re.fullmatch(r"\[1/2\] load weights \.\.\. failed after \d+\.\d\d s", lines[0])
    stages.fail("Something clearer.")
    assert stages.status().error == "Something clearer."


def test_a_long_stage_says_that_it_still_runs():
    lines: list[str] = []
    heard = threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        heard.set()

    stages = Stages(["load weights"], log, heartbeat_seconds=0.01)
    with stages.stage("load weights"):
        assert heard.wait(10)
    assert lines[0].startswith("[1/1] load weights ... still running, ")
    assert re.fullmatch(r"\[1/1\] load weights \.\.\. \d+\.\d\d s", lines[-1])


def test_status_can_be_read_from_other_threads_while_stages_run():
    names = [f"stage {number}" for number in range(1, 51)]
    stages = Stages(names, lambda line: None)
    seen: list[tuple[str, int]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            status = stages.status()
            seen.append((status.stage, status.stage_number))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for name in names:
        with stages.stage(name):
            pass
    stages.ready()
    stop.set()
    watcher.join(10)
    assert seen and all(name == f"stage {number}" for name, number in seen)
    assert [number for _, number in seen] == sorted(number for _, number in seen)


def test_an_unknown_stage_is_a_mistake():
    with pytest.raises(ValueError, match="not in tuple"), Stages(["a"], print).stage("b"):
        pass
    with pytest.raises(ValueError, match="names is empty"):
        Stages([], print)
