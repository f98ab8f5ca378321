"""JSON files of a checkpoint, read with errors that name the file and the key. Called by layout and st_modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity_bento.errors import LoadError

_MISSING = object()


def read_json(path: Path) -> Any:
    """The parsed content of a JSON file.

    Raises:
        LoadError: The file is missing, unreadable, not UTF-8 or not JSON (with line and column).
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise LoadError(f"{path} is missing; a complete checkpoint has this file, so download it again.") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read ({error.strerror}); make it a readable file.") from error
    except json.JSONDecodeError as error:
        raise LoadError(
            f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}; repair or replace the file."
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise LoadError(f"{path} is not JSON ({type(error).__name__}); repair or replace the file.") from error


def relative_path(text: str, file: Path, key: str) -> str:
    """``text`` if it names something below the checkpoint folder.

    Raises:
        LoadError: The path is absolute or climbs out with ``..``.
    """
    parts = text.replace("\\", "/").split("/")
    if text.startswith(("/", "\\")) or ".." in parts or ":" in text:
        raise LoadError(
            f"{file}: {key} is {text!r}, which leaves the checkpoint folder; use a path relative to that folder."
        )
    return text


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object and the file it stands in, with typed access to its keys."""

    file: Path
    data: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        """The object in a file.

        Raises:
            LoadError: As ``read_json``, or the top level is not an object.
        """
        data = read_json(path)
        if not isinstance(data, dict):
            raise LoadError(f"{path} holds a {type(data).__name__} where a JSON object is expected; replace the file.")
        return cls(path, data)

    @classmethod
    def read_optional(cls, path: Path) -> JsonObject:
        """As ``read``, but an absent file is an empty object."""
        return cls.read(path) if path.is_file() else cls(path, {})

    def wrong(self, key: str, expected: str) -> LoadError:
        """The error for a key whose value is not what it must be."""
        if key not in self.data:
            return LoadError(f"{self.file}: key {key!r} is missing; it must be {expected}.")
        return LoadError(f"{self.file}: {key!r} is {self.data[key]!r}; it must be {expected}.")

    def integer(self, key: str, default: Any = _MISSING, *, minimum: int = 1) -> Any:
        """A whole number of at least ``minimum``; null counts as absent where there is a default.

        Raises:
            LoadError: The value has another type or is too small, or is absent without a default.
        """
        expected = f"a whole number of at least {minimum}"
        value = self._value(key, default, expected)
        if value is not default and (type(value) is not int or value < minimum):
            raise self.wrong(key, expected)
        return value

    def boolean(self, key: str, default: bool | None) -> Any:
        """true or false, or the default where the key is absent or null.

        Raises:
            LoadError: The value is something else.
        """
        value = self._value(key, default)
        if value is not default and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def string(self, key: str, default: Any = _MISSING) -> Any:
        """A string; null counts as absent where there is a default.

        Raises:
            LoadError: The value is not a string, or is absent without a default.
        """
        value = self._value(key, default, "a string")
        if value is not default and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """One of ``allowed``.

        Raises:
            LoadError: The value is none of them.
        """
        value = self._value(key, default)
        if value not in allowed:
            raise self.wrong(key, f"one of {', '.join(allowed)}")
        return str(value)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; absent or null is empty.

        Raises:
            LoadError: The value is not a list of strings.
        """
        value = self._value(key, None)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object; absent or null is empty.

        Raises:
            LoadError: The value is not an object.
        """
        value = self._value(key, None)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return dict(value)

    def _value(self, key: str, default: Any, expected: str = "") -> Any:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.wrong(key, expected)
        return default
