"""What a decision model divides its logits by: the checkpoint's own table, and the calibration that wins over it.

Every protocol of ``heads/decisions`` gets its temperatures from ``in_force``; ``infinity-bento calibrate`` writes the
file that is read here. Free of torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.decisions import QuestionKind
from infinity_bento.errors import LoadError

# Lies beside the other files of a checkpoint, or wherever the option ``decision-calibration`` says.
CALIBRATION_FILE = "infinity_calibration.json"
FORMAT_VERSION = 1
DEFAULT = "default"
_KEY = re.compile(r"(noul|choice|score)(?::([0-9]+)(?:-([0-9]+)|(\+))?)?")


@dataclass(frozen=True, slots=True)
class _Row:
    """One entry of a table: questions of a kind (None: any) with ``first`` to ``last`` options."""

    kind: QuestionKind | None
    first: int
    last: float
    value: float

    @property
    def order(self) -> tuple[bool, float, int]:
        """Narrower entries count first; of two without an end the one that begins later."""
        return self.kind is None, self.last - self.first, -self.first


@dataclass(frozen=True, slots=True)
class Temperatures:
    """Temperatures by kind and number of options; the narrowest entry that fits counts, 1 where none does."""

    rows: tuple[_Row, ...] = ()

    @classmethod
    def read(cls, table: Mapping[str, float], file: Path, key: str = "temperature") -> Temperatures:
        """A table keyed ``default``, ``choice``, ``choice:5``, ``choice:3-5`` or ``choice:11+`` (likewise noul, score).

        Args:
            table: Key -> temperature.
            file: Where it stands, for errors.
            key: Its key in that file.

        Raises:
            LoadError: A key is none of these, or a temperature is not a finite number above 0.
        """
        rows = []
        for name, value in table.items():
            match = _KEY.fullmatch(name)
            if match is None and name != DEFAULT:
                raise LoadError(
                    f"{file}: {key!r} has the key {name!r}; it must be default, noul, choice or score, the latter also "
                    "with a number of options, such as choice:5, choice:3-5 or choice:11+."
                )
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise LoadError(f"{file}: {key!r} has {name}={value!r}; a temperature must be a finite number above 0.")
            rows.append(_row(match, float(value)))
        return cls(tuple(sorted(rows, key=lambda row: row.order)))

    def of(self, kind: QuestionKind, options: int) -> float:
        """What the logits of a question are divided by."""
        for row in self.rows:
            if row.kind in (kind, None) and row.first <= options <= row.last:
                return row.value
        return 1.0

    def under(self, calibration: Temperatures) -> Temperatures:
        """This table where ``calibration`` says nothing: a kind that it names is wholly decided there."""
        default = any(row.kind is None for row in calibration.rows)
        kinds = set(QuestionKind) if default else {row.kind for row in calibration.rows}
        kept = [row for row in self.rows if row.kind not in kinds and not (default and row.kind is None)]
        return Temperatures(tuple(sorted((*calibration.rows, *kept), key=lambda row: row.order)))


def in_force(own: Temperatures, folder: Path, calibration: Path | None = None) -> Temperatures:
    """The temperatures of a served checkpoint.

    Args:
        own: By the checkpoint's files.
        folder: Of the checkpoint; a calibration file in it counts.
        calibration: The option ``decision-calibration``: a calibration file that counts instead.

    Raises:
        LoadError: The calibration file is missing, malformed, or of another version.
    """
    file = folder / CALIBRATION_FILE if calibration is None else calibration
    return own.under(read_calibration(file)) if calibration is not None or file.is_file() else own


def read_calibration(file: Path) -> Temperatures:
    """The temperatures of a file that ``infinity-bento calibrate`` wrote.

    Raises:
        LoadError: It is missing, malformed, or of another version.
    """
    content = JsonObject.read(file)
    if content.integer("format_version") != FORMAT_VERSION:
        raise content.wrong("format_version", str(FORMAT_VERSION))
    return Temperatures.read(content.mapping("temperature"), file)


def _row(match: re.Match[str] | None, value: float) -> _Row:
    if match is None:
        return _Row(None, 0, math.inf, value)
    kind, first, last, open_end = match.groups()
    if first is None:
        return _Row(QuestionKind(kind), 0, math.inf, value)
    return _Row(QuestionKind(kind), int(first), math.inf if open_end else int(last or first), value)
