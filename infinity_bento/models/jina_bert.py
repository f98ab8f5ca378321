"""Jina BERT v2 (jina-embeddings-v2-*, jina-reranker-v1-*): BERT with ALiBi and gated feed-forward. Built by backbone.

Module names are the checkpoint's. Definition: the published remote code, described in ``KNOWN_CODE`` of remote_layouts.

Shape suffixes: T packed tokens, D width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from infinity_bento.attention.interface import CallCounter
from infinity_bento.batching.packing import PackedBatch
from infinity_bento.models.native import alibi_attention, heads_of, only, required

TITLE = "Jina BERT v2"


@dataclass(frozen=True, slots=True)
class JinaConfig:
    """The part of config.json that both Jina classes read."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    type_vocab_size: int
    layer_norm_eps: float
    feed_forward_type: str

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], title: str) -> JinaConfig:
        """Read and check a config.

        Raises:
            LoadError: If a key is missing, or a value asks for something else than ALiBi with a gated feed-forward.
        """
        only(config, title, position_embedding_type=("alibi",), feed_forward_type=("geglu", "reglu"))
        return cls(
            vocab_size=required(config, "vocab_size", title),
            hidden_size=required(config, "hidden_size", title),
            num_hidden_layers=required(config, "num_hidden_layers", title),
            num_attention_heads=required(config, "num_attention_heads", title),
            intermediate_size=required(config, "intermediate_size", title),
            type_vocab_size=int(config.get("type_vocab_size", 2)),
            layer_norm_eps=float(config.get("layer_norm_eps", 1e-12)),
            feed_forward_type=str(config.get("feed_forward_type", "geglu")),
        )

    def norm(self) -> nn.LayerNorm:
        """A layer norm over the width."""
        return nn.LayerNorm(self.hidden_size, eps=self.layer_norm_eps)

    def activate(self, gate: Tensor) -> Tensor:
        """The gate's activation."""
        return F.gelu(gate) if self.feed_forward_type == "geglu" else F.relu(gate)


class JinaEmbeddings(nn.Module):
    """Word and token type embeddings; positions come in with the attention."""

    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = config.norm()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """``[T]`` ids -> ``[T, D]``."""
        types = self.token_type_embeddings.weight[0]
        if token_type_ids is not None:
            types = self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(self.word_embeddings(input_ids) + types)  # type: ignore[no-any-return]


class JinaSelfAttention(nn.Module):
    """Attention with ALiBi; the code model also normalises queries and keys over the whole width."""

    def __init__(self, config: JinaConfig, *, norm_query_key: bool = False) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.layer_norm_q = config.norm() if norm_query_key else nn.Identity()
        self.layer_norm_k = config.norm() if norm_query_key else nn.Identity()

    def forward(self, hidden_TD: Tensor, packed: PackedBatch) -> Tensor:
        """``[T, D]`` -> ``[T, D]``, before the output projection."""
        query = self.layer_norm_q(self.query(hidden_TD)).unflatten(-1, (self.heads, -1))
        key = self.layer_norm_k(self.key(hidden_TD)).unflatten(-1, (self.heads, -1))
        return alibi_attention(query, key, heads_of(self.value, hidden_TD, self.heads), packed)


class JinaAttentionOutput(nn.Module):
    """Output projection, residual, norm."""

    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = config.norm()

    def forward(self, context_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """``[T, D]``."""
        return self.LayerNorm(self.dense(context_TD) + residual_TD)  # type: ignore[no-any-return]


class JinaAttention(nn.Module):
    """Self-attention and its output block, under BERT's names."""

    def __init__(self, config: JinaConfig, *, norm_query_key: bool = False) -> None:
        super().__init__()
        self.self = JinaSelfAttention(config, norm_query_key=norm_query_key)
        self.output = JinaAttentionOutput(config)

    def forward(self, hidden_TD: Tensor, packed: PackedBatch) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        return self.output(self.self(hidden_TD, packed), hidden_TD)  # type: ignore[no-any-return]


class JinaGatedFeedForward(nn.Module):
    """Gated feed-forward with residual and norm inside; the first half of the projection is the gate."""

    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.config = config
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = config.norm()

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        gate_TF, up_TF = self.gated_layers(hidden_TD).chunk(2, dim=-1)
        return self.layernorm(self.wo(self.config.activate(gate_TF) * up_TF) + hidden_TD)  # type: ignore[no-any-return]


class JinaBertLayer(nn.Module):
    """Attention, then gated feed-forward."""

    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.attention = JinaAttention(config)
        self.mlp = JinaGatedFeedForward(config)

    def forward(self, hidden_TD: Tensor, packed: PackedBatch) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        return self.mlp(self.attention(hidden_TD, packed))  # type: ignore[no-any-return]


class JinaModel(nn.Module):
    """Embeddings and a stack of layers; the two published layouts differ in the layer alone."""

    base_model_prefix = "bert"  # head checkpoints name the base model's tensors so

    def __init__(self, config: JinaConfig, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embeddings = JinaEmbeddings(config)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(layers)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packed: PackedBatch,
        token_type_ids: Tensor | None = None,
        attention_calls: CallCounter | None = None,
    ) -> Tensor:
        """Hidden states ``[1, T, D]`` of a packed batch; ids are ``[1, T]``, positions are not used."""
        hidden_TD = self.embeddings(input_ids[0], None if token_type_ids is None else token_type_ids[0])
        for layer in self.encoder.layer:  # type: ignore[union-attr]
            hidden_TD = layer(hidden_TD, packed)
            if attention_calls is not None:
                attention_calls.calls += 1
        return hidden_TD[None]  # type: ignore[no-any-return]


class JinaBertModel(JinaModel):
    """Jina BERT v2."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        parsed = JinaConfig.from_dict(config, TITLE)
        super().__init__(parsed, [JinaBertLayer(parsed) for _ in range(parsed.num_hidden_layers)])
