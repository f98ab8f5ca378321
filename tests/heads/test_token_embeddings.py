from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from infinity_bento.batching.packing import pack
from infinity_bento.core import Encoded, Item, Task
from infinity_bento.errors import InferenceError, InvalidInput
from infinity_bento.heads.token_embeddings import TokenEmbeddingHead
from tests import tiny
from tests.parity.test_families import backbone
from tests.references import reference

LENGTHS = (5, 1, 9, 5, 17)


def item(**kwargs: object) -> Item:
    return Item(Task.EMBED_ALL, text="a", **kwargs)  # type: ignore[arg-type]


def hidden(total: int, width: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(total, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def outputs(
    head: TokenEmbeddingHead,
    hidden_TD: Tensor,
    encoded: Sequence[Encoded],
    items: dict[int, Item],
) -> dict[int, Any]:
    """The outputs of some of the packed sequences, by the caller's index."""
    batch = pack(encoded)
    positions = [batch.order.index(index) for index in items]
    return dict(zip(items, head.collect(head.run(hidden_TD, batch), positions, list(items.values())), strict=True))


def test_each_item_gets_the_rows_of_its_own_tokens() -> None:
    rows = hidden(sum(LENGTHS))
    encoded = [Encoded([1] * length) for length in LENGTHS]
    starts = {1: 0, 0: 1, 3: 6, 2: 11, 4: 20}  # packed by length
    for chosen in (range(5), (3, 1)):  # all of them, and some in another order
        found = outputs(TokenEmbeddingHead(6), rows, encoded, {index: item() for index in chosen})
        for index, matrix in found.items():
            assert isinstance(matrix, np.ndarray)
            assert matrix.dtype == np.float32
            assert np.array_equal(matrix, rows[starts[index] : starts[index] + LENGTHS[index]].numpy())


@pytest.mark.parametrize("positions", [[0, 1, 2], [2, 0]])
def test_the_device_is_asked_once(positions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack([Encoded([1] * length) for length in (3, 4, 5)])
    head = TokenEmbeddingHead(6)
    rows = head.run(hidden(12), batch)
    transfers: list[int] = []
    original = Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        transfers.append(len(tensor))
        return original(tensor)

    monkeypatch.setattr(Tensor, "cpu", counted)
    head.collect(rows, positions, [item()] * len(positions))
    assert transfers == [sum((3, 4, 5)[position] for position in positions)]


def test_tokens_that_the_tokenizer_left_out_are_not_part_of_the_matrix() -> None:
    rows = hidden(7)
    encoded = [Encoded([1, 2, 3], kept=np.array([True, False, True])), Encoded([1, 2, 3, 4])]
    found = outputs(TokenEmbeddingHead(6), rows, encoded, {0: item(), 1: item()})
    assert np.array_equal(found[0], rows[[0, 2]].numpy())
    assert np.array_equal(found[1], rows[3:].numpy())


def test_modules_run_in_float32_and_a_request_may_overrule_normalization() -> None:
    linear = nn.Linear(6, 4).requires_grad_(False)
    head = TokenEmbeddingHead(4, modules=[linear], normalize=True)
    rows = hidden(3, dtype=torch.bfloat16)
    plain = linear(rows.float()).numpy()
    unit = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    for normalize, expected in ((None, unit), (True, unit), (False, plain)):
        found = outputs(head, rows, [Encoded([1, 2, 3])], {0: item(normalize=normalize)})
        assert np.allclose(found[0], expected, atol=1e-6)


def test_a_row_of_zeros_stays_zero() -> None:
    found = outputs(TokenEmbeddingHead(6, normalize=True), torch.zeros(1, 6), [Encoded([1])], {0: item()})
    assert np.array_equal(found[0], np.zeros((1, 6), np.float32))


def test_dimensions_are_refused_and_what_is_not_finite_harms_nobody_else() -> None:
    rows = hidden(6)
    rows[1, 2] = float("nan")
    encoded = [Encoded([1, 2]), Encoded([3, 4]), Encoded([5, 6])]
    found = outputs(TokenEmbeddingHead(6), rows, encoded, {0: item(), 1: item(dimensions=3), 2: item()})
    assert isinstance(found[0], InferenceError)
    assert isinstance(found[1], InvalidInput)
    assert found[1].param == "dimensions"
    assert "full width of 6" in found[1].message
    assert np.array_equal(found[2], rows[4:].numpy())


@pytest.mark.parametrize("name", ["bert", "roberta", "qwen3"])
def test_raw_embeddings_are_the_last_hidden_states(name: str) -> None:
    model = backbone(name)
    ids = [[5, 17, 300, 8, 9], [44], [7] * 20]
    batch = pack([Encoded(row) for row in ids], position_offset=model.position_offset)
    head = TokenEmbeddingHead(model.hidden_size)
    assert head.dimensions == tiny.WIDTH
    with torch.inference_mode():
        rows = head.run(model.forward(batch), batch)
    positions = [batch.order.index(index) for index in range(len(ids))]
    expected = list(map(reference(name), ids))
    for matrix, wanted in zip(head.collect(rows, positions, [item()] * len(ids)), expected, strict=True):
        assert np.abs(np.asarray(matrix) - wanted.numpy()).max() < 2e-5
