"""One form for all lines: ours and BentoML's, as text or JSON, with the worker's number where there are several."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from bentoml._internal.log import SERVER_LOGGING_CONFIG

from infinity_bento.settings import resolve
from infinity_bento.telemetry import logs
from infinity_bento.telemetry.logs import BENTOML_HANDLER, BENTOML_LOGGERS, configure_logging


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What goes to stderr, with BentoML's handler on its loggers as in a server."""
    stream = io.StringIO()
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stderr=stream))
    handler = logging.StreamHandler(io.StringIO())
    handler.set_name(BENTOML_HANDLER)
    names = ("infinity_bento", "bentoml", "bentoml.access", "uvicorn.error")
    before = {name: (logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in names}
    for name in names[1:]:
        logging.getLogger(name).setLevel(logging.NOTSET)  # another test may have hushed it
        logging.getLogger(name).handlers = [handler] if name != "bentoml.access" else []
    logging.getLogger("bentoml").propagate = False
    yield stream
    for name, (level, handlers) in before.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).handlers = handlers


def test_bentoml_still_has_the_handler_that_is_restyled() -> None:
    assert set(SERVER_LOGGING_CONFIG["handlers"]) == {BENTOML_HANDLER}
    loggers = {name for name, logger in SERVER_LOGGING_CONFIG["loggers"].items() if logger["handlers"]}
    assert loggers == set(BENTOML_LOGGERS) - {None}


def test_all_lines_have_one_form(written: io.StringIO) -> None:
    configure_logging(resolve())
    logging.getLogger("infinity_bento.engine").info("ours")
    logging.getLogger("bentoml.serve").info("routine of BentoML's")
    logging.getLogger("bentoml.serve").warning("theirs")
    logging.getLogger("uvicorn.error").error("another")
    first, second, third = written.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d info ours", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING theirs", second)
    assert re.fullmatch(r"\d\d:\d\d:\d\d ERROR another", third)


def test_routine_is_shown_when_debugging_and_access_when_wanted(written: io.StringIO) -> None:
    configure_logging(resolve({"log-level": "debug"}))
    logging.getLogger("bentoml.serve").info("routine")
    assert written.getvalue().endswith("info routine\n")
    configure_logging(resolve({"access-log": "true", "log-level": "error"}))
    logging.getLogger("bentoml.access").info("GET / 200")
    logging.getLogger("bentoml.serve").warning("hushed")
    assert written.getvalue().endswith("info GET / 200\n")


def test_workers_are_told_apart(written: io.StringIO) -> None:
    configure_logging(resolve({"workers": "2"}), worker=2)
    logging.getLogger("infinity_bento").info("ready")
    assert re.fullmatch(r"\d\d:\d\d:\d\d info worker 2: ready\n", written.getvalue())
    configure_logging(resolve({"json-output": "true"}), worker=2)
    logging.getLogger("bentoml").error("lost")
    line = json.loads(written.getvalue().splitlines()[1])
    assert (line["level"], line["message"], line["worker"], line["logger"]) == ("error", "lost", "2", "bentoml")
