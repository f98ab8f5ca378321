"""Compares the GPUs of this machine with what the Bento's image was built for. Called in the supervisor, at start.

Reads the driver's own library (NVML): no torch, no CUDA context, and nothing where there is no NVIDIA driver.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity_bento.errors import ConfigError
from infinity_bento.images import ARCHITECTURES, Architecture

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver sees it."""

    name: str
    capability: Capability


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that CUDA would use, in its order; empty without an NVIDIA driver."""
    gpus = _driver_gpus()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    numbers = [part.strip() for part in chosen.split(",") if part.strip()]
    if not all(number.isdigit() for number in numbers):  # named by UUID: any of them
        return gpus
    return [gpus[int(number)] for number in numbers if int(number) < len(gpus)]


def _driver_gpus() -> list[Gpu]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            Gpu(str(pynvml.nvmlDeviceGetName(handle)), tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)))
            for handle in handles
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def image_for(capability: Capability) -> Architecture | None:
    """The image whose code runs on a GPU: the newest one of the same generation; None if the GPU is too old."""
    fitting = [
        architecture
        for architecture in ARCHITECTURES.values()
        if architecture.capability is not None
        and architecture.capability[0] == capability[0]
        and architecture.capability <= capability
    ]
    return max(fitting, key=lambda architecture: architecture.capability or (0, 0), default=None)


def check_image(image: Architecture, gpus: Sequence[Gpu]) -> str | None:
    """What should be known about this image on these GPUs.

    Code for one compute capability also runs on higher ones of the same generation: ``sm80`` on 8.6 and 8.9.

    Returns:
        One sentence that names the right image; None where the image fits.

    Raises:
        ConfigError: If the image's code runs on none of the GPUs.
    """
    if image.capability is None:
        if not gpus:
            return None
        right = image_for(gpus[0].capability)
        advice = f"build it with -f {_file(right)}" if right else "no image is made for it"
        return f"this Bento is made for CPUs, and this machine has {_described(gpus[0])}; to use it, {advice}."
    if not gpus:
        return (
            f"this Bento is made for {image.name} ({image.cards}), and no GPU is visible: it runs on the CPU; give the "
            "container its GPU (docker run --gpus all), or build with -f configs/images/cpu.yaml, which is smaller."
        )
    exact = [gpu for gpu in gpus if gpu.capability == image.capability]
    if exact:
        return None
    gpu = gpus[0]
    right = image_for(gpu.capability)
    remedy = f"build with -f {_file(right)}" if right else "this GPU is older than every image: use the cpu image"
    text = f"this Bento is made for {image.name} ({image.cards}), and this machine has {_described(gpu)}; {remedy}."
    if not any(_runs_on(image.capability, gpu.capability) for gpu in gpus):
        raise ConfigError(text, param="image")
    return text


def _runs_on(built_for: Capability, capability: Capability) -> bool:
    return built_for[0] == capability[0] and built_for <= capability


def _described(gpu: Gpu) -> str:
    return f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"


def _file(architecture: Architecture) -> str:
    return f"configs/images/{architecture.name}.yaml"
