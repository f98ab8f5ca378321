"""MaxSim: the score of a document for a query where both are matrices of token vectors. Called by the rerank routes.

Numpy only: the wire layer and bulk jobs import it.

Shape suffixes: Q query rows, R document rows of a block, P width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infinity_bento.core import FloatArray

# What ``ModelInfo.similarity`` says of a model whose scores are divided by the number of query rows.
MEAN_MAXSIM = "meanmaxsim"
# Elements of one block of similarities, [Q, R], and of the document rows behind it, [R, P]: 16 MiB each in float32.
BLOCK_ELEMENTS = 1 << 22


def maxsim(query_QP: FloatArray, documents: Sequence[FloatArray], *, mean: bool = False) -> FloatArray:
    """For each document, the sum over query rows of the highest dot product with any document row.

    Args:
        query_QP: Token vectors of the query, ``[Q, P]``, normalized where the model normalizes.
        documents: Token vectors of each document, ``[n, P]``.
        mean: Divide by the number of query rows (sentence-transformers' MeanMaxSim).

    Returns:
        ``[len(documents)]`` float32. 0 for a document without rows, and for all where the query has none.
    """
    scores = np.zeros(len(documents), dtype=np.float32)
    rows = len(query_QP)
    if not rows:
        return scores
    query = np.ascontiguousarray(query_QP, dtype=np.float32)
    limit = max(1, BLOCK_ELEMENTS // max(query.shape))
    for block in _blocks([len(document) for document in documents], limit):
        matrix_RP = np.concatenate([documents[index] for index in block]).astype(np.float32, copy=False)
        starts = np.cumsum([0, *(len(documents[index]) for index in block[:-1])])
        best = np.maximum.reduceat(query @ matrix_RP.T, starts, axis=1)
        scores[block] = best.sum(axis=0)
    return scores / np.float32(rows) if mean else scores


def _blocks(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of documents that have rows, in blocks of at most ``limit`` rows, or of one document."""
    blocks: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not length:
            continue
        if not blocks or length > room:
            blocks.append([])
            room = limit
        blocks[-1].append(index)
        room -= length
    return blocks
