from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infinity_bento.checkpoints.families import BY_MODEL_TYPE
from infinity_bento.checkpoints.late_interaction import Expansion, read_late_interaction
from infinity_bento.checkpoints.layout import Layout, read_layout
from infinity_bento.checkpoints.st_modules import LayerNormSpec, NormalizeSpec
from infinity_bento.errors import LoadError, WeightMismatch
from infinity_bento.heads.late_interaction import build_late_interaction_head
from infinity_bento.heads.token_embeddings import TokenEmbeddingHead
from tests import tiny
from tests import tiny_retrieval as made


def head(layout: Layout, *, family: str = "bert", expansion: Expansion | None = None) -> TokenEmbeddingHead:
    late = read_late_interaction(layout)
    if expansion is not None:
        late = replace(late, expansion=expansion)
    return build_late_interaction_head(
        layout, late, BY_MODEL_TYPE[family], hidden_size=tiny.WIDTH, device=torch.device("cpu")
    )


@pytest.mark.parametrize("folder", [made.stanford, made.pylate])
def test_both_layouts_have_the_same_projection(folder: object) -> None:
    layout = read_layout(folder())  # type: ignore[operator]
    built = head(layout)
    assert built.dimensions == made.WIDTH
    assert built.normalize
    (linear,) = built.modules
    rows = torch.randn(3, tiny.WIDTH)
    assert torch.allclose(linear(rows), rows @ made.projection().T, atol=1e-6)


def test_a_projection_stored_in_half_precision_runs_in_float32() -> None:
    folder = made.stanford()
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (linear,) = head(read_layout(folder)).modules
    assert linear(torch.randn(2, tiny.WIDTH)).dtype is torch.float32


@pytest.mark.parametrize(
    ("shape", "message"), [(None, "is missing"), ((32, 48), r"is of shape \[32, 48\]"), ((64,), r"is of shape \[64\]")]
)
def test_a_projection_that_is_missing_or_does_not_fit_is_refused(shape: tuple[int, ...] | None, message: str) -> None:
    folder = made.stanford()
    tensors = load_file(folder / "model.safetensors")
    del tensors["linear.weight"]
    if shape is not None:
        tensors["linear.weight"] = torch.ones(shape)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightMismatch, match=rf"model\.safetensors: tensor 'linear\.weight' {message}; a ColBERT"):
        head(read_layout(folder))


def test_a_dense_module_of_another_width_is_refused() -> None:
    folder = made.pylate()
    file = folder / "1_Dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"in_features": 48}))
    with pytest.raises(LoadError, match=r"1_Dense/config\.json: 'in_features' is 48, but the rows before it have"):
        head(read_layout(folder))


def test_a_module_that_needs_a_pooled_vector_is_refused(tmp_path: Path) -> None:
    layout = read_layout(made.pylate())
    layout = replace(layout, modules=(*layout.modules, LayerNormSpec(tmp_path, made.WIDTH)))
    with pytest.raises(LoadError, match=r"modules\.json: a LayerNorm module cannot be part of a late-interaction"):
        head(layout)


def test_a_closing_normalize_module_is_a_default_that_requests_may_overrule() -> None:
    layout = replace(read_layout(made.pylate()), kind="MultiVectorEncoder", st_config={})
    bare = head(layout)
    assert not bare.normalize
    closing = head(replace(layout, modules=(*layout.modules, NormalizeSpec("token_embeddings", "token_embeddings"))))
    assert closing.normalize
    assert len(closing.modules) == len(bare.modules) == 1


@pytest.mark.parametrize("family", ["deberta-v2", "qwen3_5_text"])
def test_families_that_mix_tokens_otherwise_refuse_rows_that_only_ask(family: str) -> None:
    layout = read_layout(made.pylate())
    with pytest.raises(LoadError, match="only checkpoints with attend_to_expansion_tokens true can be served"):
        head(layout, family=family, expansion=Expansion(32))
    assert head(layout, family=family, expansion=Expansion(32, attend=True)).dimensions == made.WIDTH
