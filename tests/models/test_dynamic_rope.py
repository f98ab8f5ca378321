"""Rotary embeddings that grow with the length: each sequence by its own, as alone in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from infinity_bento.batching.packing import pack
from infinity_bento.checkpoints.families import family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.core import Encoded
from infinity_bento.errors import LoadError
from infinity_bento.models.backbone import Backbone, load_backbone
from infinity_bento.models.patches.dynamic_rope import lengths_of
from tests import tiny

TRAINED = 16
LENGTHS = (9, 40, 16, 17)


def load(folder: Path) -> Backbone:
    layout = read_layout(folder)
    return load_backbone(layout, family_of(layout.config, folder / "config.json"), dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An old NomicBERT with dynamic scaling beyond 16 tokens."""
    recipe = tiny.RECIPES["nomic_bert-old"]
    rope = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    scaled = tiny.Recipe(
        recipe.config_class,
        {**recipe.config, "rope_parameters": rope, "max_position_embeddings": TRAINED},
        recipe.tokenizer,
        recipe.pooling,
    )
    tiny.make(scaled, tmp_path, "base")
    return tmp_path


@pytest.mark.parametrize("old_keys", [False, True])
def test_each_sequence_is_scaled_by_its_own_length(folder: Path, old_keys: bool) -> None:
    ids = [[(31 * i + 7 * n) % 400 for i in range(n)] for n in LENGTHS]
    expected = []
    for row in ids:
        fresh = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()  # keeps its longest length
        with torch.inference_mode():
            expected.append(fresh(input_ids=torch.tensor([row])).last_hidden_state[0])
    if old_keys:
        tiny.old_nomic(folder)
        tiny.edit_config(folder, rotary_scaling_factor=2.0, max_trained_positions=TRAINED)
    model = load(folder)
    batch = pack([Encoded(row) for row in ids])
    with torch.inference_mode():
        rows = batch.unsort(model.forward(batch).split(batch.lengths))
    for row, wanted in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, wanted, atol=2e-5, rtol=0)


def test_lengths_are_read_off_the_positions() -> None:
    batch = pack([Encoded([1] * length) for length in (3, 1, 3, 2)])
    assert lengths_of(batch.position_ids).tolist() == [1, 2, 2, 3, 3, 3, 3, 3, 3]


def test_longrope_is_refused(tmp_path: Path) -> None:
    recipe = tiny.RECIPES["llama"]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 256,
    }
    changed = tiny.Recipe(
        recipe.config_class, {**recipe.config, "rope_parameters": rope}, recipe.tokenizer, recipe.pooling
    )
    tiny.make(changed, tmp_path, "base")
    with pytest.raises(LoadError, match="longrope"):
        load(tmp_path)
