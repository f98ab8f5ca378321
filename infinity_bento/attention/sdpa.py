"""Packed attention as dense SDPA calls, one per distinct length. Any device, any dtype; the CPU default.

Sequences are packed in order of length, so those of one length are neighbours and form a strided ``[n, N, L, H]`` view
of the packed tensor: no copy, no mask, no padding.

Shape suffixes: T packed tokens, N heads, L length of a group, H head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from infinity_bento.batching.packing import LengthGroup, PackedBatch

if TYPE_CHECKING:
    from infinity_bento.attention.interface import AttentionSpec


def run(query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, spec: AttentionSpec) -> Tensor:
    """Attention within each sequence.

    Args:
        query: ``[1, N, T, H]``.
        key: ``[1, N_kv, T, H]``, ``N`` a multiple of ``N_kv``.
        value: ``[1, N_kv, T, H_v]``.
        packed: The batch whose ``groups`` cut the T axis.
        spec: Scale, direction, window and softcap.

    Returns:
        ``[1, T, N, H_v]``, contiguous.
    """
    heads, tokens = query.shape[1], query.shape[2]
    repeats = heads // key.shape[1]
    out = query.new_empty((tokens, heads, value.shape[-1]))
    for group in packed.groups:
        q, k, v = (split(x[0, :, group.start : group.end], group).transpose(0, 1) for x in (query, key, value))
        mask, causal = allowed(group, packed, spec)
        if spec.softcap is not None:
            context = softcapped(q, k, v, mask, causal, repeats, spec)
        else:
            context = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=repeats != 1
            )
        out[group.start : group.end].view(group.size, group.length, heads, -1).copy_(context.transpose(1, 2))
    return out.unsqueeze(0)


def split(tokens: Tensor, group: LengthGroup) -> Tensor:
    """``[N, n * L, H]`` -> ``[N, n, L, H]``: the token axis is split, not copied, whatever the strides."""
    return tokens.view(tokens.shape[0], group.size, group.length, tokens.shape[-1])


def allowed(group: LengthGroup, packed: PackedBatch, spec: AttentionSpec) -> tuple[Tensor | None, bool]:
    """A group's mask (True where attention is allowed), and whether it is causal besides.

    The mask is broadcastable to ``[n, N, L, L]``; None where nothing asks for one: no window, no unattended tokens, no
    blocks.
    """
    visible = packed.visible(group)
    if visible is not None:
        return windowed_blocks(visible, group, packed, spec), False
    mask = window_mask(group.length, packed, spec)
    causal = spec.causal and mask is None and group.length > 1
    keys = packed.key_mask(group)
    if keys is None:
        return mask, causal
    if causal:
        mask = torch.ones(group.length, group.length, dtype=torch.bool, device=keys.device).tril()
    return keys if mask is None else keys & mask, False


def window_mask(length: int, packed: PackedBatch, spec: AttentionSpec) -> Tensor | None:
    """``[L, L]`` bool, True where attention is allowed; None where the window covers the whole sequence."""
    if spec.window is None or length <= spec.window:
        return None
    key = ("window", length, spec.window, spec.causal)
    mask = packed.cache.get(key)
    if mask is None:
        positions = torch.arange(length, device=packed.device)
        distance = positions[:, None] - positions[None, :]
        if spec.causal:
            mask = (distance >= 0) & (distance < spec.window)
        else:
            mask = distance.abs() < spec.window
        packed.cache[key] = mask
    return mask


def windowed_blocks(visible: Tensor, group: LengthGroup, packed: PackedBatch, spec: AttentionSpec) -> Tensor:
    """The mask of sequences made of blocks, ``[n, 1, L, L]``; blocks lie side by side, so a window goes by position."""
    if spec.window is None:
        return visible
    key = ("windowed blocks", group.start, spec.window)
    mask: Tensor | None = packed.cache.get(key)
    if mask is None:
        positions = packed.position_ids[group.start : group.end].view(group.size, 1, group.length)
        distance = positions[..., :, None] - positions[..., None, :]
        mask = visible & (distance.abs() < spec.window)
        packed.cache[key] = mask
    return mask


def softcapped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, repeats: int, spec: AttentionSpec
) -> Tensor:
    """Attention with ``softcap * tanh(scores / softcap)``, which SDPA has no argument for; shapes as in ``run``."""
    assert spec.softcap is not None
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    scores = torch.tanh((q @ k.transpose(-1, -2)) * (spec.scale / spec.softcap)) * spec.softcap
    if causal:
        length = q.shape[-2]
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
