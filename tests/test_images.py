from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bento(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU Bento, built into a store of its own; its folder."""
    environment = {**os.environ, "BENTOML_HOME": str(tmp_path_factory.mktemp("store"))}
    command = [sys.executable, "-m", "bentoml", "build", "--output", "tag"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (Path(environment["BENTOML_HOME"]) / "bentos" / "infinity-bento").glob("*/bento.yaml")
    return folder.parent


def test_the_dockerfile_installs_what_the_project_names(bento: Path) -> None:
    dockerfile = (bento / "env/docker/Dockerfile").read_text()
    assert "FROM python:3.11-slim" in dockerfile
    assert "BENTOML_DO_NOT_TRACK" in dockerfile
    requirements = (bento / "env/python/requirements.txt").read_text()
    assert "transformers>=5.17,<6" in requirements
    assert "uvloop" in requirements
    assert "http://" not in requirements
    assert "https://" not in requirements


def test_the_bento_carries_the_service_and_the_presets_and_nothing_else(bento: Path) -> None:
    source = bento / "src"
    assert (source / "service.py").is_file()
    assert (source / "configs/bge-small-en-v1.5.yaml").is_file()
    for absent in ("tests", "benchmarks", ".venv", ".git", "docs"):
        assert not (source / absent).exists()


def test_an_installed_package_without_a_checkout_imports_its_service(tmp_path: Path) -> None:
    package = tmp_path / "site" / "infinity_bento"
    shutil.copytree(ROOT / "infinity_bento", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "service.py", package / "service.py")
    code = "import infinity_bento.service as s; print(s.InfinityBento.name, s.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(package) in done.stdout
