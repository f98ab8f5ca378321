"""From a checkpoint's layout to its heads. Called by ``loading`` once the width of the hidden states is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from infinity_bento.checkpoints.layout import Layout
from infinity_bento.checkpoints.purpose import Purpose
from infinity_bento.checkpoints.remote_layouts import BIDIRECTIONAL_ALIASES
from infinity_bento.checkpoints.st_modules import DenseSpec, NormalizeSpec, PoolingSpec
from infinity_bento.core import Pooling
from infinity_bento.errors import LoadError
from infinity_bento.heads.classifiers import SHAPES, load_classifier, token_plan
from infinity_bento.heads.classify import ClassifierHead
from infinity_bento.heads.embedding import EmbeddingHead
from infinity_bento.heads.modules import build_modules
from infinity_bento.heads.tokens_classify import Reader, TokenClassifierHead
from infinity_bento.heads.verdict import load_verdict


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


def build_classifier_head(
    layout: Layout, purpose: Purpose, *, config: Mapping[str, Any], device: torch.device
) -> ClassifierHead:
    """The head of a sequence classifier or reranker.

    Args:
        layout: The checkpoint.
        purpose: What it is for; a classifier.
        config: Of the backbone, with the defaults of its class.
        device: Where the weights go.

    Raises:
        LoadError: If the config asks for something that the head does not do.
        WeightMismatch: If tensors of the head are missing or do not fit.
    """
    assert purpose.shape is not None and purpose.id2label is not None
    shape, labels = SHAPES[purpose.shape], len(purpose.id2label)
    network = load_classifier(lambda: shape(_head_config(layout, config), labels), layout.transformer_path, device)
    return ClassifierHead(network, purpose.activation, purpose.contrast)


def build_token_classifier_head(
    layout: Layout, purpose: Purpose, *, config: Mapping[str, Any], device: torch.device, reader: Reader
) -> TokenClassifierHead:
    """The head of a token classifier.

    Args:
        layout: The checkpoint.
        purpose: What it is for; a token classifier.
        config: Of the backbone, with the defaults of its class.
        device: Where the weights go.
        reader: The tokenizer, which knows where tokens lie in a text.

    Raises:
        WeightMismatch: If tensors of the head are missing or do not fit.
    """
    assert purpose.shape is not None and purpose.id2label is not None
    shape, labels = purpose.shape, len(purpose.id2label)
    network = load_classifier(lambda: token_plan(shape, config, labels), layout.transformer_path, device)
    return TokenClassifierHead(network, purpose.id2label, reader)


def build_verdict_head(
    layout: Layout,
    purpose: Purpose,
    *,
    config: Mapping[str, Any],
    device: torch.device,
    token_id: Callable[[str], int | None],
) -> ClassifierHead:
    """The head of a language model that is a reranker.

    Args:
        layout: The checkpoint.
        purpose: What it is for; a yes/no reranker.
        config: Of the backbone, with the defaults of its class.
        device: Where the weights go.
        token_id: The id of a word that is one token of the tokenizer, else None.

    Raises:
        LoadError: If a word of the verdict is no token.
        WeightMismatch: If the weights of the language model's output are missing.
    """
    verdict = purpose.verdict
    assert verdict is not None

    def resolved(token: int | str) -> int:
        found = token if isinstance(token, int) else token_id(token)
        if found is None:
            raise LoadError(
                f"The tokenizer of {layout.path.name} has no token {token!r}, in which this reranker answers; use the "
                "tokenizer that belongs to these weights."
            )
        return found

    ids = resolved(verdict.true), None if verdict.false is None else resolved(verdict.false)
    return ClassifierHead(load_verdict(layout.transformer_path, config, ids, device), purpose.activation)


def _head_config(layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with ``pooling`` where, and only where, the checkpoint's own code reads it."""
    full = {key: value for key, value in config.items() if key != "pooling"}
    if layout.config.get("model_type") in BIDIRECTIONAL_ALIASES:
        full |= {"pooling": layout.config.get("pooling"), "temperature": layout.config.get("temperature")}
    return full
