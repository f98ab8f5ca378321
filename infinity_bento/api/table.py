"""The table of routes: one row each. ``app`` serves it; the documents, error shapes and key rules follow from it."""

from __future__ import annotations

from typing import Any

from infinity_bento.api import (
    cohere,
    infinity,
    openai,
    probes,
    schemas,
    systemone,
    systemone_openai,
    tei,
    tei_default,
    tei_info,
    tei_scores,
    tei_tokens,
)
from infinity_bento.api.envelopes import COHERE, DECISIONS, OPENAI, SYSTEMONE, TEI
from infinity_bento.api.exchange import Handler
from infinity_bento.api.pages import HTML_TYPE, DocumentPages, metrics
from infinity_bento.api.routes import Route
from infinity_bento.api.tei_answer import handler
from infinity_bento.core import ModelInfo, Task
from infinity_bento.telemetry.metrics import CONTENT_TYPE

SCHEMAS: dict[str, Any] = {
    **schemas.SCHEMAS,
    **openai.SCHEMAS,
    **tei.SCHEMAS,
    **tei_scores.SCHEMAS,
    **tei_tokens.SCHEMAS,
    **tei_default.SCHEMAS,
    **tei_info.SCHEMAS,
    **infinity.SCHEMAS,
    **cohere.SCHEMAS,
    **systemone.SCHEMAS,
    **systemone_openai.SCHEMAS,
    **probes.SCHEMAS,
    "Text": {"type": "string"},
    "Document": {"type": "object", "required": ["openapi", "info", "paths"]},
}

_TEXTS = ["What is packed execution?", "Rows without padding."]
_ONE = {"model": "$MODEL", "inputs": _TEXTS[0]}
_PAIRS = {"model": "$MODEL", "inputs": [[_TEXTS[0], text] for text in _TEXTS]}
_RANK = {"model": "$MODEL", "query": _TEXTS[0], "documents": _TEXTS, "return_documents": True}


def route_table() -> tuple[Route, ...]:
    """Every route of the wire layer."""
    return (*_embedding_rows(), *_scoring_rows(), *_decision_rows(), *_other_rows(), *_server_rows())


def _scored(info: ModelInfo | None) -> dict[str, Any]:
    """One text; for a reranker pairs, which it cannot do without."""
    return _PAIRS if info is not None and Task.RERANK in info.tasks else _ONE


def _embedding_rows() -> tuple[Route, ...]:
    return (
        Route(
            ("/v1/embeddings", "/embeddings"),
            "POST",
            openai.create_embeddings,
            OPENAI,
            "Embed texts (OpenAI)",
            "OpenAIEmbeddingsResponse",
            "OpenAIEmbeddingsRequest",
            tasks=(Task.EMBED, Task.EMBED_ALL),
            example={"model": "$MODEL", "input": _TEXTS},
        ),
        Route(
            ("/embed",),
            "POST",
            handler(tei.embed),
            TEI,
            "Embed texts (TEI)",
            "EmbedResponse",
            "EmbedRequest",
            tasks=(Task.EMBED,),
            example={**_ONE, "normalize": True},
        ),
        Route(
            ("/embed_all",),
            "POST",
            handler(tei.embed_all),
            TEI,
            "One vector per token",
            "EmbedAllResponse",
            "EmbedAllRequest",
            tasks=(Task.EMBED_ALL,),
            example=_ONE,
        ),
        Route(
            ("/embed_sparse",),
            "POST",
            handler(tei.embed_sparse),
            TEI,
            "Learned sparse vectors",
            "EmbedSparseResponse",
            "EmbedSparseRequest",
            tasks=(Task.EMBED_SPARSE,),
            example=_ONE,
        ),
        Route(
            ("/v2/embed",),
            "POST",
            cohere.embed,
            COHERE,
            "Embed texts (Cohere)",
            "CohereEmbedResponse",
            "CohereEmbedRequest",
            tasks=(Task.EMBED,),
            example={"model": "$MODEL", "texts": _TEXTS, "embedding_types": ["float"]},
        ),
        Route(
            ("/similarity",),
            "POST",
            handler(tei.similarity),
            TEI,
            "Cosine of one sentence with others",
            "SimilarityResponse",
            "SimilarityRequest",
            tasks=(Task.EMBED,),
            example={"model": "$MODEL", "inputs": {"source_sentence": _TEXTS[0], "sentences": _TEXTS}},
        ),
    )


def _scoring_rows() -> tuple[Route, ...]:
    rankers = (Task.RERANK,)
    classifiers = (Task.CLASSIFY, Task.CLASSIFY_TOKENS)
    return (
        Route(
            ("/rerank",),
            "POST",
            handler(tei_scores.rerank),
            TEI,
            "Rank texts (TEI) or documents (Infinity)",
            "RerankResponse",
            "RerankRequest",
            tasks=rankers,
            late_interaction=True,
            example={"model": "$MODEL", "query": _TEXTS[0], "texts": _TEXTS},
        ),
        Route(
            ("/v1/rerank",),
            "POST",
            cohere.rerank_handler("1"),
            COHERE,
            "Rank documents (Cohere v1, Jina)",
            "CohereRerankResponse",
            "CohereRerankRequest",
            tasks=rankers,
            late_interaction=True,
            example=_RANK,
        ),
        Route(
            ("/v2/rerank",),
            "POST",
            cohere.rerank_handler("2"),
            COHERE,
            "Rank documents (Cohere v2)",
            "CohereRerankResponse",
            "CohereRerankRequest",
            tasks=rankers,
            late_interaction=True,
            example=_RANK,
        ),
        Route(
            ("/predict",),
            "POST",
            handler(tei_scores.predict),
            TEI,
            "Labels of texts or pairs (TEI)",
            "PredictResponse",
            "PredictRequest",
            tasks=(*classifiers, *rankers),
            example=_scored,
        ),
        Route(
            ("/v1/classify", "/classify"),
            "POST",
            infinity.classify,
            OPENAI,
            "Labels of texts (Infinity)",
            "ClassifyResponse",
            "ClassifyRequest",
            tasks=classifiers,
            example={"model": "$MODEL", "input": _TEXTS},
        ),
    )


def _decision_rows() -> tuple[Route, ...]:
    return (
        Route(
            ("/v1/systemone",),
            "POST",
            systemone.decide,
            SYSTEMONE,
            "Typed decisions about a state (System One)",
            "SystemOneResponse",
            "SystemOneRequest",
            tasks=(Task.DECIDE,),
            example={
                "model": "$MODEL",
                "state": {"message": "I was charged twice."},
                "questions": {
                    "refund": {"type": "noul", "instructions": "Does the customer ask for money back?"},
                    "team": {
                        "type": "choice",
                        "instructions": "Who takes it?",
                        "criteria": {"pay": "Billing", "it": ""},
                    },
                    "mood": {"type": "score", "instructions": "How upset?", "criteria": ["calm", "annoyed", "furious"]},
                },
            },
            forms=True,
        ),
        Route(
            ("/v1/decisions",),
            "POST",
            systemone_openai.decide_either,
            DECISIONS,
            "Typed decisions (Perplexity, OpenAI)",
            "DecisionsResponse",
            "DecisionsRequest",
            tasks=(Task.DECIDE,),
            example={
                "model": "$MODEL",
                "input": "I was charged twice.",
                "questions": [
                    {"type": "predicate", "instructions": "Does the customer ask for money back?"},
                    {"type": "choice", "instructions": "Who takes it?", "choices": [{"value": "pay"}, {"value": "it"}]},
                    {"type": "score", "instructions": "How upset?", "levels": [{"label": "calm"}, {"label": "mad"}]},
                ],
            },
            forms=True,
        ),
    )


def _other_rows() -> tuple[Route, ...]:
    return (
        Route(
            ("/tokenize",),
            "POST",
            tei_tokens.tokenize,
            TEI,
            "Tokens of texts",
            "TokenizeResponse",
            "TokenizeRequest",
            example=_ONE,
        ),
        Route(
            ("/decode",),
            "POST",
            tei_tokens.decode,
            TEI,
            "Texts of token ids",
            "DecodeResponse",
            "DecodeRequest",
            example={"model": "$MODEL", "ids": [1, 2, 3]},
        ),
        Route(
            ("/", "/invocations"),
            "POST",
            handler(tei_default.answer),
            TEI,
            "What the default model is for",
            "AnyResponse",
            "AnyRequest",
            tasks=tei_default.TASKS,
            example=_scored,
        ),
        Route(
            ("/vertex",),
            "POST",
            tei_default.vertex,
            TEI,
            "Several bodies of other routes",
            "VertexResponse",
            "VertexRequest",
            tasks=tei_default.TASKS,
            example=lambda info: {"instances": [_scored(info)]},
        ),
    )


def _server_rows() -> tuple[Route, ...]:
    pages = DocumentPages(SCHEMAS)
    liveness, readiness = {503: "Liveness"}, {503: "Readiness"}
    return (
        Route(("/v1/models", "/models"), "GET", openai.list_models, OPENAI, "List the loaded models", "OpenAIModels"),
        _open(("/info",), tei_info.info, "Describe the loaded models", "Info"),
        _open(("/health", "/ping"), probes.health, "200 when the models answer", "Health"),
        _open(("/livez", "/healthz"), probes.livez, "200 unless only a restart helps", "Liveness", statuses=liveness),
        _open(("/readyz",), probes.readyz, "200 when the models answer", "Readiness", statuses=readiness),
        _open(("/metrics",), metrics, "Prometheus metrics", "Text", media=CONTENT_TYPE),
        # BentoML has a page at / and a document at /docs.json, which know its own methods only; ours cover them.
        _open(("/openapi.json", "/api-doc/openapi.json", "/docs.json"), pages.openapi, "This document", "Document"),
        _open(("/docs", "/"), pages.docs, "Routes and examples", "Text", media=HTML_TYPE),
    )


def _open(paths: tuple[str, ...], handle: Handler, summary: str, response: str, **options: Any) -> Route:
    """A route about the server: no key, no time limit."""
    return Route(paths, "GET", handle, TEI, summary, response, is_open=True, **options)
