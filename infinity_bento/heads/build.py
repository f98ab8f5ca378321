"""From a checkpoint's layout to its heads. Called by ``loading`` once the width of the hidden states is known."""

from __future__ import annotations

import torch

from infinity_bento.checkpoints.layout import Layout
from infinity_bento.checkpoints.st_modules import DenseSpec, NormalizeSpec, PoolingSpec
from infinity_bento.core import Pooling
from infinity_bento.heads.embedding import EmbeddingHead
from infinity_bento.heads.modules import build_modules


def prompt_excluded(layout: Layout) -> bool:
    """Whether pooling leaves the prompt's tokens out."""
    return layout.pooling is not None and not layout.pooling.include_prompt


def build_embedding_head(
    layout: Layout,
    *,
    hidden_size: int,
    device: torch.device,
    default_pooling: Pooling,
    override: Pooling | None = None,
) -> EmbeddingHead:
    """The dense head of a checkpoint.

    Args:
        layout: The checkpoint.
        hidden_size: Width of the backbone's hidden states.
        device: Where Dense and LayerNorm weights go.
        default_pooling: Of the family; used where the checkpoint has no Pooling module.
        override: The option ``pooling``, already found possible for the family.

    Raises:
        LoadError: If a module cannot be part of a dense embedding model.
    """
    spec = layout.pooling or PoolingSpec((default_pooling,))
    poolings = spec.modes if override is None else (override,)
    after = [module for module in layout.modules if not isinstance(module, PoolingSpec)]
    # A closing Normalize is a default that each request may overrule; elsewhere it is a module like the others.
    normalize = bool(after) and isinstance(after[-1], NormalizeSpec)
    if normalize:
        after.pop()
    widths = [module.out_features for module in after if isinstance(module, DenseSpec)]
    return EmbeddingHead(
        poolings,
        dimensions=widths[-1] if widths else hidden_size * len(poolings),
        include_prompt=spec.include_prompt,
        modules=build_modules(after, device),
        normalize=normalize,
        truncate_dim=layout.truncate_dim,
    )
