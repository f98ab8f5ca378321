"""Logging: one handler for ``infinity_bento``, as text or as JSON lines, and the same form for what BentoML logs.

Called once in the supervisor and once in each worker.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import orjson

from infinity_bento.settings import Settings

# The handler that BentoML gives to the loggers of a server; ``None`` is the root.
BENTOML_HANDLER = "tracehandler"
BENTOML_LOGGERS = (None, "bentoml", "uvicorn.error", "circus")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, worker, message, and the exception if there is one.

    Args:
        worker: Number of this process among several; None: there is one.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self.worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self.worker is not None:
            line["worker"] = str(self.worker)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


class TextFormatter(logging.Formatter):
    """``12:34:56 info message``; anything worse than info names its level in capitals.

    Args:
        worker: Number of this process among several; None: there is one.
    """

    def __init__(self, worker: int | None = None) -> None:
        who = "" if worker is None else f"worker {worker}: "
        super().__init__(f"%(asctime)s %(shown_level)s {who}%(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        name = record.levelname
        record.shown_level = name if record.levelno > logging.INFO else name.lower()
        return super().format(record)


def configure_logging(settings: Settings, worker: int | None = None) -> None:
    """Send the log to stderr in the form and from the level that the settings ask for.

    Args:
        settings: Of the server.
        worker: Number of this process among several; None: there is one, or this is the supervisor.
    """
    formatter = JsonFormatter(worker) if settings.json_output else TextFormatter(worker)
    package = logging.getLogger("infinity_bento")
    for handler in package.handlers[:]:
        package.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    package.addHandler(handler)
    package.setLevel(settings.log_level.upper())
    package.propagate = False
    _restyle_bentoml(settings, formatter)


def _restyle_bentoml(settings: Settings, formatter: logging.Formatter) -> None:
    """BentoML's lines in our form; of its notes on routine, which repeat ours, only those that are wanted."""
    for name in BENTOML_LOGGERS:
        for handler in logging.getLogger(name).handlers:
            if handler.get_name() == BENTOML_HANDLER and isinstance(handler, logging.StreamHandler):
                handler.setFormatter(formatter)
                handler.setStream(sys.stderr)
    level = logging.getLevelName(settings.log_level.upper())
    logging.getLogger("bentoml").setLevel(logging.INFO if level < logging.INFO else max(level, logging.WARNING))
    if settings.access_log:
        logging.getLogger("bentoml.access").setLevel(logging.INFO)
