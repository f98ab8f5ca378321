from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.checkpoints.learned_sparse import read_learned_sparse
from infinity_bento.core import Encoded, InputType, Item, Task
from infinity_bento.errors import LoadError
from infinity_bento.inputs.static import load_routed_tokenizer, load_static_tokenizer
from infinity_bento.inputs.tokenization import TextRules, TextTokenizer
from tests import tiny
from tests import tiny_retrieval as made

LONG = "no " * 5000  # cut before tokenising, so its tokens are not all counted


def rules(limit: int = 16384, **kwargs: Any) -> TextRules:
    return TextRules(max_input_length=limit, vocabulary_size=tiny.VOCABULARY, **kwargs)


def encode(tokenizer: TextTokenizer, text: str, side: InputType | None = None, **kwargs: Any) -> Encoded:
    (encoded,) = tokenizer.encode([Item(Task.EMBED_SPARSE, text=text, input_type=side, **kwargs)])
    assert isinstance(encoded, Encoded), encoded
    return encoded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer.json that adds special tokens."""
    (tmp_path / "tokenizer.json").write_bytes((tiny.checkpoint("bert") / "tokenizer.json").read_bytes())
    return tmp_path


def test_static_texts_get_no_special_tokens_and_have_no_limit_of_their_own(folder: Path) -> None:
    tokenizer = load_static_tokenizer(folder, rules(prompts={"query": "yes "}))
    no = tokenizer.token_id("no")
    assert encode(tokenizer, "no").input_ids == [no]
    assert encode(tokenizer, "no", prompt_name="query").input_ids == [tokenizer.token_id("yes"), no]
    assert len(encode(tokenizer, LONG)) == 5000
    cut = encode(load_static_tokenizer(folder, rules(100)), LONG)
    assert len(cut) == 100 and 100 < (cut.truncated_from or 0) <= 5000


def test_the_truncation_of_tokenizer_json_holds(folder: Path) -> None:
    file = folder / "tokenizer.json"
    cutting = {"direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": cutting}))
    cut = encode(load_static_tokenizer(folder, rules()), LONG)
    assert len(cut) == 7 and 7 < (cut.truncated_from or 0) <= 5000


def test_a_damaged_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer\.json cannot be read"):
        load_static_tokenizer(folder, rules())


def test_queries_of_a_router_are_static_and_documents_are_not() -> None:
    layout = read_layout(made.inference_free())
    sparse = read_learned_sparse(layout)
    tokenizer = load_routed_tokenizer(layout, sparse, rules(100), token_budget=300)
    query, document, unsaid = (encode(tokenizer, "no", side) for side in (InputType.QUERY, InputType.DOCUMENT, None))
    assert query.static
    assert len(query) == 1
    assert not document.static
    assert document == unsaid
    assert len(document) == 3
    assert len(encode(tokenizer, LONG, InputType.QUERY)) == 300
    assert len(encode(tokenizer, LONG, InputType.DOCUMENT)) == 100
