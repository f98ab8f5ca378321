"""What a learned sparse checkpoint (SPLADE) says: its pooling, and whether queries are a table look-up.

Read by the sparse head and its tokenizer. Free of torch and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infinity_bento.checkpoints.layout import Layout
from infinity_bento.checkpoints.st_modules import (
    ModuleSpec,
    RouterSpec,
    SparseStaticEmbeddingSpec,
    SpladePoolingSpec,
    TransformerSpec,
)
from infinity_bento.core import InputType
from infinity_bento.errors import LoadError


@dataclass(frozen=True, slots=True)
class LearnedSparse:
    """How vectors over the vocabulary are made."""

    pooling: SpladePoolingSpec = field(default_factory=SpladePoolingSpec)
    query: SparseStaticEmbeddingSpec | None = None  # queries are looked up here; None: the model runs for them too
    default: InputType = InputType.DOCUMENT  # side of inputs that do not say


def read_learned_sparse(layout: Layout) -> LearnedSparse:
    """The rules of a checkpoint of kind SparseEncoder, or of a plain masked language model.

    Raises:
        LoadError: The modules are none of: nothing, SpladePooling, or a Router whose query side is a
            SparseStaticEmbedding and whose document side is a Transformer with SpladePooling.
    """
    if not layout.modules:
        return LearnedSparse()
    first = layout.modules[0]
    if len(layout.modules) == 1 and isinstance(first, SpladePoolingSpec):
        return LearnedSparse(first)
    if len(layout.modules) == 1 and isinstance(first, RouterSpec):
        return _read_router(first)
    listed = ", ".join(type(spec).__name__.removesuffix("Spec") for spec in layout.modules)
    raise LoadError(
        f"{layout.path / 'modules.json'}: a sparse model of the modules {listed} is not supported; SpladePooling must "
        "follow the Transformer, alone or inside a Router."
    )


def _read_router(router: RouterSpec) -> LearnedSparse:
    query, document = (_route(router, side) for side in ("query", "document"))
    pooling = document[1] if len(document) == 2 and isinstance(document[0], TransformerSpec) else None
    table = query[0] if len(query) == 1 else None
    if not isinstance(table, SparseStaticEmbeddingSpec) or not isinstance(pooling, SpladePoolingSpec):
        raise LoadError(
            f"{router.path}: the Router's routes are not supported; 'query' must be a SparseStaticEmbedding, and "
            "'document' a Transformer with SpladePooling."
        )
    default = router.mappings.get((None, "text"), router.mappings.get((None, None), router.default_route))
    unsaid_is_query = default is not None and router.routes[default] == query
    return LearnedSparse(pooling, table, InputType.QUERY if unsaid_is_query else InputType.DOCUMENT)


def _route(router: RouterSpec, side: str) -> tuple[ModuleSpec, ...]:
    """The modules of a side, found as sentence-transformers' Router finds them for texts."""
    for key in ((side, "text"), (side, None), (None, "text"), (None, None)):
        if key in router.mappings:
            return router.routes[router.mappings[key]]
    return router.routes.get(side, ())
