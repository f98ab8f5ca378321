"""From items to tokens: prompts, special tokens, and truncation that is reported. Called by the workers of ``pool``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity_bento.core import Encoded, InputType, Item, Task, TokenSpans, TruncationDirection
from infinity_bento.errors import EmptyInput, InfinityError, InputTooLong, InvalidInput, LoadError
from infinity_bento.inputs.pairs import kept_tokens, pair_of, refuse_prompt
from infinity_bento.inputs.shortening import CHARACTERS_PER_TOKEN, Shortener
from infinity_bento.inputs.spans import SpanReader
from infinity_bento.inputs.templates import PUBLISHED, PairTemplate, PairWriter, Written, from_chat_template
from infinity_bento.inputs.tokenizer_files import load_tokenizer_files, tokenizer_options


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
    template: str | None = None  # how pairs are written: a name of ``templates.PUBLISHED``, "chat", or None: as pairs
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # of a chat template


@dataclass(slots=True)
class _Texts:
    """What one call encodes: texts and pairs for the tokenizer's own way, and pairs written by a template."""

    sources: list[str | tuple[str, str]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # of each source
    indices: list[int] = field(default_factory=list)  # the item of each source
    written: dict[int, Written] = field(default_factory=dict)  # by item

    def add(self, index: int, source: str | tuple[str, str], prompt: str) -> None:
        """One more source."""
        self.sources.append(source)
        self.prompts.append(prompt)
        self.indices.append(index)


class TextTokenizer:
    """One checkpoint's tokenizer with its text rules. Thread-safe: nothing changes after construction.

    Args:
        backend: A ``tokenizers.Tokenizer``; its own truncation and padding are switched off.
        rules: Prompts and limits.
        special_ids: Ids of special tokens, for the length of a prompt.
        unknown_id: Of the token for what is in no vocabulary.
        template: How a pair becomes one text; None: the tokenizer's own way.
        token_types: Whether the model is given token types; without, those of the tokenizer are dropped.

    Raises:
        LoadError: If the length limit leaves no room for text between the special tokens.
    """

    def __init__(
        self,
        backend: Any,
        rules: TextRules,
        special_ids: frozenset[int] = frozenset(),
        *,
        unknown_id: int | None = None,
        template: PairTemplate | None = None,
        token_types: bool = True,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_ids = special_ids
        self._token_types = token_types
        self.rules = rules
        around = _added_tokens(backend)
        self._head, self._tail = map(len, around)
        self._spans = SpanReader(backend, special_ids, unknown_id)
        self._shortener = Shortener(backend)
        self._writer = PairWriter(backend, template, around) if template is not None else None
        if rules.max_input_length <= self._head + self._tail:
            raise LoadError(
                f"--max-sequence-length {rules.max_input_length} leaves no room for text: the tokenizer adds "
                f"{self._head + self._tail} special tokens; allow at least {self._head + self._tail + 1}."
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
        texts = _Texts()
        for index, item in enumerate(items):
            try:
                outcomes[index] = self._take(index, item, texts)
            except InfinityError as error:
                outcomes[index] = error
        if texts.sources:
            located = any(item.task is Task.CLASSIFY_TOKENS for item in items)  # only labels need offsets
            encode = self._backend.encode_batch if located else self._backend.encode_batch_fast
            encodings = encode(texts.sources, add_special_tokens=True)
            for index, prompt, encoding in zip(texts.indices, texts.prompts, encodings, strict=True):
                try:
                    outcomes[index] = self._finish(items[index], prompt, encoding)
                except InfinityError as error:
                    outcomes[index] = error
        if texts.written:
            self._encode_written(items, texts.written, outcomes)
        return [outcome for outcome in outcomes if outcome is not None]

    @property
    def backend(self) -> Any:
        """The ``tokenizers.Tokenizer``; nobody changes it."""
        return self._backend

    def prompted(self, item: Item) -> str:
        """The text of a single-text item as the tokenizer sees it: with its prompt, in the checkpoint's case.

        Raises:
            EmptyInput: If the text is empty.
            InvalidInput: If the prompt is unknown.
        """
        return self._cased(self._prompt(item) + self._text(item))

    def join(self, tokens: Sequence[str]) -> str:
        """Tokens as text."""
        return self._spans.join(tokens)

    def token_id(self, word: str) -> int | None:
        """The id of a word that is a single token; None if it is not."""
        ids: list[int] = self._backend.encode(word, add_special_tokens=False).ids
        return ids[0] if len(ids) == 1 else self._backend.token_to_id(word)

    def _take(self, index: int, item: Item, texts: _Texts) -> Encoded | None:
        """Note what of an item is to be encoded; token ids are there already."""
        pair = pair_of(item)
        if item.token_ids is not None:
            return self._given(item, item.token_ids)
        if pair is None:
            prompt = self._prompt(item)
            texts.add(index, self._shortened(item, self._cased(prompt + self._text(item))), prompt)
            return None
        query = self._cased(pair[0])
        document = self._shortened(item, self._cased(pair[1]), query)
        if self._writer is None:
            refuse_prompt(item)
            texts.add(index, (query, document), "")
        else:
            instruction = self._instruction(item, self._writer.template)
            texts.written[index] = self._writer.write(query, document, instruction)
        return None

    def _encode_written(
        self, items: Sequence[Item], written: Mapping[int, Written], outcomes: list[Encoded | InfinityError | None]
    ) -> None:
        """Encode the pairs that a template wrote."""
        assert self._writer is not None
        for (index, pieces), ids in zip(written.items(), self._writer.encode(list(written.values())), strict=True):
            item, total = items[index], len(ids)
            try:
                limit = self._limit(item, total)
                if total > limit:
                    ids = self._writer.cut(pieces, limit, item.truncation_direction)
            except InfinityError as error:
                outcomes[index] = error
                continue
            outcomes[index] = Encoded(
                ids, truncated_from=total if total > limit else None, characters=_characters(item)
            )

    def _cased(self, text: str) -> str:
        return text.lower() if self.rules.lower_case else text

    def _shortened(self, item: Item, text: str, query: str = "") -> str:
        """As much of a far too long text as its kept tokens depend on; all of it where its length is to be told.

        The document of a pair stays the longer side, so that both sides keep what they would.
        """
        limit = self.rules.max_input_length
        if (
            not self._truncates(item)
            or item.truncation_direction == "left"
            or len(text) <= limit * CHARACTERS_PER_TOKEN
        ):
            return text
        tokens = max(limit, self._shortener.count(query) + 1) if query else limit
        return self._shortener.shortened(text, tokens)

    def _text(self, item: Item) -> str:
        if not item.text:
            raise EmptyInput("The input text is empty: send at least one character.")
        return item.text

    def _prompt(self, item: Item) -> str:
        """The literal prefix of an item: its own, the one it names, the one of its side, or the default."""
        if item.instruction is not None:
            raise InvalidInput(
                "`instruction` needs a pair of texts: for a single text use prompt.", param="instruction"
            )
        if item.prompt is not None:
            return item.prompt
        prompts = self.rules.prompts
        if item.prompt_name is not None:
            if item.prompt_name not in prompts:
                known = ", ".join(sorted(prompts)) or "none"
                raise InvalidInput(
                    f"`prompt_name` {item.prompt_name!r} is unknown: this model has {known}.", param="prompt_name"
                )
            return prompts[item.prompt_name]
        if item.input_type is not None:
            names = ("query",) if item.input_type is InputType.QUERY else ("document", "passage")
            for name in names:
                if name in prompts:
                    return prompts[name]
        # Of a model with a template the default is an instruction; its single texts are written out by the caller.
        return "" if self._writer is not None else self.rules.default_prompt or ""

    def _instruction(self, item: Item, template: PairTemplate) -> str | None:
        """The instruction of a pair that a template writes: the item's, the one it names, or a default."""
        asked = item.instruction
        if asked is None and (item.prompt is not None or item.prompt_name is not None):
            asked = self._prompt(item)
        if template.instructed is None:
            if asked is not None:
                refuse_prompt(item)
            return None
        return asked or self.rules.default_prompt or template.default_instruction

    def _given(self, item: Item, ids: list[int]) -> Encoded:
        """Token ids are used as given: no prompt, no special tokens."""
        if not ids:
            raise EmptyInput("The list of token ids is empty: send at least one id.")
        highest = self.rules.vocabulary_size - 1
        for position, token in enumerate(ids):
            if not 0 <= token <= highest:
                raise InvalidInput(
                    f"Token id {token} at position {position} is outside the vocabulary: 0 to {highest}."
                )
        limit = self._limit(item, len(ids))
        kept = ids[:limit] if item.truncation_direction == "right" else ids[-limit:]
        return Encoded(
            kept,
            truncated_from=len(ids) if len(kept) < len(ids) else None,
            characters=len(ids),
            readout=self._spans.of_ids(kept) if item.task is Task.CLASSIFY_TOKENS else None,
        )

    def _finish(self, item: Item, prompt: str, encoding: Any) -> Encoded:
        ids: list[int] = encoding.ids
        if not ids:
            raise EmptyInput("The input text has no tokens: send text that this model's tokenizer can read.")
        types: list[int] | None = encoding.type_ids if self._token_types else None
        if types is not None and not any(types):
            types = None
        total = len(ids)
        limit = self._limit(item, total)
        kept: Sequence[int] = range(total)
        if total > limit:
            if item.text_pair is None:
                kept = self._kept(total, item.truncation_direction)
            else:
                kept = kept_tokens(encoding.sequence_ids, limit, item.truncation_direction)
            ids = [ids[index] for index in kept]
            types = None if types is None else [types[index] for index in kept]
        return Encoded(
            ids,
            token_type_ids=types,
            prompt_length=self._prompt_length(prompt) if self.rules.report_prompt_length else 0,
            truncated_from=total if total > limit else None,
            characters=_characters(item),
            readout=self._place(item, prompt, encoding, kept) if item.task is Task.CLASSIFY_TOKENS else None,
        )

    def _place(self, item: Item, prompt: str, encoding: Any, kept: Sequence[int]) -> TokenSpans:
        """Where the tokens of an item lie in its text, for their labels."""
        return self._spans.of_text(encoding, kept, item.text or "", prompt)

    def _truncates(self, item: Item) -> bool:
        return self.rules.auto_truncate if item.truncate is None else item.truncate

    def _limit(self, item: Item, total: int) -> int:
        """The length limit, if ``total`` may be cut to it."""
        limit = self.rules.max_input_length
        if total > limit and not self._truncates(item):
            raise InputTooLong(
                f"The input has {total} tokens, more than the limit of {limit}: shorten it, or set truncate to true."
            )
        return limit

    def _kept(self, total: int, direction: TruncationDirection) -> Sequence[int]:
        """Indices that remain of a text's tokens: the special ones at both ends, and what fits from the chosen end."""
        excess = total - self.rules.max_input_length
        if excess <= 0:
            return range(total)
        first = self._head if direction == "left" else total - self._tail - excess
        return [*range(first), *range(first + excess, total)]

    def _prompt_length(self, prompt: str) -> int:
        """Leading tokens of a prompt as sentence-transformers counts them: without a trailing special token."""
        if not prompt:
            return 0
        ids = self._backend.encode(prompt, add_special_tokens=True).ids
        return len(ids) - 1 if ids and ids[-1] in self._special_ids else len(ids)


def _added_tokens(backend: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a single text."""
    probe = "a"
    bare = backend.encode(probe, add_special_tokens=False).ids
    full = backend.encode(probe, add_special_tokens=True).ids
    for head in range(len(full) - len(bare) + 1):
        if full[head : head + len(bare)] == bare:
            return full[:head], full[head + len(bare) :]
    raise LoadError("tokenizer.json changes a text's tokens when special tokens are added, which is not supported.")


def _characters(item: Item) -> int:
    return len(item.text or "") + len(item.text_pair or "")


def load_text_tokenizer(path: Path, rules: TextRules, kind: type[TextTokenizer] = TextTokenizer) -> TextTokenizer:
    """The tokenizer of a checkpoint folder, as a ``TextTokenizer`` of some kind.

    Raises:
        LoadError: If the folder holds no tokenizer that can be read.
    """
    tokenizer = load_tokenizer_files(path)
    template = None
    if rules.template is not None:
        template = PUBLISHED.get(rules.template) or from_chat_template(tokenizer, rules.template_arguments)
    return kind(tokenizer.backend_tokenizer, rules, template=template, **tokenizer_options(tokenizer))
