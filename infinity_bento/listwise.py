"""Scores of a reranker that reads a query and many documents in one sequence: cosines of projected token states.

A long list is several sequences, which every door has to see as one answer. Free of torch; the head makes the rows, the
tokenizer says how they become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from infinity_bento.core import FloatArray


class Cut(NamedTuple):
    """What became of a document that was too long."""

    tokens: int  # before
    kept: int


class Block(NamedTuple):
    """What is read of one sequence."""

    query: FloatArray  # [P]
    documents: FloatArray  # [n, P]
    cuts: Sequence[Cut | None]  # [n]


class ListwiseScores(NamedTuple):
    """The answer to one request."""

    scores: FloatArray  # [documents] in [-1, 1]
    cuts: list[Cut | None]  # [documents]


def listwise_scores(blocks: Sequence[Block]) -> ListwiseScores:
    """Cosine of each document with the query, ``[documents]`` float32.

    The query of a list of several blocks is the mean of theirs, weighted by ``(1 + s) / 2`` of the block's best cosine
    ``s``, as jina-reranker-v3's own code has it.
    """
    documents = np.concatenate([block.documents for block in blocks])
    weights = [(1.0 + float(cosines(block.query, block.documents).max())) / 2.0 for block in blocks]
    # All opposite to the query: then there is nothing to weigh by.
    weights = weights if sum(weights) > 0 else [1.0] * len(blocks)
    query = np.average(np.stack([block.query for block in blocks]), axis=0, weights=weights)
    cuts = [cut for block in blocks for cut in block.cuts]
    return ListwiseScores(cosines(query, documents).astype(np.float32), cuts)


def pair_scores(blocks: Sequence[Block]) -> FloatArray:
    """The output of an item that is one pair, ``[1]``, as that of other rerankers."""
    return listwise_scores(blocks).scores


def cosines(query: FloatArray, documents: FloatArray) -> FloatArray:
    """``[P]`` and ``[n, P]`` to ``[n]``; 0 for a vector of zeros."""
    norms = np.linalg.norm(query) * np.linalg.norm(documents, axis=1)
    products: FloatArray = documents @ query / np.maximum(norms, 1e-12)
    return products
