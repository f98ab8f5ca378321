"""Vectors to what the response carries, without a Python object per number. Called by the dialects.

An ``Encoding`` is an output type (float32 ... ubinary) and a form (numbers, base64, packed tensor). Vectors and token
matrices take the same way.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity_bento.api.fields import Body, choice
from infinity_bento.core import FloatArray
from infinity_bento.errors import InvalidInput

Array = NDArray[Any]
Caster = Callable[[FloatArray], Array]
Form = Callable[[Array], Any]

# int8 and uint8 reach this many times the usual magnitude of a unit vector's values; see as_int8.
_INTEGER_RANGE = 8.0


def as_floats(vector: FloatArray) -> FloatArray:
    """``vector`` as ``Reply.of_json`` can write it: contiguous, native float32, any shape."""
    return np.ascontiguousarray(vector, dtype=np.float32)


def as_float16(vector: FloatArray) -> Array:
    """``vector`` in half precision.

    Raises:
        InvalidInput: A value is beyond float16's range, which only unnormalised vectors can reach.
    """
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(vector, dtype=np.float16)
    if not np.isfinite(half).all():
        raise InvalidInput(
            "`output_dtype` is float16, but a value of this vector is beyond 65504; ask for float32, or normalize.",
            param="output_dtype",
        )
    return half


def as_int8(vector: FloatArray) -> Array:
    """The nearest multiples of a step that depends on the width alone: min(1, 8 / sqrt(D)) / 127 for D values.

    That is sentence-transformers' rule with fixed ranges (-128.5 to 126.5 steps), so that a row depends neither on
    others nor on calibration, zero stays zero, and cosines can be taken of the bytes as they are. The values of a unit
    vector have a root mean square of 1 / sqrt(D): 16 steps, and next to nothing is clipped.
    """
    limit = min(1.0, _INTEGER_RANGE / math.sqrt(max(vector.shape[-1], 1)))
    steps: FloatArray = np.floor(vector * np.float32(127 / limit) + np.float32(0.5))
    return np.clip(steps, -128, 127).astype(np.int8)


def as_uint8(vector: FloatArray) -> Array:
    """``as_int8`` shifted by 128."""
    return (as_int8(vector).astype(np.int16) + 128).astype(np.uint8)


def as_ubinary(vector: FloatArray) -> Array:
    """One bit per value, 1 where it is positive, eight to a byte, the first in the highest bit."""
    return np.packbits(vector > 0, axis=-1)


def as_binary(vector: FloatArray) -> Array:
    """``as_ubinary`` shifted by -128, as sentence-transformers has it."""
    return (as_ubinary(vector).astype(np.int16) - 128).astype(np.int8)


def as_base64(values: Array) -> str:
    """The little-endian bytes of ``values``, row-major, in standard base64 with padding."""
    return binascii.b2a_base64(_little_endian(values).data, newline=False).decode("ascii")


def as_tensor(values: Array) -> dict[str, Any]:
    """A packed tensor: shape, dtype, byte order and row-major bytes; ``Reply`` writes those as bytes or as base64."""
    packed = _little_endian(values)
    return {
        "dtype": packed.dtype.name,
        "shape": list(packed.shape),
        "byte_order": "little",
        "data": packed.tobytes(),
    }


def _as_numbers(values: Array) -> Array:
    return values


class Encoding(NamedTuple):
    """How the vectors of one response are written."""

    cast: Caster
    form: Form

    def __call__(self, vector: FloatArray) -> Any:
        """The value to put into the response."""
        return self.form(self.cast(vector))

    @property
    def compressible(self) -> bool:
        """Whether a general compressor finds anything: digits yes, bits of floating-point numbers no."""
        return self.form is _as_numbers


OUTPUT_DTYPES: Mapping[str, Caster] = {
    "float32": as_floats,
    "float16": as_float16,
    "int8": as_int8,
    "uint8": as_uint8,
    "binary": as_binary,
    "ubinary": as_ubinary,
}
# The values of ``encoding_format``: OpenAI's two, and ours.
FORMATS: Mapping[str, Form] = {"float": _as_numbers, "base64": as_base64, "tensor": as_tensor}
NUMBERS = Encoding(as_floats, _as_numbers)

_NEED_UNIT_LENGTH = (as_int8, as_uint8)


def requested_encoding(body: Body, *, unit_length: bool) -> Encoding:
    """What ``encoding_format`` and ``output_dtype`` of a body ask for; float32 numbers by default.

    Args:
        body: The request.
        unit_length: The vectors have length 1.

    Raises:
        InvalidInput: An unknown value, or an integer type for vectors without a known range.
    """
    form = choice(body, "encoding_format", FORMATS, _as_numbers)
    cast = choice(body, "output_dtype", OUTPUT_DTYPES, as_floats)
    if cast in _NEED_UNIT_LENGTH and not unit_length:
        raise InvalidInput(
            f'`output_dtype` is "{body["output_dtype"]}", which needs vectors of length 1, and these are not '
            "normalized; ask for float32, float16, binary or ubinary.",
            param="output_dtype",
        )
    return NUMBERS if form is _as_numbers and cast is as_floats else Encoding(cast, form)


def _little_endian(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
