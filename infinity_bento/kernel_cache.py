"""Fills FlashAttention-4's kernel cache for one GPU architecture, without a GPU. Run while an image is built.

FlashAttention-4 compiles a kernel at its first use, ten seconds each; ``images.py`` runs this file as a script so that
the image's first requests find them. It imports nothing of this package: only this file is there at that point.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Multiprocessors of the card most machines of an architecture have; the kernels' scheduling depends on it.
MULTIPROCESSORS = {"sm90": 132, "sm100": 148, "sm120": 188}


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a kernel is compiled for; the precision is bfloat16."""

    head_size: int
    causal: bool
    query_heads_per_key_head: int = 1
    window: int | None = None  # tokens to each side


# Encoders attend to both sides, some of them locally; decoders are causal, and share key heads.
SHAPES = (
    KernelShape(32, causal=False),
    KernelShape(64, causal=False),
    KernelShape(64, causal=False, window=64),
    KernelShape(128, causal=False),
    KernelShape(128, causal=False, query_heads_per_key_head=2),
    KernelShape(64, causal=True, query_heads_per_key_head=2),
    KernelShape(128, causal=True, query_heads_per_key_head=2),
    KernelShape(128, causal=True, query_heads_per_key_head=4),
)


def compile_environment(architecture: str, folder: Path) -> dict[str, str]:
    """The variables that make FlashAttention-4 compile for an architecture that is not there.

    Raises:
        KeyError: If there is no such architecture.
    """
    number = architecture.removeprefix("sm")
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder),
        "FLASH_ATTENTION_ARCH": f"sm_{number}",
        "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS[architecture]),
        "CUTE_DSL_ARCH": f"sm_{number}a",
    }


def compile_kernel(shape: KernelShape) -> None:
    """Compile one kernel into the cache; the environment must be set before the first call."""
    import torch
    from flash_attn.cute import flash_attn_varlen_func
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        key_heads = 4
        heads = key_heads * shape.query_heads_per_key_head

        def tokens(count: int) -> torch.Tensor:
            return torch.empty(256, count, shape.head_size, dtype=torch.bfloat16, device="cuda")

        offsets = torch.empty(5, dtype=torch.int32, device="cuda")
        side = shape.window
        flash_attn_varlen_func(
            tokens(heads),
            tokens(key_heads),
            tokens(key_heads),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=64,
            max_seqlen_k=64,
            causal=shape.causal,
            window_size=(side, side) if side is not None else (None, None),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """``kernel_cache.py sm90 FOLDER``: compile all shapes, and say how long each took."""
    parser = argparse.ArgumentParser(description="Fill FlashAttention-4's kernel cache without a GPU.")
    parser.add_argument("architecture", choices=sorted(MULTIPROCESSORS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="compile only the first N shapes")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(compile_environment(given.architecture, given.folder))
    for shape in SHAPES[: given.shapes]:
        started = time.perf_counter()
        compile_kernel(shape)
        print(f"{given.architecture} {shape}: {time.perf_counter() - started:.1f} s", flush=True)
    files = [file for file in given.folder.rglob("*") if file.is_file()]
    if not files:
        print(f"the cache {given.folder} is empty after compiling", file=sys.stderr)
        return 1
    print(f"{len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB in {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
