from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from infinity_bento.core import Encoded, Item, Task
from infinity_bento.errors import EmptyInput, InfinityError, InputTooLong, InvalidInput
from infinity_bento.inputs.pairs import longest_first
from infinity_bento.inputs.tokenization import TextRules, TextTokenizer

WORDS = ["[UNK]", "[CLS]", "[SEP]", *"abcdefghij"]
CLS, SEP = 1, 2


def backend() -> Tokenizer:
    """One token a word; [CLS] a [SEP] b [SEP], the second text of type 1."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return made


def tokenizer(limit: int = 8, *, token_types: bool = True, **rules: object) -> TextTokenizer:
    made = TextRules(**{"max_input_length": limit, "vocabulary_size": len(WORDS), **rules})  # type: ignore[arg-type]
    return TextTokenizer(backend(), made, frozenset({CLS, SEP}), token_types=token_types)


def pair(query: str | None, document: str | None, task: Task = Task.RERANK, **kwargs: object) -> Item:
    return Item(task, text=query, text_pair=document, **kwargs)  # type: ignore[arg-type]


def one(made: TextTokenizer, item: Item) -> Encoded:
    (encoded,) = made.encode([item])
    assert isinstance(encoded, Encoded), encoded
    return encoded


def failed(made: TextTokenizer, item: Item) -> InfinityError:
    (error,) = made.encode([item])
    assert isinstance(error, InfinityError), error
    return error


def ids(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


def test_a_pair_has_the_special_tokens_and_types_of_the_tokenizer() -> None:
    encoded = one(tokenizer(), pair("a b", "c"))
    assert encoded.input_ids == ids("[CLS]", "a", "b", "[SEP]", "c", "[SEP]")
    assert encoded.token_type_ids == [0, 0, 0, 0, 1, 1]
    assert encoded.truncated_from is None
    assert encoded.characters == 4


def test_types_are_dropped_where_the_model_is_not_given_them() -> None:
    assert one(tokenizer(token_types=False), pair("a b", "c")).token_type_ids is None


def test_pairs_and_single_texts_mix_in_one_call() -> None:
    items = [pair("a", "b"), Item(Task.CLASSIFY, text="c"), pair("", ""), Item(Task.CLASSIFY, token_ids=[5])]
    first, second, third, fourth = tokenizer().encode(items)
    assert isinstance(first, Encoded) and first.input_ids == ids("[CLS]", "a", "[SEP]", "b", "[SEP]")
    assert isinstance(second, Encoded) and second.input_ids == ids("[CLS]", "c", "[SEP]")
    assert isinstance(third, EmptyInput)
    assert isinstance(fourth, Encoded) and fourth.input_ids == [5]


@pytest.mark.parametrize(("query", "document"), [("a", ""), ("", "a")])
def test_one_side_may_be_empty(query: str, document: str) -> None:
    assert one(tokenizer(), pair(query, document)).input_ids.count(SEP) == 2


words = st.lists(st.sampled_from("abcdefghij"), max_size=12).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(words, words, st.integers(5, 20), st.sampled_from(["right", "left"]))
def test_truncation_equals_the_tokenizers_own(query: str, document: str, limit: int, direction: str) -> None:
    if not query and not document:
        return
    library = backend()
    full = library.encode(query, document)
    library.enable_truncation(limit, strategy="longest_first", direction=direction)
    expected = library.encode(query, document)
    encoded = one(tokenizer(limit), pair(query, document, truncation_direction=direction))
    assert encoded.input_ids == expected.ids
    assert (encoded.token_type_ids or [0] * len(encoded)) == expected.type_ids
    assert encoded.truncated_from == (len(full.ids) if len(full.ids) > limit else None)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60))
def test_longest_first_fills_the_room_and_spares_the_shorter_side(first: int, second: int, room: int) -> None:
    kept = longest_first(first, second, room)
    assert sum(kept) == min(room, first + second)
    assert kept[0] <= first and kept[1] <= second
    assert min(kept) >= min(first, second, room // 2)


def test_a_limit_below_the_special_tokens_is_an_error() -> None:
    library = tokenizer(3)
    assert one(library, Item(Task.CLASSIFY, text="a b")).input_ids == ids("[CLS]", "a", "[SEP]")
    made = TextTokenizer(backend(), TextRules(max_input_length=3, vocabulary_size=len(WORDS)))
    assert one(made, pair("a", "b")).input_ids == ids("[CLS]", "[SEP]", "[SEP]")
    wide = backend()
    wide.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] [CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    error = failed(TextTokenizer(wide, TextRules(max_input_length=3, vocabulary_size=len(WORDS))), pair("a", "b"))
    assert isinstance(error, InputTooLong)
    assert "4 special tokens" in error.message


def test_a_pair_too_long_is_refused_where_truncation_is_off() -> None:
    error = failed(tokenizer(), pair("a b c d e", "f g h", truncate=False))
    assert isinstance(error, InputTooLong)
    assert "11 tokens" in error.message and "limit of 8" in error.message


def test_a_default_prompt_is_never_put_before_a_pair() -> None:
    made = tokenizer(default_prompt="j ", prompts={"query": "i "})
    assert one(made, pair("a", "b")).input_ids == ids("[CLS]", "a", "[SEP]", "b", "[SEP]")
    assert one(made, Item(Task.CLASSIFY, text="a")).input_ids == ids("[CLS]", "j", "a", "[SEP]")


@pytest.mark.parametrize("asked", [{"prompt_name": "query"}, {"prompt": "i "}, {"instruction": "i"}])
def test_a_prompt_that_was_asked_for_is_refused_not_ignored(asked: dict[str, str]) -> None:
    error = failed(tokenizer(prompts={"query": "i "}), pair("a", "b", **asked))
    assert isinstance(error, InvalidInput)
    assert error.param == next(iter(asked))


def test_lower_case_is_applied_to_both_sides() -> None:
    assert one(tokenizer(lower_case=True), pair("A", "B")).input_ids == ids("[CLS]", "a", "[SEP]", "b", "[SEP]")


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (pair("a", None), "needs a query and a document"),
        (pair("a", "b", Task.EMBED), "embed takes single texts"),
        (pair("a", "b", Task.CLASSIFY_TOKENS), "classify_tokens takes single texts"),
        (pair(None, "b", token_ids=[3]), "token ids cannot be one of them"),
        (Item(Task.CLASSIFY, text="a", instruction="i"), "`instruction` needs a pair"),
    ],
)
def test_what_is_no_pair(item: Item, says: str) -> None:
    error = failed(tokenizer(), item)
    assert isinstance(error, InvalidInput)
    assert says in error.message
