"""A runner holds one checkpoint on one device and does three verbs: prepare, run, collect.

A plain class, without BentoML: lanes drive it, tests use it alone. It is safe to run from several threads at once;
nothing of a batch is left on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity_bento.batching.duplicates import distinct
from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.core import Encoded, Item, Task
from infinity_bento.errors import InfinityError

Row = Any  # what Result.output holds for the task
GROUPED = frozenset({Task.DECIDE})  # tasks whose items may be several sequences


class Backbone(Protocol):
    """What a runner needs of a model (``models.backbone.Backbone``)."""

    @property
    def position_offset(self) -> int:
        """First position id of a sequence."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def causal(self) -> bool:
        """No token sees what stands behind it."""

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


class GroupHead(Protocol):
    """A head whose items are several sequences each (``Encoded.parts``)."""

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> Any:
        """Rows of all sequences in packed order, on the device."""

    def collect(
        self, rows: Any, positions: Sequence[Sequence[int]], items: Sequence[Item]
    ) -> Sequence[Row | InfinityError]:
        """Outputs of ``items``; the sequences of item ``i`` lie at ``positions[i]``, in the order of its parts."""


class Runner:
    """One checkpoint on one device.

    Args:
        backbone: Runs packed batches.
        heads: What each task does with the hidden states; a ``GroupHead`` for DECIDE.
    """

    def __init__(self, backbone: Backbone, heads: Mapping[Task, Head | GroupHead]) -> None:
        self.backbone = backbone
        self.heads: dict[Task, Any] = dict(heads)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.backbone.device

    def prepare(self, encoded: Sequence[Encoded], items: Sequence[Item] = ()) -> PackedBatch:
        """Pack tokenised items, each of their distinct sequences once, and start their way to the device.

        Args:
            encoded: At least one item's sequences each.
            items: What was asked, in the same order; only read where the checkpoint has task adapters.
        """
        sequences = [sequence for one in encoded for sequence in one.sequences]
        adapters = self._adapters(encoded, items)
        kept, copies = distinct(sequences, adapters)
        batch = pack(
            kept,
            position_offset=self.backbone.position_offset,
            device=self.device,
            causal=self.backbone.causal,
        )
        if len(kept) < len(sequences):
            batch.copies = copies
        if len(sequences) > len(encoded):
            batch.item_sizes = [len(one.sequences) for one in encoded]
        if adapters is not None:
            first = dict(reversed(list(zip(copies, adapters, strict=True))))  # of each kept sequence
            batch.adapters = [first[index] for index in batch.order]
        return batch

    def _adapters(self, encoded: Sequence[Encoded], items: Sequence[Item]) -> list[str | None] | None:
        """The task adapter of each sequence; None where the checkpoint has none."""
        if not self.backbone.adapters:
            return None
        chosen = [self.backbone.adapter_for(item.prompt_name) for item in items]
        return [name for name, one in zip(chosen, encoded, strict=True) for _ in one.sequences]

    @torch.inference_mode()
    def run(self, batch: PackedBatch, items: Sequence[Item]) -> dict[Task, Any]:
        """One forward pass; returns each task's device rows in packed order. Asynchronous on CUDA.

        Args:
            batch: What ``prepare`` made.
            items: In the order they were prepared in.
        """
        hidden = self.backbone.forward(batch, adapters=batch.adapters)
        return {task: self.heads[task].run(hidden, batch) for task in {item.task for item in items}}

    def collect(self, rows: Mapping[Task, Any], batch: PackedBatch, items: Sequence[Item]) -> list[Row | InfinityError]:
        """Wait for the device, and give each item its output, in the order the items were packed in.

        Errors: ``InferenceError`` for a row that is not finite; whatever else the head's ``collect`` returns.
        """
        outputs: list[Row | InfinityError] = [None] * len(items)
        places = batch.places()
        for task, device_rows in rows.items():
            chosen = [index for index, item in enumerate(items) if item.task is task]
            positions: list[Any] = [places[index] for index in chosen]
            if task not in GROUPED:
                positions = [place[0] for place in positions]
            finished = self.heads[task].collect(device_rows, positions, [items[index] for index in chosen])
            for index, output in zip(chosen, finished, strict=True):
                outputs[index] = output
        return outputs

    def warm_up(self, max_tokens: int, max_length: int) -> None:
        """Run the shapes that would otherwise be slow at first: one short sequence, and one full batch."""
        longest = max(1, min(max_length, max_tokens))
        for lengths in ([2], [longest] * max(1, max_tokens // longest)):
            sequences = [Encoded([number % 50] * length) for number, length in enumerate(lengths)]  # all distinct
            asked = [Item(Task.EMBED, token_ids=[0])] * len(sequences)
            batch = self.prepare(sequences, asked)
            with torch.inference_mode():
                hidden = self.backbone.forward(batch)
                rows = {task: head.run(hidden, batch) for task, head in self.heads.items() if task not in GROUPED}
            for task in rows:
                self.heads[task].collect(rows[task], range(len(batch)), [Item(task, token_ids=[0])] * len(batch))
