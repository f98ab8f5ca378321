"""The head of late-interaction models: a projection of every token, of unit length. Built by ``loading``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from infinity_bento.checkpoints.families import PATCHES, Family
from infinity_bento.checkpoints.late_interaction import LateInteraction
from infinity_bento.checkpoints.layout import Layout
from infinity_bento.checkpoints.st_modules import (
    SENTENCE,
    DenseSpec,
    ModuleSpec,
    MultiVectorMaskSpec,
    NormalizeSpec,
)
from infinity_bento.checkpoints.tensor_files import read_tensors, refuse_non_finite
from infinity_bento.errors import LoadError, WeightMismatch
from infinity_bento.heads.modules import build_modules
from infinity_bento.heads.token_embeddings import TokenEmbeddingHead

PROJECTION = "linear.weight"
# Their layers mix tokens in ways that tokens which only ask cannot be kept out of.
NO_UNATTENDED_TOKENS = (f"{PATCHES}.deberta", f"{PATCHES}.deltanet")


def build_late_interaction_head(
    layout: Layout, late: LateInteraction, family: Family, *, hidden_size: int, device: torch.device
) -> TokenEmbeddingHead:
    """The head of a late-interaction checkpoint.

    Args:
        layout: The checkpoint.
        late: Its rules.
        family: Of its transformer.
        hidden_size: Width of the backbone's hidden states.
        device: Where the projection goes.

    Raises:
        LoadError: A module cannot be part of a late-interaction model, or the family cannot run its query expansion.
        WeightMismatch: The projection is missing or has a wrong shape.
    """
    expansion = late.expansion
    if expansion is not None and not expansion.attend and family.patch in NO_UNATTENDED_TOKENS:
        raise LoadError(
            f"{family.title} cannot run a query expansion that other tokens do not attend to; only checkpoints with "
            "attend_to_expansion_tokens true can be served."
        )
    if late.stanford:
        linear = _stanford_projection(layout, hidden_size, device)
        return TokenEmbeddingHead(linear.out_features, modules=[linear], normalize=True)
    specs = [_on_tokens(spec, layout) for spec in layout.modules if not isinstance(spec, MultiVectorMaskSpec)]
    normalize = late.normalize
    while specs and isinstance(specs[-1], NormalizeSpec):
        specs.pop()
        normalize = True
    widths = _widths(specs, hidden_size, layout)
    return TokenEmbeddingHead(widths[-1], modules=build_modules(specs, device), normalize=normalize)


def _on_tokens(spec: ModuleSpec, layout: Layout) -> DenseSpec | NormalizeSpec:
    """A module that runs on the rows of tokens; configurations from before there was a choice do not say so."""
    if not isinstance(spec, DenseSpec | NormalizeSpec):
        raise LoadError(
            f"{layout.path / 'modules.json'}: a {type(spec).__name__.removesuffix('Spec')} module cannot be part of a "
            "late-interaction model; only Dense, MultiVectorMask and Normalize can."
        )
    return replace(spec, input_name=SENTENCE, output_name=SENTENCE)


def _widths(specs: Sequence[DenseSpec | NormalizeSpec], hidden_size: int, layout: Layout) -> list[int]:
    """Width of the rows before the first module and after each Dense."""
    widths = [hidden_size]
    for spec in specs:
        if isinstance(spec, DenseSpec):
            if spec.in_features != widths[-1]:
                raise LoadError(
                    f"{spec.path / 'config.json'}: 'in_features' is {spec.in_features}, but the rows before it have "
                    f"width {widths[-1]}; the two must be equal."
                )
            widths.append(spec.out_features)
    return widths


def _stanford_projection(layout: Layout, hidden_size: int, device: torch.device) -> nn.Linear:
    """``linear.weight`` of the encoder's own weight file, in float32."""
    read = read_tensors(layout.transformer_path, device=device, wanted=PROJECTION.__eq__)
    refuse_non_finite(read)
    weight = read.tensors.get(PROJECTION)
    if weight is None or weight.ndim != 2 or weight.shape[1] != hidden_size:
        found = "missing" if weight is None else f"of shape {list(weight.shape)}"
        raise WeightMismatch(
            f"{read.files[0]}: tensor {PROJECTION!r} is {found}; a ColBERT checkpoint has one of shape "
            f"[dimensions, {hidden_size}]."
        )
    linear = nn.Linear(hidden_size, weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.float(), requires_grad=False)
    return linear.eval()
