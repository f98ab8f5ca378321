"""Shared prefixes computed once: the same numbers as each sequence alone, for every causal family and mask."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.core import BlockMask, Encoded
from infinity_bento.models.backbone import Backbone
from tests.parity.measure import NAMES, backbone, difference, tolerance

CAUSAL = [name for name in NAMES if backbone(name).causal]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Sums over several threads may differ in the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def family_of_prompts(seed: int = 5) -> list[list[int]]:
    """A template, two queries on it, documents on these; a lone text; a text that is another's prefix; a repeat."""
    generator = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(5, 400) for _ in range(count)]

    template, lone = tokens(70), tokens(9)
    queries = [template + tokens(4), template + tokens(20)]
    prompts = [query + tokens(length) for query in queries for length in (1, 30, 30, 66)]
    return [*prompts, lone, queries[0], template[:3], prompts[1]]


def states(model: Backbone, batch: PackedBatch) -> list[Tensor]:
    with torch.inference_mode():
        return batch.unsort(model.forward(batch).split(batch.lengths))


def packed(model: Backbone, encoded: list[Encoded], *, causal: bool) -> PackedBatch:
    return pack(encoded, position_offset=model.position_offset, causal=causal)


@pytest.mark.parametrize("name", CAUSAL)
def test_folded_equals_alone(name: str) -> None:
    model, prompts = backbone(name), family_of_prompts()
    batch = packed(model, [Encoded(prompt) for prompt in prompts], causal=True)
    assert batch.fold is not None and batch.rows < 0.5 * batch.tokens
    alone = [states(model, packed(model, [Encoded(prompt)], causal=True))[0] for prompt in prompts]
    assert difference(states(model, batch), alone) < tolerance(name)


@pytest.mark.parametrize("name", CAUSAL)
def test_changing_one_prompt_leaves_the_others_bit_equal(name: str) -> None:
    model, prompts = backbone(name), family_of_prompts()
    before = states(model, packed(model, [Encoded(prompt) for prompt in prompts], causal=True))
    prompts[2] = [*prompts[2][:-1], (prompts[2][-1] + 1) % 400]
    after = states(model, packed(model, [Encoded(prompt) for prompt in prompts], causal=True))
    assert difference([before[2]], [after[2]]) > 1e-3
    del before[2], after[2]
    assert difference(before, after) < (1e-5 if "moe" in name else 1e-30)


def question(state: list[int], asked: list[int]) -> Encoded:
    """A question about a state, under the block mask."""
    blocks = np.array([0] * len(state) + [1] * len(asked), dtype=np.int32)
    return Encoded(state + asked, blocks=blocks, block_mask=BlockMask.SHARED_APART)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
def test_block_masks_share_the_state(name: str) -> None:
    model = backbone(name)
    generator = random.Random(1)
    tokens = [generator.randrange(5, 400) for _ in range(300)]
    first, second = tokens[:80], tokens[:83]
    encoded = [question(first, tokens[100:110]), question(first, tokens[110:150]), question(second, tokens[100:110])]
    batch = packed(model, encoded, causal=False)
    assert batch.fold is not None and batch.rows == 80 + 10 + 40 + 83 + 10
    alone = [states(model, packed(model, [one], causal=False))[0] for one in encoded]
    assert difference(states(model, batch), alone) < tolerance(name)
    causal = [states(model, packed(model, [Encoded(one.input_ids)], causal=True))[0] for one in encoded]
    assert difference(alone, causal) > 1e-2  # the mask is not the causal one


def test_bidirectional_models_never_fold() -> None:
    model = backbone("bert")
    assert packed(model, [Encoded(prompt) for prompt in family_of_prompts()], causal=model.causal).fold is None
