"""The head of token matrices: one vector per token, raw (``/embed_all``) or projected (late interaction).

Called by the runner with packed hidden states.

Shape suffixes: T packed tokens, B sequences, n tokens of one sequence, D width, P output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.core import FloatArray, Item
from infinity_bento.errors import InfinityError, InvalidInput
from infinity_bento.heads.rows import not_finite, unit_rows


class TokenRows(NamedTuple):
    """The vectors of a batch, and which belong to whom."""

    matrix_TP: Tensor  # float32, on the device, not normalized
    bounds: list[int]  # [B + 1] first row of each packed sequence
    kept: NDArray[np.bool_] | None  # [T] rows that are part of the output; None: all


class TokenEmbeddingHead:
    """A matrix ``[n, P]`` for each sequence, special and prompt tokens included.

    Args:
        dimensions: Width of a vector, P.
        modules: Applied in order to the float32 token vectors, ``[T, D]`` -> ``[T, P]``; none for raw embeddings.
        normalize: Whether the checkpoint makes the vectors unit length: the default of items that do not say.
    """

    def __init__(
        self, dimensions: int, *, modules: Sequence[Callable[[Tensor], Tensor]] = (), normalize: bool = False
    ) -> None:
        self.dimensions = dimensions
        self.modules = tuple(modules)
        self.normalize = normalize

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> TokenRows:
        """``[T, D]`` hidden states -> the vectors of all tokens in packed order, not normalized."""
        rows = hidden_TD.float()
        for module in self.modules:
            rows = module(rows)
        bounds = [0, *np.cumsum(batch.lengths).tolist()]
        return TokenRows(rows, bounds, batch.kept)

    def collect(
        self, rows: TokenRows, positions: Sequence[int], items: Sequence[Item]
    ) -> list[FloatArray | InfinityError]:
        """Each item's matrix ``[n, P]`` float32, without the tokens that the tokenizer marked as left out.

        All matrices come from the device in one block. Arguments as for ``EmbeddingHead.collect``.

        Errors: ``InvalidInput`` for ``dimensions``, ``InferenceError`` for NaN or infinity.
        """
        spans = [slice(rows.bounds[position], rows.bounds[position + 1]) for position in positions]
        matrices = _to_host(rows, spans)
        if rows.kept is not None:
            matrices = [matrix[rows.kept[span]] for matrix, span in zip(matrices, spans, strict=True)]
        return [self._finish(matrix, item) for matrix, item in zip(matrices, items, strict=True)]

    def _finish(self, matrix: FloatArray, item: Item) -> FloatArray | InfinityError:
        if item.dimensions is not None:
            return InvalidInput(
                f"`dimensions` {item.dimensions} cannot be asked for here: vectors of single tokens always have their "
                f"full width of {self.dimensions}; leave dimensions out.",
                param="dimensions",
            )
        if not np.isfinite(matrix).all():
            return not_finite(item)
        normalize = self.normalize if item.normalize is None else item.normalize
        return unit_rows(matrix) if normalize else matrix


def _to_host(rows: TokenRows, spans: Sequence[slice]) -> list[FloatArray]:
    """The rows of each span; one transfer, of these spans only."""
    if len(spans) == len(rows.bounds) - 1:
        block: FloatArray = rows.matrix_TP.cpu().numpy()
        return [block[span] for span in spans]
    wanted: FloatArray = torch.cat([rows.matrix_TP[span] for span in spans]).cpu().numpy()
    return np.split(wanted, np.cumsum([span.stop - span.start for span in spans])[:-1])
