"""From items to tokens: prompts, special tokens, truncation that is reported, and the workers that do it.

``TextTokenizer`` is one checkpoint's tokenizer; ``TokenizerPool`` runs it in threads (the tokenizers library lets go of
the GIL), so the event loop stays responsive however long a text is.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity_bento.core import Encoded, InputType, Item, TruncationDirection
from infinity_bento.errors import EmptyInput, InfinityError, InputTooLong, InvalidInput, LoadError

# Texts of one encode_batch call: enough to amortise the call, few enough that no request waits for a long one.
MAX_TEXTS_PER_CALL = 64
# Where a tokenizer's vocabulary can be; the others are converted to the first by transformers.
VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
)


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a served model treats text. Set at load from the checkpoint and the options."""

    max_input_length: int  # tokens, prompt and special tokens included
    vocabulary_size: int
    auto_truncate: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False  # sentence-transformers' do_lower_case: the text is lowered before the tokenizer sees it
    report_prompt_length: bool = False  # pooling leaves the prompt out, so its length must be known


class TextTokenizer:
    """One checkpoint's tokenizer with its text rules. Thread-safe: nothing changes after construction.

    Args:
        backend: A ``tokenizers.Tokenizer``; its own truncation and padding are switched off.
        rules: Prompts and limits.
        special_ids: Ids of special tokens, for the length of a prompt.

    Raises:
        LoadError: If the length limit leaves no room for text between the special tokens.
    """

    def __init__(self, backend: Any, rules: TextRules, special_ids: frozenset[int] = frozenset()) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_ids = special_ids
        self.rules = rules
        self._head, self._tail = _added_tokens(backend)
        if rules.max_input_length <= self._head + self._tail:
            raise LoadError(
                f"max-sequence-length {rules.max_input_length} leaves no room for text: the tokenizer adds "
                f"{self._head + self._tail} special tokens; allow at least {self._head + self._tail + 1}"
            )

    @property
    def special_token_count(self) -> int:
        """Special tokens that are added around a single text."""
        return self._head + self._tail

    def encode(self, items: Sequence[Item]) -> list[Encoded | InfinityError]:
        """Tokenise items, in order; an item that cannot be tokenised gets an error as its value.

        Errors: ``EmptyInput`` for an empty text or id list, ``InvalidInput`` for an unknown prompt name or an id
        outside the vocabulary, ``InputTooLong`` where truncation is off.
        """
        outcomes: list[Encoded | InfinityError | None] = [None] * len(items)
        texts: list[str] = []
        prompts: list[str] = []
        indices: list[int] = []
        for index, item in enumerate(items):
            try:
                if item.token_ids is not None:
                    outcomes[index] = self._given(item, item.token_ids)
                    continue
                prompt = self._prompt(item)
                text = prompt + self._text(item)
            except InfinityError as error:
                outcomes[index] = error
                continue
            texts.append(text.lower() if self.rules.lower_case else text)
            prompts.append(prompt)
            indices.append(index)
        if texts:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=True)
            for index, prompt, encoding in zip(indices, prompts, encodings, strict=True):
                try:
                    outcomes[index] = self._finish(items[index], prompt, encoding)
                except InfinityError as error:
                    outcomes[index] = error
        return [outcome for outcome in outcomes if outcome is not None]

    def _text(self, item: Item) -> str:
        if not item.text:
            raise EmptyInput("the input text is empty: send at least one character")
        return item.text

    def _prompt(self, item: Item) -> str:
        """The literal prefix of an item: its own, the one it names, the one of its side, or the default."""
        if item.prompt is not None:
            return item.prompt
        prompts = self.rules.prompts
        if item.prompt_name is not None:
            if item.prompt_name not in prompts:
                known = ", ".join(sorted(prompts)) or "none"
                raise InvalidInput(
                    f"prompt_name {item.prompt_name!r} is unknown: this model has {known}", param="prompt_name"
                )
            return prompts[item.prompt_name]
        if item.input_type is not None:
            names = ("query",) if item.input_type is InputType.QUERY else ("document", "passage")
            for name in names:
                if name in prompts:
                    return prompts[name]
        return self.rules.default_prompt or ""

    def _given(self, item: Item, ids: list[int]) -> Encoded:
        """Token ids are used as given: no prompt, no special tokens."""
        if not ids:
            raise EmptyInput("the list of token ids is empty: send at least one id")
        highest = self.rules.vocabulary_size - 1
        for position, token in enumerate(ids):
            if not 0 <= token <= highest:
                raise InvalidInput(f"token id {token} at position {position} is outside the vocabulary: 0 to {highest}")
        limit = self._limit(item, len(ids))
        kept = ids[:limit] if item.truncation_direction == "right" else ids[-limit:]
        return Encoded(kept, truncated_from=len(ids) if len(kept) < len(ids) else None, characters=len(ids))

    def _finish(self, item: Item, prompt: str, encoding: Any) -> Encoded:
        ids: list[int] = encoding.ids
        if not ids:
            raise EmptyInput("the input text has no tokens: send text that this model's tokenizer can read")
        types: list[int] | None = encoding.type_ids
        if types is not None and not any(types):
            types = None
        total = len(ids)
        limit = self._limit(item, total)
        if total > limit:
            ids = self._cut(ids, limit, item.truncation_direction)
            types = None if types is None else self._cut(types, limit, item.truncation_direction)
        return Encoded(
            ids,
            token_type_ids=types,
            prompt_length=self._prompt_length(prompt) if self.rules.report_prompt_length else 0,
            truncated_from=total if total > limit else None,
            characters=len(item.text or ""),
        )

    def _limit(self, item: Item, total: int) -> int:
        """The length limit, if ``total`` may be cut to it."""
        limit = self.rules.max_input_length
        truncate = self.rules.auto_truncate if item.truncate is None else item.truncate
        if total > limit and not truncate:
            raise InputTooLong(
                f"the input has {total} tokens, more than the limit of {limit}: shorten it, or set truncate to true"
            )
        return limit

    def _cut(self, ids: list[int], limit: int, direction: TruncationDirection) -> list[int]:
        """Keep the special tokens at both ends and as much text as fits, from the chosen end."""
        room = limit - self._head - self._tail
        body = ids[self._head : len(ids) - self._tail]
        kept = body[:room] if direction == "right" else body[-room:]
        return ids[: self._head] + kept + ids[len(ids) - self._tail :]

    def _prompt_length(self, prompt: str) -> int:
        """Leading tokens of a prompt as sentence-transformers counts them: without a trailing special token."""
        if not prompt:
            return 0
        ids = self._backend.encode(prompt, add_special_tokens=True).ids
        return len(ids) - 1 if ids and ids[-1] in self._special_ids else len(ids)


def _added_tokens(backend: Any) -> tuple[int, int]:
    """How many special tokens the tokenizer puts before and after a single text."""
    probe = "a"
    bare = backend.encode(probe, add_special_tokens=False).ids
    full = backend.encode(probe, add_special_tokens=True).ids
    for head in range(len(full) - len(bare) + 1):
        if full[head : head + len(bare)] == bare:
            return head, len(full) - len(bare) - head
    raise LoadError("tokenizer.json changes a text's tokens when special tokens are added, which is not supported")


def load_text_tokenizer(path: Path, rules: TextRules) -> TextTokenizer:
    """The tokenizer of a checkpoint folder.

    Raises:
        LoadError: If the folder holds no tokenizer that can be read.
    """
    import transformers

    # transformers builds an empty tokenizer out of nothing, without a word.
    if not any((path / name).is_file() for name in VOCABULARY_FILES):
        raise LoadError(
            f"{path.name} holds no tokenizer: one of {', '.join(VOCABULARY_FILES)} must lie beside config.json"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise LoadError(
            f"the tokenizer files of {path.name} cannot be read ({type(error).__name__}: {_first_line(error)}): "
            "replace them with those of the original checkpoint"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LoadError(f"{path.name} has a slow tokenizer ({type(tokenizer).__name__}) only: tokenizer.json is needed")
    return TextTokenizer(backend, rules, frozenset(tokenizer.all_special_ids))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200]


Encodings = list[Encoded | InfinityError]
OnEncoded = Callable[[Encodings, float], None]


class TokenizerPool:
    """Threads that tokenise; waiting requests are taken together and encoded in one call.

    Args:
        tokenizer: What the threads run.
        workers: How many threads.
        name: Of the model, for the threads' names.
    """

    def __init__(self, tokenizer: TextTokenizer, workers: int, name: str = "") -> None:
        self._tokenizer = tokenizer
        self._jobs: queue.SimpleQueue[tuple[Sequence[Item], OnEncoded] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"tokenize-{name}-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, items: Sequence[Item], on_encoded: OnEncoded) -> None:
        """Tokenise ``items``; ``on_encoded(encodings, seconds)`` is called in a worker thread."""
        self._jobs.put((items, on_encoded))

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs = [job]
            texts = len(job[0])
            closing = False
            while texts < MAX_TEXTS_PER_CALL:
                try:
                    following = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    closing = True
                    break
                jobs.append(following)
                texts += len(following[0])
            self._encode(jobs)
            if closing:
                return

    def _encode(self, jobs: Sequence[tuple[Sequence[Item], OnEncoded]]) -> None:
        started = time.perf_counter()
        try:
            encodings = self._tokenizer.encode([item for items, _ in jobs for item in items])
        except Exception:  # the tokenizer's own failure on one text must not end the thread
            encodings = self._one_by_one(jobs)
        seconds = time.perf_counter() - started
        start = 0
        for items, on_encoded in jobs:
            on_encoded(encodings[start : start + len(items)], seconds)
            start += len(items)

    def _one_by_one(self, jobs: Sequence[tuple[Sequence[Item], OnEncoded]]) -> Encodings:
        """Find the item that the tokenizer cannot take; the others are unharmed."""
        encodings: Encodings = []
        for items, _ in jobs:
            for item in items:
                try:
                    encodings += self._tokenizer.encode([item])
                except Exception as error:
                    encodings.append(InvalidInput(f"the tokenizer failed on this input: {_first_line(error)}"))
        return encodings
