"""Layers point down (docs/architecture.md): who may import whom, read from the source and checked at run time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "infinity_bento"
FORBIDDEN = {
    "api": {"torch", "transformers", "infinity_bento.runners", "infinity_bento.models", "infinity_bento.heads"},
    "grpc_api": {
        "torch",
        "transformers",
        "bentoml",
        "infinity_bento.runners",
        "infinity_bento.models",
        "infinity_bento.heads",
    },
    "runners": {"bentoml", "starlette", "infinity_bento.api"},
    "heads": {"bentoml", "starlette", "infinity_bento.api", "infinity_bento.models", "infinity_bento.runners"},
    "models": {"bentoml", "starlette", "infinity_bento.api", "infinity_bento.heads", "infinity_bento.runners"},
    "attention": {"bentoml", "starlette", "infinity_bento.api", "infinity_bento.models", "infinity_bento.heads"},
    "checkpoints": {"starlette", "infinity_bento.api", "infinity_bento.models", "infinity_bento.heads"},
    "batching": {"bentoml", "starlette", "infinity_bento.api", "infinity_bento.models", "infinity_bento.heads"},
    "inputs": {"bentoml", "starlette", "infinity_bento.api", "infinity_bento.models", "infinity_bento.heads"},
}


def imports_of(file: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_no_layer_imports_what_lies_above_it(layer: str) -> None:
    files = list((PACKAGE / layer).rglob("*.py"))
    assert files
    for file in files:
        for module in imports_of(file):
            for forbidden in FORBIDDEN[layer]:
                bad = module == forbidden or module.startswith(forbidden + ".")
                # The model store is BentoML's; the resolver asks it inside a function.
                assert not bad or (layer == "checkpoints" and file.name == "resolve.py"), f"{file.name}: {module}"


@pytest.mark.parametrize(
    "module", ["infinity_bento.api.app", "infinity_bento.settings", "infinity_bento.checkpoints.preflight", "service"]
)
def test_what_the_supervisor_imports_is_free_of_torch(module: str) -> None:
    code = f"import sys, {module}; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
