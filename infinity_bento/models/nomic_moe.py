"""NomicBERT with what transformers' class lacks: mixture-of-experts layers (v2) and biases. Built by backbone.

Module names are the checkpoint's. Routing is per token, so packing changes nothing about it.

Shape suffixes: T packed tokens, D width, N heads, H head size, E experts, K experts per token, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity_bento.attention.interface import CallCounter, packed_attention
from infinity_bento.batching.packing import PackedBatch
from infinity_bento.models.native import dynamic_base, only, required, rotary_angles, rotate, sequence_lengths

TITLE = "NomicBERT"
GATED = ("swiglu", "silu")


@dataclass(frozen=True, slots=True)
class NomicConfig:
    """The part of config.json that is read."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    type_vocab_size: int
    layer_norm_eps: float
    activation: str
    attention_bias: bool
    up_bias: bool
    down_bias: bool
    rotary_base: float
    rotary_factor: float | None
    trained_positions: int
    num_experts: int
    experts_per_token: int
    moe_every: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> NomicConfig:
        """Read and check a config with the published keys.

        Raises:
            LoadError: If a key is missing or asks for something that is not done here.
        """
        only(
            config,
            TITLE,
            prenorm=(False,),
            rotary_emb_interleaved=(False,),
            rotary_emb_fraction=(1.0,),
            moe_normalize_expert_weights=(False, None),
            use_rms_norm=(False, None),
            activation_function=("gelu", "swiglu", "silu"),
            expert_choice_router=(False, None),
            num_shared_experts=(0, None),
        )
        num_experts = int(config.get("num_experts") or 0)
        if num_experts:
            only(config, f"{TITLE} with experts", activation_function=("gelu",), ffn_div=(1.0,))
        return cls(
            vocab_size=required(config, "vocab_size", TITLE),
            hidden_size=required(config, "n_embd", TITLE),
            num_hidden_layers=required(config, "n_layer", TITLE),
            num_attention_heads=required(config, "n_head", TITLE),
            intermediate_size=int(config.get("n_inner") or 4 * config["n_embd"]),
            type_vocab_size=required(config, "type_vocab_size", TITLE),
            layer_norm_eps=float(config.get("layer_norm_epsilon", 1e-12)),
            activation=str(config.get("activation_function", "gelu")),
            attention_bias=bool(config.get("qkv_proj_bias", True)),
            up_bias=bool(config.get("mlp_fc1_bias", True)),
            down_bias=bool(config.get("mlp_fc2_bias", True)),
            rotary_base=float(config.get("rotary_emb_base", 10000.0)),
            rotary_factor=config.get("rotary_scaling_factor"),
            trained_positions=int(config.get("max_trained_positions") or 2048),
            num_experts=num_experts,
            experts_per_token=int(config.get("moe_top_k") or 1),
            moe_every=int(config.get("moe_every_n_layers") or 0),
        )

    def norm(self) -> nn.LayerNorm:
        """A layer norm over the width."""
        return nn.LayerNorm(self.hidden_size, eps=self.layer_norm_eps)

    def has_experts(self, layer: int) -> bool:
        """Every n-th layer has experts, beginning with the second."""
        return bool(self.num_experts) and self.moe_every > 0 and layer % self.moe_every == 1


class NomicAttention(nn.Module):
    """Rotary attention with one projection for queries, keys and values."""

    is_causal = False

    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.Wqkv = nn.Linear(width, 3 * width, bias=config.attention_bias)
        self.out_proj = nn.Linear(width, width, bias=config.attention_bias)

    def forward(
        self,
        hidden_TD: Tensor,
        angles: tuple[Tensor, Tensor],
        packed: PackedBatch,
        attention_calls: CallCounter | None,
    ) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        query, key, value = self.Wqkv(hidden_TD).unflatten(-1, (3, self.heads, -1)).unbind(1)
        query, key = rotate(query, *angles), rotate(key, *angles)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        context, _ = packed_attention(self, q, k, v, None, packed=packed, attention_calls=attention_calls)
        return self.out_proj(context[0].flatten(1))  # type: ignore[no-any-return]


class NomicFeedForward(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.up_bias)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.down_bias)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        return self.fc2(F.gelu(self.fc1(hidden_TD)))  # type: ignore[no-any-return]


class NomicGatedFeedForward(nn.Module):
    """SwiGLU: ``fc12`` is the gate."""

    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.fc11 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.up_bias)
        self.fc12 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.up_bias)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.down_bias)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        return self.fc2(self.fc11(hidden_TD) * F.silu(self.fc12(hidden_TD)))  # type: ignore[no-any-return]


class NomicRouter(nn.Module):
    """Softmax over all experts, then the best K; their weights are not normalised again."""

    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.top = config.experts_per_token
        self.layer = nn.Linear(config.hidden_size, config.num_experts, bias=False)

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights ``[T, K]`` in the input's dtype and expert numbers ``[T, K]``."""
        weights, experts = self.layer(hidden_TD).softmax(-1, dtype=torch.float32).topk(self.top, dim=-1)
        return weights.to(hidden_TD.dtype), experts


class NomicExpertWeights(nn.Module):
    """The weights of all experts, stacked as in the checkpoint: ``[E * F, D]`` each."""

    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        rows = config.num_experts * config.intermediate_size
        self.w1 = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(rows, config.hidden_size))


class NomicExperts(nn.Module):
    """All experts of a layer and the bias they share."""

    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.count = config.num_experts
        self.mlp = NomicExpertWeights(config)
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, hidden_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts, ``[T, D]``."""
        up, down = (w.view(self.count, -1, w.shape[-1]) for w in (self.mlp.w1, self.mlp.w2))
        out_TD = torch.zeros_like(hidden_TD)
        for expert in range(self.count):
            tokens, rank = (experts_TK == expert).nonzero(as_tuple=True)
            if tokens.numel() == 0:
                continue
            result = F.gelu(hidden_TD[tokens] @ up[expert].t()) @ down[expert]
            out_TD.index_add_(0, tokens, result * weights_TK[tokens, rank, None])
        return out_TD + self.bias


class NomicExpertLayer(nn.Module):
    """Router and experts in place of the feed-forward."""

    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.router = NomicRouter(config)
        self.experts = NomicExperts(config)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        return self.experts(hidden_TD, *self.router(hidden_TD))  # type: ignore[no-any-return]


def feed_forward(config: NomicConfig, layer: int) -> nn.Module:
    """The feed-forward of one layer."""
    if config.has_experts(layer):
        return NomicExpertLayer(config)
    return NomicGatedFeedForward(config) if config.activation in GATED else NomicFeedForward(config)


class NomicLayer(nn.Module):
    """Attention and feed-forward, norms after the residuals."""

    def __init__(self, config: NomicConfig, layer: int) -> None:
        super().__init__()
        self.attn = NomicAttention(config)
        self.norm1 = config.norm()
        self.mlp = feed_forward(config, layer)
        self.norm2 = config.norm()


class NomicMoeModel(nn.Module):
    """NomicBERT, experts and biases included."""

    base_model_prefix = "bert"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = NomicConfig.from_dict(config)
        width = self.settings.hidden_size
        self.embeddings = nn.Module()
        self.embeddings.word_embeddings = nn.Embedding(self.settings.vocab_size, width)
        self.embeddings.token_type_embeddings = nn.Embedding(self.settings.type_vocab_size, width)
        self.emb_ln = self.settings.norm()
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(
            NomicLayer(self.settings, index) for index in range(self.settings.num_hidden_layers)
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packed: PackedBatch,
        token_type_ids: Tensor | None = None,
        attention_calls: CallCounter | None = None,
    ) -> Tensor:
        """Hidden states ``[1, T, D]`` of a packed batch; ids, positions and types are ``[1, T]``."""
        embeddings: Any = self.embeddings
        types = embeddings.token_type_embeddings.weight[:1]
        if token_type_ids is not None:
            types = embeddings.token_type_embeddings(token_type_ids[0])
        hidden_TD = self.emb_ln(embeddings.word_embeddings(input_ids[0]) + types)
        angles = self.angles(position_ids[0], packed)
        encoder: Any = self.encoder
        for layer in encoder.layers:
            hidden_TD = layer.norm1(hidden_TD + layer.attn(hidden_TD, angles, packed, attention_calls))
            hidden_TD = layer.norm2(hidden_TD + layer.mlp(hidden_TD))
        return hidden_TD[None]  # type: ignore[no-any-return]

    def angles(self, position_ids_T: Tensor, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines of all tokens."""
        settings = self.settings
        size = settings.hidden_size // settings.num_attention_heads
        base_T = torch.full(position_ids_T.shape, settings.rotary_base, device=position_ids_T.device)
        if settings.rotary_factor:
            base_T = dynamic_base(
                sequence_lengths(packed), settings.rotary_base, size, settings.rotary_factor, settings.trained_positions
            )
        return rotary_angles(position_ids_T, base_T, size)
