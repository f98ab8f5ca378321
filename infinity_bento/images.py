"""The image of the Bento: what `bentoml build` writes into its Dockerfile. Used by ``service.py``."""

from __future__ import annotations

import bentoml

# Inside the image, as in tests: no telemetry of ours exists, and BentoML's is off.
ENVIRONMENT = ({"name": "BENTOML_DO_NOT_TRACK", "value": "True"},)


def cpu_image() -> bentoml.images.Image:
    """A slim Debian with Python and the packages of ``pyproject.toml``.

    ``lock_python_packages`` is off: locking asks the network at build time and would write the package index it asked
    into the Bento.
    """
    image = bentoml.images.Image(
        base_image="python:3.11-slim", distro="debian", python_version="3.11", lock_python_packages=False
    )
    return image.pyproject_toml("pyproject.toml")
