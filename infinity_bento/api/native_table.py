"""The BentoML methods as the documents show them: one row each. The methods themselves are in ``service.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from infinity_bento.api.native_items import (
    ClassifyItem,
    ClassifyResult,
    DecideItem,
    DecideResult,
    EmbedAllResult,
    EmbedItem,
    EmbedResult,
    EmbedSparseResult,
    RerankItem,
    RerankResult,
    SimilarityItem,
    SimilarityResult,
    TextItem,
    TokenizeItem,
    TokenizeResult,
)
from infinity_bento.core import Task


@dataclass(frozen=True, slots=True)
class NativeMethod:
    """One row.

    Args:
        name: Of the method of ``service.py``; BentoML's client has one of the same name.
        summary: One line for the document.
        item: What the list ``items`` holds.
        result: What the answer holds, one per item.
        example: An item that works as it is, ``$MODEL`` standing for a loaded model's name.
        tasks: One of these the model must be able to do; empty if any model will do.
        late_interaction: Late-interaction models can do it as well.
    """

    name: str
    summary: str
    item: type[BaseModel]
    result: type[BaseModel]
    example: Mapping[str, Any]
    tasks: tuple[Task, ...] = ()
    late_interaction: bool = False

    @property
    def path(self) -> str:
        """Where it is."""
        return f"/bento/{self.name}"


_TEXT = "What is packed execution?"
_DOCUMENTS = ["Rows without padding.", "A recipe for soup."]
_ONE = {"text": _TEXT, "model": "$MODEL"}

NATIVE_METHODS = (
    NativeMethod("embed", "Texts to vectors", EmbedItem, EmbedResult, _ONE, (Task.EMBED,)),
    NativeMethod("embed_all", "Texts to one vector per token", TextItem, EmbedAllResult, _ONE, (Task.EMBED_ALL,)),
    NativeMethod(
        "embed_sparse", "Texts to learned sparse vectors", TextItem, EmbedSparseResult, _ONE, (Task.EMBED_SPARSE,)
    ),
    NativeMethod(
        "rerank",
        "Rank documents for each query",
        RerankItem,
        RerankResult,
        {"query": _TEXT, "documents": _DOCUMENTS, "model": "$MODEL"},
        (Task.RERANK,),
        late_interaction=True,
    ),
    NativeMethod(
        "classify",
        "Label texts or pairs of texts",
        ClassifyItem,
        ClassifyResult,
        _ONE,
        (Task.CLASSIFY, Task.CLASSIFY_TOKENS),
    ),
    NativeMethod(
        "similarity",
        "Cosine of one sentence with others",
        SimilarityItem,
        SimilarityResult,
        {"source_sentence": _TEXT, "sentences": _DOCUMENTS, "model": "$MODEL"},
        (Task.EMBED,),
    ),
    NativeMethod(
        "decide",
        "Typed decisions about a state",
        DecideItem,
        DecideResult,
        {
            "model": "$MODEL",
            "state": {"message": "I was charged twice."},
            "questions": {"refund": {"type": "noul", "instructions": "Does the customer ask for money back?"}},
        },
        (Task.DECIDE,),
    ),
    NativeMethod("tokenize", "Tokens of texts", TokenizeItem, TokenizeResult, _ONE),
)


def native_schemas(methods: Sequence[NativeMethod]) -> dict[str, Any]:
    """The schemas of all items and results, by name."""
    classes: list[tuple[type[BaseModel], Any]] = [(method.item, "validation") for method in methods]
    classes += [(method.result, "serialization") for method in methods]
    _, definitions = models_json_schema(classes, ref_template="#/components/schemas/{model}")
    return dict(definitions.get("$defs", {}))
