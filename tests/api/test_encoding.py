from __future__ import annotations

import base64

import numpy as np
import orjson
import pytest

from infinity_bento.api.encoding import as_base64, as_floats
from infinity_bento.api.exchange import Reply


def awkward_rows() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    table = rng.standard_normal((4, 6)).astype(np.float32)
    tiny = np.array([1e-45, -0.0, 3.4e38, 1 / 3, 0.1, 1e-7], dtype=np.float32)
    return [table[0], table[:, 2], table[::-1][1], table.T, tiny, table.astype(">f4")[0], np.zeros(0, np.float32)]


@pytest.mark.parametrize("row", awkward_rows())
def test_both_encodings_give_back_the_same_bits(row: np.ndarray) -> None:
    wanted = np.ascontiguousarray(row, dtype="<f4").tobytes()
    assert base64.b64decode(as_base64(row), validate=True) == wanted
    body = orjson.loads(Reply.of_json({"v": as_floats(row)}).body)
    assert np.array(body["v"], dtype="<f4").tobytes() == wanted


def test_float32_digits_are_short() -> None:
    assert Reply.of_json(as_floats(np.array([0.1], dtype=np.float32))).body == b"[0.1]"
