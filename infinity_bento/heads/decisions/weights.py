"""Weights of the small networks that decision families put behind the backbone. Called by their protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from infinity_bento.checkpoints.tensor_names import wrong_shape
from infinity_bento.errors import WeightMismatch

Network = TypeVar("Network", bound=nn.Module)


def fill(
    build: Callable[[], Network], tensors: Mapping[str, Tensor], file: Path, device: torch.device | str
) -> Network:
    """A network with exactly these weights, in float32 and eval mode.

    Args:
        build: Makes the network; runs on the meta device.
        tensors: By the names of the network's parameters.
        file: Where they come from, for errors.
        device: Where they go.

    Raises:
        WeightMismatch: A tensor is missing, left over, of a wrong shape or quantized.
    """
    with torch.device("meta"):
        network = build()
    expected = dict(network.named_parameters())
    for name, parameter in expected.items():
        if name not in tensors:
            raise WeightMismatch(f"{file}: tensor {name!r} of the decision head is missing; use a complete checkpoint.")
        tensor = tensors[name]
        if tensor.shape != parameter.shape:
            raise wrong_shape(str(file), name, list(tensor.shape), list(parameter.shape), 0)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise WeightMismatch(
                f"{file}: tensor {name!r} is stored as {str(tensor.dtype).removeprefix('torch.')}; quantized heads are "
                "not supported, so use the float16, bfloat16 or float32 weights."
            )
    left = sorted(set(tensors) - set(expected))
    if left:
        raise WeightMismatch(
            f"{file}: tensor {left[0]!r} has no place in the decision head that the config describes; use the config "
            "that belongs to these weights."
        )
    network.load_state_dict({name: tensors[name].to(device, torch.float32) for name in expected}, assign=True)
    return network.requires_grad_(False).eval()
