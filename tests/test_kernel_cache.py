"""Filling FlashAttention-4's cache while an image is built: what it is asked to compile, and for what."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from infinity_bento.images import ARCHITECTURES, KERNEL_CACHE, ImageArguments, build_image
from infinity_bento.kernel_cache import MULTIPROCESSORS, SHAPES, compile_environment, compile_kernel, main

ROOT = Path(__file__).parent.parent


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What FlashAttention-4 is called with; it leaves a file in its cache, as the real one does."""
    made: list[dict[str, Any]] = []

    def varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **keywords: Any) -> None:
        made.append({"query": query, "key": key, "value": value, **keywords})
        folder = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
        if folder:
            (Path(folder) / f"kernel-{len(made)}.o").write_bytes(b"object code")

    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    return made


def test_every_shape_is_compiled_without_a_gpu(
    calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in compile_environment("sm90", tmp_path):
        monkeypatch.setenv(name, "")  # put back afterwards
    folder = tmp_path / "cache"
    assert main(["sm90", str(folder)]) == 0
    assert len(calls) == len(SHAPES) == len(list(folder.iterdir()))
    assert os.environ["FLASH_ATTENTION_ARCH"] == "sm_90" and os.environ["CUTE_DSL_ARCH"] == "sm_90a"
    for call, shape in zip(calls, SHAPES, strict=True):
        query, key = call["query"], call["key"]
        assert isinstance(query, FakeTensor) and query.device.type == "cuda" and query.dtype == torch.bfloat16
        assert query.shape[2] == key.shape[2] == shape.head_size
        assert query.shape[1] == key.shape[1] * shape.query_heads_per_key_head
        assert call["causal"] == shape.causal
        assert call["window_size"] == ((shape.window, shape.window) if shape.window else (None, None))
        assert call["cu_seqlens_q"].dtype == torch.int32
    assert f"{len(SHAPES)} files" in capsys.readouterr().out


def test_an_empty_cache_fails_the_build(
    calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in compile_environment("sm90", tmp_path):
        monkeypatch.setenv(name, "")
    assert main(["sm90", str(tmp_path / "empty"), "--shapes", "0"]) == 1
    compile_kernel(SHAPES[0])
    assert len(calls) == 1


def test_the_image_runs_it_as_a_script_that_needs_nothing_of_the_package(tmp_path: Path) -> None:
    ahead = [name for name, architecture in ARCHITECTURES.items() if architecture.fa4_ahead]
    assert set(ahead) <= set(MULTIPROCESSORS)
    for name in ahead:
        image = build_image(ImageArguments.read({"image": name}))
        (step,) = image.post_commands
        assert step.startswith(f"python src/infinity_bento/kernel_cache.py {name} {KERNEL_CACHE} && chown")
        assert image.build_include_paths == ["infinity_bento/kernel_cache.py"]
    alone = tmp_path / "kernel_cache.py"
    alone.write_text((ROOT / "infinity_bento" / "kernel_cache.py").read_text())
    done = subprocess.run(
        [sys.executable, str(alone), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "sm90" in done.stdout
