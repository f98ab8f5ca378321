from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity_bento.checkpoints.late_interaction import read_late_interaction
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.core import Encoded, InputType, Item, Task
from infinity_bento.errors import InputTooLong, InvalidInput, LoadError
from infinity_bento.inputs.late_interaction import LateInteractionTokenizer, load_late_interaction_tokenizer
from infinity_bento.inputs.tokenization import TextRules
from tests import tiny
from tests import tiny_retrieval as made

QUERY, DOCUMENT = InputType.QUERY, InputType.DOCUMENT


def tokenizer(folder: Path, *, position_limit: int | None = 512, budget: int = 1024, **rules: Any) -> Any:
    layout = read_layout(folder)
    late = read_late_interaction(layout)
    text_rules = TextRules(
        **{"max_input_length": late.document_length or 128, "vocabulary_size": tiny.VOCABULARY, **rules}
    )
    return load_late_interaction_tokenizer(layout, late, text_rules, position_limit=position_limit, token_budget=budget)


def encode(made_tokenizer: LateInteractionTokenizer, text: str | None = "no", **kwargs: Any) -> Encoded:
    (encoded,) = made_tokenizer.encode([Item(Task.EMBED_ALL, text=text, **kwargs)])
    assert isinstance(encoded, Encoded), encoded
    return encoded


def names(made_tokenizer: LateInteractionTokenizer, encoded: Encoded) -> list[str]:
    backend = made_tokenizer.query._backend
    by_id = {backend.token_to_id(name): name for name in backend.get_vocab()}
    return [by_id[token] for token in encoded.input_ids]


def test_queries_are_expanded_and_documents_are_not() -> None:
    made_tokenizer = tokenizer(made.stanford())
    query = encode(made_tokenizer, input_type=QUERY)
    assert names(made_tokenizer, query) == ["[CLS]", "[unused0]", "no", "[SEP]", *["[MASK]"] * 28]
    assert query.attended == 4
    assert query.kept is None
    assert query.truncated_from is None
    document = encode(made_tokenizer, "no, yes.", input_type=DOCUMENT)
    assert names(made_tokenizer, document) == ["[CLS]", "[unused1]", "no", ",", "yes", ".", "[SEP]"]
    assert document.attended is None
    assert document.kept is not None
    assert document.kept.tolist() == [True, True, True, False, True, False, True]


def test_expansion_rows_that_are_attended_to_are_ordinary_tokens() -> None:
    query = encode(tokenizer(made.stanford(attend_to_mask_tokens=True)), input_type=QUERY)
    assert len(query) == 32
    assert query.attended is None


@pytest.mark.parametrize(
    ("kwargs", "side"),
    [
        ({}, DOCUMENT),
        ({"prompt_name": "query"}, QUERY),
        ({"prompt_name": "document"}, DOCUMENT),
        ({"prompt_name": "query", "input_type": DOCUMENT}, DOCUMENT),
    ],
)
def test_the_side_is_the_input_type_or_the_prompt_or_the_document(kwargs: dict[str, Any], side: InputType) -> None:
    made_tokenizer = tokenizer(made.stanford())
    assert made_tokenizer.side(Item(Task.EMBED_ALL, text="no", **kwargs)) is side
    assert len(encode(made_tokenizer, **kwargs)) == (32 if side is QUERY else 4)


def test_each_side_has_its_own_limit_and_reports_what_was_cut() -> None:
    made_tokenizer = tokenizer(made.pylate(document_length=10))
    text = "no " * 40
    query, document = (encode(made_tokenizer, text, input_type=side) for side in (QUERY, DOCUMENT))
    assert (len(query), query.truncated_from, query.attended) == (32, 43, None)
    assert (len(document), document.truncated_from) == (10, 43)
    for side, limit in ((QUERY, 32), (DOCUMENT, 10)):
        item = Item(Task.EMBED_ALL, text=text, input_type=side, truncate=False)
        (error,) = made_tokenizer.encode([item])
        assert isinstance(error, InputTooLong)
        assert f"more than the limit of {limit}" in error.message


def test_a_literal_prompt_and_other_prompts_follow_the_marker() -> None:
    made_tokenizer = tokenizer(made.pylate(prompts={"search": "yes "}))
    for kwargs in ({"prompt": "yes "}, {"prompt_name": "search"}):
        for side, marker in ((QUERY, "[Q] "), (DOCUMENT, "[D] ")):
            found = names(made_tokenizer, encode(made_tokenizer, input_type=side, **kwargs))
            assert found[:5] == ["[CLS]", marker, "yes", "no", "[SEP]"]


def test_markers_keep_their_case_where_texts_are_lowered() -> None:
    made_tokenizer = tokenizer(made.pylate(), lower_case=True)
    assert names(made_tokenizer, encode(made_tokenizer, "NO"))[:3] == ["[CLS]", "[D] ", "no"]


def test_token_ids_are_taken_as_given_and_expanded_as_queries() -> None:
    made_tokenizer = tokenizer(made.stanford())
    assert encode(made_tokenizer, None, token_ids=[7, 8]).input_ids == [7, 8]
    query = encode(made_tokenizer, None, token_ids=[7, 8], input_type=QUERY)
    assert query.input_ids[:2] == [7, 8]
    assert (len(query), query.attended) == (32, 2)


def test_order_and_errors_survive_the_split_into_sides() -> None:
    made_tokenizer = tokenizer(made.stanford())
    texts = [("no", QUERY), ("", DOCUMENT), ("yes", DOCUMENT), ("yes", QUERY), ("no", DOCUMENT)]
    outcomes = made_tokenizer.encode([Item(Task.EMBED_ALL, text=text, input_type=side) for text, side in texts])
    assert [getattr(outcome, "code", None) for outcome in outcomes] == [None, "empty_input", None, None, None]
    for (text, side), outcome in zip(texts, outcomes, strict=True):
        if text:
            assert outcome.input_ids == encode(made_tokenizer, text, input_type=side).input_ids
    (unknown,) = made_tokenizer.encode([Item(Task.EMBED_ALL, text="no", prompt_name="other", input_type=QUERY)])
    assert isinstance(unknown, InvalidInput)


def test_an_expansion_that_cannot_be_honoured_is_refused_at_load() -> None:
    with pytest.raises(LoadError, match="expanded to 40 tokens, but the model and max-batch-tokens allow 30"):
        tokenizer(made.stanford(query_maxlen=40), budget=30)
    folder = made.pylate("qwen3", tokens=())
    with pytest.raises(LoadError, match="expanded on the left"):
        tokenizer(folder)
    folder = made.pylate(query_expansion={"strategy": "fixed", "length": 8, "token": "[nowhere]"})
    with pytest.raises(LoadError, match=r"expanded by \[nowhere\], which the tokenizer does not have"):
        tokenizer(folder)


def test_without_a_mask_token_queries_are_expanded_by_the_end_token() -> None:
    folder = made.pylate("gemma", tokens=())
    made_tokenizer = tokenizer(folder)
    assert names(made_tokenizer, encode(made_tokenizer, input_type=QUERY))[-2:] == ["<eos>", "<eos>"]
