from __future__ import annotations

from pathlib import Path

import pytest

from infinity_bento.checkpoints.temperatures import Temperatures, in_force
from infinity_bento.decisions import QuestionKind
from infinity_bento.errors import LoadError

FILE = Path("c.json")
NOUL, CHOICE, SCORE = QuestionKind.NOUL, QuestionKind.CHOICE, QuestionKind.SCORE


def test_the_narrowest_entry_counts() -> None:
    table = {"default": 9.0, "choice": 8.0, "choice:3-5": 7.0, "choice:4": 6.0, "choice:11+": 5.0, "score:2+": 4.0}
    read = Temperatures.read(table, FILE)
    assert [read.of(CHOICE, count) for count in (2, 3, 4, 5, 10, 11, 99)] == [8.0, 7.0, 6.0, 7.0, 8.0, 5.0, 5.0]
    assert [read.of(SCORE, count) for count in (1, 2)] == [9.0, 4.0]
    assert read.of(NOUL, 2) == 9.0
    assert Temperatures().of(NOUL, 2) == 1.0


def test_a_calibration_decides_the_kinds_that_it_names() -> None:
    own = Temperatures.read({"default": 9.0, "choice:2": 8.0, "choice": 7.0, "noul": 6.0}, FILE)
    both = own.under(Temperatures.read({"choice": 2.0}, FILE))
    assert [both.of(CHOICE, 2), both.of(CHOICE, 3), both.of(NOUL, 2), both.of(SCORE, 2)] == [2.0, 2.0, 6.0, 9.0]
    all_of_it = own.under(Temperatures.read({"default": 3.0, "score": 4.0}, FILE))
    assert [all_of_it.of(kind, 2) for kind in (CHOICE, NOUL, SCORE)] == [3.0, 3.0, 4.0]
    assert own.under(Temperatures()) == own


@pytest.mark.parametrize("key", ["box", "choice:", "choice:a", "choice:3-", "default:2", "choice:-3", "noul :2"])
def test_an_unknown_key_is_refused(key: str) -> None:
    with pytest.raises(LoadError, match=f"c.json: 'temperature' has the key {key!r}"):
        Temperatures.read({key: 1.0}, FILE)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1", None])
def test_a_wrong_temperature_is_refused(value: object) -> None:
    with pytest.raises(LoadError, match="a temperature must be a finite number above 0"):
        Temperatures.read({"noul": value}, FILE)  # type: ignore[dict-item]


def test_without_a_file_the_own_table_counts(tmp_path: Path) -> None:
    own = Temperatures.read({"noul": 2.0}, FILE)
    assert in_force(own, tmp_path) is own
