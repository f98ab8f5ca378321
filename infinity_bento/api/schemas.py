"""JSON schemas that several dialects share. Each dialect's ``SCHEMAS`` is built from these; ``table`` collects them."""

from __future__ import annotations

from typing import Any

from infinity_bento.api.encoding import FORMATS, OUTPUT_DTYPES
from infinity_bento.api.fields import DIRECTION_NAMES, INPUT_TYPE_NAMES

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    """A reference to a named schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(kind: str, description: str, **more: Any) -> Schema:
    """A field that may be left out or null."""
    return {"type": [kind, "null"], "description": description, **more}


def one_of(names: Any, description: str, **more: Any) -> Schema:
    """A field with a fixed set of values, or null."""
    return {"type": ["string", "null"], "enum": [*names, None], "description": description, **more}


def array(items: Schema, **more: Any) -> Schema:
    """An array of ``items``."""
    return {"type": "array", "items": items, **more}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None, **more: Any) -> Schema:
    """An object; fields that it does not name are ignored."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}, **more}


TEXT: Schema = {"type": "string", "minLength": 1}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
TOKEN_IDS = array({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, minItems=1)

MODEL = nullable("string", "A served name; null if only one model can answer.")
TRUNCATE = nullable("boolean", "Cut long inputs; null: as the server is set.")
DIRECTION = one_of(DIRECTION_NAMES, "The side that is cut off.", default="right")
RAW_SCORES = nullable("boolean", "Give logits instead of probabilities.", default=False)
INSTRUCTION = nullable("string", "What to judge by, for rerankers whose template has a place for it.")
DIMENSIONS = nullable("integer", "Keep the first n values.", minimum=1)
PROMPTS: dict[str, Schema] = {
    "prompt_name": nullable("string", "A key of the checkpoint's prompts, put before the text."),
    "prompt": nullable("string", "A literal prefix; wins over prompt_name."),
    "input_type": one_of(INPUT_TYPE_NAMES, "Which side of a retrieval pair; picks the checkpoint's prompt."),
}
TRUNCATION: dict[str, Schema] = {"truncate": TRUNCATE, "truncation_direction": DIRECTION}
ENCODINGS: dict[str, Schema] = {
    "encoding_format": one_of(FORMATS, "Numbers, base64 of little-endian bytes, or a packed tensor.", default="float"),
    "output_dtype": one_of(
        OUTPUT_DTYPES,
        "int8: multiples of min(1, 8 / sqrt(width)) / 127; uint8: that + 128; binary, ubinary: one bit per value.",
        default="float32",
    ),
}
RERANK_OPTIONS: dict[str, Schema] = {
    "model": MODEL,
    "top_n": nullable("integer", "Show only the n best.", minimum=1),
    "return_documents": nullable("boolean", "Repeat the documents in the answer.", default=False),
    "raw_scores": RAW_SCORES,
    "instruction": INSTRUCTION,
    **TRUNCATION,
}

SCHEMAS: dict[str, Schema] = {
    "Documents": array({"anyOf": [{"type": "string"}, record({"text": {"type": "string"}})]}, minItems=1),
    "Input": {
        "description": "One text, several texts, one list of token ids, or several such lists; ids are used as given.",
        "anyOf": [TEXT, TOKEN_IDS, array({"anyOf": [TEXT, TOKEN_IDS]}, minItems=1)],
    },
    "Texts": {"description": "One text or several.", "anyOf": [TEXT, array(TEXT, minItems=1)]},
    "Tensor": record(
        {
            "dtype": {"type": "string", "enum": ["float32", "float16", "int8", "uint8", "int32"]},
            "shape": array({"type": "integer", "minimum": 0}),
            "byte_order": {"const": "little"},
            "data": {"type": "string", "description": "Row-major bytes: base64 in JSON, binary in MessagePack."},
        }
    ),
    "Vector": {
        "description": "By encoding_format: numbers, base64, or a packed tensor.",
        "anyOf": [array(NUMBER), {"type": "string", "contentEncoding": "base64"}, ref("Tensor")],
    },
    "Matrix": {
        "description": "One row per token; by encoding_format.",
        "anyOf": [array(array(NUMBER)), {"type": "string", "contentEncoding": "base64"}, ref("Tensor")],
    },
    "Usage": record(
        {
            "prompt_tokens": {"type": "integer", "description": "With prompt and special tokens, after cuts."},
            "total_tokens": INTEGER,
        },
        {"truncated": {"type": "integer", "description": "Inputs that were cut; absent if none was."}},
    ),
    "Truncation": record(
        {"from": {"type": "integer", "description": "Tokens before."}, "to": INTEGER},
        description="Present only if the input was cut.",
    ),
    "LabelScore": record({"label": {"type": "string"}, "score": NUMBER}),
    "TokenLabel": record(
        {
            "label": {"type": "string"},
            "score": NUMBER,
            "start": {"type": ["integer", "null"], "description": "In characters of the text."},
            "end": {"type": ["integer", "null"]},
            "word": {"type": "string"},
        }
    ),
}
