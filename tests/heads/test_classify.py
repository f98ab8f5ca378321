from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.checkpoints.purpose import Activation
from infinity_bento.core import Encoded, Item, Task
from infinity_bento.errors import InferenceError, LoadError
from infinity_bento.heads.classifiers import SHAPES, last_before_padding
from infinity_bento.heads.classify import ClassifierHead, activate

LOGITS = torch.tensor([[1.0, -2.0, 0.5], [3.0, 3.0, 3.0]])


def network(hidden: Tensor, batch: PackedBatch) -> Tensor:
    return hidden


def ask(task: Task = Task.CLASSIFY, **kwargs: Any) -> Item:
    return Item(task, text="x", **kwargs)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (Activation.IDENTITY, LOGITS),
        (Activation.SIGMOID, LOGITS.sigmoid()),
        (Activation.SOFTMAX, LOGITS.softmax(-1)),
        (Activation.TANH, LOGITS.tanh()),
    ],
)
def test_activations(activation: Activation, expected: Tensor) -> None:
    outputs = ClassifierHead(network, activation).collect(LOGITS, [0, 1], [ask(), ask()])
    for output, row in zip(outputs, expected, strict=True):
        assert isinstance(output, np.ndarray) and output.dtype == np.float32
        assert output == pytest.approx(row.numpy(), abs=1e-6)


@pytest.mark.parametrize("activation", [Activation.SIGMOID, Activation.SOFTMAX])
def test_large_logits_do_not_overflow(activation: Activation) -> None:
    with np.errstate(over="raise", invalid="raise"):
        scores = activate(np.array([[1000.0, -1000.0]], dtype=np.float32), activation)
    assert scores.tolist() == [[1.0, 0.0]]


def test_raw_scores_and_positions_are_each_items_own() -> None:
    head = ClassifierHead(network, Activation.SOFTMAX)
    first, second = head.collect(LOGITS, [1, 0], [ask(), ask(raw_scores=True)])
    assert first == pytest.approx([1 / 3] * 3)
    assert second == pytest.approx([1.0, -2.0, 0.5])


def test_a_contrast_of_two_labels_is_for_reranking_only() -> None:
    head = ClassifierHead(network, Activation.SOFTMAX, contrast=(2, 0))
    items = [ask(Task.RERANK), ask(Task.RERANK, raw_scores=True), ask()]
    score, raw, labels = head.collect(LOGITS, [0, 0, 0], items)
    assert raw == pytest.approx([-0.5])
    assert score == pytest.approx([1 / (1 + np.exp(0.5))], abs=1e-6)
    assert isinstance(labels, np.ndarray) and labels.shape == (3,)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_an_error_and_harms_nobody(value: float) -> None:
    rows = LOGITS.clone()
    rows[0, 1] = value
    bad, good = ClassifierHead(network, Activation.SOFTMAX).collect(rows, [0, 1], [ask(), ask()])
    assert isinstance(bad, InferenceError)
    assert good == pytest.approx([1 / 3] * 3)


def test_the_last_token_before_padding() -> None:
    batch = pack([Encoded([7, 8, 0, 0]), Encoded([0, 7, 0, 8]), Encoded([0, 0]), Encoded([7])])
    hidden = torch.arange(batch.tokens).float()[:, None]
    chosen = batch.unsort(last_before_padding(0)(hidden, batch).flatten().tolist())
    starts = batch.unsort(batch.starts().tolist())
    assert [place - start for place, start in zip(chosen, starts, strict=True)] == [1, 3, 0, 0]
    without = batch.unsort(last_before_padding(None)(hidden, batch).flatten().tolist())
    assert [place - start for place, start in zip(without, starts, strict=True)] == [3, 3, 1, 0]


@pytest.mark.parametrize(
    ("shape", "config", "key"),
    [
        ("modernbert", {"classifier_pooling": "sum"}, "classifier_pooling"),
        ("eurobert", {"classifier_pooling": "sum"}, "classifier_pooling"),
        ("last_token", {"pooling": "weighted"}, "pooling"),
        ("deberta-v2", {"pooler_hidden_act": "bend"}, "bend"),
    ],
)
def test_settings_that_no_head_has_are_refused(shape: str, config: dict[str, Any], key: str) -> None:
    with pytest.raises(LoadError, match=key):
        SHAPES[shape]({"hidden_size": 4, **config}, 2)
