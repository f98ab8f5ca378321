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
from infinity_bento.batching.radix import Fold
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
    if packed.fold is not None:
        scan_tree(layer, namespace, packed.fold, (mixed, beta, decay), scanned)
    else:
        for bucket in buckets(packed):
            scanned[bucket.packed] = scan_bucket(layer, namespace, bucket, mixed, beta, decay)
    normed = layer.norm(scanned.view(-1, layer.head_v_dim), gate.view(-1, layer.head_v_dim))
    return layer.out_proj(normed.view(1, hidden_TD.shape[0], -1))  # type: ignore[no-any-return]


def scan_bucket(layer: Any, namespace: Any, bucket: Bucket, mixed: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Convolution and delta rule of one bucket; the outputs of its real tokens, ``[tokens, heads, head size]``."""
    gates = decay[bucket.gather_nC], beta[bucket.gather_nC]
    out, _ = delta_rule(layer, namespace, convolved(layer, namespace, mixed[bucket.gather_nC]), gates)
    return out.flatten(0, 1)[bucket.padded]


def convolved(layer: Any, namespace: Any, mixed: Tensor) -> Tensor:
    """The short causal convolution over ``[n, C, channels]``."""
    out = namespace.causal_conv1d_fn(
        mixed.transpose(1, 2), layer.conv1d.weight.squeeze(1), layer.conv1d.bias, activation=layer.activation
    )
    return out.transpose(1, 2)  # type: ignore[no-any-return]


def delta_rule(
    layer: Any,
    namespace: Any,
    mixed: Tensor,
    gates: tuple[Tensor, Tensor],
    state: Tensor | None = None,
    *,
    keep_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The scan over ``[n, C, channels]`` with decay and beta ``[n, C, heads]``, from a state or from nothing.

    Returns:
        ``[n, C, heads, head size]``, and the state after the last token where it is to be kept.
    """
    query, key, value = torch.split(mixed, [layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    # Several value heads share a key head; not every version of the scan repeats them itself.
    query, key = (
        x.reshape(*x.shape[:-1], -1, layer.head_k_dim).repeat_interleave(layer.num_v_heads // layer.num_k_heads, dim=2)
        for x in (query, key)
    )
    return namespace.torch_chunk_gated_delta_rule(  # type: ignore[no-any-return]
        query,
        key,
        value.reshape(*value.shape[:-1], -1, layer.head_v_dim),
        g=gates[0],
        beta=gates[1],
        initial_state=state,
        output_final_state=keep_state,
        use_qk_l2norm_in_kernel=True,
    )


def scan_tree(layer: Any, namespace: Any, tree: Fold, inputs: tuple[Tensor, Tensor, Tensor], scanned: Tensor) -> None:
    """The same over a radix tree: an edge begins with the window and the state in which the edge before it ends.

    Args:
        layer: The DeltaNet layer.
        namespace: Its module in transformers.
        tree: Of the nodes.
        inputs: Of the nodes: channels before the convolution, beta and decay.
        scanned: Filled with the outputs of the nodes.
    """
    mixed, beta, decay = inputs
    window = layer.conv1d.weight.shape[-1] - 1
    mixed = torch.cat([mixed, mixed.new_zeros(1, mixed.shape[1])])  # the last row stands for what is before the start
    states: dict[int, Tensor] = {}
    for bucket in tree_buckets(tree, window):
        channels = convolved(layer, namespace, mixed[bucket.gather_nC])[:, window:]
        own = bucket.gather_nC[:, window:]
        # Padding must not touch the state: it neither decays nor writes.
        gates = decay[own] * bucket.real_nC, beta[own] * bucket.real_nC
        first = tree.edges[bucket.edges[0]]
        before = None if first.parent < 0 else torch.stack([states[tree.edges[e].parent] for e in bucket.edges])
        out, after = delta_rule(layer, namespace, channels, gates, before, keep_state=bucket.has_children)
        scanned[bucket.packed] = out.flatten(0, 1)[bucket.padded]
        if after is not None:
            states.update(zip(bucket.edges, after, strict=True))


class TreeBucket(NamedTuple):
    """Edges of one generation and one number of chunks; indices are of nodes."""

    edges: list[int]
    gather_nC: Tensor  # ``[n, window + C]``: the window before each edge, its nodes, padding
    real_nC: Tensor  # ``[n, C, 1]``: 1 for nodes, 0 for padding
    padded: Tensor  # [nodes] flat padded position of each real node
    packed: Tensor  # [nodes] the node
    has_children: bool


def tree_buckets(tree: Fold, window: int) -> list[TreeBucket]:
    """The tree cut into what runs side by side, parents first; computed once and shared by all layers."""
    key = ("deltanet", window)
    if key not in tree.cache:
        parents = {edge.parent for edge in tree.edges}
        found = []
        for generation in tree.generations():
            by_chunks: dict[tuple[int, bool], list[int]] = {}
            for number in generation:
                by_chunks.setdefault((-(-tree.edges[number].length // CHUNK), number in parents), []).append(number)
            found += [
                make_tree_bucket(tree, numbers, window, has_children=kept) for (_, kept), numbers in by_chunks.items()
            ]
        tree.cache[key] = found
    return tree.cache[key]  # type: ignore[no-any-return]


def make_tree_bucket(tree: Fold, numbers: list[int], window: int, *, has_children: bool) -> TreeBucket:
    """Indices of some edges; what lies before the first token is the row behind the last node."""
    width = max(tree.edges[number].length for number in numbers)
    rows = []
    for number in numbers:
        edge = tree.edges[number]
        before = (
            [node for past in tree.path(number) for node in range(past.start, past.end)][-window:] if window else []
        )
        rows.append([tree.nodes] * (window - len(before)) + before + list(range(edge.start, edge.end)))
        rows[-1] += [edge.end - 1] * (window + width - len(rows[-1]))
    gather = torch.tensor(rows)
    lengths = torch.tensor([tree.edges[number].length for number in numbers])[:, None]
    real = torch.arange(width)[None] < lengths
    device = tree.scatter.device
    return TreeBucket(
        numbers,
        gather_nC=gather.to(device),
        real_nC=real[..., None].float().to(device),
        padded=real.flatten().nonzero().flatten().to(device),
        packed=gather[:, window:][real].to(device),
        has_children=has_children,
    )


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
