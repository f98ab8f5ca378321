"""Loading and the self-check: what is served, and what is refused with which sentence."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinity_bento.batching.packing import pack
from infinity_bento.checkpoints.families import BY_MODEL_TYPE, Family, family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.core import Encoded
from infinity_bento.errors import LoadError, WeightMismatch
from infinity_bento.models.backbone import Backbone, load_backbone
from infinity_bento.models.patches import dynamic_rope
from tests import tiny


def load(folder: Path, family: Family | None = None) -> Backbone:
    layout = read_layout(folder)
    found = family or family_of(layout.config, layout.transformer_path / "config.json")
    return load_backbone(layout, found, dtype=torch.float32)


def hidden(model: Backbone, rows: list[Encoded]) -> list[Tensor]:
    batch = pack(rows, position_offset=model.position_offset)
    with torch.inference_mode():
        return batch.unsort(model.forward(batch).split(batch.lengths))


@pytest.mark.parametrize(
    ("name", "offset", "causal", "width"),
    [
        ("bert", 0, False, 64),
        ("roberta", 2, False, 64),
        ("mpnet", 2, False, 64),
        ("distilbert", 0, False, 64),
        ("jina_bert-6-heads", 0, False, 96),
        ("nomic_bert-moe", 0, False, 64),
        ("qwen3", 0, True, 64),
        ("qwen3-bidirec", 0, False, 64),
        ("llama_bidirec", 0, False, 64),
        ("embeddinggemma", 0, False, 64),
        ("gemma3_text", 0, True, 64),
    ],
)
def test_facts(name: str, offset: int, causal: bool, width: int) -> None:
    model = load(tiny.checkpoint(name))
    assert (model.position_offset, model.causal, model.hidden_size) == (offset, causal, width)
    assert model.attention_name == "infinity_packed"
    assert model.device == torch.device("cpu") and model.dtype is torch.float32
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert not model.module.training


@pytest.mark.parametrize("name", ["bert", "roberta", "gte", "jina_embeddings_v3", "nomic_bert", "mpnet", "qwen3"])
def test_head_checkpoints_hold_the_same_backbone(name: str) -> None:
    rows = [Encoded([5, 6, 7]), Encoded([8])]
    base = hidden(load(tiny.checkpoint(name)), rows)
    with_head = hidden(load(tiny.checkpoint(name, "cls")), rows)
    assert all(row.isfinite().all() for row in with_head)
    assert [row.shape for row in with_head] == [row.shape for row in base]


def test_token_types_reach_families_that_have_them() -> None:
    ids, types = [5, 6, 7, 8], [0, 0, 1, 1]
    for name, differs in (("bert", True), ("deberta-v2-xlarge", True), ("deberta-v2", False), ("xlm-roberta", False)):
        model = load(tiny.checkpoint(name))
        plain, typed = hidden(model, [Encoded(ids)])[0], hidden(model, [Encoded(ids, types)])[0]
        assert torch.equal(plain, typed) != differs, name


@pytest.mark.parametrize("name", ["bert", "mpnet", "deberta-v2", "qwen3_5_text", "jina_bert"])
def test_several_threads_run_one_module(name: str) -> None:
    model = load(tiny.checkpoint(name))
    texts = [[Encoded([(7 * i + k) % 400 for i in range(n)]) for n in (4 + k, 21, 9)] for k in range(4)]
    wanted = [hidden(model, rows) for rows in texts]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(10):
            got = hidden(model, texts[index])
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted[index], strict=True)):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", ["mpnet", "deberta-v2"])
def test_a_class_that_ignores_packing_is_caught(name: str) -> None:
    """Without its patch the class keeps its own attention, which must not pass for packed."""
    family = replace(BY_MODEL_TYPE[name], patch=None)
    with pytest.raises(LoadError, match=r"kept attention 'eager'"):
        load(tiny.checkpoint(name), family).self_check()


def test_missing_attention_calls_are_caught() -> None:
    model = load(tiny.checkpoint("bert"))
    model.family = replace(model.family, attention_layers=lambda config: 3)
    with pytest.raises(LoadError, match=r"BERT: 2 packed attention calls .* instead of 3"):
        model.self_check()


def test_leaking_neighbours_are_caught() -> None:
    model = load(tiny.checkpoint("bert"))

    class Leak(nn.Module):
        """Adds the mean of the whole batch to every row."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **kwargs: Any) -> Tensor:
            states: Tensor = self.inner(**kwargs).last_hidden_state
            return states + states.mean(1, keepdim=True)

    model.module = Leak(model.module)
    with pytest.raises(LoadError, match=r"BERT: two inputs run packed differ .* by \d\.\d\de[-+]\d+ .*float32"):
        model.self_check()


def test_not_a_number_is_caught() -> None:
    model = load(tiny.checkpoint("bert"))
    model.weights.wait_checked()  # the files are fine: what follows is for whatever makes NaN of good weights
    next(model.module.parameters()).data.fill_(float("nan"))
    with pytest.raises(LoadError, match="differ"):
        model.self_check()


def test_a_missing_class_names_the_version_needed() -> None:
    family = replace(BY_MODEL_TYPE["gte"], model_type="gte_of_tomorrow", since="9.9")
    with pytest.raises(LoadError, match=r"GTE .* is not in the installed transformers .* version 9\.9 has it"):
        load(tiny.checkpoint("gte"), family)


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    source = tiny.checkpoint("bert")
    for file in source.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_bytes((source / "1_Pooling/config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    tiny.rename_tensors(tmp_path, lambda name: name.replace("layer.1.", "layer.9."))
    with pytest.raises(WeightMismatch):
        load(tmp_path)


def test_one_dynamic_layer_type_among_several_is_refused() -> None:
    model = nn.Module()
    model.rotary = nn.Module()
    model.rotary.rope_type = {"full_attention": "dynamic", "sliding_attention": "default"}
    with pytest.raises(LoadError, match=r"Some family.*dynamic"):
        dynamic_rope.install(model, "Some family")


def test_a_layout_is_only_asked_for_config_and_weights() -> None:
    layout = read_layout(tiny.checkpoint("bert"))
    bare = SimpleNamespace(
        config=layout.config,
        transformer_path=layout.transformer_path,
        weights_path=layout.transformer_path,
        tensor_prefix="",
        adapter_path=None,
    )
    model = load_backbone(bare, BY_MODEL_TYPE["bert"], dtype=torch.float32)
    assert model.self_check().difference < 1e-5
