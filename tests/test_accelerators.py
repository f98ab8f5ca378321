"""Which image fits which GPU, and what the start says where it does not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from bentoml.exceptions import BentoMLException

from infinity_bento import accelerators, serving
from infinity_bento.accelerators import Gpu, check_image, image_for, visible_gpus
from infinity_bento.errors import ConfigError
from infinity_bento.fleet import RUN_FOLDER_VARIABLE
from infinity_bento.images import ARCHITECTURES, ImageArguments
from infinity_bento.serving import check_before_workers
from infinity_bento.settings import resolve

A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0))
A10 = Gpu("NVIDIA A10", (8, 6))
L4 = Gpu("NVIDIA L4", (8, 9))
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))
B200 = Gpu("NVIDIA B200", (10, 0))
B300 = Gpu("NVIDIA B300", (10, 3))
BLACKWELL = Gpu("NVIDIA RTX PRO 6000 Blackwell", (12, 0))
T4 = Gpu("Tesla T4", (7, 5))


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        (A100, "sm80"),
        (A10, "sm86"),
        (Gpu("Orin", (8, 7)), "sm86"),
        (L4, "sm89"),
        (H100, "sm90"),
        (B200, "sm100"),
        (B300, "sm100"),
        (BLACKWELL, "sm120"),
        (T4, None),
        (Gpu("Thor", (11, 0)), None),
    ],
)
def test_the_right_image(gpu: Gpu, name: str | None) -> None:
    image = image_for(gpu.capability)
    assert (image.name if image else None) == name
    if image is not None and gpu.capability == image.capability:
        assert check_image(image, [gpu]) is None


@pytest.mark.parametrize(
    ("name", "gpus", "parts"),
    [
        ("sm80", [L4], ("sm80 (A100", "NVIDIA L4 (compute capability 8.9)", "configs/images/sm89.yaml")),
        ("sm90", [], ("sm90 (H100", "no GPU is visible", "--gpus all", "configs/images/cpu.yaml")),
        ("cpu", [H100], ("for CPUs", "H100", "configs/images/sm90.yaml")),
        ("cpu", [T4], ("for CPUs", "Tesla T4", "no image is made for it")),
    ],
)
def test_a_notice_where_it_runs_but_another_fits_better(name: str, gpus: list[Gpu], parts: tuple[str, ...]) -> None:
    text = check_image(ARCHITECTURES[name], gpus)
    assert text is not None and all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("name", "gpu", "right"),
    [
        ("sm90", A100, "configs/images/sm80.yaml"),
        ("sm89", A10, "configs/images/sm86.yaml"),
        ("sm80", H100, "configs/images/sm90.yaml"),
        ("sm100", BLACKWELL, "configs/images/sm120.yaml"),
        ("sm80", T4, "use the cpu image"),
    ],
)
def test_a_refusal_where_it_cannot_run(name: str, gpu: Gpu, right: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_image(ARCHITECTURES[name], [gpu])
    assert right in error.value.message and gpu.name in error.value.message and name in error.value.message


def test_one_fitting_gpu_is_enough() -> None:
    assert check_image(ARCHITECTURES["sm90"], [A100, H100]) is None
    assert check_image(ARCHITECTURES["cpu"], []) is None


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "_driver_gpus", lambda: [A100, H100])
    assert visible_gpus({}) == [A100, H100]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == [H100]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1, 0,7"}) == [H100, A100]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8f0"}) == [A100, H100]


def test_the_driver_is_asked_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    closed: list[bool] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: closed.append(True))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: f"card {handle}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda handle: (9, handle))
    assert visible_gpus({}) == [Gpu("card 0", (9, 0)), Gpu("card 1", (9, 1))]
    assert closed == [True]

    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert visible_gpus({}) == []


def test_the_start_says_it_or_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))  # put back afterwards
    monkeypatch.setattr(serving, "visible_gpus", lambda: [H100])
    with caplog.at_level(logging.WARNING, logger="infinity_bento"):
        check_before_workers(resolve({}), ImageArguments.read({"image": "cpu"}))
    assert "configs/images/sm90.yaml" in caplog.text
    with pytest.raises(BentoMLException, match=r"made for sm80 .* H100 .* -f configs/images/sm90\.yaml"):
        check_before_workers(resolve({}), ImageArguments.read({"image": "sm80"}))
    # Neither a checkout nor a server that was told to use the CPU is bothered.
    caplog.clear()
    check_before_workers(resolve({}), ImageArguments.read({}))
    check_before_workers(resolve({"torch-device": "cpu"}), ImageArguments.read({"image": "sm80"}))
    assert "made for" not in caplog.text
