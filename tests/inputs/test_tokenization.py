from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from infinity_bento.core import Encoded, InputType, Item, Task
from infinity_bento.errors import EmptyInput, InfinityError, InputTooLong, InvalidInput, LoadError
from infinity_bento.inputs.pool import Encodings, TokenizerPool
from infinity_bento.inputs.tokenization import TextRules, TextTokenizer, load_text_tokenizer

WORDS = ["[UNK]", "[CLS]", "[SEP]", *"abcdefghij", "q", "p", ":"]
CLS, SEP = 1, 2


def backend(special: bool = True) -> Tokenizer:
    """One token a word; [CLS] before and [SEP] after."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
        )
    return tokenizer


def tokenizer(special: bool = True, **rules: object) -> TextTokenizer:
    defaults = {"max_input_length": 6, "vocabulary_size": len(WORDS)}
    made = TextRules(**{**defaults, **rules})  # type: ignore[arg-type]
    return TextTokenizer(backend(special), made, frozenset({CLS, SEP}))


def item(text: str | None = None, **kwargs: object) -> Item:
    return Item(Task.EMBED, text=text, **kwargs)  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return [CLS, *(WORDS.index(word) for word in text.split()), SEP]


def one(made: TextTokenizer, asked: Item) -> Encoded:
    (encoded,) = made.encode([asked])
    assert isinstance(encoded, Encoded), encoded
    return encoded


def failed(made: TextTokenizer, asked: Item) -> InfinityError:
    (error,) = made.encode([asked])
    assert isinstance(error, InfinityError), error
    return error


def test_special_tokens_are_added_and_nothing_is_cut_within_the_limit() -> None:
    encoded = one(tokenizer(), item("a b c d"))
    assert encoded.input_ids == ids("a b c d")
    assert encoded.truncated_from is None
    assert encoded.characters == 7
    assert encoded.token_type_ids is None


@pytest.mark.parametrize(("direction", "kept"), [("right", "a b c d"), ("left", "c d e f")])
def test_truncation_keeps_the_special_tokens_and_says_what_it_cut(direction: str, kept: str) -> None:
    encoded = one(tokenizer(), item("a b c d e f", truncation_direction=direction))
    assert encoded.input_ids == ids(kept)
    assert encoded.truncated_from == 8


def test_truncation_equals_the_tokenizers_own() -> None:
    text = "a b c d e f g h"
    for direction in ("right", "left"):
        oracle = backend()
        oracle.enable_truncation(6, direction=direction)
        assert one(tokenizer(), item(text, truncation_direction=direction)).input_ids == oracle.encode(text).ids


@pytest.mark.parametrize(
    ("auto", "asked", "cut"), [(True, None, True), (True, False, False), (False, None, False), (False, True, True)]
)
def test_the_request_decides_about_truncation_before_the_server(auto: bool, asked: bool | None, cut: bool) -> None:
    made = tokenizer(auto_truncate=auto)
    long = item("a b c d e f", truncate=asked)
    if cut:
        assert len(one(made, long)) == 6
    else:
        error = failed(made, long)
        assert isinstance(error, InputTooLong)
        assert "8 tokens, more than the limit of 6" in error.message


def test_a_limit_without_room_for_text_is_refused_at_load() -> None:
    with pytest.raises(LoadError, match=r"max-sequence-length 2 leaves no room .* at least 3"):
        tokenizer(max_input_length=2)


PROMPTS = {"query": "q : ", "passage": "p : "}


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, "a"),
        ({"prompt_name": "query"}, "q : a"),
        ({"prompt": "p : "}, "p : a"),
        ({"prompt": "", "prompt_name": "query"}, "a"),
        ({"input_type": InputType.QUERY}, "q : a"),
        ({"input_type": InputType.DOCUMENT}, "p : a"),
    ],
)
def test_prompts(kwargs: dict[str, object], expected: str) -> None:
    made = tokenizer(prompts=PROMPTS)
    assert one(made, item("a", **kwargs)).input_ids == ids(expected)
    assert one(made, item("a", **kwargs)).characters == 1  # the caller's text, without the prompt


def test_the_default_prompt_holds_where_nothing_is_named() -> None:
    made = tokenizer(prompts=PROMPTS, default_prompt="q : ")
    assert one(made, item("a")).input_ids == ids("q : a")
    assert one(made, item("a", prompt_name="passage")).input_ids == ids("p : a")
    assert one(made, item(token_ids=[3])).input_ids == [3]


def test_an_unknown_prompt_names_the_known_ones() -> None:
    error = failed(tokenizer(prompts=PROMPTS), item("a", prompt_name="title"))
    assert isinstance(error, InvalidInput)
    assert error.param == "prompt_name"
    assert "'title' is unknown: this model has passage, query" in error.message


def test_the_prompt_length_is_reported_where_pooling_leaves_it_out() -> None:
    made = tokenizer(prompts=PROMPTS, report_prompt_length=True)
    assert one(made, item("a", prompt_name="query")).prompt_length == 3  # [CLS] q :
    assert one(made, item("a")).prompt_length == 0
    assert one(tokenizer(prompts=PROMPTS), item("a", prompt_name="query")).prompt_length == 0


def test_lower_case_is_applied_before_the_tokenizer() -> None:
    assert one(tokenizer(lower_case=True), item("A B")).input_ids == ids("a b")


def test_token_ids_are_used_as_given_and_cut_at_the_chosen_end() -> None:
    made = tokenizer()
    assert one(made, item(token_ids=[5, 6])).input_ids == [5, 6]
    cut = one(made, item(token_ids=[3, 4, 5, 6, 7, 8, 9], truncation_direction="left"))
    assert cut.input_ids == [4, 5, 6, 7, 8, 9]
    assert cut.truncated_from == 7


@pytest.mark.parametrize("token", [-1, len(WORDS)])
def test_a_token_id_outside_the_vocabulary_is_named(token: int) -> None:
    error = failed(tokenizer(), item(token_ids=[3, token]))
    assert isinstance(error, InvalidInput)
    assert f"Token id {token} at position 1 is outside the vocabulary: 0 to {len(WORDS) - 1}" in error.message


@pytest.mark.parametrize("asked", [item(""), item(token_ids=[])])
def test_empty_inputs(asked: Item) -> None:
    assert isinstance(failed(tokenizer(), asked), EmptyInput)


def test_a_text_without_any_token_is_empty() -> None:
    assert isinstance(failed(tokenizer(special=False), item("   ")), EmptyInput)


def test_a_bad_item_does_not_disturb_the_others() -> None:
    outcomes = tokenizer().encode([item("a"), item(""), item(token_ids=[3]), item("b", prompt_name="no"), item("c")])
    assert [isinstance(outcome, Encoded) for outcome in outcomes] == [True, False, True, False, True]
    assert isinstance(outcomes[4], Encoded)
    assert outcomes[4].input_ids == ids("c")


class Collected:
    """Waits for the answers of a pool."""

    def __init__(self, count: int) -> None:
        self.answers: dict[int, Encodings] = {}
        self._left = count
        self._done = threading.Event()

    def into(self, index: int) -> object:
        def on_encoded(encodings: Encodings, seconds: float) -> None:
            assert seconds >= 0
            self.answers[index] = encodings
            if len(self.answers) == self._left:
                self._done.set()

        return on_encoded

    def wait(self) -> None:
        assert self._done.wait(20)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_pool_answers_each_request_with_its_own_items(workers: int) -> None:
    pool = TokenizerPool(tokenizer(max_input_length=64), workers)
    collected = Collected(200)
    for number in range(200):
        words = ["abcdefghij"[(number + place) % 10] for place in range(1 + number % 5)]
        pool.submit([item(word) for word in words], collected.into(number))  # type: ignore[arg-type]
    collected.wait()
    pool.close()
    for number in range(200):
        words = ["abcdefghij"[(number + place) % 10] for place in range(1 + number % 5)]
        assert [answer.input_ids for answer in collected.answers[number] if isinstance(answer, Encoded)] == [
            ids(word) for word in words
        ]


class Choking:
    """A backend whose tokenizer fails on one text."""

    def __init__(self) -> None:
        self._backend = backend()

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> object:
        if "bad" in texts:
            raise RuntimeError("cannot read this")
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def test_a_failing_tokenizer_is_an_error_of_one_item_and_the_thread_lives() -> None:
    made = TextTokenizer(Choking(), TextRules(6, len(WORDS)), frozenset())
    pool = TokenizerPool(made, 1)
    collected = Collected(2)
    pool.submit([item("a"), item("bad")], collected.into(0))  # type: ignore[arg-type]
    pool.submit([item("b")], collected.into(1))  # type: ignore[arg-type]
    collected.wait()
    pool.close()
    good, bad = collected.answers[0]
    assert isinstance(good, Encoded)
    assert isinstance(bad, InvalidInput)
    assert "cannot read this" in bad.message
    assert isinstance(collected.answers[1][0], Encoded)


def test_close_finishes_what_was_queued() -> None:
    pool = TokenizerPool(tokenizer(), 2)
    collected = Collected(50)
    for number in range(50):
        pool.submit([item("a")], collected.into(number))  # type: ignore[arg-type]
    pool.close()
    collected.wait()


def test_a_long_text_leaves_other_threads_running() -> None:
    """The library lets go of the GIL: this thread keeps ticking while a worker tokenises a megabyte."""
    pool = TokenizerPool(tokenizer(max_input_length=10**6), 1)  # so that all of it is tokenised
    collected = Collected(1)
    pool.submit([item("a b c d " * 131072)], collected.into(0))  # type: ignore[arg-type]
    ticks = 0
    deadline = time.monotonic() + 20
    while not collected.answers and time.monotonic() < deadline:
        time.sleep(0.001)
        ticks += 1
    collected.wait()
    pool.close()
    assert ticks >= 10


def test_a_folder_without_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(LoadError, match=r"holds no tokenizer: one of tokenizer\.json, vocab\.txt"):
        load_text_tokenizer(tmp_path, TextRules(8, 10))


def test_a_broken_tokenizer_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(LoadError, match=r"The tokenizer files of .* cannot be read .* replace them") as caught:
        load_text_tokenizer(tmp_path, TextRules(8, 10))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("auto_map", "ends"), [({"AutoModel": "modeling_qwen.Qwen2Model"}, True), (None, False)])
def test_texts_of_gte_qwen2_end_with_its_end_token(tmp_path: Path, auto_map: object, ends: bool) -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "auto_map": auto_map or {}}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    loaded = load_text_tokenizer(tmp_path, TextRules(4, 3))
    assert one(loaded, item("a b")).input_ids == ([0, 1, 2] if ends else [0, 1])
    assert one(loaded, item("a b a b a b")).input_ids == ([0, 1, 0, 2] if ends else [0, 1, 0, 1])


@pytest.mark.parametrize("wanted", [True, False, None])
def test_texts_end_with_the_end_token_where_the_tokenizer_says_so(tmp_path: Path, wanted: bool | None) -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 2)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said | {"add_eos_token": wanted}))
    loaded = load_text_tokenizer(tmp_path, TextRules(5, 4))
    end = [3] if wanted else []
    assert one(loaded, item("a b")).input_ids == [2, 0, 1, *end]
    assert one(loaded, item("a b a b a b")).input_ids == [2, 0, 1, 0, *(end or [1])]


class Counted:
    """A tokenizer that counts the texts it is given."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.texts = 0

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        if name not in ("encode", "encode_batch", "encode_batch_fast"):
            return found

        def counting(*args: object, **kwargs: object) -> object:
            self.texts += 1 if name == "encode" else len(args[0])  # type: ignore[arg-type]
            return found(*args, **kwargs)

        return counting


@pytest.mark.parametrize("task", [Task.EMBED, Task.CLASSIFY_TOKENS])
def test_a_text_is_tokenised_once_whatever_is_asked_of_it(task: Task) -> None:
    made = tokenizer()
    counted = Counted(made._backend)
    made._backend = counted
    texts = ["a b", "c", "d e f g h"]
    encoded = made.encode([Item(task, text=text) for text in texts])
    assert counted.texts == len(texts)
    for text, one_of in zip(texts, encoded, strict=True):
        assert isinstance(one_of, Encoded)
        if task is Task.EMBED:
            assert one_of.readout is None
        else:
            kept = one_of.readout.offsets[1:-1]
            assert [text[start:end] for start, end in kept] == text.split()[:4]
