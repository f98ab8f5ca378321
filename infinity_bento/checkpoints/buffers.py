"""Values for buffers that no checkpoint stores (positions, rotary frequencies). Called by weights, after its build."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infinity_bento.errors import LoadError


def compute_buffers(module: nn.Module, device: torch.device) -> None:
    """Replace buffers on meta by computed ones on ``device``.

    A class of transformers computes them in ``_init_weights``; any other class that owns such a buffer has a method
    ``reset_buffers()`` that fills it in place.

    Raises:
        LoadError: A buffer keeps no value, because its class does not compute it.
    """
    owners: list[tuple[str, nn.Module, Any]] = []
    _collect(module, "", None, owners)
    for name, part, model in owners:
        # The mark keeps _init_weights off what was loaded.
        for tensor in (*part.parameters(), *part.buffers()):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        keys = [key for key, buffer in part._buffers.items() if buffer is not None and buffer.is_meta]
        for key in keys:
            old = part.get_buffer(key)
            part._buffers[key] = torch.full_like(old, _unset(old.dtype), device=device)
        with torch.no_grad():
            reset: Any = getattr(part, "reset_buffers", None)
            if reset is not None:
                reset()
            elif model is not None:
                model._init_weights(part)
        _refuse_unset(name, part, keys)


def tensors_on_meta(module: nn.Module) -> list[str]:
    """Names of parameters, buffers and plain tensor attributes without a value."""
    found = []
    for path, part in module.named_modules():
        for table in (part._parameters, part._buffers, vars(part)):
            found += [f"{path}.{key}" for key, value in table.items() if isinstance(value, Tensor) and value.is_meta]
    return found


def _collect(part: nn.Module, path: str, model: Any, owners: list[tuple[str, nn.Module, Any]]) -> None:
    """Modules that own buffers on meta, each with the nearest transformers model around it."""
    model = part if hasattr(type(part), "_init_weights") else model
    if any(buffer is not None and buffer.is_meta for buffer in part._buffers.values()):
        owners.append((path or type(part).__name__, part, model))
    for key, child in part._modules.items():
        if child is not None:
            _collect(child, f"{path}.{key}" if path else key, model, owners)


def _unset(dtype: torch.dtype) -> float | int | bool:
    """A value no class computes, to see whether it was replaced. bool has none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _refuse_unset(name: str, part: nn.Module, keys: list[str]) -> None:
    for key in keys:
        buffer = part.get_buffer(key)
        if buffer.dtype == torch.bool or not buffer.numel():
            continue
        mark = _unset(buffer.dtype)
        unset = buffer.isnan() if mark != mark else buffer == mark
        if bool(unset.any()):
            raise LoadError(
                f"Buffer {key!r} of {name} ({type(part).__name__}) is stored in no checkpoint and the class does not "
                "compute it; give the class a reset_buffers() method."
            )
