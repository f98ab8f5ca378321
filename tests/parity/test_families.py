"""Every family, loaded from its hub layout and run packed, against its reference run one text at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from infinity_bento.checkpoints.families import TABLE, family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.models.backbone import Backbone, load_backbone
from tests import tiny
from tests.parity.measure import NAMES, backbone, batch_of, difference, measure, run, texts, tolerance

# Tokens of all sequences share the matrix products of an expert, so their rounding may move in the last bit.
EXPERTS = ("qwen3_moe", "gemma4_text-moe", "qwen3_5_moe_text", "nomic_bert-moe")


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Sums over several threads may differ in the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_family_has_a_checkpoint() -> None:
    tested = {backbone(name).family.model_type for name in NAMES}
    assert tested == {family.model_type for family in TABLE}


@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_reference(name: str) -> None:
    found = measure(name)
    assert found.scale > 0.5  # the outputs are not all close to zero
    assert found.alone < tolerance(name)
    assert found.batched < tolerance(name)
    assert found.shuffled < tolerance(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_never_depends_on_its_neighbours(name: str) -> None:
    model, ids = backbone(name), texts()
    before = run(model, ids)
    changed = 2
    ids[changed] = texts(seed=4)[changed]
    after = run(model, ids)
    assert difference([before[changed]], [after[changed]]) > 1e-2
    del before[changed], after[changed]
    if name in EXPERTS:
        assert difference(before, after) < 1e-5
    else:
        assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_self_check_passes(name: str) -> None:
    model = backbone(name)
    check = model.self_check()
    assert check.attention == "infinity_packed"
    assert check.attention_calls == model.family.attention_layers(model.config) > 0
    assert check.difference < 1e-5


@pytest.mark.parametrize(
    "name", ["bert", "mpnet", "deberta-v2", "gemma2", "qwen3_5_text", "jina_bert", "nomic_bert-moe"]
)
def test_bfloat16_stays_close_to_float32(name: str) -> None:
    layout = read_layout(tiny.checkpoint(name))
    family = family_of(layout.config, layout.transformer_path / "config.json")
    model = load_backbone(layout, family, dtype=torch.bfloat16)
    assert model.dtype is torch.bfloat16
    assert model.self_check().difference < 0.1
    for low, full in zip(run(model, texts()), run(backbone(name), texts()), strict=True):
        assert torch.nn.functional.cosine_similarity(low.float().flatten(), full.flatten(), dim=0) > 0.99


def peak_bytes(model: Backbone, length: int, folder: Path) -> int:
    """Most memory that one forward pass holds at once, by the allocator's own record."""
    batch = batch_of(model, [[7] * length])
    with torch.profiler.profile(profile_memory=True) as profile, torch.inference_mode():
        model.forward(batch)
    trace = folder / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    records = [event["args"] for event in sorted(events, key=lambda event: event["ts"])]
    before = records[0]["Total Allocated"] - records[0]["Bytes"]
    return max(record["Total Allocated"] for record in records) - before


@pytest.mark.parametrize("name", ["deberta-v2", "deberta-v2-xlarge", "jina_bert"])
def test_memory_grows_with_the_length_not_with_its_square(name: str, tmp_path: Path) -> None:
    model = backbone(name)
    half, full = (peak_bytes(model, length, tmp_path) for length in (2048, 4096))
    assert full < 2.2 * half
    assert full < 4 * 4096 * 4096 * 4  # one bias of all heads in float32
