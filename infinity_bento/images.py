"""The images of a Bento: one for CPUs and one per GPU architecture, computed from the arguments of `bentoml build`.

``configs/images/NAME.yaml`` says ``args: {image: NAME}``; ``service.py`` takes the image, its environment and the GPUs
it asks for from here. ``accelerators.py`` compares the architecture with the GPUs of the machine at start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bentoml

from infinity_bento import __version__
from infinity_bento.catalogue import configs_folder
from infinity_bento.errors import ConfigError

# Arguments of `bentoml build` and `bentoml serve` that are no options of the server.
BUILD_ARGUMENTS = ("image", "flash_attn", "front_workers")

PYTHON_IMAGE = "python:3.11-slim-bookworm"
CUDA_IMAGE = "nvidia/cuda:13.0.1-devel-ubuntu24.04"  # has nvcc; only what is compiled from source needs it
UV = "uv==0.13.4"  # the version BentoML's Dockerfile asks for
FLASH_ATTN = "flash-attn==2.8.3.post2"
GRPC_PACKAGES = ("grpcio==1.85.3", "grpcio-health-checking==1.85.1", "grpcio-reflection==1.85.1", "protobuf==7.36.2")
KERNEL_CACHE = "/home/bentoml/.cache/flash-attention"

# Without telemetry: neither BentoML's nor the hub client's. This package has none.
ENVIRONMENT = {"BENTOML_DO_NOT_TRACK": "True", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an image is for.

    ``capability`` is CUDA's compute capability, None for CPUs. ``fa4``: FlashAttention-4 has kernels of its own for
    it; ``fa4_ahead``: they also compile without a GPU, so that the image carries them.
    """

    name: str
    cards: str
    capability: tuple[int, int] | None = None
    fa4: bool = False
    fa4_ahead: bool = False

    @property
    def compute_capability(self) -> str:
        """As ``TORCH_CUDA_ARCH_LIST`` writes it: ``9.0``."""
        major, minor = self.capability or (0, 0)
        return f"{major}.{minor}"


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("cpu", "any x86-64 or Arm processor"),
        Architecture("sm80", "A100, A30", (8, 0)),
        Architecture("sm86", "A10, A40, RTX 30 series", (8, 6)),
        Architecture("sm89", "L4, L40S, RTX 40 series", (8, 9)),
        Architecture("sm90", "H100, H200, GH200", (9, 0), fa4=True, fa4_ahead=True),
        Architecture("sm100", "B200, GB200", (10, 0), fa4=True),
        Architecture("sm120", "RTX PRO 6000 Blackwell, RTX 50 series", (12, 0)),
    )
}


@dataclass(frozen=True, slots=True)
class ImageArguments:
    """What ``args:`` of a build file and ``--arg`` say about the image."""

    architecture: Architecture
    declared: bool  # False: nobody said anything, as when a checkout is served
    flash_attn: bool

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> ImageArguments:
        """The image's share of BentoML's arguments.

        Raises:
            ConfigError: If there is no such image, or an argument does not fit it.
        """
        name = str(arguments.get("image", "cpu"))
        if name not in ARCHITECTURES:
            raise ConfigError(f"--arg image is {name!r}; it must be one of {', '.join(ARCHITECTURES)}.", param="image")
        text = str(arguments.get("flash_attn", "false")).lower()
        if text not in {"true", "false"}:
            raise ConfigError(f"--arg flash_attn is {text!r}; it must be true or false.", param="flash_attn")
        architecture = ARCHITECTURES[name]
        if text == "true" and architecture.capability is None:
            raise ConfigError("--arg flash_attn is for GPUs, and image is cpu; leave it out or name a GPU image.")
        return cls(architecture, "image" in arguments, text == "true")


def build_image(given: ImageArguments, packages: Sequence[str] = ()) -> bentoml.images.Image:
    """The image that ``bentoml build`` writes down as a Dockerfile.

    Versions come from the lock files in ``configs/images``. BentoML's own locking stays off: it asks the network at
    build time, and would write the package index it asked into the Bento.

    Args:
        given: Which image.
        packages: Further Python packages, such as those that carry a model's weights.
    """
    architecture, on_gpu = given.architecture, given.architecture.capability is not None
    image = bentoml.images.Image(
        base_image=CUDA_IMAGE if given.flash_attn else PYTHON_IMAGE,
        distro="",  # BentoML would install a compiler and git everywhere; what is needed is named below
        python_version="3.11",
        lock_python_packages=False,
    )
    if given.flash_attn:
        # This base has no pip for BentoML's step that installs uv, and its distribution refuses pip outside a venv.
        image = image.run(_install("python3-pip", "ninja-build", "git"))
        image = image.run(f"pip install --no-cache-dir --break-system-packages {UV}")
    elif on_gpu:
        image = image.run(_install("gcc", "libc6-dev"))  # Triton compiles the launchers of its kernels
    if architecture.fa4_ahead:
        image = image.build_include("infinity_bento/kernel_cache.py")
    image = image.python_packages(*requirements(architecture), *packages)
    if given.flash_attn:
        image = image.run(_compile_flash_attn(architecture))
    if architecture.fa4:
        image = image.run(_fill_kernel_cache(architecture))
    return image


def _install(*packages: str) -> str:
    return (
        f"apt-get update && apt-get install -y --no-install-recommends {' '.join(packages)} && "
        "rm -rf /var/lib/apt/lists/*"
    )


def _compile_flash_attn(architecture: Architecture) -> str:
    # Each RUN is a shell of its own. flash-attn reads its own variable, other extensions TORCH_CUDA_ARCH_LIST.
    number = architecture.name.removeprefix("sm")
    flash = {"86": "80", "89": "80"}.get(number, number)
    return (
        "uv pip install setuptools wheel packaging ninja && "
        f'export TORCH_CUDA_ARCH_LIST="{architecture.compute_capability}" FLASH_ATTN_CUDA_ARCHS={flash} MAX_JOBS=8 && '
        f"uv pip install --no-build-isolation {FLASH_ATTN}"
    )


def _fill_kernel_cache(architecture: Architecture) -> str:
    own = f"chown -R bentoml:bentoml {KERNEL_CACHE.rsplit('/', 1)[0]}"
    if not architecture.fa4_ahead:  # its compiler looks for a driver: the first start fills the cache
        return f"mkdir -p {KERNEL_CACHE} && {own}"
    return f"python src/infinity_bento/kernel_cache.py {architecture.name} {KERNEL_CACHE} && {own}"


def image_environment(given: ImageArguments, *, hub_token: bool = False) -> list[dict[str, str]]:
    """The variables of the container, as BentoML's ``envs``; a variable that is set outside wins.

    ``hub_token``: the build needs ``HF_TOKEN``. It is mounted for the commands of the build and reaches no layer.
    """
    variables = dict(ENVIRONMENT)
    if given.declared:
        variables["HF_HUB_OFFLINE"] = "1"  # the weights are inside: nothing is left to ask for
        if given.architecture.capability is None:
            variables["UV_TORCH_BACKEND"] = "cpu"  # PyPI's torch would bring gigabytes of CUDA libraries
        else:
            variables["TORCH_CUDA_ARCH_LIST"] = given.architecture.compute_capability
    if given.declared and given.architecture.fa4:
        variables["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
        variables["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = KERNEL_CACHE
    secrets = [{"name": "HF_TOKEN", "stage": "build"}] if hub_token and given.declared else []
    return [*({"name": name, "value": value} for name, value in variables.items()), *secrets]


def gpu_resources(given: ImageArguments, workers: int) -> dict[str, Any]:
    """The service's ``resources``: a GPU per worker. Empty on the CPU, where BentoML wants the key left out."""
    return {} if given.architecture.capability is None else {"resources": {"gpu": workers}}


def requirements(architecture: Architecture) -> list[str]:
    """The Python packages of an image: the locked ones, and this release where an installed wheel is served."""
    names = ["requirements.txt"]
    if architecture.capability is not None:
        names.append("requirements-cuda.txt")
    if architecture.fa4:
        names.append("requirements-fa4.txt")
    lines = [line for name in names for line in (configs_folder() / "images" / name).read_text().splitlines()]
    locked = [line for line in lines if line and not line.startswith("#")]
    installed = not (Path(__file__).parent.parent / "pyproject.toml").is_file()
    return [*locked, f"infinity-bento=={__version__}"] if installed else locked
