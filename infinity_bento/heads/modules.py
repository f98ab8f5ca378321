"""The sentence-transformers modules that follow pooling, on pooled rows; and the static embedding model.

Built by the dense head from ``Layout.modules``. Everything runs in float32, whatever the backbone's dtype.

Shape suffixes: T packed tokens, B rows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity_bento.checkpoints.st_modules import (
    DenseSpec,
    LayerNormSpec,
    ModuleSpec,
    NormalizeSpec,
    StaticEmbeddingSpec,
)
from infinity_bento.checkpoints.tensor_files import read_tensors, refuse_non_finite
from infinity_bento.checkpoints.weights import load_module
from infinity_bento.errors import LoadError, WeightMismatch


class Dense(nn.Module):
    """``activation(W x + b)``, plus ``x`` or ``W_r x``."""

    def __init__(self, spec: DenseSpec) -> None:
        super().__init__()
        self.linear = nn.Linear(spec.in_features, spec.out_features, bias=spec.bias)
        self.activation: nn.Module = getattr(nn, spec.activation)()
        self.residual: nn.Module | None = None
        if spec.residual:
            same = spec.in_features == spec.out_features
            self.residual = nn.Identity() if same else nn.Linear(spec.in_features, spec.out_features, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """``[B, in_features]`` to ``[B, out_features]``."""
        out: Tensor = self.activation(self.linear(rows))
        return out if self.residual is None else out + self.residual(rows)


class LayerNorm(nn.Module):
    """Layer normalization with learned scale and shift."""

    def __init__(self, spec: LayerNormSpec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(spec.dimension)

    def forward(self, rows: Tensor) -> Tensor:
        """``[B, D]`` to ``[B, D]``."""
        out: Tensor = self.norm(rows)
        return out


class Normalize(nn.Module):
    """Unit length; a row shorter than 1e-12 is divided by 1e-12."""

    def forward(self, rows: Tensor) -> Tensor:
        """``[B, D]`` to ``[B, D]``."""
        return F.normalize(rows, p=2.0, dim=-1, eps=1e-12)


class StaticEmbedding(nn.Module):
    """The mean of the token vectors of each text: no transformer, no special tokens, no length limit.

    Args:
        weight_VD: One vector per token id, ``[V, D]``, any float dtype.
    """

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VD.float(), requires_grad=False)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> StaticEmbedding:
        """The model in a folder, in the layout of sentence-transformers or model2vec.

        Raises:
            LoadError: Weights are missing or corrupt.
            WeightMismatch: There is no matrix of token vectors, or it holds NaN or Inf.
        """
        read = read_tensors(folder, device=device)
        refuse_non_finite(read)
        tensors = read.tensors
        weight = tensors.get("embedding.weight")
        if weight is None:
            weight = _fold(tensors.get("embeddings"), tensors.get("mapping"), tensors.get("weights"))
        if weight is None or weight.ndim != 2:
            raise WeightMismatch(
                f"{read.files[0]}: there is no tensor 'embedding.weight' or 'embeddings' of two dimensions; a "
                "StaticEmbedding module needs one."
            )
        return cls(weight)

    @property
    def dimension(self) -> int:
        """Width of a vector."""
        return self.weight.shape[1]

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """The mean vector of each sequence.

        Args:
            input_ids: ``[T]``, token ids of all sequences.
            cu_seqlens: Boundaries, ``[B + 1]``.

        Returns:
            ``[B, D]`` float32; zero for a sequence without tokens.
        """
        return F.embedding_bag(input_ids.long(), self.weight, cu_seqlens[:-1].long(), mode="mean")


def build_modules(specs: Sequence[ModuleSpec], device: torch.device | str = "cpu") -> list[nn.Module]:
    """The modules after pooling, ready to run in order on ``[B, D]`` float32 rows.

    Args:
        specs: ``Layout.modules`` from behind the Pooling module.
        device: Where the weights go.

    Raises:
        LoadError: A module cannot run on pooled rows, or its weights cannot be loaded.
    """
    return [_build(spec, device) for spec in specs]


def _build(spec: ModuleSpec, device: torch.device | str) -> nn.Module:
    if isinstance(spec, DenseSpec):
        _on_rows(spec, "Dense")
        return load_module(lambda: Dense(spec), spec.path, device=device)[0]
    if isinstance(spec, LayerNormSpec):
        return load_module(lambda: LayerNorm(spec), spec.path, device=device)[0]
    if isinstance(spec, NormalizeSpec):
        _on_rows(spec, "Normalize")
        return Normalize().eval()
    name = type(spec).__name__.removesuffix("Spec")
    extra = "; load it with StaticEmbedding.load" if isinstance(spec, StaticEmbeddingSpec) else ""
    raise LoadError(
        f"modules.json: a {name} module cannot follow pooling; only Dense, LayerNorm and Normalize can{extra}."
    )


def _on_rows(spec: DenseSpec | NormalizeSpec, name: str) -> None:
    for key, value in (("module_input_name", spec.input_name), ("module_output_name", spec.output_name)):
        if value != "sentence_embedding":
            where = spec.path / "config.json" if isinstance(spec, DenseSpec) else "modules.json"
            raise LoadError(
                f"{where}: {key!r} of {name} is {value!r}, but the module follows pooling; only 'sentence_embedding' "
                "can be used there."
            )


def _fold(embeddings: Tensor | None, mapping: Tensor | None, weights: Tensor | None) -> Tensor | None:
    """model2vec stores one vector per group of tokens, and a weight per token."""
    if embeddings is None:
        return None
    if mapping is not None:
        embeddings = embeddings[mapping.long()]
    if weights is not None:
        embeddings = embeddings.float() * weights.float()[:, None]
    return embeddings.contiguous()
