"""MPNet, taught packing: its own attention with one relative position bias that all layers share.

Installed by the backbone. The bias depends on ``i - j`` alone, so it is kept as one row per head.

Shape suffixes: T packed tokens, N heads, H head size, D width.
"""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from infinity_bento.attention import biased
from infinity_bento.attention.interface import CallCounter
from infinity_bento.batching.packing import PackedBatch


def install(model: nn.Module) -> None:
    """Replace the forward of one ``MPNetModel``; its modules and weights stay."""
    model.forward = types.MethodType(forward, model)


def forward(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    packed: PackedBatch,
    attention_calls: CallCounter | None = None,
) -> BaseModelOutput:
    """Hidden states ``[1, T, D]`` of a packed batch; ids and positions are ``[1, T]``."""
    hidden_TD = model.embeddings(input_ids=input_ids, position_ids=position_ids)[0]
    bias = biased.ByDistance(relative_bias(model.encoder, packed).to(hidden_TD.dtype))
    for layer in model.encoder.layer:
        attention = layer.attention
        context_TD = self_attention(attention.attn, hidden_TD, bias, packed)
        if attention_calls is not None:
            attention_calls.calls += 1
        attended_TD = attention.LayerNorm(context_TD + hidden_TD)
        hidden_TD = layer.output(layer.intermediate(attended_TD), attended_TD)
    return BaseModelOutput(last_hidden_state=hidden_TD[None])


def relative_bias(encoder: Any, packed: PackedBatch) -> Tensor:
    """The learned bias over all distances ``i - j`` of the longest sequence, ``[N, 2 * max_seqlen - 1]``."""
    buckets = encoder.relative_position_bucket(
        -biased.distances(packed), num_buckets=encoder.relative_attention_bias.num_embeddings
    )
    return encoder.relative_attention_bias(buckets).t().contiguous()  # type: ignore[no-any-return]


def self_attention(attention: Any, hidden_TD: Tensor, bias: biased.BlockBias, packed: PackedBatch) -> Tensor:
    """One attention layer, output projection included: ``[T, D]``."""

    def heads(projection: nn.Module) -> Tensor:
        split: Tensor = projection(hidden_TD).unflatten(-1, (attention.num_attention_heads, -1))
        return split.transpose(0, 1)

    q, k, v = heads(attention.q), heads(attention.k), heads(attention.v)
    context = biased.run(q, k, v, packed, attention.attention_head_size**-0.5, bias)
    return attention.o(context)  # type: ignore[no-any-return]
