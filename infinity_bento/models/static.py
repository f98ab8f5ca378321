"""Models without a transformer: static token embeddings, and learned sparse models whose queries are a table look-up.

Both fit where the runner expects a backbone.

Shape suffixes: T packed tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.checkpoints.tensor_files import read_tensors, refuse_non_finite
from infinity_bento.errors import WeightMismatch
from infinity_bento.models.backbone import Backbone, SelfCheck


class StaticBackbone:
    """A table of token vectors; the hidden state of a token is its row, whatever stands beside it.

    Args:
        weight_VD: One vector per token id, ``[V, D]``, any float dtype.
    """

    position_offset = 0
    causal = False
    adapters: tuple[str, ...] = ()
    attention_name = "none"

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD.float()
        self.config: dict[str, Any] = {"vocab_size": weight_VD.shape[0], "hidden_size": weight_VD.shape[1]}

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> StaticBackbone:
        """The table in a folder, in the layout of sentence-transformers or model2vec.

        Raises:
            LoadError: Weights are missing or corrupt.
            WeightMismatch: There is no matrix of token vectors, or it holds NaN or Inf.
        """
        read = read_tensors(folder, device=device)
        refuse_non_finite(read)
        weight = read.tensors.get("embedding.weight")
        if weight is None:
            weight = _fold(*(read.tensors.get(name) for name in ("embeddings", "mapping", "weights")))
        if weight is None or weight.ndim != 2:
            raise WeightMismatch(
                f"{read.files[0]}: there is no tensor 'embedding.weight' or 'embeddings' of two dimensions; a "
                "StaticEmbedding module needs one."
            )
        return cls(weight)

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return self.weight_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Always float32: the table costs no arithmetic."""
        return self.weight_VD.dtype

    @property
    def hidden_size(self) -> int:
        """Width of a vector, D."""
        return int(self.weight_VD.shape[1])

    @property
    def vocabulary_size(self) -> int:
        """Token ids there are, V."""
        return int(self.weight_VD.shape[0])

    def adapter_for(self, prompt_name: str | None) -> str | None:
        """There are no adapters."""
        return None

    def forward(self, batch: PackedBatch, *, adapters: Sequence[str | None] | None = None) -> Tensor:
        """The vectors of all tokens, ``[T, D]`` float32; ``adapters`` are none."""
        return F.embedding(batch.input_ids, self.weight_VD)

    def self_check(self) -> SelfCheck:
        """Nothing to prove: a look-up cannot mix sequences."""
        return SelfCheck(self.attention_name, 0, 0.0, 0.0)


class RoutedBackbone:
    """Runs the transformer on documents only; queries are answered by the head, from a table.

    Args:
        documents: The transformer.
    """

    def __init__(self, documents: Backbone) -> None:
        self.documents = documents
        self.module = documents.module
        self.position_offset = documents.position_offset
        self.causal = False  # learned sparse vectors come from encoders
        self.device = documents.device
        self.dtype = documents.dtype
        self.config = documents.config
        self.hidden_size = documents.hidden_size
        self.attention_name = documents.attention_name
        self.adapters = documents.adapters

    def adapter_for(self, prompt_name: str | None) -> str | None:
        """As the transformer's."""
        return self.documents.adapter_for(prompt_name)

    def forward(self, batch: PackedBatch, *, adapters: Sequence[str | None] | None = None) -> Tensor:
        """Hidden states of ``batch.without_static()``, ``[T', D]``; no rows where that is empty."""
        part = batch.without_static()
        if not len(part):
            return torch.empty((0, self.hidden_size), dtype=self.dtype, device=self.device)
        return self.documents.forward(part, adapters=None if adapters is None else adapters[: len(part)])

    def self_check(self) -> SelfCheck:
        """As the transformer's."""
        return self.documents.self_check()


def _fold(embeddings: Tensor | None, mapping: Tensor | None, weights: Tensor | None) -> Tensor | None:
    """model2vec stores one vector per group of tokens, and a weight per token."""
    if embeddings is None:
        return None
    if mapping is not None:
        embeddings = embeddings[mapping.long()]
    if weights is not None:
        embeddings = embeddings.float() * weights.float()[:, None]
    return embeddings.contiguous()
