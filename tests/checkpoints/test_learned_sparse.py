from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from infinity_bento.checkpoints.layout import Layout, read_layout
from infinity_bento.checkpoints.learned_sparse import LearnedSparse, read_learned_sparse
from infinity_bento.checkpoints.st_modules import (
    ModuleSpec,
    NormalizeSpec,
    RouterSpec,
    SparseStaticEmbeddingSpec,
    SpladePoolingSpec,
    TransformerSpec,
)
from infinity_bento.core import InputType
from infinity_bento.errors import LoadError
from tests import tiny
from tests import tiny_retrieval as made

TABLE, DOCUMENTS = SparseStaticEmbeddingSpec(Path("q")), (TransformerSpec(Path("d")), SpladePoolingSpec("sum"))


def layout(*modules: ModuleSpec) -> Layout:
    return replace(read_layout(tiny.checkpoint("bert", "mlm")), modules=modules)


def router(**kwargs: object) -> RouterSpec:
    return RouterSpec(Path("r"), {"query": (TABLE,), "document": DOCUMENTS}, **kwargs)  # type: ignore[arg-type]


def test_a_plain_masked_language_model_is_pooled_by_maximum() -> None:
    assert read_learned_sparse(layout()) == LearnedSparse(SpladePoolingSpec("max", "relu"))


def test_the_pooling_of_the_checkpoint_is_read() -> None:
    sparse = read_learned_sparse(read_layout(made.splade(pooling="sum", activation="log1p_relu")))
    assert (sparse.pooling.strategy, sparse.pooling.activation) == ("sum", "log1p_relu")
    assert sparse.query is None


def test_a_saved_router_has_a_table_of_query_weights() -> None:
    sparse = read_learned_sparse(read_layout(made.inference_free()))
    assert sparse.query is not None
    assert sparse.default is InputType.DOCUMENT
    assert sparse.pooling.activation == "log1p_relu"


@pytest.mark.parametrize(
    ("options", "default"),
    [
        ({}, InputType.DOCUMENT),
        ({"default_route": "query"}, InputType.QUERY),
        ({"default_route": "document", "mappings": {(None, "image"): "query"}}, InputType.DOCUMENT),
    ],
)
def test_the_default_route_is_the_default_side(options: dict[str, object], default: InputType) -> None:
    assert read_learned_sparse(layout(router(**options))).default is default


def test_mappings_name_the_routes_of_both_sides() -> None:
    mappings = {("query", None): "table", ("document", "text"): "model", (None, None): "table"}
    routes = {"table": (TABLE,), "model": DOCUMENTS}
    sparse = read_learned_sparse(layout(RouterSpec(Path("r"), routes, None, mappings)))  # type: ignore[arg-type]
    assert sparse == LearnedSparse(DOCUMENTS[1], TABLE, InputType.QUERY)


@pytest.mark.parametrize(
    "modules",
    [
        (RouterSpec(Path("r"), {"query": DOCUMENTS, "document": DOCUMENTS}),),
        (RouterSpec(Path("r"), {"query": (TABLE,)}),),
        (SpladePoolingSpec(), NormalizeSpec()),
        (TABLE,),
    ],
)
def test_other_modules_are_refused(modules: tuple[ModuleSpec, ...]) -> None:
    with pytest.raises(LoadError, match="not supported"):
        read_learned_sparse(layout(*modules))
