"""Blockwise biased attention against attention in full, for every way a batch is cut into blocks."""

from __future__ import annotations

import math

import pytest
import torch

from infinity_bento.attention import biased
from infinity_bento.batching.packing import pack
from infinity_bento.core import Encoded

HEADS, SIZE = 3, 8
LENGTHS = (5, 1, 40, 5, 5, 33)


@pytest.mark.parametrize("elements", [1, 64, 3000, 1 << 22])
def test_equals_attention_in_full(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biased, "BLOCK_ELEMENTS", elements)
    packed = pack([Encoded([1] * length) for length in LENGTHS])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(packed.tokens, HEADS, SIZE, generator=generator).transpose(0, 1) for _ in range(3))
    table = torch.randn(HEADS, 2 * packed.max_seqlen - 1, generator=generator)
    bias = biased.ByDistance(table)
    for _ in range(2):  # the second time from what was kept
        out = biased.run(q, k, v, packed, 0.3, bias)
        assert out.is_contiguous() and out.shape == (packed.tokens, HEADS * SIZE)
        start = 0
        for length in packed.lengths:
            rows = slice(start, start + length)
            distance = torch.arange(length)[:, None] - torch.arange(length)[None]
            scores = q[:, rows] @ k[:, rows].transpose(1, 2) * 0.3 + table[:, distance + packed.max_seqlen - 1]
            expected = (scores.softmax(-1) @ v[:, rows]).transpose(0, 1).flatten(1)
            torch.testing.assert_close(out[rows], expected, atol=2e-6, rtol=0)
            start += length


@pytest.mark.parametrize("elements", [1, 5000, 1 << 22])
def test_blocks_cover_each_row_once(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biased, "BLOCK_ELEMENTS", elements)
    packed = pack([Encoded([1] * length) for length in LENGTHS])
    seen = torch.zeros(packed.tokens, dtype=torch.int64)
    for block in biased.blocks(packed, HEADS):
        rows = block.last_row - block.first_row
        scores = (block.last - block.first) * HEADS * rows * block.group.length
        assert scores <= max(elements, HEADS * biased.MIN_ROWS * block.group.length)
        view = seen[biased.token_range(block)].view(block.last - block.first, block.group.length)
        view[:, block.first_row : block.last_row] += 1
    assert seen.eq(1).all()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biased, "KEPT_BYTES", 4 * HEADS * 40 * 40)
    packed = pack([Encoded([1] * length) for length in LENGTHS])
    bias = biased.ByDistance(torch.zeros(HEADS, 2 * packed.max_seqlen - 1))
    for block in biased.blocks(packed, HEADS):
        bias(block)
    kept = sum(math.prod(rows.shape) * 4 for rows in bias._kept.values())
    assert 0 < kept <= biased.KEPT_BYTES


@pytest.mark.parametrize("elements", [1, 3000, 1 << 22])
def test_tokens_that_only_ask_are_no_keys(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biased, "BLOCK_ELEMENTS", elements)
    attended = (5, None, 7, 2, None, 30)
    encoded = [Encoded([1] * length, attended=keys) for length, keys in zip(LENGTHS, attended, strict=True)]
    packed = pack(encoded)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(HEADS, packed.tokens, SIZE, generator=generator) for _ in range(3))
    table = torch.randn(HEADS, 2 * packed.max_seqlen - 1, generator=generator)
    out = biased.run(q, k, v, packed, 0.3, biased.ByDistance(table))
    start = 0
    for index in packed.order:
        length = LENGTHS[index]
        keys = slice(start, start + (attended[index] or length))
        distance = torch.arange(length)[:, None] - torch.arange(attended[index] or length)[None]
        rows = slice(start, start + length)
        scores = q[:, rows] @ k[:, keys].transpose(1, 2) * 0.3 + table[:, distance + packed.max_seqlen - 1]
        expected = (scores.softmax(-1) @ v[:, keys]).transpose(0, 1).flatten(1)
        torch.testing.assert_close(out[rows], expected, atol=2e-6, rtol=0)
        start += length
