"""Every error text of the package is a sentence: it begins with a capital or the name at fault and ends with a stop."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import infinity_bento
from infinity_bento import errors

PACKAGE = Path(infinity_bento.__file__).parent
CLASSES = {name for name, value in vars(errors).items() if isinstance(value, type)} | {"BentoMLException"}
# Names begin a sentence as they are written: a `field`, an --option, a file, or whatever a placeholder holds.
BEGINNING = re.compile(r"[A-Z`{]|--[a-z{]|[\w-]+\.(json|safetensors|yaml|txt)\b")


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every error that is made of a literal; what is worked out at run time shows as ``{}``."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.args and _name(node.func) in CLASSES:
            text = _text(node.args[0])
            if text.strip("{}"):
                yield node.lineno, text


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "{}"


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_error_texts_are_sentences(file: Path) -> None:
    wrong = [
        f"{file.name}:{line}: {text}"
        for line, text in texts(file)
        if not BEGINNING.match(text) or not text.endswith((".", "}"))
    ]
    assert not wrong, "begin with a capital or a name, and end with a full stop:\n" + "\n".join(wrong)


def test_the_walk_finds_texts_of_every_kind(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text('E = errors.LoadError("a " + "b")\nF = InvalidInput(f"`{x}` is" " y")\nG = NotReady(text)\n')
    assert list(texts(source)) == [(1, "a b"), (2, "`{}` is y")]
    assert sum(1 for file in PACKAGE.rglob("*.py") for _ in texts(file)) > 200
