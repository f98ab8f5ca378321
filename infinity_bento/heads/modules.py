"""The sentence-transformers modules that follow pooling, on pooled rows; and the static embedding model.

Built by the dense head from ``Layout.modules``. Everything runs in float32, whatever the backbone's dtype.

Shape suffixes: T packed tokens, B rows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from infinity_bento.checkpoints.weights import load_module
from infinity_bento.errors import LoadError


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
