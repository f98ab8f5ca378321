"""What a late-interaction checkpoint says about its two sides: markers, lengths, query expansion, skiplist.

Three layouts say it in three places: Stanford's ColBERT in ``artifact.metadata``, PyLate in keys of
config_sentence_transformers.json, sentence-transformers in its modules. Read by preflight, the tokenizer and the head.
Free of torch and transformers.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.checkpoints.layout import Layout
from infinity_bento.checkpoints.st_modules import MultiVectorMaskSpec
from infinity_bento.errors import LoadError

STANFORD = "HF_ColBERT"
METADATA = "artifact.metadata"
PUNCTUATION = tuple(string.punctuation)
DEFAULT_QUERY_LENGTH = 32

_PREFIXES = {"query": "query_prefix", "document": "document_prefix"}
# Any of them in config_sentence_transformers.json shows that PyLate wrote it, which expands queries by default.
_PYLATE_KEYS = (
    *("query_length", "document_length", "query_expansion", "do_query_expansion", "skiplist_words"),
    *("attend_to_expansion_tokens", "attend_to_mask_tokens", *_PREFIXES.values()),
)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Rows appended to short queries; each asks like a word of the query."""

    length: int  # tokens of a query after expansion
    attend: bool = False  # other tokens attend to the rows too
    fixed: bool = True  # longer queries are cut to ``length``; False: it is only a floor
    token: str | None = None  # None: the tokenizer's mask token, or its end token


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """The rules of both sides. Lengths are tokens, markers and special tokens included; None: the model's limit."""

    stanford: bool = False  # the projection ``linear.weight`` lies beside the encoder's weights
    markers: dict[str, str] = field(default_factory=dict)  # side -> prefix, one token if the vocabulary has it
    prompts: dict[str, str] = field(default_factory=dict)  # the checkpoint's, markers included
    query_length: int | None = None
    document_length: int | None = None
    expansion: Expansion | None = None
    mask: MultiVectorMaskSpec = field(default_factory=MultiVectorMaskSpec)
    normalize: bool = False  # unit length, though no Normalize module says so


def is_late_interaction(layout: Layout) -> bool:
    """Whether a checkpoint gives a matrix of token vectors to compare by MaxSim, instead of one vector."""
    if layout.kind == "MultiVectorEncoder" or _is_stanford(layout):
        return True
    # The first versions of PyLate named no model type.
    return layout.pooling is None and any(key in layout.st_config for key in _PREFIXES.values())


def read_late_interaction(layout: Layout) -> LateInteraction:
    """The rules of a checkpoint for which ``is_late_interaction`` holds.

    Raises:
        LoadError: A key has a value that cannot be honoured, or there is no projection.
    """
    if _is_stanford(layout):
        return _read_stanford(layout)
    if not layout.has_sentence_transformers:
        raise LoadError(
            f"{layout.path} has no modules.json and is not of architecture {STANFORD}, so its late-interaction "
            "projection is unknown; use a complete checkpoint."
        )
    return _read_modules(layout)


def _is_stanford(layout: Layout) -> bool:
    return STANFORD in layout.architectures and not layout.has_sentence_transformers


def _read_stanford(layout: Layout) -> LateInteraction:
    data = JsonObject.read_optional(layout.transformer_path / METADATA)
    markers = {
        "query": data.string("query_token_id", "[unused0]") + " ",
        "document": data.string("doc_token_id", "[unused1]") + " ",
    }
    length = data.integer("query_maxlen", DEFAULT_QUERY_LENGTH)
    words = PUNCTUATION if data.boolean("mask_punctuation", True) else ()
    return LateInteraction(
        stanford=True,
        markers=markers,
        prompts=markers | layout.prompts,
        document_length=data.integer("doc_maxlen", None),
        expansion=Expansion(length, attend=data.boolean("attend_to_mask_tokens", False)),
        mask=MultiVectorMaskSpec(skiplist_words=words),
        normalize=True,
    )


def _read_modules(layout: Layout) -> LateInteraction:
    old = JsonObject(layout.path / "config_sentence_transformers.json", layout.st_config)
    settings = layout.transformer.settings if layout.transformer else {}
    new = JsonObject(layout.transformer_path / "sentence_bert_config.json", settings)
    markers = {side: old.string(key, "") for side, key in _PREFIXES.items() if key in old.data}
    prompts = dict(layout.prompts)
    for side, marker in markers.items():
        prompts[side] = marker + prompts.get(side, "").removeprefix(marker)
    mask = next((spec for spec in layout.modules if isinstance(spec, MultiVectorMaskSpec)), None)
    # PyLate masked and normalized in its own code, so its module list does not say so.
    pylate = mask is None and (old.data.get("model_type") == "ColBERT" or layout.kind != "MultiVectorEncoder")
    if pylate:
        given = old.data.get("skiplist_words") is not None
        mask = MultiVectorMaskSpec(skiplist_words=old.strings("skiplist_words") if given else PUNCTUATION)
    expansion, translated = _expansion(new, old)
    if mask is None and expansion is not None and not expansion.attend:
        expansion = None  # nobody attends to the rows, and without a mask module they are no output either
    return LateInteraction(
        markers=markers,
        prompts=prompts,
        query_length=new.integer("query_length", None if translated else old.integer("query_length", None)),
        document_length=new.integer("document_length", old.integer("document_length", None)),
        expansion=expansion,
        mask=mask or MultiVectorMaskSpec(),
        normalize=pylate,
    )


def _expansion(new: JsonObject, old: JsonObject) -> tuple[Expansion | None, bool]:
    """The query expansion, and whether PyLate's ``query_length`` went into it."""
    for config in (new, old):
        if "query_expansion" in config.data:
            return _expansion_object(config), False
    if not any(key in old.data for key in _PYLATE_KEYS):
        return None, False
    if not old.boolean("do_query_expansion", True):
        return None, False
    key = "attend_to_expansion_tokens" if "attend_to_expansion_tokens" in old.data else "attend_to_mask_tokens"
    length = old.integer("query_length", DEFAULT_QUERY_LENGTH)
    return Expansion(length, attend=old.boolean(key, False)), True


def _expansion_object(config: JsonObject) -> Expansion | None:
    value: Mapping[str, Any] = config.mapping("query_expansion")
    if not value:
        return None
    data = JsonObject(config.file, value)
    strategy = data.choice("strategy", "", ("fixed", "min"))
    return Expansion(
        data.integer("length"),
        attend=data.boolean("attend", False),
        fixed=strategy == "fixed",
        token=data.string("token", None),
    )
