"""Modules behind pooling, and static embeddings, against sentence-transformers on the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizer

from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.checkpoints.st_modules import (
    ACTIVATIONS,
    DenseSpec,
    LayerNormSpec,
    NormalizeSpec,
    PoolingSpec,
    StaticEmbeddingSpec,
    read_dense,
)
from infinity_bento.errors import LoadError, WeightMismatch
from infinity_bento.heads.modules import build_modules


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def reference(module: nn.Module, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return module({"sentence_embedding": rows.clone()})["sentence_embedding"]


def saved_dense(folder: Path, **options: object) -> st.Dense:
    torch.manual_seed(1)
    module = st.Dense(6, **{"out_features": 4, **options})  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    module.save(str(folder))
    return module


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_equals_the_library(name: str, tmp_path: Path, rows: Tensor) -> None:
    saved_dense(tmp_path, activation_function=getattr(nn, name)())
    (module,) = build_modules([read_dense(tmp_path)])
    assert torch.equal(module(rows), reference(st.Dense.load(str(tmp_path)), rows))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("width", [4, 6])
def test_dense_equals_the_library(bias: bool, residual: bool, width: int, tmp_path: Path, rows: Tensor) -> None:
    dense = saved_dense(tmp_path, out_features=width, bias=bias, use_residual=residual)
    (module,) = build_modules([read_dense(tmp_path)])
    assert torch.equal(module(rows), reference(dense, rows))
    assert not module.training


def test_dense_in_the_old_file_format_and_half_precision_runs_in_float32(tmp_path: Path, rows: Tensor) -> None:
    dense = saved_dense(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({name: t.half() for name, t in dense.state_dict().items()}, tmp_path / "pytorch_model.bin")
    (module,) = build_modules([read_dense(tmp_path)])
    assert module(rows).dtype == torch.float32
    assert torch.equal(module(rows), reference(dense.half().float(), rows))


def test_dense_with_weights_of_another_shape_is_refused(tmp_path: Path) -> None:
    saved_dense(tmp_path)
    spec = DenseSpec(tmp_path, 6, 5)
    with pytest.raises(WeightMismatch, match=r"model\.safetensors: tensor 'linear\.\w+' has shape \[4.*\[5"):
        build_modules([spec])
    with pytest.raises(WeightMismatch, match=r"model\.safetensors: 1 tensor \(residual\.weight\) is missing"):
        build_modules([DenseSpec(tmp_path, 6, 4, residual=True)])


def test_layer_norm_and_normalize_equal_the_library(tmp_path: Path, rows: Tensor) -> None:
    norm = st.LayerNorm(6)
    with torch.no_grad():
        norm.norm.weight.uniform_(0.5, 2.0)
        norm.norm.bias.uniform_(-1.0, 1.0)
    norm.save(str(tmp_path))
    ours, unit = build_modules([LayerNormSpec(tmp_path, 6), NormalizeSpec()])
    assert torch.equal(ours(rows), reference(norm, rows))
    rows[0] = 0.0
    rows[1] = 1e-20
    assert torch.equal(unit(rows), reference(st.Normalize(), rows))
    assert torch.isfinite(unit(rows)).all()


def test_a_row_does_not_depend_on_its_neighbours(tmp_path: Path, rows: Tensor) -> None:
    saved_dense(tmp_path)
    chain = build_modules([read_dense(tmp_path), NormalizeSpec()])
    together = alone = rows
    alone_rows = []
    for row in rows.split(1):
        alone = row
        for module in chain:
            alone = module(alone)
        alone_rows.append(alone)
    for module in chain:
        together = module(together)
    assert torch.allclose(together, torch.cat(alone_rows), atol=1e-6)


def old_checkpoint(folder: Path) -> Path:
    """A folder in the layout of sentence-transformers 2, written by hand: BERT, mean and max, Dense, Normalize."""
    torch.manual_seed(4)
    settings = BertConfig(
        vocab_size=8, hidden_size=6, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )  # fmt: skip
    BertModel(settings).save_pretrained(folder / "0_Transformer")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    BertTokenizer(vocab={name: number for number, name in enumerate(names)}).save_pretrained(folder / "0_Transformer")
    files: dict[str, object] = {
        "0_Transformer/sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": 6,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": True,
        },
        "2_Dense/config.json": {
            "in_features": 12,
            "out_features": 4,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
        "modules.json": [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{path[2:]}"}
            for n, path in enumerate(["0_Transformer", "1_Pooling", "2_Dense", "3_Normalize"])
        ],
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(data))
    torch.save(nn.Linear(12, 4).state_dict(prefix="linear."), folder / "2_Dense" / "pytorch_model.bin")
    return folder


def test_a_checkpoint_of_the_old_layout_equals_the_library(tmp_path: Path) -> None:
    folder = old_checkpoint(tmp_path)
    model = SentenceTransformer(str(folder), device="cpu")
    layout = read_layout(folder)
    assert layout.pooling is not None
    assert [mode.value for mode in layout.pooling.modes] == ["max", "mean"]
    assert (layout.max_seq_length, model.max_seq_length) == (16, 16)
    with torch.no_grad():
        features = model[1](model[0](model.preprocess(TEXTS)))
        rows = features["sentence_embedding"].clone()
        for module in build_modules(layout.modules[1:]):
            rows = module(rows)
    assert torch.allclose(rows, torch.from_numpy(model.encode(TEXTS)), atol=1e-6)


def test_modules_that_cannot_follow_pooling_are_refused(tmp_path: Path) -> None:
    saved_dense(tmp_path)
    with pytest.raises(LoadError, match=r"modules\.json: a Pooling module cannot follow pooling"):
        build_modules([PoolingSpec(())])
    with pytest.raises(LoadError, match="StaticEmbedding module cannot follow"):
        build_modules([StaticEmbeddingSpec(tmp_path)])
    with pytest.raises(LoadError, match=r"config\.json: 'module_input_name' of Dense is 'token_embeddings'"):
        build_modules([DenseSpec(tmp_path, 6, 4, input_name="token_embeddings")])
    with pytest.raises(LoadError, match=r"modules\.json: 'module_output_name' of Normalize"):
        build_modules([NormalizeSpec(output_name="token_embeddings")])


TEXTS = ["a b c", "b", "", "c c a unknown"]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def packed(texts: list[str]) -> tuple[Tensor, Tensor]:
    rows = [encoding.ids for encoding in tokenizer().encode_batch(texts, add_special_tokens=False)]
    bounds = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0).int()
    return torch.tensor([token for row in rows for token in row]), bounds
