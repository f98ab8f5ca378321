"""The dense embedding head: pooling, the checkpoint's own modules, then per item dimensions and normalization.

Called by the runner with packed hidden states.

Shape suffixes: T packed tokens, B sequences, D width, P output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.core import FloatArray, Item, Pooling
from infinity_bento.errors import InfinityError, InvalidInput
from infinity_bento.heads.pooling import pool
from infinity_bento.heads.rows import not_finite, unit_rows


class EmbeddingHead:
    """One vector per sequence.

    Args:
        poolings: At least one mode; several concatenate.
        include_prompt: False leaves the prompt's tokens out of pooling.
        modules: Applied in order to the pooled float32 rows, ``[B, D]`` -> ``[B, P]`` (Dense, LayerNorm).
        normalize: Whether the checkpoint ends in a Normalize module: the default of items that do not say.
        dimensions: Width of a vector, P.
        truncate_dim: Width to which the checkpoint itself cuts vectors; the default of items that do not say.
    """

    def __init__(
        self,
        poolings: Sequence[Pooling],
        *,
        dimensions: int,
        include_prompt: bool = True,
        modules: Sequence[Callable[[Tensor], Tensor]] = (),
        normalize: bool = False,
        truncate_dim: int | None = None,
    ) -> None:
        self.poolings = tuple(poolings)
        self.dimensions = dimensions
        self.include_prompt = include_prompt
        self.modules = tuple(modules)
        self.normalize = normalize
        self.truncate_dim = truncate_dim

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """``[T, D]`` hidden states -> ``[B, P]`` float32 rows in packed order, not normalized."""
        rows = pool(hidden_TD, batch, self.poolings, include_prompt=self.include_prompt)
        for module in self.modules:
            rows = module(rows)
        return rows

    def collect(
        self, rows: Tensor, positions: Sequence[int], items: Sequence[Item]
    ) -> list[FloatArray | InfinityError]:
        """Device rows ``[B, P]`` -> each item's vector in float32, cut and normalized as it asks.

        Args:
            rows: What ``run`` gave.
            positions: Packed index of each item.
            items: In the order of ``positions``.

        Errors: ``InvalidInput`` for more dimensions than the model has, ``InferenceError`` for NaN or infinity.
        """
        host: FloatArray = rows.float().cpu().numpy()[list(positions)]
        finite = np.asarray(np.isfinite(host).all(axis=1))
        if finite.all():
            return self._finish(host, items)
        clean = self._finish(np.where(finite[:, None], host, np.float32(0)), items)
        return [row if good else not_finite(item) for row, good, item in zip(clean, finite, items, strict=True)]

    def _finish(self, rows: FloatArray, items: Sequence[Item]) -> list[FloatArray | InfinityError]:
        widths = {item.dimensions or self.truncate_dim for item in items}
        flags = {self.normalize if item.normalize is None else item.normalize for item in items}
        if widths == {None} and len(flags) == 1:  # the usual case, in one step
            return list(unit_rows(rows) if flags.pop() else rows)
        return [self._finish_one(row, item) for row, item in zip(rows, items, strict=True)]

    def _finish_one(self, row: FloatArray, item: Item) -> FloatArray | InfinityError:
        width = item.dimensions or self.truncate_dim
        if width is not None:
            if width > self.dimensions:
                return InvalidInput(
                    f"`dimensions` {width} is more than this model's {self.dimensions}: ask for 1 to "
                    f"{self.dimensions}.",
                    param="dimensions",
                )
            row = row[:width]
        normalize = self.normalize if item.normalize is None else item.normalize
        return unit_rows(row[None])[0] if normalize else row
