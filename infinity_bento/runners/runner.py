"""A runner holds one checkpoint on one device and does three verbs: prepare, run, collect.

A plain class, without BentoML: lanes drive it, tests use it alone. It is safe to run from several threads at once;
nothing of a batch is left on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.core import Encoded, Item, Task
from infinity_bento.errors import InfinityError

Row = Any  # what Result.output holds for the task


class Backbone(Protocol):
    """What a runner needs of a model (``models.backbone.Backbone``)."""

    @property
    def position_offset(self) -> int:
        """First position id of a sequence."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the checkpoint's task adapters; empty for nearly all."""

    def adapter_for(self, prompt_name: str | None) -> str | None:
        """The adapter of an item that names this prompt."""

    def forward(self, batch: PackedBatch, *, adapters: Sequence[str | None] | None = None) -> Tensor:
        """Hidden states of a packed batch, ``[T, D]``; ``adapters`` in packed order."""


class Head(Protocol):
    """Hidden states -> one row per sequence, then each item's own wishes."""

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> Any:
        """Rows of all sequences in packed order, on the device."""

    def collect(self, rows: Any, positions: Sequence[int], items: Sequence[Item]) -> list[Row | InfinityError]:
        """Outputs of ``items``, which lie at ``positions`` of the packed order; waits for the device."""


class Runner:
    """One checkpoint on one device.

    Args:
        backbone: Runs packed batches.
        heads: What each task does with the hidden states.
    """

    def __init__(self, backbone: Backbone, heads: Mapping[Task, Head]) -> None:
        self.backbone = backbone
        self.heads = dict(heads)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.backbone.device

    def prepare(self, encoded: Sequence[Encoded]) -> PackedBatch:
        """Pack tokenised items and start their way to the device."""
        return pack(encoded, position_offset=self.backbone.position_offset, device=self.device)

    @torch.inference_mode()
    def run(self, batch: PackedBatch, items: Sequence[Item]) -> dict[Task, Any]:
        """One forward pass; returns each task's device rows in packed order. Asynchronous on CUDA.

        Args:
            batch: What ``prepare`` made.
            items: In the order they were prepared in.
        """
        adapters = None
        if self.backbone.adapters:
            adapters = [self.backbone.adapter_for(items[index].prompt_name) for index in batch.order]
        hidden = self.backbone.forward(batch, adapters=adapters)
        return {task: self.heads[task].run(hidden, batch) for task in {item.task for item in items}}

    def collect(self, rows: Mapping[Task, Any], batch: PackedBatch, items: Sequence[Item]) -> list[Row | InfinityError]:
        """Wait for the device, and give each item its output, in the order the items were packed in.

        Errors: ``InferenceError`` for a row that is not finite; whatever else the head's ``collect`` returns.
        """
        outputs: list[Row | InfinityError] = [None] * len(items)
        position = dict(zip(batch.order, range(len(batch)), strict=True))  # caller's index -> packed index
        for task, device_rows in rows.items():
            chosen = [index for index, item in enumerate(items) if item.task is task]
            finished = self.heads[task].collect(
                device_rows, [position[index] for index in chosen], [items[index] for index in chosen]
            )
            for index, output in zip(chosen, finished, strict=True):
                outputs[index] = output
        return outputs

    def warm_up(self, max_tokens: int, max_length: int) -> None:
        """Run the shapes that would otherwise be slow at first: one short sequence, and one full batch."""
        longest = max(1, min(max_length, max_tokens))
        for lengths in ([2], [longest] * max(1, max_tokens // longest)):
            batch = self.prepare([Encoded([0] * length) for length in lengths])
            with torch.inference_mode():
                hidden = self.backbone.forward(batch)
                rows = {task: head.run(hidden, batch) for task, head in self.heads.items()}
            for task, head in self.heads.items():
                head.collect(rows[task], range(len(batch)), [Item(task, token_ids=[0])] * len(batch))
