"""Vectors to what the response carries, without a Python object per number. Called by the dialects."""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping

import numpy as np

from infinity_bento.core import FloatArray

Encoder = Callable[[FloatArray], "FloatArray | str"]


def as_floats(vector: FloatArray) -> FloatArray:
    """``vector`` as ``Reply.of_json`` can write it: contiguous, native float32, any shape."""
    return np.ascontiguousarray(vector, dtype=np.float32)


def as_base64(vector: FloatArray) -> str:
    """The little-endian float32 bytes of ``vector``, row-major, in standard base64 with padding."""
    return binascii.b2a_base64(np.ascontiguousarray(vector, dtype="<f4").data, newline=False).decode("ascii")


# The values of OpenAI's ``encoding_format``.
ENCODERS: Mapping[str, Encoder] = {"float": as_floats, "base64": as_base64}
