"""Task adapters: mixed in one packed batch, against transformers with the adapter merged into the weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.checkpoints.families import family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.core import Encoded
from infinity_bento.errors import LoadError
from infinity_bento.models.backbone import Backbone, load_backbone
from tests import tiny
from tests.references import load as load_reference
from tests.references import one_by_one

HUB, PEFT = "jina_embeddings_v3-hub", "jina_embeddings_v3-peft"
LENGTHS = (12, 3, 12, 30, 1)
Merge = Callable[[str, dict[str, Tensor]], dict[str, Tensor]]


def load(folder: Path) -> Backbone:
    layout = read_layout(folder)
    return load_backbone(layout, family_of(layout.config, folder / "config.json"), dtype=torch.float32)


def batch_of() -> tuple[list[list[int]], PackedBatch]:
    ids = [[(37 * i + 11 * n) % 400 for i in range(n)] for n in LENGTHS]
    return ids, pack([Encoded(row) for row in ids])


def run(model: Backbone, batch: PackedBatch, chosen: list[str | None] | None) -> list[Tensor]:
    """``chosen`` and the result in the caller's order."""
    names = None if chosen is None else [chosen[index] for index in batch.order]
    with torch.inference_mode():
        return batch.unsort(model.forward(batch, adapters=names).split(batch.lengths))


def merge_hub(task: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked adapters of one task added to the stored (still fused) weights; scale 1 / rank."""
    index = tiny.JINA_TASKS.index(task)
    stored = load_file(tiny.checkpoint(HUB) / "model.safetensors")
    merged = dict(tensors)
    for name in tensors:
        stem = f"roberta.{name}".removesuffix(".weight") + ".parametrizations.weight"
        if f"{stem}.0.lora_A" in stored:
            a, b = stored[f"{stem}.0.lora_A"][index], stored[f"{stem}.0.lora_B"][index]
            merged[name] = tensors[name] + (a @ b if "embeddings" in name else b @ a) / tiny.JINA_RANK
    return merged


def merge_peft(task: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A PEFT folder added to the stored weights; scale 8 / rank. The query part of the fused projection is its top."""
    adapter = load_file(tiny.checkpoint(PEFT) / task.replace(".", "_") / "adapter_model.safetensors")
    merged = {name: tensor.clone() for name, tensor in tensors.items()}
    scale = 8 / tiny.JINA_RANK
    for layer in range(2):
        stem = f"base_model.model.layers.{layer}"
        query = adapter[f"{stem}.self_attn.q_proj.lora_B.weight"] @ adapter[f"{stem}.self_attn.q_proj.lora_A.weight"]
        merged[f"encoder.layers.{layer}.mixer.Wqkv.weight"][: tiny.WIDTH] += query * scale
        up = adapter[f"{stem}.mlp.fc1.lora_B.weight"] @ adapter[f"{stem}.mlp.fc1.lora_A.weight"]
        merged[f"encoder.layers.{layer}.mlp.fc1.weight"] += up * scale
    stem = "base_model.model.embeddings.word_embeddings.lora_embedding"
    merged["embeddings.word_embeddings.weight"] += (adapter[f"{stem}_B"] @ adapter[f"{stem}_A"]).t() * scale
    return merged


def expected(name: str, task: str | None, merge: Merge, ids: list[int], folder: Path) -> Tensor:
    """Transformers on the plain checkpoint with one task's adapter merged."""
    plain = tiny.plain(name)
    tensors = load_file(plain / "model.safetensors")
    target = folder / str(task)
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text((plain / "config.json").read_text())
    merged = tensors if task is None else merge(task, tensors)
    save_file(merged, target / "model.safetensors", metadata={"format": "pt"})
    with torch.inference_mode():
        return one_by_one(load_reference(target))(ids)


@pytest.mark.parametrize(
    ("name", "merge", "tasks"),
    [
        (HUB, merge_hub, ["retrieval.query", "text-matching", None, "retrieval.query", "separation"]),
        (PEFT, merge_peft, ["retrieval.query", "text_matching", None, "retrieval_query", "text_matching"]),
    ],
)
def test_tasks_mix_in_one_batch(name: str, merge: Merge, tasks: list[str | None], tmp_path: Path) -> None:
    model = load(tiny.checkpoint(name))
    model.self_check()
    ids, batch = batch_of()
    mixed = run(model, batch, tasks)
    plain = run(model, batch, None)
    for row, bare, task, text in zip(mixed, plain, tasks, ids, strict=True):
        torch.testing.assert_close(row, expected(name, task, merge, text, tmp_path), atol=2e-5, rtol=0)
        assert torch.equal(row, bare) == (task is None)


def test_names_come_from_the_checkpoint() -> None:
    assert load(tiny.checkpoint(HUB)).adapters == tuple(tiny.JINA_TASKS)
    assert load(tiny.checkpoint(PEFT)).adapters == ("retrieval_query", "text_matching")
    assert load(tiny.checkpoint("jina_embeddings_v3")).adapters == ()
    assert load(tiny.checkpoint("bert")).adapters == ()


def test_a_named_prompt_chooses_its_adapter() -> None:
    model = load(tiny.checkpoint(PEFT))
    assert model.adapter_for("retrieval.query") == "retrieval_query"
    assert model.adapter_for("query") is None and model.adapter_for(None) is None
    assert load(tiny.checkpoint("bert")).adapter_for("retrieval.query") is None


def test_threads_choose_for_themselves() -> None:
    model = load(tiny.checkpoint(HUB))
    _, batch = batch_of()
    wanted = {task: run(model, batch, [task] * len(LENGTHS)) for task in tiny.JINA_TASKS}
    wrong: list[str] = []

    def work(task: str) -> None:
        for _ in range(20):
            got = run(model, batch_of()[1], [task] * len(LENGTHS))
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted[task], strict=True)):
                wrong.append(task)

    threads = [threading.Thread(target=work, args=(task,)) for task in tiny.JINA_TASKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_adapter_for_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    source = tiny.checkpoint(PEFT)
    for file in (*source.glob("*.json"), source / "model.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    task = tmp_path / "retrieval_query"
    task.mkdir()
    (task / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    stem = "base_model.model.layers.7.mlp.fc1"
    tensors = {f"{stem}.lora_A.weight": torch.zeros(4, 64), f"{stem}.lora_B.weight": torch.zeros(96, 4)}
    save_file(tensors, task / "adapter_model.safetensors")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_bytes((source / "1_Pooling/config.json").read_bytes())
    with pytest.raises(LoadError, match=r"layers\.7\.mlp\.fc1"):
        load(tmp_path)
