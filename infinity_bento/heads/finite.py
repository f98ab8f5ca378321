"""What a head answers for a row that is not a number. NaN is an error, never a null in a 200."""

from __future__ import annotations

from infinity_bento.core import Item
from infinity_bento.errors import InferenceError


def not_finite(item: Item) -> InferenceError:
    """The error of an item whose output holds NaN or infinity."""
    return InferenceError(
        f"the model produced NaN or infinite numbers for this {item.task.value} input: serve it with dtype float32, "
        "and check the checkpoint's weights"
    )
