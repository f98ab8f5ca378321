"""Every family as the CPU serves it (fast linears, native encoders), against the same model as transformers runs it."""

from __future__ import annotations

import functools

import pytest
import torch

from infinity_bento.checkpoints.families import TABLE, family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.models.backbone import Backbone, load_backbone
from infinity_bento.models.linears import FastLinear, Kernel, LinearPlan, Precision
from tests import tiny
from tests.parity.measure import NAMES, backbone, difference, run, texts, tolerance
from tests.parity.test_families import EXPERTS

NATIVE_FAMILIES = {family.model_type for family in TABLE if family.native_encoder is not None}
NATIVE = [name for name in NAMES if backbone(name).family.model_type in NATIVE_FAMILIES]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Sums over several threads may differ in the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def rebuilt(name: str, kernel: Kernel, precision: Precision = Precision.FLOAT32, *, native: bool = True) -> Backbone:
    layout = read_layout(tiny.checkpoint(name))
    family = family_of(layout.config, layout.transformer_path / "config.json")
    plan = LinearPlan(kernel, precision)
    return load_backbone(layout, family, dtype=torch.float32, linears=plan, native_encoders=native)


def is_native(model: Backbone) -> bool:
    return not type(model.module).__module__.startswith("transformers.")


@pytest.mark.parametrize("kernel", [Kernel.ONEDNN, Kernel.BOTH])
@pytest.mark.parametrize("name", NAMES)
def test_same_numbers_alone_batched_and_shuffled(name: str, kernel: Kernel) -> None:
    model, ids = rebuilt(name, kernel), texts()
    expected = run(backbone(name), ids)
    assert any(isinstance(part, FastLinear) for part in model.module.modules())
    assert difference([run(model, [row])[0] for row in ids], expected) < tolerance(name)
    assert difference(run(model, ids), expected) < tolerance(name)
    order = [4, 0, 6, 2, 1, 5, 3]
    assert difference(run(model, [ids[i] for i in order]), [expected[i] for i in order]) < tolerance(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_never_depends_on_its_neighbours(name: str) -> None:
    model, ids = rebuilt(name, Kernel.ONEDNN), texts()
    before = run(model, ids)
    ids[2] = texts(seed=4)[2]
    after = run(model, ids)
    assert difference([before[2]], [after[2]]) > 1e-2
    del before[2], after[2]
    assert difference(before, after) < (1e-5 if name in EXPERTS else 1e-30)


@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("name", NATIVE)
def test_native_encoders_are_used_and_equal_their_twin(name: str, kernel: Kernel) -> None:
    model, twin = rebuilt(name, kernel), rebuilt(name, kernel, native=False)
    assert is_native(model) and not is_native(twin)
    check = model.self_check()
    assert (check.attention, check.attention_calls) == ("infinity_packed", twin.self_check().attention_calls)
    assert difference(run(model, texts()), run(twin, texts())) < tolerance(name)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", [*NATIVE, "modernbert", "qwen3", "gemma2", "deberta-v2", "qwen3_5_text"])
def test_mixed_precision_stays_close_and_keeps_the_stream_in_float32(name: str, native: bool) -> None:
    model = rebuilt(name, Kernel.TORCH, Precision.MIXED, native=native)
    assert model.dtype is torch.float32
    assert model.self_check().difference < 0.1
    for mixed, full in zip(run(model, texts()), run(backbone(name), texts()), strict=True):
        assert mixed.dtype is torch.float32
        assert torch.nn.functional.cosine_similarity(mixed.flatten(), full.flatten(), dim=0) > 0.99
