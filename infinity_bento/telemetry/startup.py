"""What a start shows: one block with every setting and its origin, then numbered stages with their times.

The engine reports its stages here; readiness and ``/info`` read ``Stages.status()`` while it loads.
"""

from __future__ import annotations

import contextlib
import json
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from infinity_bento import __version__
from infinity_bento.core import EngineStatus
from infinity_bento.errors import InfinityError
from infinity_bento.options import MODEL_OPTIONS, SERVER_OPTIONS, Option, Secret
from infinity_bento.settings import Settings, Source

_WIDTH = 116


def settings_block(settings: Settings) -> str:
    """The settings as lines of text: what was chosen, with its origin, then the defaults; first the server's.

    Secrets appear as ``***``, texts with control characters in their JSON form, so that no value forges a line.
    """
    lines = [f"infinity-bento {__version__}", *_section("server", settings, SERVER_OPTIONS, settings)]
    count = len(settings.models)
    for number, model in enumerate(settings.models, start=1):
        title = f"model {number} of {count}: {_show(model.served_model_name)}"
        lines += _section(title, settings, MODEL_OPTIONS, model)
    lines += [f"note: {_show(note)}" for note in settings.notes]
    return "\n".join(lines)


def _section(title: str, settings: Settings, options: Sequence[Option], values: object) -> list[str]:
    chosen, defaults = [], []
    for option in options:
        text, origin = _show(getattr(values, option.field)), settings.origins[option.name]
        if origin.source is Source.DEFAULT:
            defaults.append(f"{option.name}={text}")
        else:
            chosen.append((option.name, text, str(origin)))
    name_width = max((len(name) for name, _, _ in chosen), default=0)
    text_width = max((len(text) for _, text, _ in chosen), default=0)
    lines = [f"  {title}"]
    lines += [f"    {name:<{name_width}}  {text:<{text_width}}  {origin}" for name, text, origin in chosen]
    lines += textwrap.wrap(
        "defaults: " + " ".join(defaults),
        width=_WIDTH,
        initial_indent="    ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines


def _show(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, (bool, Secret)):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(_show(part) for part in value)
    text = str(value)
    return text if text.isprintable() and text == text.strip() else json.dumps(text)


class Stages:
    """The numbered stages of one load, with their times. Safe to read from any thread; one thread runs the stages.

    Args:
        names: The stages in the order in which they run; at least one.
        log: Takes one line of text.
        heartbeat_seconds: A stage that runs longer than this says so each time it has passed again, so that a slow
            start does not look hung.
    """

    def __init__(self, names: Sequence[str], log: Callable[[str], None], *, heartbeat_seconds: float = 5.0) -> None:
        if not names:
            raise ValueError("names is empty; give at least one stage")
        self._names = tuple(names)
        self._log = log
        self._heartbeat_seconds = heartbeat_seconds
        self._lock = threading.Lock()
        self._started = time.perf_counter()
        self._elapsed: float | None = None  # fixed once the load is over
        self._index = 0
        self._detail = ""
        self._ready = False
        self._error: str | None = None

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run one stage; its line is logged at its end. An exception fails the load and passes on.

        Raises:
            ValueError: If there is no stage ``name``.
        """
        index = self._names.index(name)
        with self._lock:
            self._index, self._detail = index, ""
        started = time.perf_counter()
        over = threading.Event()
        heartbeat = threading.Thread(target=self._beat, args=(index, started, over), daemon=True)
        heartbeat.start()
        try:
            yield
        except BaseException as error:
            self._log(self._line(index, f"failed after {time.perf_counter() - started:.2f} s"))
            self.fail(_sentence(name, error))
            raise
        else:
            detail = f" ({self._detail})" if self._detail else ""
            self._log(self._line(index, f"{time.perf_counter() - started:.2f} s{detail}"))
        finally:
            over.set()
            heartbeat.join()

    def detail(self, text: str) -> None:
        """How far the current stage is, such as ``"3 of 7 files"``; shown by its heartbeat and its line."""
        self._detail = text

    def skip(self, name: str, reason: str) -> None:
        """Say that stage ``name`` does not run.

        Raises:
            ValueError: If there is no stage ``name``.
        """
        index = self._names.index(name)
        with self._lock:
            self._index, self._detail = index, ""
        self._log(self._line(index, f"skipped ({reason})"))

    def ready(self, url: str = "") -> None:
        """The load is over and the engine takes requests, at ``url`` if that is known."""
        with self._lock:
            self._elapsed = time.perf_counter() - self._started
            self._ready, self._error, self._index = True, None, len(self._names) - 1
            elapsed = self._elapsed
        where = f": {url} (routes and examples: {url}/docs)" if url else ""
        self._log(f"ready after {elapsed:.2f} s{where}")

    def fail(self, message: str) -> None:
        """The load is over and failed; ``message`` is one sentence."""
        with self._lock:
            self._elapsed = time.perf_counter() - self._started
            self._ready, self._error = False, message

    def status(self) -> EngineStatus:
        """How far the load is, now."""
        with self._lock:
            elapsed = time.perf_counter() - self._started if self._elapsed is None else self._elapsed
            return EngineStatus(
                ready=self._ready,
                stage=self._names[self._index],
                stage_number=self._index + 1,
                stage_count=len(self._names),
                elapsed_seconds=elapsed,
                error=self._error,
            )

    def _line(self, index: int, text: str) -> str:
        return f"[{index + 1}/{len(self._names)}] {self._names[index]} ... {text}"

    def _beat(self, index: int, started: float, over: threading.Event) -> None:
        while not over.wait(self._heartbeat_seconds):
            detail = f" ({self._detail})" if self._detail else ""
            self._log(self._line(index, f"still running, {time.perf_counter() - started:.0f} s{detail}"))


def _sentence(stage: str, error: BaseException) -> str:
    """What readiness shows of an error: our own texts in full, of others the type and the first line."""
    if isinstance(error, InfinityError):
        return error.message
    first_line = (str(error).splitlines() or [""])[0]
    return f"Stage '{stage}' failed: {type(error).__name__}: {first_line}".rstrip(": ")
