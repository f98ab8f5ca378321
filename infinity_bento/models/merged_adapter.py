"""A LoRA that belongs to a checkpoint's weights, added to them at load. Called by the backbone.

It lies in a folder of its own in PEFT's layout, beside weights that were not changed by it: JEV is published so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.checkpoints.tensor_files import read_file
from infinity_bento.errors import LoadError, WeightMismatch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
# What may stand before the layers of a language model in a whole model.
WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
# Settings that change what is added, with the values that leave it a plain LoRA.
PLAIN = {
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "lora_bias": (None, False),
}


@torch.no_grad()
def merge(module: nn.Module, folder: Path) -> int:
    """Add a LoRA to the linears that it was trained on.

    Args:
        module: The loaded transformer, without head.
        folder: With ``adapter_config.json`` and ``adapter_model.safetensors``.

    Returns:
        How many linears were changed.

    Raises:
        LoadError: A file is missing, or it is no plain LoRA.
        WeightMismatch: A tensor has no place, or a wrong shape.
    """
    config = JsonObject.read(folder / CONFIG_FILE)
    scale = _scale(config)
    file = folder / WEIGHTS_FILE
    pairs = dict(_pairs(read_file(file), file))
    linears = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    for path, (down, up) in pairs.items():
        linear = linears.get(_place(path, linears))
        if linear is None:
            raise WeightMismatch(
                f"{file}: the adapter of layer {path!r} has no linear in {type(module).__name__}; use the adapter that "
                "belongs to this checkpoint."
            )
        wanted = [linear.out_features, linear.in_features]
        if up.ndim != 2 or down.ndim != 2 or [up.shape[0], down.shape[1]] != wanted or up.shape[1] != down.shape[0]:
            raise WeightMismatch(
                f"{file}: the adapter of layer {path!r} has shapes {list(up.shape)} and {list(down.shape)}, which "
                f"cannot be added to a weight of {wanted}; use the adapter that belongs to this checkpoint."
            )
        weight = linear.weight
        added = up.to(weight.device, torch.float32) @ down.to(weight.device, torch.float32) * scale
        linear.weight = nn.Parameter((weight.float() + added).to(weight.dtype), requires_grad=False)
    return len(pairs)


def _scale(config: JsonObject) -> float:
    """Factor on what is added."""
    config.choice("peft_type", "", ("LORA",))
    for key, plain in PLAIN.items():
        if config.data.get(key) not in plain:
            raise config.wrong(key, "absent: only plain LoRA can be merged; merge it with PEFT instead")
    rank, alpha = config.integer("r"), config.data.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise config.wrong("lora_alpha", "a finite number")
    return float(alpha) / (math.sqrt(rank) if config.boolean("use_rslora", False) else rank)


def _pairs(tensors: dict[str, Tensor], file: Path) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Layer by layer: ``[R, in]`` and ``[out, R]``."""
    for name in tensors:
        path, kind = next(((name.removesuffix(end), end) for end in (DOWN, UP) if name.endswith(end)), (name, None))
        other = None if kind is None else path + (UP if kind == DOWN else DOWN)
        if other not in tensors:
            raise LoadError(
                f"{file}: tensor {name!r} is not one of a pair {DOWN[1:]} and {UP[1:]}; only plain LoRA of linears can "
                "be merged."
            )
        if kind == DOWN:
            yield path.removeprefix(PREFIX), (tensors[name], tensors[path + UP])


def _place(path: str, linears: dict[str, nn.Linear]) -> str:
    """The name of a layer in the bare language model, whatever it was wrapped in when the adapter was trained."""
    return next((name for name in map(path.removeprefix, WRAPPERS) if name in linears), path)
