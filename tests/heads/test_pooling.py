from __future__ import annotations

import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Pooling as OraclePooling

from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.core import Encoded, Pooling
from infinity_bento.heads.pooling import POOLERS, pool

LENGTHS = [4, 1, 7, 4, 2]
WIDTH = 6


def packed(prompts: list[int] | None = None) -> tuple[torch.Tensor, PackedBatch]:
    torch.manual_seed(0)
    prompts = prompts or [0] * len(LENGTHS)
    batch = pack([Encoded([1] * n, prompt_length=p) for n, p in zip(LENGTHS, prompts, strict=True)])
    return torch.randn(batch.tokens, WIDTH), batch


def oracle(hidden: torch.Tensor, batch: PackedBatch, modes: list[str], prompt: int | None = None) -> torch.Tensor:
    """sentence-transformers' pooling of the same states, right-padded, in packed order."""
    longest = max(batch.lengths)
    states = torch.full((len(batch), longest, WIDTH), 50.0)  # padding that would show
    mask = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, (start, length) in enumerate(zip(batch.starts().tolist(), batch.lengths, strict=True)):
        states[row, :length] = hidden[start : start + length]
        mask[row, :length] = 1
    module = OraclePooling(WIDTH, pooling_mode=tuple(modes), include_prompt=prompt is None)
    features = {"token_embeddings": states, "attention_mask": mask}
    if prompt is not None:
        features["prompt_length"] = prompt
    return module(features)["sentence_embedding"]


@pytest.mark.parametrize("mode", list(POOLERS))
def test_equals_sentence_transformers(mode: Pooling) -> None:
    hidden, batch = packed()
    assert (pool(hidden, batch, [mode]) - oracle(hidden, batch, [mode.value])).abs().max() < 1e-6


def test_several_modes_concatenate_in_the_order_of_the_class() -> None:
    hidden, batch = packed()
    modes = [Pooling.CLS, Pooling.MAX, Pooling.MEAN, Pooling.LAST_TOKEN]
    out = pool(hidden, batch, modes)
    assert out.shape == (len(LENGTHS), 4 * WIDTH)
    assert (out - oracle(hidden, batch, [mode.value for mode in modes])).abs().max() < 1e-6


@pytest.mark.parametrize("mode", list(POOLERS))
def test_a_left_out_prompt_equals_sentence_transformers(mode: Pooling) -> None:
    hidden, batch = packed([1] * len(LENGTHS))
    out = pool(hidden, batch, [mode], include_prompt=False)
    expected = oracle(hidden, batch, [mode.value], prompt=1)
    longer = [row for row, length in enumerate(batch.lengths) if length > 1]  # of one token nothing would be left
    assert (out[longer] - expected[longer]).abs().max() < 1e-6
    assert torch.isfinite(out).all()


def test_each_sequence_leaves_out_its_own_prompt() -> None:
    hidden, batch = packed([2, 0, 3, 1, 0])
    out = pool(hidden, batch, [Pooling.MEAN], include_prompt=False)
    assert batch.prompt_lengths is not None
    for row, (start, length, prompt) in enumerate(
        zip(batch.starts().tolist(), batch.lengths, batch.prompt_lengths, strict=True)
    ):
        assert torch.allclose(out[row], hidden[start + prompt : start + length].mean(0), atol=1e-6)


def test_half_precision_is_summed_in_float32() -> None:
    hidden = torch.full((4096, 2), 1.0, dtype=torch.bfloat16)
    batch = pack([Encoded([1] * 4096)])
    out = pool(hidden, batch, [Pooling.MEAN])
    assert out.dtype == torch.float32
    assert out.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("mode", list(POOLERS))
def test_a_row_does_not_see_its_neighbours(mode: Pooling) -> None:
    hidden, batch = packed()
    before = pool(hidden, batch, [mode])
    hidden = torch.where((batch.sequence_ids() == 3)[:, None], hidden + 1, hidden)
    after = pool(hidden, batch, [mode])
    others = [row for row in range(len(batch)) if row != 3]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[3], after[3])
