"""Rotary embeddings whose base grows with the length, made independent of the neighbours. Installed by the backbone.

Transformers rescales by the longest sequence of a batch and keeps the result on the module. Here each token is rotated
by the length of its own sequence, read off the positions, which restart at 0 with every sequence.

Shape suffixes: T packed tokens.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from infinity_bento.errors import LoadError
from infinity_bento.models.native import dynamic_base, rotary_angles


def install(model: nn.Module, title: str) -> None:
    """Replace the forward of each rotary embedding of type "dynamic"; other types stay as they are.

    Raises:
        LoadError: If a rotary embedding switches its frequencies by length in a way that is not known here.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if kind == "dynamic":
            module.forward = types.MethodType(forward, module)
        elif kinds & {"dynamic", "longrope"}:
            raise LoadError(
                f"{title}: rope_type {kind!r} changes a row with the length of its neighbours and is not supported; "
                "use a checkpoint with another rope_type."
            )


def forward(rotary: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[1, T, size]`` for positions ``[1, T]``."""
    config = rotary.config
    parameters = config.rope_parameters
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(head_size * parameters.get("partial_rotary_factor", 1.0))
    base_T = dynamic_base(
        lengths_of(position_ids[0]),
        parameters["rope_theta"],
        size,
        parameters["factor"],
        config.max_position_embeddings,
    )
    cos, sin = rotary_angles(position_ids[0], base_T, size)
    return cos.transpose(0, 1).to(x.dtype), sin.transpose(0, 1).to(x.dtype)


def lengths_of(position_ids_T: Tensor) -> Tensor:
    """Length of the sequence each token belongs to, ``[T]``, without waiting for the device."""
    sequence_T = (position_ids_T == 0).cumsum(0) - 1
    last = torch.zeros_like(position_ids_T).scatter_reduce(0, sequence_T, position_ids_T, "amax")
    return last[sequence_T] + 1
