"""Logging of this package: one handler for ``infinity_bento``, as text or as JSON lines. Called once per process."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import orjson

from infinity_bento.settings import Settings


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


class TextFormatter(logging.Formatter):
    """``12:34:56 info message``; anything worse than info names its level in capitals."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(shown_level)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        name = record.levelname
        record.shown_level = name if record.levelno > logging.INFO else name.lower()
        return super().format(record)


def configure_logging(settings: Settings) -> None:
    """Send this package's log to stderr in the form and from the level that the settings ask for."""
    package = logging.getLogger("infinity_bento")
    for handler in package.handlers[:]:
        package.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.json_output else TextFormatter())
    package.addHandler(handler)
    package.setLevel(settings.log_level.upper())
    package.propagate = False
