"""DeBERTa v2 and v3, taught packing: disentangled attention per length group, in blocks of query rows.

Installed by the backbone. The relative terms are content times position: gathered per block from products with the
``2 * span`` relative embeddings, so memory grows with the length, not with its square.

Shape suffixes: T packed tokens, N heads, H head size, D width, S = 2 * span relative positions.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from infinity_bento.attention import biased
from infinity_bento.attention.interface import CallCounter
from infinity_bento.batching.packing import PackedBatch


def install(model: nn.Module) -> None:
    """Replace the forward of one ``DebertaV2Model``; its modules and weights stay."""
    model.forward = types.MethodType(forward, model)


def forward(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    packed: PackedBatch,
    token_type_ids: Tensor | None = None,
    attention_calls: CallCounter | None = None,
) -> BaseModelOutput:
    """Hidden states ``[1, T, D]`` of a packed batch; ids, positions and types are ``[1, T]``."""
    encoder = model.encoder
    embedded_TD = model.embeddings(input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids)[0]
    relative_SD = encoder.get_rel_embedding()
    hidden_TD = embedded_TD
    for index, layer in enumerate(encoder.layer):
        context_TD = self_attention(layer.attention.self, hidden_TD, relative_SD, packed)
        if attention_calls is not None:
            attention_calls.calls += 1
        attended_TD = layer.attention.output(context_TD, hidden_TD)
        hidden_TD = layer.output(layer.intermediate(attended_TD), attended_TD)
        if index == 0 and encoder.conv is not None:
            hidden_TD = convolution(encoder.conv, embedded_TD, hidden_TD, packed)
    return BaseModelOutput(last_hidden_state=hidden_TD[None])


@dataclass(frozen=True, slots=True)
class RelativeTerms:
    """What the bias of one layer is gathered from."""

    query_NTH: Tensor
    key_NTH: Tensor
    position_key_NSH: Tensor | None  # None: no content-to-position term
    position_query_NSH: Tensor | None  # None: no position-to-content term
    index: biased.ByDistance  # row of the relative table for each distance i - j
    scale: float

    def bias(self, block: biased.Block) -> Tensor:
        """The relative terms of one block, scaled: ``[n, N, Q, L]``."""
        length, rows = block.group.length, slice(block.first_row, block.last_row)
        index = self.index(block)
        total: Tensor | None = None
        if self.position_key_NSH is not None:
            query = biased.sequences(self.query_NTH, block)[:, :, rows]
            products = query @ self.position_key_NSH.transpose(-1, -2)  # [n, N, Q, S]
            total = products.gather(-1, index.expand(*products.shape[:3], length))
        if self.position_query_NSH is not None:
            key = biased.sequences(self.key_NTH, block)
            products = key @ self.position_query_NSH.transpose(-1, -2)  # [n, N, L, S]
            index = index.t().expand(*products.shape[:3], rows.stop - rows.start)
            term = products.gather(-1, index).transpose(-1, -2)
            total = term if total is None else total.add_(term)
        if total is None:
            return self.query_NTH.new_zeros(())
        return total.mul_(self.scale)


def self_attention(attention: Any, hidden_TD: Tensor, relative_SD: Tensor | None, packed: PackedBatch) -> Tensor:
    """One disentangled attention layer, without output projection: ``[T, D]``."""

    def heads(projection: nn.Module, x: Tensor) -> Tensor:
        split: Tensor = projection(x).unflatten(-1, (attention.num_attention_heads, -1))
        return split.transpose(0, 1)

    q, k, v = (heads(p, hidden_TD) for p in (attention.query_proj, attention.key_proj, attention.value_proj))
    kinds = attention.pos_att_type if attention.relative_attention else ()
    to_position, to_content = "c2p" in attention.pos_att_type, "p2c" in attention.pos_att_type
    scale = (q.shape[-1] * (1 + to_position + to_content)) ** -0.5
    if relative_SD is None or not kinds:
        return biased.run(q, k, v, packed, scale, lambda block: q.new_zeros((1, 1, 1, 1)))
    shared = attention.share_att_key
    relative_SD = relative_SD[: 2 * attention.pos_ebd_size].to(hidden_TD.dtype)
    position_key: Any = attention.key_proj if shared else getattr(attention, "pos_key_proj", None)
    position_query: Any = attention.query_proj if shared else getattr(attention, "pos_query_proj", None)
    terms = RelativeTerms(
        query_NTH=q,
        key_NTH=k,
        position_key_NSH=heads(position_key, relative_SD) if to_position else None,
        position_query_NSH=heads(position_query, relative_SD) if to_content else None,
        index=relative_index(attention, packed),
        scale=scale,
    )
    return biased.run(q, k, v, packed, scale, terms.bias)


def relative_index(attention: Any, packed: PackedBatch) -> biased.ByDistance:
    """Row of the relative table for each distance ``i - j``; shared by all layers.

    Both terms read the same row: the published code looks the second up by ``-(j - i)``, and the buckets are odd.
    """
    span, buckets, farthest = attention.pos_ebd_size, attention.position_buckets, attention.max_relative_positions
    key = ("deberta", span, buckets, farthest)
    if key not in packed.cache:
        distance = biased.distances(packed)
        if buckets > 0 and farthest > 0:
            distance = make_log_bucket_position(distance, buckets, farthest).long()
        packed.cache[key] = biased.ByDistance((distance + span).clamp(0, 2 * span - 1))
    return packed.cache[key]  # type: ignore[no-any-return]


def convolution(layer: Any, input_TD: Tensor, residual_TD: Tensor, packed: PackedBatch) -> Tensor:
    """The convolution after the first layer (xlarge v2), zero-padded at the ends of each sequence: ``[T, D]``."""
    convolved_TD = torch.empty_like(residual_TD)
    for group in packed.groups:
        tokens = slice(group.start, group.start + group.size * group.length)
        rows = input_TD[tokens].view(group.size, group.length, -1)
        convolved_TD[tokens] = layer.conv(rows.transpose(1, 2)).transpose(1, 2).flatten(0, 1)
    return layer.LayerNorm(residual_TD + ACT2FN[layer.conv_act](convolved_TD))  # type: ignore[no-any-return]
