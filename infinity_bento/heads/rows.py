"""What heads share about rows on the host: length 1, and the answer for a row that is not a number."""

from __future__ import annotations

import numpy as np

from infinity_bento.core import FloatArray, Item
from infinity_bento.errors import InferenceError

# sentence-transformers' Normalize divides by max(norm, 1e-12).
NORM_EPSILON = 1e-12


def unit_rows(rows: FloatArray) -> FloatArray:
    """Rows of length 1, ``[n, P]``; norms are accumulated in float64, so they do not depend on the values' order."""
    norms = np.sqrt(np.einsum("np,np->n", rows, rows, dtype=np.float64))
    scale: FloatArray = (1.0 / np.maximum(norms, NORM_EPSILON)).astype(np.float32)
    return rows * scale[:, None]


def not_finite(item: Item) -> InferenceError:
    """The error of an item whose output holds NaN or infinity: never a null in a 200."""
    return InferenceError(
        f"The model produced NaN or infinite numbers for this {item.task.value} input: serve it with dtype float32, "
        "and check the checkpoint's weights."
    )
