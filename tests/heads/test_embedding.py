from __future__ import annotations

import numpy as np
import pytest
import torch

from infinity_bento.core import FloatArray, Item, Pooling, Task
from infinity_bento.errors import InferenceError, InvalidInput
from infinity_bento.heads.embedding import EmbeddingHead

ROWS = torch.tensor([[3.0, 4.0, 12.0], [1.0, 0.0, 0.0]])


def head(normalize: bool = False, truncate_dim: int | None = None) -> EmbeddingHead:
    return EmbeddingHead([Pooling.CLS], dimensions=3, normalize=normalize, truncate_dim=truncate_dim)


def ask(**kwargs: object) -> Item:
    return Item(Task.EMBED, text="x", **kwargs)  # type: ignore[arg-type]


def vector(output: object) -> list[float]:
    assert isinstance(output, np.ndarray)
    assert output.dtype == np.float32
    return [round(float(value), 6) for value in output]


@pytest.mark.parametrize(
    ("item", "checkpoint_normalizes", "expected"),
    [
        (ask(), False, [3, 4, 12]),
        (ask(), True, [3 / 13, 4 / 13, 12 / 13]),
        (ask(normalize=True), False, [3 / 13, 4 / 13, 12 / 13]),
        (ask(normalize=False), True, [3, 4, 12]),
        (ask(dimensions=2), True, [0.6, 0.8]),  # cut first, then normalized again
        (ask(dimensions=2), False, [3, 4]),
        (ask(dimensions=3), False, [3, 4, 12]),
    ],
)
def test_normalize_and_dimensions(item: Item, checkpoint_normalizes: bool, expected: list[float]) -> None:
    (output,) = head(checkpoint_normalizes).collect(ROWS, [0], [item])
    assert vector(output) == pytest.approx(expected, abs=1e-6)


def test_items_of_one_batch_keep_their_own_wishes_and_positions() -> None:
    items = [ask(normalize=True), ask(dimensions=1), ask()]
    outputs = head().collect(ROWS, [1, 0, 0], items)
    assert [vector(output) for output in outputs] == [[1, 0, 0], [3], [3, 4, 12]]


def test_truncate_dim_of_the_checkpoint_is_the_default() -> None:
    outputs = head(truncate_dim=2).collect(ROWS, [0, 0], [ask(), ask(dimensions=3)])
    assert [vector(output) for output in outputs] == [[3, 4], [3, 4, 12]]


def test_too_many_dimensions_concern_one_item_only() -> None:
    bad, good = head().collect(ROWS, [0, 1], [ask(dimensions=4), ask()])
    assert isinstance(bad, InvalidInput)
    assert "`dimensions` 4 is more than this model's 3" in bad.message
    assert vector(good) == [1, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_row_that_is_not_finite_is_an_error_and_harms_nobody(value: float, normalize: bool) -> None:
    rows = ROWS.clone()
    rows[0, 1] = value
    bad, good = head(normalize).collect(rows, [0, 1], [ask(), ask()])
    assert isinstance(bad, InferenceError)
    assert "float32" in bad.message
    assert vector(good) == [1, 0, 0]


def test_a_zero_vector_stays_zero() -> None:
    (output,) = head(normalize=True).collect(torch.zeros(1, 3), [0], [ask()])
    assert vector(output) == [0, 0, 0]


def test_modules_run_on_the_pooled_rows() -> None:
    from infinity_bento.batching.packing import pack
    from infinity_bento.core import Encoded

    seen: list[torch.Size] = []

    def double(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows.shape)
        return rows * 2

    made = EmbeddingHead([Pooling.CLS], dimensions=3, modules=[double])
    batch = pack([Encoded([1, 2]), Encoded([3])])
    out = made.run(torch.tensor([[1.0, 1, 1], [2, 2, 2], [3, 3, 3]]), batch)
    assert seen == [torch.Size([2, 3])]
    assert out.tolist() == [[2, 2, 2], [4, 4, 4]]


def test_collect_returns_float32_for_half_precision_rows() -> None:
    (output,) = head().collect(ROWS.to(torch.bfloat16), [0], [ask()])
    checked: FloatArray = output  # type: ignore[assignment]
    assert checked.dtype == np.float32
