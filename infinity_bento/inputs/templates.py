"""Templates that make one text of a query and a document, for language models used as rerankers.

The published ones are in a table; others come from a checkpoint's chat template. Called by the tokenizer. The caller's
texts never become special tokens, and truncation cuts the document only.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity_bento.core import TruncationDirection
from infinity_bento.errors import InputTooLong, LoadError


class Slot(enum.Enum):
    """A place that a request fills."""

    QUERY = "query"
    DOCUMENT = "document"
    INSTRUCTION = "instruction"


Part = tuple[str | Slot, ...]


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """How a pair is written.

    Each part is tokenised by itself, as the model's authors do it: where one ends, no token spans both sides.
    """

    name: str
    parts: tuple[Part, ...]
    instructed: tuple[Part, ...] | None = None  # with an instruction; None: there is no place for one
    default_instruction: str | None = None
    special_tokens: bool = False  # the tokenizer puts its own around the whole


QUERY, DOCUMENT, INSTRUCTION = Slot.QUERY, Slot.DOCUMENT, Slot.INSTRUCTION

_QWEN3_PARTS: tuple[Part, ...] = (
    (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    ),
    ("<Instruct>: ", INSTRUCTION, "\n<Query>: ", QUERY, "\n<Document>: ", DOCUMENT),
    ("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",),
)
_MXBAI_BEFORE: Part = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n",
)
_MXBAI_AFTER: tuple[Part, ...] = (
    ("\n",),
    ("document: ", DOCUMENT),
    ("\n",),
    (
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
    ),
    ("<|im_end|>\n<|im_start|>assistant\n",),
)

PUBLISHED: Mapping[str, PairTemplate] = {
    template.name: template
    for template in (
        PairTemplate(
            "qwen3-reranker",
            _QWEN3_PARTS,
            instructed=_QWEN3_PARTS,
            default_instruction="Given a web search query, retrieve relevant passages that answer the query",
        ),
        PairTemplate(
            "mxbai-rerank-v2",
            (_MXBAI_BEFORE, ("query: ", QUERY), *_MXBAI_AFTER),
            instructed=(_MXBAI_BEFORE, ("instruction: ", INSTRUCTION, "\nquery: ", QUERY), *_MXBAI_AFTER),
        ),
        PairTemplate(
            "bge-reranker-v2-gemma",
            (
                ("<bos>",),
                ("A: ", QUERY),
                ("\n",),
                ("B: ", DOCUMENT),
                ("\n",),
                (
                    "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
                    "providing a prediction of either 'Yes' or 'No'.",
                ),
            ),
        ),
        PairTemplate("nemotron-rerank", (("question:", QUERY, " \n \n passage:", DOCUMENT),), special_tokens=True),
    )
}


# From a chat template ---------------------------------------------------------------------------------------------

# Private-use characters, so that no template treats the marks as anything but text.
_MARKS = {slot: f"\ue000{slot.value}\ue001" for slot in Slot}
_SLOTS = {mark: slot for slot, mark in _MARKS.items()}
_ANY_MARK = re.compile("|".join(map(re.escape, _SLOTS)))


# Settings of sentence-transformers that stand among the template's arguments, and sizes, which are ours.
_NOT_ARGUMENTS = frozenset(("restore_suffix", "truncation", "max_length", "padding", "tokenize", "return_tensors"))


def chat_template_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a sentence_bert_config.json gives a chat template besides the messages."""
    processing = settings.get("processing_kwargs")
    arguments = processing.get("chat_template") if isinstance(processing, Mapping) else None
    if not isinstance(arguments, Mapping):
        return {}
    return {key: value for key, value in arguments.items() if key not in _NOT_ARGUMENTS}


def from_chat_template(tokenizer: Any, arguments: Mapping[str, Any]) -> PairTemplate:
    """A tokenizer's chat template, rendered once for messages of the roles query and document.

    Args:
        tokenizer: A transformers tokenizer.
        arguments: Further arguments of the template, such as ``add_generation_prompt``.

    Raises:
        LoadError: If it cannot be rendered, or does not contain each of the two texts exactly once.
    """
    messages = [{"role": slot.value, "content": _MARKS[slot]} for slot in (QUERY, DOCUMENT)]
    system = {"role": "system", "content": _MARKS[INSTRUCTION]}
    parts = _rendered(tokenizer, messages, arguments)
    for slot in (QUERY, DOCUMENT):
        if parts.count(slot) != 1:
            raise LoadError(
                f"The chat template of the tokenizer uses the text of the role {slot.value!r} {parts.count(slot)} "
                "times; a reranker's template needs each of the roles query and document once."
            )
    try:
        instructed = _rendered(tokenizer, [system, *messages], arguments)
    except LoadError:  # templates may refuse a system message
        instructed = ()
    places = all(instructed.count(slot) == 1 for slot in Slot)
    return PairTemplate("chat", (parts,), instructed=(instructed,) if places else None)


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any]) -> Part:
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))
    except Exception as error:  # jinja's errors, and whatever a template raises on purpose
        raise LoadError(
            f"The chat template of the tokenizer cannot be rendered for a query and a document ({error}); a reranker "
            "needs one that takes these two roles."
        ) from error
    parts: list[str | Slot] = []
    start = 0
    for found in _ANY_MARK.finditer(text):
        parts += [text[start : found.start()], _SLOTS[found.group()]]
        start = found.end()
    parts.append(text[start:])
    return tuple(piece for piece in parts if piece != "")


# Encoding ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Chunk:
    """A run of text that is tokenised by itself, with the characters of it that are the document's."""

    text: str = ""
    document: tuple[int, int] | None = None


Written = list[Chunk | list[int]]  # token ids for what is the same in every request


class PairWriter:
    """Pairs to tokens by a template. Thread-safe: nothing changes after construction.

    Args:
        backend: A ``tokenizers.Tokenizer`` without truncation and padding.
        template: How a pair is written.
        around: Special tokens that the tokenizer puts before and after a text.
    """

    def __init__(self, backend: Any, template: PairTemplate, around: tuple[list[int], list[int]]) -> None:
        self._backend = backend
        self.template = template
        self._before, self._after = around if template.special_tokens else ([], [])
        added = backend.get_added_tokens_decoder().values()
        self._special = _any_of(token.content for token in added if token.special and len(token.content) > 1)
        static = {part for part in (*template.parts, *(template.instructed or ())) if not _slots(part)}
        self._ids = {part: backend.encode("".join(map(str, part)), add_special_tokens=False).ids for part in static}

    def write(self, query: str, document: str, instruction: str | None) -> Written:
        """The pieces of a pair; ``instruction`` only where the template has a place for one."""
        values = {QUERY: query, DOCUMENT: document, INSTRUCTION: instruction or ""}
        parts = self.template.parts if instruction is None else self.template.instructed or self.template.parts
        written: Written = [self._before]
        for part in parts:
            ids = self._ids.get(part)
            written += [ids] if ids is not None else self._chunks(part, values)
        return [*written, self._after]

    def encode(self, written: Sequence[Written]) -> list[list[int]]:
        """The token ids of several pairs, not truncated."""
        texts = [piece.text for pieces in written for piece in pieces if isinstance(piece, Chunk)]
        encodings = iter(self._backend.encode_batch_fast(texts, add_special_tokens=False) if texts else ())
        return [
            [token for piece in pieces for token in (next(encodings).ids if isinstance(piece, Chunk) else piece)]
            for pieces in written
        ]

    def cut(self, written: Written, limit: int, direction: TruncationDirection) -> list[int]:
        """The token ids of a pair that is longer than ``limit``, with as much of the document as fits.

        Raises:
            InputTooLong: If the pair is too long without any document.
        """
        ids: list[int] = []
        body: list[int] = []  # indices of tokens that are the document's alone
        for piece in written:
            if not isinstance(piece, Chunk):
                ids += piece
                continue
            encoding = self._backend.encode(piece.text, add_special_tokens=False)
            first, last = piece.document or (0, 0)
            body += [
                len(ids) + index for index, (start, end) in enumerate(encoding.offsets) if first <= start < end <= last
            ]
            ids += encoding.ids
        excess = len(ids) - limit
        if excess > len(body):
            raise InputTooLong(
                f"The query takes {len(ids) - len(body)} tokens with the model's template, more than the limit of "
                f"{limit}: shorten the query."
            )
        dropped = set(body[len(body) - excess :] if direction == "right" else body[:excess])
        return [token for index, token in enumerate(ids) if index not in dropped]

    def _chunks(self, part: Part, values: Mapping[Slot, str]) -> list[Chunk]:
        """A part with its slots filled: one chunk, or more where the caller wrote out a special token."""
        chunks = [Chunk()]
        for piece in part:
            texts = [piece] if isinstance(piece, str) else self._harmless(values[piece])
            for number, text in enumerate(texts):
                if number:
                    chunks.append(Chunk())
                start = len(chunks[-1].text)
                chunks[-1].text += text
                if piece is DOCUMENT:
                    chunks[-1].document = (start, start + len(text))
        return chunks

    def _harmless(self, text: str) -> list[str]:
        """A caller's text, divided inside every special token that it spells out: apart, the halves are plain text."""
        places = [found.start() + 1 for found in self._special.finditer(text)]
        return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def _slots(part: Part) -> bool:
    return any(isinstance(piece, Slot) for piece in part)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds any of several texts, the longest first; nothing for none."""
    listed = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, listed)) if listed else r"(?!)")
