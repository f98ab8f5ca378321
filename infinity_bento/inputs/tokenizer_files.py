"""The tokenizer of a checkpoint folder, read by transformers. Called by every kind of tokenizer in this package."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from infinity_bento.errors import LoadError

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
# gte-Qwen2's own tokenizer class ends every text with this token, which is the one that is pooled. Its tokenizer.json
# does not, and the class is code of the repository, which is never run.
QWEN2_END = "<|endoftext|>"
QWEN2_REMOTE_MODEL = "modeling_qwen.Qwen2Model"


def load_tokenizer_files(path: Path) -> Any:
    """The transformers tokenizer of a folder; its ``backend_tokenizer`` is what ``TextTokenizer`` takes.

    Raises:
        LoadError: If the folder holds no fast tokenizer that can be read.
    """
    import transformers

    # transformers builds an empty tokenizer out of nothing, without a word.
    if not any((path / name).is_file() for name in VOCABULARY_FILES):
        raise LoadError(
            f"{path.name} holds no tokenizer: one of {', '.join(VOCABULARY_FILES)} must lie beside config.json."
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise LoadError(
            f"The tokenizer files of {path.name} cannot be read ({type(error).__name__}: {first_line(error)}): "
            "replace them with those of the original checkpoint."
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise LoadError(
            f"{path.name} has a slow tokenizer ({type(tokenizer).__name__}) only: tokenizer.json is needed."
        )
    if _wants_qwen2_end(path):
        _append_token(tokenizer.backend_tokenizer, QWEN2_END, path)
    elif _wants_end(path) and tokenizer.eos_token is not None:
        _append_token(tokenizer.backend_tokenizer, tokenizer.eos_token, path)
    return tokenizer


def tokenizer_options(tokenizer: Any) -> dict[str, Any]:
    """What ``TextTokenizer`` has to know of a transformers tokenizer besides its backend."""
    return {
        "special_ids": frozenset(tokenizer.all_special_ids),
        "unknown_id": tokenizer.unk_token_id,
        "token_types": "token_type_ids" in tokenizer.model_input_names,
    }


def first_line(error: Exception) -> str:
    """An error's text, cut to what fits into a sentence."""
    return str(error).strip().split("\n", 1)[0][:200]


def _wants_qwen2_end(path: Path) -> bool:
    file = path / "config.json"
    if not file.is_file():
        return False
    auto_map = json.loads(file.read_text()).get("auto_map") or {}
    return isinstance(auto_map, dict) and str(auto_map.get("AutoModel", "")).endswith(QWEN2_REMOTE_MODEL)


def _wants_end(path: Path) -> bool:
    """Whether texts must end with the end token, for last-token pooling: transformers 5 no longer reads this key."""
    file = path / "tokenizer_config.json"
    return file.is_file() and json.loads(file.read_text()).get("add_eos_token") is True


def _append_token(backend: Any, token: str, path: Path) -> None:
    """Make the tokenizer end every text with ``token``; a post-processor that does so already stays."""
    from tokenizers.processors import TemplateProcessing

    token_id = backend.token_to_id(token)
    if token_id is None:
        raise LoadError(f"The tokenizer of {path.name} has no token {token!r}, with which its texts must end.")
    encoding = backend.encode("a")
    if encoding.ids[-1:] == [token_id]:
        return
    before = list(
        itertools.takewhile(lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True))
    )
    starts = [(backend.id_to_token(start), start) for start, _ in before]
    single = " ".join([*(name for name, _ in starts), "$A", token])
    backend.post_processor = TemplateProcessing(
        single=single, pair=f"{single} {single.replace('$A', '$B')}", special_tokens=[*starts, (token, token_id)]
    )
