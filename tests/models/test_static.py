from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from infinity_bento.batching.packing import pack
from infinity_bento.checkpoints.families import family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.core import Encoded
from infinity_bento.errors import WeightMismatch
from infinity_bento.models.backbone import load_backbone
from infinity_bento.models.static import RoutedBackbone, StaticBackbone
from tests import tiny


def test_the_state_of_a_token_is_its_row(tmp_path: Path) -> None:
    weight = torch.randn(9, 4).half()
    save_file({"embedding.weight": weight}, tmp_path / "model.safetensors")
    backbone = StaticBackbone.load(tmp_path)
    assert (backbone.hidden_size, backbone.vocabulary_size, backbone.dtype) == (4, 9, torch.float32)
    batch = pack([Encoded([3, 1, 3]), Encoded([8])])
    assert torch.equal(backbone.forward(batch), weight.float()[[8, 3, 1, 3]])
    assert backbone.self_check().attention_calls == 0


def test_the_layout_of_model2vec_is_folded(tmp_path: Path) -> None:
    tensors = {
        "embeddings": torch.randn(2, 5).half(),
        "mapping": torch.tensor([0, 1, 1, 0]),
        "weights": torch.rand(4, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    rows = StaticBackbone.load(tmp_path).weight_VD
    expected = tensors["embeddings"].float()[tensors["mapping"]] * tensors["weights"].float()[:, None]
    assert torch.equal(rows, expected)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"other": torch.zeros(2, 2)}, r"there is no tensor 'embedding\.weight' or 'embeddings' of two dimensions"),
        ({"embedding.weight": torch.zeros(2)}, "there is no tensor"),
        ({"embedding.weight": torch.tensor([[float("nan")]])}, "holds 1 values that are NaN"),
    ],
)
def test_a_folder_without_a_sound_table_is_refused(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=message):
        StaticBackbone.load(tmp_path)


def test_the_transformer_runs_for_documents_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = read_layout(tiny.checkpoint("bert"))
    documents = load_backbone(layout, family_of(layout.config, layout.path), dtype=torch.float32)
    backbone = RoutedBackbone(documents)
    ids = [[5, 6, 7], [8], [9, 10]]
    alone = pack([Encoded(row) for row in ids[:2]])
    mixed = pack([Encoded(ids[0]), Encoded(ids[1]), Encoded(ids[2], static=True)])
    with torch.inference_mode():
        expected = documents.forward(alone)
        assert torch.equal(backbone.forward(mixed), expected)
        monkeypatch.setattr(documents, "forward", lambda batch, adapters=None: pytest.fail("it ran"))
        assert backbone.forward(pack([Encoded(ids[2], static=True)])).shape == (0, tiny.WIDTH)
