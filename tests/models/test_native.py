"""ALiBi slopes, per-sequence rotary bases, and the refusal of configs that the native classes do not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity_bento.errors import LoadError
from infinity_bento.models.jina_bert import JinaBertModel
from infinity_bento.models.native import alibi_slopes, dynamic_base
from infinity_bento.models.nomic_moe import NomicMoeModel
from tests import tiny


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (4, [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
        (8, [2.0**-power for power in range(1, 9)]),
        (12, [2.0**-power for power in range(1, 9)] + [2.0**-power for power in (0.5, 1.5, 2.5, 3.5)]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
    ],
)
def test_alibi_slopes(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads) == pytest.approx(slopes)


def test_dynamic_base_leaves_trained_lengths_alone() -> None:
    base = dynamic_base(torch.tensor([1, 16, 17, 32]), 1000.0, 8, factor=2.0, trained=16)
    assert base[:2].tolist() == [1000.0, 1000.0]
    assert base[3].item() == pytest.approx(1000.0 * 3 ** (8 / 6))
    assert base[1] < base[2] < base[3]


@pytest.mark.parametrize(
    "change",
    [
        {"position_embedding_type": "absolute"},
        {"feed_forward_type": "original"},
        {"hidden_size": None},
    ],
)
def test_jina_refuses_what_it_does_not_do(change: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=next(iter(change))):
        JinaBertModel({**tiny.NATIVE["jina_bert"], **change})


@pytest.mark.parametrize(
    "change",
    [
        {"prenorm": True},
        {"rotary_emb_interleaved": True},
        {"rotary_emb_fraction": 0.5},
        {"moe_normalize_expert_weights": True},
        {"activation_function": "swiglu"},
        {"n_embd": None},
    ],
)
def test_nomic_refuses_what_it_does_not_do(change: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=next(iter(change))):
        NomicMoeModel({**tiny.NATIVE["nomic_bert-moe"], **change})
