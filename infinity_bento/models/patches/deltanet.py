"""Gated DeltaNet layers (Qwen3.5), taught packing: projections run packed, convolution and scan per chunk count.

Installed by the backbone. Transformers' scan works in chunks of 64 tokens and pads the last one, so sequences with the
same number of chunks run side by side at no extra cost; convolution and scan never look right, so padding is harmless.

Shape suffixes: T packed tokens, D width, n sequences of one chunk count, C their padded length.
"""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.errors import LoadError

CHUNK = 64


class Bucket(NamedTuple):
    """Sequences with one number of chunks, as indices into the packed tokens and back."""

    gather_nC: Tensor  # packed index of each padded position; padding repeats the sequence's last token
    padded: Tensor  # [tokens] flat padded position of each real token
    packed: Tensor  # [tokens] its packed index


def install(model: nn.Module) -> None:
    """Replace the forward of each gated DeltaNet layer in a model; modules and weights stay.

    Raises:
        LoadError: If the installed transformers lacks the functions that this needs.
    """
    for layer in model.modules():
        if not type(layer).__name__.endswith("GatedDeltaNet"):
            continue
        namespace = sys.modules[type(layer).__module__]
        convolve = getattr(namespace, "causal_conv1d_fn", None)
        scan = getattr(namespace, "torch_chunk_gated_delta_rule", None)
        if not callable(convolve) or not callable(scan) or not hasattr(layer, "in_proj_qkv"):
            raise LoadError(
                f"{type(layer).__name__} of the installed transformers cannot run packed; versions 5.17 to 5.24 can."
            )
        layer.forward = types.MethodType(forward, layer)


def forward(layer: Any, hidden_states: Tensor, packed: PackedBatch, **kwargs: Any) -> Tensor:
    """One DeltaNet layer: ``[1, T, D]`` in, ``[1, T, D]`` out. Caches and masks do not exist here."""
    namespace = sys.modules[type(layer).__module__]
    hidden_TD = hidden_states[0]
    mixed = layer.in_proj_qkv(hidden_TD)
    gate = layer.in_proj_z(hidden_TD)
    beta = layer.in_proj_b(hidden_TD).sigmoid()
    # float(): in half precision exp(A_log) could overflow.
    decay = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(hidden_TD).float() + layer.dt_bias)
    scanned = mixed.new_empty((mixed.shape[0], layer.num_v_heads, layer.head_v_dim))
    for bucket in buckets(packed):
        scanned[bucket.packed] = scan_bucket(layer, namespace, bucket, mixed, beta, decay)
    normed = layer.norm(scanned.view(-1, layer.head_v_dim), gate.view(-1, layer.head_v_dim))
    return layer.out_proj(normed.view(1, hidden_TD.shape[0], -1))  # type: ignore[no-any-return]


def scan_bucket(layer: Any, namespace: Any, bucket: Bucket, mixed: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Convolution and delta rule of one bucket; the outputs of its real tokens, ``[tokens, heads, head size]``."""
    padded = namespace.causal_conv1d_fn(
        mixed[bucket.gather_nC].transpose(1, 2),
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        activation=layer.activation,
    ).transpose(1, 2)
    query, key, value = padded.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    # Several value heads share a key head; not every version of the scan repeats them itself.
    query, key = (
        x.unflatten(-1, (-1, layer.head_k_dim)).repeat_interleave(layer.num_v_heads // layer.num_k_heads, dim=2)
        for x in (query, key)
    )
    out, _ = namespace.torch_chunk_gated_delta_rule(
        query,
        key,
        value.unflatten(-1, (-1, layer.head_v_dim)),
        g=decay[bucket.gather_nC],
        beta=beta[bucket.gather_nC],
        use_qk_l2norm_in_kernel=True,
    )
    return out.flatten(0, 1)[bucket.padded]  # type: ignore[no-any-return]


def buckets(packed: PackedBatch) -> list[Bucket]:
    """The batch cut by number of chunks; computed once and shared by all layers."""
    if "deltanet" not in packed.cache:
        by_chunks: dict[int, list[tuple[int, int]]] = {}
        start = 0
        for length in packed.lengths:
            by_chunks.setdefault(-(-length // CHUNK), []).append((start, length))
            start += length
        packed.cache["deltanet"] = [make_bucket(spans, packed.device) for spans in by_chunks.values()]
    return packed.cache["deltanet"]  # type: ignore[no-any-return]


def make_bucket(spans: list[tuple[int, int]], device: torch.device) -> Bucket:
    """Indices of sequences given as (first token, length)."""
    width = max(length for _, length in spans)
    starts = torch.tensor([start for start, _ in spans])[:, None]
    lengths = torch.tensor([length for _, length in spans])[:, None]
    columns = torch.arange(width)[None]
    real = (columns < lengths).flatten()
    gather = starts + torch.minimum(columns, lengths - 1)
    return Bucket(
        gather_nC=gather.to(device),
        padded=real.nonzero().flatten().to(device),
        packed=gather.flatten()[real].to(device),
    )
