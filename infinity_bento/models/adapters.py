"""Task adapters (LoRA) chosen per sequence inside one packed batch. Installed by the backbone for Jina Embeddings v3.

All adapters of a layer are stacked: a token's low-rank activations are masked to its own adapter, so tasks may mix
in one batch and a row still depends on nothing but itself. The choice lives in the calling thread, not on modules.

Shape suffixes: T packed tokens, D width, A adapters, R rank.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.checkpoints.tensor_files import read_tensors
from infinity_bento.errors import LoadError


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of one layer: the weight becomes ``W + up @ down``, scaling included."""

    down: Tensor  # [A, R, in]
    up: Tensor  # [A, out, R]


class AdapterSwitch:
    """Which adapter each token of the running forward pass uses; one value per thread.

    Args:
        names: The adapters, in the order they are stacked.
        rank: Of each.
    """

    def __init__(self, names: Sequence[str], rank: int) -> None:
        self.names = tuple(names)
        self._rank = rank
        self._local = threading.local()

    @property
    def mask(self) -> Tensor | None:
        """``[T, A * R]``, 1 where a token's adapter is, else 0; None: no adapter at all."""
        return getattr(self._local, "mask", None)

    def index(self, name: str) -> int | None:
        """Position of an adapter; dots and underscores in names are the same. None if there is no such adapter."""
        plain = [known.replace(".", "_") for known in self.names]
        wanted = name.replace(".", "_")
        return plain.index(wanted) if wanted in plain else None

    @contextmanager
    def use(self, chosen: Sequence[str | None] | None, packed: PackedBatch, dtype: torch.dtype) -> Iterator[None]:
        """Choose an adapter (or None) for each packed sequence during a forward pass of this thread."""
        self._local.mask = None if chosen is None else self._make_mask(chosen, packed, dtype)
        try:
            yield
        finally:
            self._local.mask = None

    def _make_mask(self, chosen: Sequence[str | None], packed: PackedBatch, dtype: torch.dtype) -> Tensor | None:
        if len(chosen) != len(packed):
            raise ValueError(f"{len(chosen)} adapter names for {len(packed)} sequences. This is a bug.")
        indices = [None if name is None else self.index(name) for name in chosen]
        if any(name is not None and index is None for name, index in zip(chosen, indices, strict=True)):
            raise ValueError(f"Unknown adapter in {sorted(set(filter(None, chosen)))}. This is a bug.")
        if all(index is None for index in indices):
            return None
        rows = torch.zeros(len(chosen), len(self.names) * self._rank, dtype=dtype)
        for row, index in zip(rows, indices, strict=True):
            if index is not None:
                row[index * self._rank : (index + 1) * self._rank] = 1
        return rows.to(packed.device)[packed.sequence_ids()]


class AdaptedLinear(nn.Module):
    """A linear layer plus the chosen adapter of each token."""

    def __init__(self, base: nn.Linear, adapters: LayerAdapters, switch: AdapterSwitch) -> None:
        super().__init__()
        self.base = base
        self.switch = switch
        self.down = nn.Parameter(adapters.down.flatten(0, 1).to(base.weight), requires_grad=False)  # [A * R, in]
        self.up = nn.Parameter(adapters.up.transpose(0, 1).flatten(1).to(base.weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, T, in]`` -> ``[1, T, out]``."""
        out: Tensor = self.base(x)
        mask = self.switch.mask
        return out if mask is None else out + F.linear(F.linear(x, self.down) * mask, self.up)


class AdaptedEmbedding(nn.Module):
    """An embedding table plus the chosen adapter of each token."""

    def __init__(self, base: nn.Embedding, adapters: LayerAdapters, switch: AdapterSwitch) -> None:
        super().__init__()
        self.base = base
        self.switch = switch
        self.down = nn.Parameter(adapters.down.flatten(0, 1).t().contiguous().to(base.weight), requires_grad=False)
        self.up = nn.Parameter(adapters.up.transpose(0, 1).flatten(1).to(base.weight), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """``[1, T]`` -> ``[1, T, D]``."""
        out: Tensor = self.base(ids)
        mask = self.switch.mask
        return out if mask is None else out + F.linear(F.embedding(ids, self.down) * mask, self.up)


def load_adapters(config: Mapping[str, Any], folder: Path) -> tuple[AdapterSwitch, dict[str, LayerAdapters]] | None:
    """The task adapters of a checkpoint by transformers' layer names; None if it has none.

    Two layouts: stacked beside the weights (``lora_adaptations`` in config.json), or one PEFT folder per task.

    Raises:
        LoadError: If the files are incomplete or of a kind that is not LoRA.
    """
    if config.get("lora_adaptations"):
        return stacked_adapters(config, folder)
    return peft_adapters(folder)


def stacked_adapters(config: Mapping[str, Any], folder: Path) -> tuple[AdapterSwitch, dict[str, LayerAdapters]]:
    """Adapters stored as parametrizations of the published remote code."""
    rank = int(config["lora_rank"])
    scale = float(config.get("lora_alpha", 1)) / rank
    tensors = read_tensors(folder, wanted=lambda name: ".lora_" in name).tensors
    suffix = ".parametrizations.weight.0.lora_A"
    layers: dict[str, LayerAdapters] = {}
    for name, first in tensors.items():
        if not name.endswith(suffix):
            continue
        path = name.removesuffix(suffix)
        second = tensors[f"{path}.parametrizations.weight.0.lora_B"]
        if path.endswith("embeddings"):  # [A, V, R] and [A, R, D]
            first, second = first.transpose(1, 2), second.transpose(1, 2)
        layers.update(split_layer(native_path(path), LayerAdapters(first, second * scale)))
    if not layers:
        raise LoadError(f"{folder}: config.json names lora_adaptations, but the weights hold no adapter tensors.")
    return AdapterSwitch(list(config["lora_adaptations"]), rank), layers


RENAMES = (
    ("roberta.", ""),
    ("encoder.layers", "layers"),
    ("mixer.out_proj", "self_attn.o_proj"),
    ("mixer.Wqkv", "self_attn.qkv"),
)


def native_path(path: str) -> str:
    """The published layer name -> transformers' own; the fused projection becomes ``self_attn.qkv``."""
    for old, new in RENAMES:
        path = path.replace(old, new)
    return path


def split_layer(path: str, adapters: LayerAdapters) -> dict[str, LayerAdapters]:
    """One layer, or three where queries, keys and values were one projection."""
    if not path.endswith(".qkv"):
        return {path: adapters}
    parts = zip("qkv", adapters.up.chunk(3, dim=1), strict=True)
    return {f"{path.removesuffix('qkv')}{kind}_proj": LayerAdapters(adapters.down, up) for kind, up in parts}


def peft_adapters(folder: Path) -> tuple[AdapterSwitch, dict[str, LayerAdapters]] | None:
    """Adapters stored as PEFT folders below the checkpoint, one for each task, named after it."""
    files = sorted(folder.glob("*/adapter_config.json"))
    if not files:
        return None
    tasks: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    ranks = set()
    for file in files:
        settings = json.loads(file.read_text())
        if settings.get("peft_type") != "LORA" or settings.get("rank_pattern") or settings.get("use_dora"):
            raise LoadError(f"{file}: only plain LoRA adapters with one rank are supported.")
        rank = int(settings["r"])
        ranks.add(rank)
        scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        tasks[file.parent.name] = peft_layers(file.parent, scale)
    paths = {path for layers in tasks.values() for path in layers}
    if len(ranks) != 1 or any(paths != set(layers) for layers in tasks.values()):
        raise LoadError(f"{folder}: its adapters {', '.join(tasks)} differ in rank or layers, which is not supported.")
    stacked: dict[str, LayerAdapters] = {}
    for path in sorted(paths):
        pairs = [layers[path] for layers in tasks.values()]
        adapters = LayerAdapters(torch.stack([down for down, _ in pairs]), torch.stack([up for _, up in pairs]))
        stacked.update(split_layer(native_path(path), adapters))
    return AdapterSwitch(list(tasks), ranks.pop()), stacked


def peft_layers(folder: Path, scale: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer path -> (down ``[R, in]``, scaled up ``[out, R]``) of one PEFT folder."""
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise LoadError(f"{file} is missing beside its adapter_config.json.")
    tensors = load_file(file)
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    for name, down in tensors.items():
        for first, second in ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")):
            if name.endswith(first):
                path = name.removesuffix(first)
                layers[path.removeprefix("base_model.model.")] = (down, tensors[path + second] * scale)
    return layers


def install(model: nn.Module, switch: AdapterSwitch, layers: Mapping[str, LayerAdapters]) -> None:
    """Put adapters around a model's layers. Adapters of a pooler that was not built are left out.

    Raises:
        LoadError: If a layer does not exist, or has another shape.
    """
    for path, adapters in layers.items():
        if path.startswith("pooler."):
            continue
        parent_path, _, name = path.rpartition(".")
        try:
            parent = model.get_submodule(parent_path)
            base = getattr(parent, name)
        except AttributeError:
            raise LoadError(f"The checkpoint has an adapter for layer {path!r}, which the model lacks.") from None
        width = base.embedding_dim if isinstance(base, nn.Embedding) else base.out_features
        if adapters.up.shape[1] != width:
            raise LoadError(f"The adapter of layer {path!r} has width {adapters.up.shape[1]} instead of {width}.")
        adapted = AdaptedEmbedding if isinstance(base, nn.Embedding) else AdaptedLinear
        setattr(parent, name, adapted(base, adapters, switch))
