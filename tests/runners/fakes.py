"""A backbone and a head that compute something known, and can be told to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.core import FloatArray, Item

POISON = 666
NAN = 777


class FakeBackbone:
    """Hidden state of a token = its id; raises on ``POISON``, waits at ``gate`` if there is one."""

    position_offset = 0
    causal = False
    device = torch.device("cpu")
    chosen: Sequence[str | None] | None = None  # adapters of the last forward, in packed order

    def __init__(self, error: Callable[[], Exception] = lambda: RuntimeError("poisoned")) -> None:
        self.error = error
        self.batches: list[list[list[int]]] = []  # ids of every sequence of every forward that began
        self.gate: threading.Event | None = None
        self.entered = threading.Event()

    adapters: tuple[str, ...] = ()

    def adapter_for(self, prompt_name: str | None) -> str | None:
        return prompt_name if prompt_name in self.adapters else None

    def forward(self, batch: PackedBatch, *, adapters: Sequence[str | None] | None = None) -> Tensor:
        self.chosen = adapters
        bounds = batch.cu_seqlens.tolist()
        ids = batch.input_ids.tolist()
        self.batches.append([ids[a:b] for a, b in pairwise(bounds)])
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(20)
        if POISON in ids:
            raise self.error()
        hidden = batch.input_ids.float()
        return torch.where(batch.input_ids == NAN, torch.tensor(float("nan")), hidden).unsqueeze(1)


class FirstAndLast:
    """Row = first and last hidden state."""

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        return torch.cat([hidden_TD[batch.starts()], hidden_TD[batch.ends()]], dim=1)

    def collect(self, rows: Tensor, positions: Sequence[int], items: Sequence[Item]) -> list[FloatArray]:
        host: FloatArray = rows.numpy()[list(positions)].astype(np.float32)
        return list(host)
