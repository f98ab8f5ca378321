"""Weight files of a folder as named tensors: safetensors, or pickles through ``weights_only``. Called by weights.

Tensors on the CPU are views of the mapped file: nothing is copied, and processes on one machine share the pages.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infinity_bento.checkpoints.json_files import JsonObject, relative_path
from infinity_bento.errors import LoadError, WeightMismatch

# Preferred first.
_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """What the weight files of a folder hold."""

    files: tuple[Path, ...]
    tensors: dict[str, Tensor]
    origin: dict[str, Path]  # tensor name -> its file


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The weight files of a folder: one file, or the shards of an index.

    Raises:
        LoadError: There are none, or the index is malformed or names a file that is not there.
    """
    for name in _NAMES:
        path = folder / name
        if path.is_file():
            return _shards(path) if name.endswith(".index.json") else (path,)
    raise LoadError(f"{folder} has no weights; put one of {', '.join(_NAMES)} there.")


def read_tensors(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    wanted: Callable[[str], bool] | None = None,
) -> TensorFiles:
    """Read the weights of a folder. ``refuse_non_finite`` is a second step, for callers to overlap with other work.

    Args:
        folder: Where the weight files lie.
        device: Where the tensors go.
        wanted: Picks tensors by name as stored; None reads all.

    Raises:
        LoadError: No weights, a missing shard, a truncated or corrupt file, or pickled objects other than tensors.
        WeightMismatch: A tensor stands in two files.
    """
    files = find_weight_files(folder)
    tensors: dict[str, Tensor] = {}
    origin: dict[str, Path] = {}
    for file in files:
        read = _read_safetensors if file.suffix == ".safetensors" else _read_pickle
        for name, tensor in read(file, torch.device(device), wanted).items():
            if name in tensors:
                raise WeightMismatch(f"{file}: tensor {name!r} also stands in {origin[name]}; keep one of the two.")
            tensors[name] = tensor
            origin[name] = file
    return TensorFiles(files, tensors, origin)


def read_file(file: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file, on the CPU.

    Raises:
        LoadError: The file is missing or corrupt.
        WeightMismatch: A tensor is not finite.
    """
    if not file.is_file():
        raise LoadError(f"{file} is missing; a complete checkpoint has this file, so download it again.")
    tensors = _read_safetensors(file, torch.device("cpu"), None)
    refuse_non_finite(TensorFiles((file,), tensors, dict.fromkeys(tensors, file)))
    return tensors


def refuse_non_finite(read: TensorFiles) -> None:
    """Refuse weights that are NaN or infinite, at the price of one pass over them.

    Raises:
        WeightMismatch: A tensor holds such a value; names the tensor and its file.
    """
    names = [name for name, t in read.tensors.items() if t.is_floating_point() and t.element_size() > 1]
    if not names:
        return
    # One call for all, so that it runs without the GIL. A norm is not finite if any term is not; it may also overflow,
    # hence the second look.
    norms = torch.stack([norm.float() for norm in torch._foreach_norm([read.tensors[name] for name in names], 2)])
    for number in (~torch.isfinite(norms)).nonzero().flatten().tolist():
        values = read.tensors[names[number]]
        bad = values.numel() - int(torch.isfinite(values).sum())
        if bad:
            raise WeightMismatch(
                f"{read.origin[names[number]]}: tensor {names[number]!r} holds {bad} values that are NaN or infinite; "
                "the weights are damaged, so use another copy or revision."
            )


def _shards(index: Path) -> tuple[Path, ...]:
    entries = JsonObject(index, JsonObject.read(index).mapping("weight_map"))
    if not entries.data:
        raise LoadError(f"{index}: 'weight_map' is missing or empty; it must name a file for each tensor.")
    names = sorted(
        {relative_path(entries.string(tensor), index, f"'weight_map' {tensor!r}") for tensor in entries.data}
    )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise LoadError(
            f"{index}: {len(missing)} of {len(names)} weight files are missing, first {missing[0]}; download the "
            "checkpoint again."
        )
    return tuple(index.parent / name for name in names)


def _read_safetensors(file: Path, device: torch.device, wanted: Callable[[str], bool] | None) -> dict[str, Tensor]:
    try:
        # Opening validates the whole header: types, shapes, offsets, file size.
        with safe_open(file, framework="pt", device=str(device)) as opened:
            names = [name for name in opened.keys() if wanted is None or wanted(name)]  # noqa: SIM118
            views = _views(file, names) if device.type == "cpu" else None
            return views or {name: opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise LoadError(f"{file} is truncated or corrupt ({error}); download the file again.") from error
    except OSError as error:
        raise LoadError(f"{file} cannot be read ({error}); make it a readable file.") from error


def _views(file: Path, names: list[str]) -> dict[str, Tensor] | None:
    """Tensors as views of one mapping, five times faster than one by one; None if the file has a rare type."""
    with file.open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(start - 8))
    storage: Any = torch.UntypedStorage.from_file(str(file), False, file.stat().st_size)
    views = {}
    for name in names:
        entry = header[name]
        dtype, offset, shape = _DTYPES.get(entry["dtype"]), start + entry["data_offsets"][0], entry["shape"]
        if dtype is None or offset % dtype.itemsize:
            return None
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        views[name] = torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, strides)
    return views


def _read_pickle(file: Path, device: torch.device, wanted: Callable[[str], bool] | None) -> dict[str, Tensor]:
    try:
        state = _torch_load(file)
    except pickle.UnpicklingError as error:
        raise LoadError(
            f"{file} is corrupt or holds pickled objects other than tensors, which are never executed; convert it to "
            "model.safetensors on a machine that trusts it."
        ) from error
    except (RuntimeError, ValueError, OSError, EOFError) as error:
        line = str(error).strip().splitlines()
        raise LoadError(
            f"{file} is truncated or corrupt ({line[0] if line else type(error).__name__}); download the file again."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise LoadError(f"{file} does not hold a dictionary of named tensors; save the model's state_dict there.")
    return {name: t.to(device) for name, t in state.items() if wanted is None or wanted(name)}


def _torch_load(file: Path) -> object:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        return torch.load(file, map_location="cpu", weights_only=True)  # the format before torch 1.6
