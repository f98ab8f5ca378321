"""The head of a listwise reranker: the states behind each document and the query, projected. Built by ``heads.build``.

Shape suffixes: T packed tokens, D hidden size, R readouts, P projected size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.core import Item
from infinity_bento.errors import InfinityError, WeightMismatch
from infinity_bento.heads.classifiers import read_head
from infinity_bento.heads.rows import not_finite
from infinity_bento.inputs.listwise import Marks
from infinity_bento.listwise import Block

FIRST, SECOND = "projector.0.weight", "projector.2.weight"


class Rows(NamedTuple):
    """What was read of a batch."""

    projected_RP: Tensor  # of all sequences in packed order: the documents, then the query of each
    marks: list[Marks]  # in packed order


class ListwiseHead:
    """Two linear layers with a ReLU between, without bias, in float32.

    Args:
        first: ``[H, D]``.
        second: ``[P, H]``.
        device: Where they go.
    """

    def __init__(self, first: Tensor, second: Tensor, device: torch.device | str) -> None:
        self._projector = nn.Sequential(
            _linear(first, device),
            nn.ReLU(),
            _linear(second, device),
        )

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> Rows:
        """The projected rows of all readouts."""
        starts = batch.cu_seqlens[:-1].tolist()
        # Without readouts (at warm-up) the last token is the query and the only document.
        readouts = batch.readouts or [Marks((length - 1,), length - 1, (None,)) for length in batch.lengths]
        places = [
            start + place
            for start, marks in zip(starts, readouts, strict=True)
            for place in (*marks.documents, marks.query)
        ]
        chosen = torch.tensor(places, device=hidden_TD.device)
        return Rows(self._projector(hidden_TD[chosen].float()), list(readouts))

    def collect(self, rows: Rows, positions: Sequence[int], items: Sequence[Item]) -> list[Block | InfinityError]:
        """A ``Block`` per sequence; waits for the device. Errors: ``InferenceError`` for rows that are not finite."""
        projected = rows.projected_RP.cpu().numpy()
        ends = np.cumsum([len(marks.documents) + 1 for marks in rows.marks]).tolist()
        outputs: list[Block | InfinityError] = []
        for position, item in zip(positions, items, strict=True):
            marks, end = rows.marks[position], ends[position]
            documents, query = projected[end - len(marks.documents) - 1 : end - 1], projected[end - 1]
            finite = np.isfinite(documents).all() and np.isfinite(query).all()
            outputs.append(Block(query, documents, marks.cuts) if finite else not_finite(item))
        return outputs


def load_listwise_head(folder: Path, hidden_size: int, device: torch.device | str) -> ListwiseHead:
    """The projector of a checkpoint.

    Raises:
        WeightMismatch: If one of its tensors is missing or does not fit.
    """
    found = read_head(folder, {FIRST, SECOND})
    missing = [name for name in (FIRST, SECOND) if name not in found]
    if missing:
        raise WeightMismatch(
            f"{folder}: the weights have no tensor {' and no tensor '.join(missing)}, which a listwise reranker scores "
            "with; use the complete checkpoint."
        )
    first, second = found[FIRST], found[SECOND]
    if first.ndim != 2 or first.shape[1] != hidden_size or second.ndim != 2 or second.shape[1] != first.shape[0]:
        raise WeightMismatch(
            f"{folder}: tensors {FIRST!r} {tuple(first.shape)} and {SECOND!r} {tuple(second.shape)} do not follow "
            f"hidden states of {hidden_size}; use the complete checkpoint of one model."
        )
    return ListwiseHead(first, second, device)


def _linear(weight: Tensor, device: torch.device | str) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.float().to(device), requires_grad=False)
    return layer
