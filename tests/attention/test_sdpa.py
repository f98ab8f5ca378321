from __future__ import annotations

import pytest
import torch
from torch import nn

from infinity_bento.attention.interface import AttentionSpec, CallCounter, packed_attention
from infinity_bento.attention.sdpa import run
from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.core import Encoded

LENGTHS = [5, 1, 9, 5, 17]


def batch_of(lengths: list[int]) -> PackedBatch:
    return pack([Encoded([1] * length) for length in lengths])


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PackedBatch, spec: AttentionSpec) -> torch.Tensor:
    """Attention as one dense block-diagonal mask in float64, ``[1, T, N, H]``."""
    tokens = q.shape[2]
    owner, place = batch.sequence_ids(), batch.position_ids
    distance = place[:, None] - place[None, :]
    allowed = owner[:, None] == owner[None, :]
    if spec.causal:
        allowed &= distance >= 0
    if spec.window is not None:
        allowed &= distance.abs() < spec.window
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeats, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    assert allowed.shape == (tokens, tokens)
    return (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_one_dense_masked_attention(
    causal: bool, window: int | None, softcap: float | None, kv_heads: int
) -> None:
    torch.manual_seed(0)
    batch = batch_of(LENGTHS)
    q = torch.randn(1, 4, batch.tokens, 8)
    k, v = torch.randn(2, 1, kv_heads, batch.tokens, 8)
    spec = AttentionSpec(0.3, causal, window, softcap)
    assert (run(q, k, v, batch, spec) - naive(q, k, v, batch, spec)).abs().max() < 2e-6


def test_a_sequence_does_not_see_its_neighbours() -> None:
    torch.manual_seed(0)
    batch = batch_of(LENGTHS)
    q, k, v = torch.randn(3, 1, 2, batch.tokens, 8)
    spec = AttentionSpec(0.3, causal=False)
    before = run(q, k, v, batch, spec)
    changed = batch.sequence_ids() == 2
    k[:, :, changed] += 1.0
    v[:, :, changed] += 1.0
    after = run(q, k, v, batch, spec)
    assert torch.equal(before[:, ~changed], after[:, ~changed])
    assert not torch.equal(before[:, changed], after[:, changed])


def test_value_heads_may_have_another_size() -> None:
    batch = batch_of([3, 4])
    q, k = torch.randn(2, 1, 2, 7, 8)
    assert run(q, k, torch.randn(1, 2, 7, 5), batch, AttentionSpec(1.0, causal=True)).shape == (1, 7, 2, 5)


def test_the_function_reads_direction_and_scale_from_the_layer() -> None:
    torch.manual_seed(0)
    layer = nn.Module()
    layer.is_causal = False  # type: ignore[assignment]
    batch = batch_of(LENGTHS)
    q, k, v = torch.randn(3, 1, 2, batch.tokens, 8)
    counter = CallCounter()
    out, weights = packed_attention(layer, q, k, v, None, packed=batch, attention_calls=counter)
    assert weights is None
    assert counter.calls == 1
    assert torch.equal(out, run(q, k, v, batch, AttentionSpec(8**-0.5, causal=False)))
    turned, _ = packed_attention(layer, q, k, v, None, is_causal=True, packed=batch)
    assert torch.equal(turned, run(q, k, v, batch, AttentionSpec(8**-0.5, causal=True)))


@pytest.mark.parametrize("kwargs", [{}, {"attention_mask": torch.ones(1)}, {"s_aux": torch.ones(1)}])
def test_a_missing_batch_a_mask_or_sinks_never_pass_silently(kwargs: dict[str, torch.Tensor]) -> None:
    q = torch.randn(1, 1, 2, 4)
    packed = batch_of([2]) if kwargs else None
    mask = kwargs.pop("attention_mask", None)
    with pytest.raises(RuntimeError, match="bug"):
        packed_attention(nn.Module(), q, q, q, mask, packed=packed, **kwargs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_tokens_that_only_ask_are_no_keys(causal: bool, window: int | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    attended = [3, None, 9, 5, None, 2, 1]
    lengths = [9, 9, 9, 6, 1, 6, 9]
    encoded = [Encoded([1] * length, attended=keys) for length, keys in zip(lengths, attended, strict=True)]
    batch = pack(encoded)
    q = torch.randn(1, 4, batch.tokens, 8)
    k, v = torch.randn(2, 1, kv_heads, batch.tokens, 8)
    spec = AttentionSpec(0.3, causal, window)
    out = run(q, k, v, batch, spec)[0]
    bounds = batch.cu_seqlens.tolist()
    for packed, index in enumerate(batch.order):
        start, end = bounds[packed], bounds[packed + 1]
        keys = attended[index] or end - start
        allowed = torch.arange(end - start) < keys
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
        if causal:
            allowed = allowed & (distance >= 0)
        if window is not None:
            allowed = allowed & (distance.abs() < window)
        allowed = allowed.expand(end - start, end - start)
        repeats = 4 // kv_heads
        wide = (q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))
        heads = [x[0, :, start:end].double() for x in wide]
        scores = (heads[0] @ heads[1].transpose(1, 2) * 0.3).masked_fill(~allowed, float("-inf"))
        # A token that may see nothing gets zeros, as in torch's attention.
        expected = (scores.softmax(-1).nan_to_num() @ heads[2]).transpose(0, 1)
        assert (out[start:end] - expected).abs().max() < 2e-6
