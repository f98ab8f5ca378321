"""Tokenizers without special tokens: of static embeddings, and of the queries of inference-free sparse models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity_bento.checkpoints.layout import Layout
from infinity_bento.checkpoints.learned_sparse import LearnedSparse
from infinity_bento.core import Encoded, InputType
from infinity_bento.errors import LoadError
from infinity_bento.inputs.sides import SidedTokenizer
from infinity_bento.inputs.tokenization import TextRules, TextTokenizer
from infinity_bento.inputs.tokenizer_files import load_tokenizer_files, tokenizer_options

# Tokenizers without a limit say 10^30.
UNLIMITED = 10_000_000


class RoutedTokenizer(SidedTokenizer):
    """Queries are bags of tokens for a table look-up; documents are tokenised for the model."""

    def finished(self, encoded: Encoded, side: InputType) -> Encoded:
        """Mark queries as static."""
        encoded.static = side is InputType.QUERY
        return encoded


def load_static_tokenizer(folder: Path, rules: TextRules) -> TextTokenizer:
    """The tokenizer of a StaticEmbedding module: tokenizer.json as it is, special tokens and padding left out.

    Raises:
        LoadError: The file cannot be read.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise LoadError(f"{file} cannot be read ({error}): replace it with that of the original checkpoint.") from error
    limit = rules.max_input_length
    if backend.truncation is not None:  # the file's own limit holds
        limit = min(limit, int(backend.truncation["max_length"]))
    return bare_tokenizer(backend, rules, limit)


def load_routed_tokenizer(
    layout: Layout, sparse: LearnedSparse, rules: TextRules, *, token_budget: int
) -> RoutedTokenizer:
    """The two tokenizers of a sparse model whose queries are looked up.

    Args:
        layout: The checkpoint.
        sparse: Its rules; there is a ``query``.
        rules: Of documents.
        token_budget: Tokens of one batch.

    Raises:
        LoadError: A tokenizer is missing or cannot be read.
    """
    assert sparse.query is not None
    documents = load_tokenizer_files(layout.transformer_path)
    queries = load_tokenizer_files(sparse.query.path)
    limit = queries.model_max_length if queries.model_max_length < UNLIMITED else token_budget
    return RoutedTokenizer(
        documents.backend_tokenizer,
        rules,
        query=bare_tokenizer(queries.backend_tokenizer, rules, min(limit, token_budget)),
        default=sparse.default,
        **tokenizer_options(documents),
    )


def bare_tokenizer(backend: Any, rules: TextRules, limit: int) -> TextTokenizer:
    """A tokenizer that adds no special tokens, with the rules' prompts and another limit."""
    backend.post_processor = None
    return TextTokenizer(backend, replace(rules, max_input_length=limit))
