"""Jina BERT v2 for code (jina-embeddings-v2-base-code): normalised queries and keys. Built by backbone.

Module names are the checkpoint's. Definition: the published remote code, "jina-bert-v2-qk-post-norm".

Shape suffixes: T packed tokens, D width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.models.jina_bert import JinaAttention, JinaConfig, JinaModel

TITLE = "Jina BERT v2 code"


class JinaCodeFeedForward(nn.Module):
    """Gated feed-forward; the second half of the projection is the gate."""

    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.config = config
        self.up_gated_layer = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_layer = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        up_TF, gate_TF = self.up_gated_layer(hidden_TD).chunk(2, dim=-1)
        return self.down_layer(up_TF * self.config.activate(gate_TF))  # type: ignore[no-any-return]


class JinaCodeLayer(nn.Module):
    """Attention and feed-forward, each with its residual and norm; attention has one of its own inside."""

    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.attention = JinaAttention(config, norm_query_key=True)
        self.layer_norm_1 = config.norm()
        self.layer_norm_2 = config.norm()
        self.mlp = JinaCodeFeedForward(config)

    def forward(self, hidden_TD: Tensor, packed: PackedBatch) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        attended_TD = self.layer_norm_1(hidden_TD + self.attention(hidden_TD, packed))
        return self.layer_norm_2(attended_TD + self.mlp(attended_TD))  # type: ignore[no-any-return]


class JinaCodeModel(JinaModel):
    """Jina BERT v2 code."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        parsed = JinaConfig.from_dict(config, TITLE)
        super().__init__(parsed, [JinaCodeLayer(parsed) for _ in range(parsed.num_hidden_layers)])
