from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.splade_memory import peak_allocated
from infinity_bento.batching.packing import pack
from infinity_bento.checkpoints.families import BY_MODEL_TYPE, family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.checkpoints.learned_sparse import LearnedSparse
from infinity_bento.checkpoints.st_modules import SparseStaticEmbeddingSpec, SpladePoolingSpec
from infinity_bento.core import Encoded, Item, SparseRow, Task
from infinity_bento.errors import InferenceError, InvalidInput, LoadError, WeightMismatch
from infinity_bento.heads import sparse as module
from infinity_bento.heads.masked_lm import MaskedLM, load_masked_lm
from infinity_bento.heads.sparse import SparseHead, build_sparse_head, load_query_weights
from infinity_bento.models.backbone import Backbone, load_backbone
from tests import tiny

LENGTHS = (3, 1, 7, 3, 12)
VOCABULARY = 50


def item(**kwargs: object) -> Item:
    return Item(Task.EMBED_SPARSE, text="a", **kwargs)  # type: ignore[arg-type]


def masked_lm(vocabulary: int = VOCABULARY, width: int = 6, shift: float = -1.0) -> MaskedLM:
    generator = torch.Generator().manual_seed(1)
    decoder = torch.randn(vocabulary, width, generator=generator)
    return MaskedLM(decoder, torch.randn(vocabulary, generator=generator) + shift)


def hidden(total: int, width: int = 6) -> Tensor:
    return torch.randn(total, width, generator=torch.Generator().manual_seed(0))


def vectors(head: SparseHead, encoded: Sequence[Encoded], hidden_TD: Tensor) -> list[Tensor]:
    """Dense vectors in the caller's order."""
    batch = pack(encoded)
    with torch.inference_mode():
        rows = head.run(hidden_TD, batch)
    outputs = head.collect(rows, [batch.order.index(index) for index in range(len(batch))], [item()] * len(batch))
    dense = []
    for output in outputs:
        assert isinstance(output, SparseRow)
        dense.append(torch.zeros(head.vocabulary_size))
        dense[-1][torch.from_numpy(output.indices).long()] = torch.from_numpy(output.values)
    return dense


def expected(head: SparseHead, encoded: Sequence[Encoded], hidden_TD: Tensor) -> list[Tensor]:
    """The definition, one sequence at a time in float64."""
    lengths = [len(one) for one in encoded]
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    pieces = torch.split(hidden_TD, [lengths[index] for index in order])
    rows: dict[int, Tensor] = {}
    for index, piece in zip(order, pieces, strict=True):
        values = head.masked_lm.logits(piece).double().relu().log1p()
        if head.pooling.activation == "log1p_relu":
            values = values.log1p()
        rows[index] = (values.amax(0) if head.pooling.strategy == "max" else values.sum(0)).float()
    return [rows[index] for index in range(len(lengths))]


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("chunk_tokens", [1000, 7, 4])
@pytest.mark.parametrize("block_rows", [1000, 2])
def test_chunks_and_blocks_do_not_change_a_vector(
    strategy: str, activation: str, chunk_tokens: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": chunk_tokens * VOCABULARY})
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(module, "ROW_ELEMENTS", block_rows * VOCABULARY)
    head = SparseHead(masked_lm(), SpladePoolingSpec(strategy=strategy, activation=activation))
    encoded = [Encoded([1] * length) for length in LENGTHS]
    rows = hidden(sum(LENGTHS))
    for ours, wanted in zip(vectors(head, encoded, rows), expected(head, encoded, rows), strict=True):
        assert (ours - wanted).abs().max() < 1e-5
        assert 0 < int((wanted > 0).sum()) < VOCABULARY


def test_a_sequence_without_positive_logits_is_an_empty_vector() -> None:
    head = SparseHead(MaskedLM(torch.zeros(VOCABULARY, 6), torch.full((VOCABULARY,), -1.0)), SpladePoolingSpec())
    batch = pack([Encoded([1, 2])])
    (row,) = head.collect(head.run(hidden(2), batch), [0], [item()])
    assert isinstance(row, SparseRow)
    assert len(row.indices) == len(row.values) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_an_error_and_harms_nobody_else(value: float) -> None:
    head = SparseHead(masked_lm(), SpladePoolingSpec())
    batch = pack([Encoded([1, 2]), Encoded([3, 4])])
    rows = hidden(4)
    clean = head.collect(head.run(rows, batch), [0, 1], [item()] * 2)
    rows[0, 0] = value
    spoilt, fine = head.collect(head.run(rows, batch), [0, 1], [item()] * 2)
    assert isinstance(spoilt, InferenceError)
    assert isinstance(fine, SparseRow)
    assert np.array_equal(fine.values, clean[1].values)  # type: ignore[union-attr]


@pytest.mark.parametrize("wish", [{"dimensions": 5}, {"normalize": True}])
def test_wishes_that_make_no_sense_for_sparse_vectors_are_refused(wish: dict[str, object]) -> None:
    head = SparseHead(masked_lm(), SpladePoolingSpec())
    batch = pack([Encoded([1, 2]), Encoded([3, 4])])
    refused, fine = head.collect(head.run(hidden(4), batch), [0, 1], [item(**wish), item(normalize=False)])
    assert isinstance(refused, InvalidInput)
    assert refused.param == next(iter(wish))
    assert isinstance(fine, SparseRow)


def test_static_queries_are_looked_up_and_need_no_hidden_states() -> None:
    weights = np.arange(VOCABULARY, dtype=np.float32)
    head = SparseHead(masked_lm(), SpladePoolingSpec(), query_weights=weights)
    encoded = [Encoded([9, 0, 9, 4], static=True), Encoded([1, 2]), Encoded([7], static=True), Encoded([3] * 6)]
    batch = pack(encoded)
    rows = head.run(hidden(8), batch)
    positions = [batch.order.index(index) for index in range(4)]
    first, document, last, _ = head.collect(rows, positions, [item()] * 4)
    assert isinstance(first, SparseRow)
    assert isinstance(last, SparseRow)
    assert first.indices.tolist() == [4, 9]  # a token counts once, and one without weight not at all
    assert first.values.tolist() == [4.0, 9.0]
    assert last.indices.tolist() == [7]
    alone = pack([encoded[1]])
    (same,) = head.collect(head.run(hidden(8)[:2], alone), [0], [item()])
    assert isinstance(document, SparseRow)
    assert np.array_equal(document.values, same.values)  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize(("sequences", "length"), [(32, 512), (2048, 8), (1, 16384)])
def test_memory_does_not_grow_with_the_batch(
    strategy: str, sequences: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tenth of every size the bound of 300 MB is one of 30 MB; ``benchmarks.splade_memory`` has the full."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": module.CHUNK_ELEMENTS["cpu"] // 10})
    monkeypatch.setattr(module, "ROW_ELEMENTS", module.ROW_ELEMENTS // 10)
    head = SparseHead(masked_lm(3052, 32, shift=-15.0), SpladePoolingSpec(strategy=strategy))
    batch = pack([Encoded([1] * length)] * sequences)
    rows = hidden(batch.tokens, 32)

    @torch.inference_mode()
    def run() -> object:
        return head.collect(head.run(rows, batch), range(sequences), [item()] * sequences)

    assert batch.tokens * 3052 * 4 > 190e6  # all logits at once
    assert peak_allocated(run, "cpu") < 15e6


# Loading -------------------------------------------------------------------------------------------------------------


def embeddings_of(backbone: Backbone) -> Tensor:
    module: Any = backbone.module
    weight: Tensor = module.get_input_embeddings().weight
    return weight


def loaded(name: str, folder: Path) -> tuple[Backbone, MaskedLM]:
    layout = read_layout(folder)
    family = family_of(layout.config, folder / "config.json")
    backbone = load_backbone(layout, family, dtype=torch.float32)
    return backbone, load_masked_lm(folder, family, backbone)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a masked language model."""
    for file in tiny.checkpoint("bert", "mlm").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of the checkpoint; None removes one. ``__`` stands for a dot."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    for key, tensor in tensors.items():
        name = f"cls.predictions.{key.replace('__', '.')}"
        if tensor is None:
            del stored[name]
        else:
            stored[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})


def test_a_tied_decoder_is_the_table_of_word_embeddings_itself(folder: Path) -> None:
    backbone, masked = loaded("bert", folder)
    embeddings = embeddings_of(backbone)
    assert masked.decoder_VE.data_ptr() == embeddings.data_ptr()
    change(folder, decoder__weight=embeddings.detach().clone())
    backbone, masked = loaded("bert", folder)  # as pickled checkpoints store it
    assert masked.decoder_VE.data_ptr() == embeddings_of(backbone).data_ptr()


def test_a_decoder_of_its_own_is_used(folder: Path) -> None:
    own = torch.randn(tiny.VOCABULARY, tiny.WIDTH)
    change(folder, decoder__weight=own)
    assert torch.equal(loaded("bert", folder)[1].decoder_VE, own)


def test_old_names_of_layer_norm_and_both_names_of_the_bias_are_read(folder: Path) -> None:
    _, before = loaded("bert", folder)
    assert before.norm is not None and before.norm[1] is not None and before.bias_V is not None
    stem = "transform__LayerNorm"
    change(folder, **{f"{stem}__weight": None, f"{stem}__bias": None})
    change(folder, **{f"{stem}__gamma": before.norm[0].clone(), f"{stem}__beta": before.norm[1].clone()})
    change(folder, decoder__bias=torch.ones(tiny.VOCABULARY))  # the tied one wins, as in transformers
    _, after = loaded("bert", folder)
    assert torch.equal(after.logits(hidden(3, 64)), before.logits(hidden(3, 64)))


def test_missing_tensors_wrong_shapes_and_nan_are_refused(folder: Path) -> None:
    change(folder, transform__LayerNorm__weight=None)
    with pytest.raises(WeightMismatch, match=r"tensor 'cls\.predictions\.transform\.LayerNorm\.weight' is missing"):
        loaded("bert", folder)
    change(folder, transform__LayerNorm__weight=torch.ones(3))
    with pytest.raises(WeightMismatch, match=r"has shape \[3\], but config\.json asks for \[64\]"):
        loaded("bert", folder)
    change(folder, transform__LayerNorm__weight=torch.full((64,), float("nan")))
    with pytest.raises(WeightMismatch, match="NaN"):
        loaded("bert", folder)


def test_a_checkpoint_or_family_without_such_a_head_is_refused() -> None:
    with pytest.raises(LoadError, match=r"has no masked-language-model head .* use a checkpoint whose architecture"):
        loaded("bert", tiny.checkpoint("bert"))
    backbone, _ = loaded("bert", tiny.checkpoint("bert", "mlm"))
    layout = read_layout(tiny.checkpoint("electra"))
    with pytest.raises(LoadError, match="ELECTRA has no masked-language-model head"):
        build_sparse_head(layout, BY_MODEL_TYPE["electra"], backbone, LearnedSparse())


def test_query_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatch, match="there is no tensor 'weight' of one dimension"):
        load_query_weights(SparseStaticEmbeddingSpec(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes((tiny.checkpoint("bert") / "tokenizer.json").read_bytes())
    (tmp_path / "idf.json").write_text(json.dumps({"no": 1.5, "unheard of": 2}))
    table = load_query_weights(SparseStaticEmbeddingSpec(tmp_path, "idf.json"))
    assert sorted(table[table != 0].tolist()) == [1.5]  # a word that is no token weighs nothing
    (tmp_path / "idf.json").write_text(json.dumps({"no": "much"}))
    with pytest.raises(LoadError, match=r"idf\.json: the weight of 'no' is 'much'; it must be a number"):
        load_query_weights(SparseStaticEmbeddingSpec(tmp_path, "idf.json"))
