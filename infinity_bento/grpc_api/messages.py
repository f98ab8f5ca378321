"""Between TEI's messages and what the HTTP routes read and make. Used by ``methods``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from infinity_bento.api import fields
from infinity_bento.api.exchange import Call
from infinity_bento.api.fields import Body
from infinity_bento.core import FloatArray, ModelInfo, Result, Timing
from infinity_bento.grpc_api import tei_pb2

_UINT32_MAX = 2**32 - 1
_NANOSECONDS = 1e9
_DIRECTIONS = {tei_pb2.TRUNCATION_DIRECTION_RIGHT: "right", tei_pb2.TRUNCATION_DIRECTION_LEFT: "left"}


def body_of(request: Message, model: str | None) -> dict[str, Any]:
    """The body that the HTTP route of the same name reads: every field but the optional ones that are absent.

    Args:
        request: A message of the client. What proto3 cannot tell from absent has its zero: ``truncate`` is false.
        model: The model that the call's metadata names.

    Raises:
        InvalidInput: A direction of truncation that the contract does not have.
    """
    body: dict[str, Any] = {"model": model}
    for field in request.DESCRIPTOR.fields:
        if not field.has_presence or request.HasField(field.name):
            value = getattr(request, field.name)
            body[field.name] = list(value) if field.is_repeated else value
    if "truncation_direction" in body:
        body["truncation_direction"] = _direction(body)
    return body


def _direction(body: Body) -> str:
    value = body["truncation_direction"]
    if value not in _DIRECTIONS:  # proto3 hands on numbers it does not know
        fields.refuse("truncation_direction", value, "0 (right) or 1 (left)")
    return _DIRECTIONS[value]


def metadata(call: Call, results: Sequence[Result]) -> tei_pb2.Metadata:
    """What the results cost; times of the stages are means over the inputs."""
    timing = call.state.timing or Timing()
    return tei_pb2.Metadata(
        compute_chars=sum(result.usage.characters for result in results),
        compute_tokens=sum(result.usage.tokens for result in results),
        total_time_ns=_nanoseconds(call.state.elapsed_seconds()),
        tokenization_time_ns=_nanoseconds(timing.tokenize_seconds),
        queue_time_ns=_nanoseconds(timing.queue_seconds),
        inference_time_ns=_nanoseconds(timing.inference_seconds),
    )


def embedding(vector: FloatArray) -> tei_pb2.EmbedResponse:
    """``[D]`` float32."""
    return tei_pb2.EmbedResponse(embeddings=vector.tolist())


def matrix(rows: FloatArray) -> tei_pb2.EmbedAllResponse:
    """``[n, D]`` float32."""
    return tei_pb2.EmbedAllResponse(
        token_embeddings=[tei_pb2.TokenEmbedding(embeddings=row) for row in rows.tolist()],
    )


def sparse(pairs: Sequence[Mapping[str, Any]]) -> tei_pb2.EmbedSparseResponse:
    """TEI's HTTP form of a sparse vector."""
    return tei_pb2.EmbedSparseResponse(
        sparse_embeddings=[tei_pb2.SparseValue(index=pair["index"], value=pair["value"]) for pair in pairs]
    )


def server_info(info: ModelInfo, kind: str, version: str, sha: str | None, label: str | None) -> tei_pb2.InfoResponse:
    """TEI's description of a model; ``kind`` is the key of its HTTP form, such as ``reranker``."""
    return tei_pb2.InfoResponse(
        version=version,
        sha=sha,
        docker_label=label,
        model_id=info.model_id,
        model_sha=info.revision,
        model_dtype=info.dtype,
        model_type=f"MODEL_TYPE_{kind.upper()}",
        max_concurrent_requests=_uint32(info.max_concurrent_requests),
        max_input_length=_uint32(info.max_input_length),
        max_batch_tokens=_uint32(info.max_batch_tokens),
        max_batch_requests=None if info.max_batch_requests is None else _uint32(info.max_batch_requests),
        max_client_batch_size=_uint32(info.max_client_batch_size),
        tokenization_workers=_uint32(info.tokenization_workers),
    )


def _uint32(value: int) -> int:
    """Limits have no limit of their own here; the contract's numbers do."""
    return min(value, _UINT32_MAX)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)
