"""Packed hidden states of every tiny checkpoint, and how far they are from the reference's, alone and in company.

Used by the parity tests, and by ``tests.parity.report``, which writes down what they find.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.checkpoints.families import family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.core import Encoded
from infinity_bento.models.backbone import Backbone, load_backbone
from tests import tiny
from tests.references import reference

# One, two equal, longer than the windows (16), longer than a DeltaNet chunk (64).
LENGTHS = (17, 3, 40, 1, 9, 9, 70)
TOLERANCE = 2e-5
RECURRENT = ("qwen3_5_text", "qwen3_5_moe_text")
RECURRENT_TOLERANCE = 1e-4  # their states are sums over the whole sequence, in another order than the reference's

NAMES = [name for name in (*tiny.RECIPES, *tiny.NATIVE) if name not in ("qwen3-noeos", "modernbert-mean")]


@dataclass(frozen=True, slots=True)
class Differences:
    """Largest absolute differences to the reference over all hidden states of the texts."""

    alone: float
    batched: float
    shuffled: float
    scale: float  # largest absolute value of the reference itself

    @property
    def largest(self) -> float:
        """The worst of the three ways."""
        return max(self.alone, self.batched, self.shuffled)

    def rounded(self) -> dict[str, float]:
        """The numbers with two digits, by name."""
        return {name: float(f"{value:.1e}") for name, value in asdict(self).items()}


def tolerance(name: str) -> float:
    """Most that a tiny checkpoint may differ from its reference, in float32."""
    return RECURRENT_TOLERANCE if name in RECURRENT else TOLERANCE


@functools.cache
def backbone(name: str) -> Backbone:
    """Our model of a tiny checkpoint."""
    layout = read_layout(tiny.checkpoint(name))
    family = family_of(layout.config, layout.transformer_path / "config.json")
    return load_backbone(layout, family, dtype=torch.float32)


def texts(seed: int = 3) -> list[list[int]]:
    """Random token ids of the lengths above."""
    generator = random.Random(seed)
    return [[generator.randrange(5, 400) for _ in range(length)] for length in LENGTHS]


def batch_of(model: Backbone, ids: Sequence[list[int]]) -> PackedBatch:
    """A packed batch for a model."""
    return pack([Encoded(row) for row in ids], position_offset=model.position_offset)


def run(model: Backbone, ids: Sequence[list[int]]) -> list[Tensor]:
    """Hidden states of each text, in the caller's order."""
    batch = batch_of(model, ids)
    with torch.inference_mode():
        hidden = model.forward(batch)
    return batch.unsort(hidden.split(batch.lengths))


def difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Largest absolute difference over all texts."""
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def measure(name: str) -> Differences:
    """How far a tiny checkpoint is from its reference: each text alone, all in one batch, and in a shuffled batch."""
    model, ids = backbone(name), texts()
    expected = list(map(reference(name), ids))
    order = random.Random(1).sample(range(len(ids)), len(ids))
    return Differences(
        alone=difference([run(model, [row])[0] for row in ids], expected),
        batched=difference(run(model, ids), expected),
        shuffled=difference(run(model, [ids[index] for index in order]), [expected[index] for index in order]),
        scale=max(row.abs().max().item() for row in expected),
    )
