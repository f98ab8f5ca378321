from __future__ import annotations

from typing import Any

import pytest

from infinity_bento.checkpoints.late_interaction import (
    PUNCTUATION,
    Expansion,
    is_late_interaction,
    read_late_interaction,
)
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.errors import LoadError
from tests import tiny
from tests import tiny_retrieval as made


def test_stanford_metadata_and_its_defaults() -> None:
    folder = made.stanford(query_maxlen=16, attend_to_mask_tokens=True, mask_punctuation=False)
    late = read_late_interaction(read_layout(folder))
    assert late.stanford
    assert late.prompts == late.markers == {"query": "[unused0] ", "document": "[unused1] "}
    assert late.expansion == Expansion(16, attend=True)
    assert late.document_length == 60
    assert late.mask.skiplist_words == ()
    (folder / "artifact.metadata").unlink()
    late = read_late_interaction(read_layout(folder))
    assert late.expansion == Expansion(32)
    assert late.document_length is None
    assert late.mask.skiplist_words == PUNCTUATION


def test_pylate_keys_and_their_defaults() -> None:
    late = read_late_interaction(read_layout(made.pylate(prompts={"query": "find: "}, skiplist_words=[","])))
    assert late.prompts == {"query": "[Q] find: ", "document": "[D] "}
    assert late.expansion == Expansion(32)
    assert (late.query_length, late.document_length) == (None, 48)
    assert late.mask.skiplist_words == (",",)
    assert late.mask.skiplist_tasks == ("document",)
    assert late.normalize
    late = read_late_interaction(read_layout(made.pylate(do_query_expansion=False)))
    assert late.expansion is None
    assert late.query_length == 32
    assert late.mask.skiplist_words == PUNCTUATION


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_a_dense_checkpoint_is_none(name: str) -> None:
    assert not is_late_interaction(read_layout(tiny.checkpoint(name)))


def test_late_interaction_by_model_type_architecture_or_prefix() -> None:
    assert is_late_interaction(read_layout(made.stanford()))
    assert is_late_interaction(read_layout(made.pylate()))
    assert is_late_interaction(read_layout(made.pylate(model_type=None)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"query_expansion": {"strategy": "fixed"}}, "'length' is missing"),
        ({"query_expansion": {"strategy": "most", "length": 3}}, "'strategy' is 'most'; it must be one of fixed, min"),
        ({"query_length": 0}, "'query_length' is 0; it must be a whole number of at least 1"),
        ({"attend_to_expansion_tokens": 1}, "'attend_to_expansion_tokens' is 1; it must be true or false"),
        ({"skiplist_words": "."}, "'skiplist_words' is '.'; it must be a list of strings"),
        ({"document_prefix": 5}, "'document_prefix' is 5; it must be a string"),
    ],
)
def test_a_key_that_cannot_be_honoured_is_named(config: dict[str, Any], message: str) -> None:
    folder = made.pylate(**config)
    with pytest.raises(LoadError, match=message) as caught:
        read_late_interaction(read_layout(folder))
    assert "config_sentence_transformers.json" in caught.value.message


def test_a_folder_without_projection_is_refused() -> None:
    folder = made.pylate()
    (folder / "modules.json").unlink()
    with pytest.raises(LoadError, match=r"has no modules\.json and is not of architecture HF_ColBERT"):
        read_late_interaction(read_layout(folder))
