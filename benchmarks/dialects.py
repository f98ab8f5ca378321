"""How each API asks for vectors and answers: one row of ``DIALECTS`` each. Called by traffic.py."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.client import Answer
from benchmarks.common import FloatArray


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API asks for vectors and answers."""

    path: str
    body: Callable[[Sequence[str], str | None], dict[str, Any]]  # texts, model name
    rows: Callable[[Any], FloatArray]  # parsed JSON -> ``[B, D]``, in the order of the texts
    tokens: Callable[[Answer, Any], int | None]  # as counted by the server


def _openai_body(texts: Sequence[str], model: str | None) -> dict[str, Any]:
    return {"input": list(texts)} | ({"model": model} if model else {})


def _openai_base64_body(texts: Sequence[str], model: str | None) -> dict[str, Any]:
    return _openai_body(texts, model) | {"encoding_format": "base64"}


def _openai_rows(parsed: Any) -> FloatArray:
    data = parsed["data"]
    rows: list[Any] = [None] * len(data)
    for entry in data:
        vector = entry["embedding"]
        if isinstance(vector, str):
            vector = np.frombuffer(base64.b64decode(vector), dtype="<f4")
        rows[entry["index"]] = vector
    return np.asarray(rows, dtype=np.float32)


def _openai_tokens(answer: Answer, parsed: Any) -> int | None:
    return (parsed.get("usage") or {}).get("total_tokens")


def _tei_body(texts: Sequence[str], model: str | None) -> dict[str, Any]:
    return {"inputs": list(texts), "truncate": True} | ({"model": model} if model else {})


def _tei_rows(parsed: Any) -> FloatArray:
    return np.asarray(parsed, dtype=np.float32)


def _tei_tokens(answer: Answer, parsed: Any) -> int | None:
    value = answer.header("x-compute-tokens")
    return int(value) if value and value.isdecimal() else None


DIALECTS = {
    "openai": Dialect("/v1/embeddings", _openai_body, _openai_rows, _openai_tokens),
    "openai-base64": Dialect("/v1/embeddings", _openai_base64_body, _openai_rows, _openai_tokens),
    "tei": Dialect("/embed", _tei_body, _tei_rows, _tei_tokens),
}
