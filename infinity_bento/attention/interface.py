"""The attention function that transformers calls: packed q, k, v of one layer in, packed context out.

``register()`` puts it into transformers' attention registry under ``IMPLEMENTATION``. No mask function is registered
under that name, on purpose: transformers then builds no mask at all. A model forward passes the batch along as the
keyword ``packed``, which reaches every attention call untouched.

Shape suffixes: T packed tokens, N heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from infinity_bento.attention import folded, sdpa
from infinity_bento.batching.packing import PackedBatch

IMPLEMENTATION = "infinity_packed"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one attention layer asks for beyond q, k and v."""

    scale: float
    causal: bool
    window: int | None = None  # a token sees j with |i - j| < window, itself included
    softcap: float | None = None


class CallCounter:
    """Counts attention calls of one self-check: some classes ignore a custom implementation with only a log line."""

    def __init__(self) -> None:
        self.calls = 0


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    packed: PackedBatch | None = None,
    attention_calls: CallCounter | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of each packed sequence to itself; the signature is transformers' ``AttentionInterface``.

    Args:
        module: The calling layer; only ``module.is_causal`` is read, where ``is_causal`` is not given.
        query: ``[1, N, T, H]``, after rotary embedding.
        key: ``[1, N_kv, T, H]``; grouped heads are expanded here.
        value: ``[1, N_kv, T, H_v]``.
        attention_mask: Always None: packed execution has no masks.
        dropout: Ignored; serving never drops.
        scaling: Factor on the scores; default ``H ** -0.5``.
        sliding_window: Tokens each side that a token sees, itself included.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        is_causal: Overrides ``module.is_causal``.
        packed: The batch, passed through ``model.forward(packed=...)``.
        attention_calls: Counted up when given.
        s_aux: Attention sinks; not supported.
        **kwargs: Whatever else transformers passes along; unused.

    Returns:
        ``[1, T, N, H_v]`` and None (no attention weights).

    Raises:
        RuntimeError: If the batch is missing or a mask or sinks are given. These are bugs, not user errors.
    """
    if packed is None:
        raise RuntimeError(f"{type(module).__name__} called packed attention without a packed batch. This is a bug.")
    if attention_mask is not None or s_aux is not None:
        raise RuntimeError(f"{type(module).__name__} passed a mask or sinks to packed attention. This is a bug.")
    if attention_calls is not None:
        attention_calls.calls += 1
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    spec = AttentionSpec(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        causal=bool(causal),
        window=sliding_window,
        softcap=softcap,
    )
    if packed.attention_dtype is not None:
        query, key, value = (x.to(packed.attention_dtype) for x in (query, key, value))
    if packed.fold is not None:
        return folded.run(query, key, value, packed.fold, spec), None
    return sdpa.run(query, key, value, packed, spec), None


def register() -> None:
    """Make ``attn_implementation=IMPLEMENTATION`` legal in transformers. Safe to call more than once."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
