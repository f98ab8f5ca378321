"""The image of the Bento: what `bentoml build` writes into its Dockerfile. Used by ``service.py``."""

from __future__ import annotations

import tomllib
from pathlib import Path

import bentoml

from infinity_bento import __version__

# Inside the image, as in tests: no telemetry of ours exists, and BentoML's is off.
ENVIRONMENT = ({"name": "BENTOML_DO_NOT_TRACK", "value": "True"},)


def cpu_image() -> bentoml.images.Image:
    """A slim Debian with Python and the packages of ``pyproject.toml``; of an installed wheel, that very release.

    ``lock_python_packages`` is off: locking asks the network at build time and would write the package index it asked
    into the Bento.
    """
    image = bentoml.images.Image(
        base_image="python:3.11-slim", distro="debian", python_version="3.11", lock_python_packages=False
    )
    return image.python_packages(*requirements(Path(__file__).parent.parent / "pyproject.toml"))


def requirements(project: Path) -> list[str]:
    """What the image installs: the dependencies of a checkout's or Bento's ``pyproject.toml``, else this release."""
    if not project.is_file():
        return [f"infinity-bento=={__version__}"]
    dependencies: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
    return dependencies
