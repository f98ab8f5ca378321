"""What a decision protocol is: it writes a request as sequences, and reads the answers from their hidden states.

One file per family beside this one. ``loading`` builds the protocol of a checkpoint; the tokenizer pool calls
``encode``, the runner ``run`` and ``collect``.

Shape suffixes: T packed tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.core import Encoded, Item
from infinity_bento.decisions import Decision, DecisionRequest
from infinity_bento.errors import InfinityError


class DecisionProtocol(Protocol):
    """One family's way of deciding, bound to a loaded checkpoint. Thread-safe: nothing changes after construction."""

    @property
    def name(self) -> str:
        """Public name, as in ``--decision-protocol`` and ``/info``."""

    def encode(self, request: DecisionRequest) -> Encoded:
        """The sequences of a request, as ``Encoded.parts`` (one per question, or one in all), each with ``readout``.

        Raises:
            InvalidInput: If the family cannot ask a question; ``param`` is the field's path.
            InputTooLong: If a sequence exceeds the model's limit; nothing is truncated, except where the family's
                reference does.
        """

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> Any:
        """Logits of all readouts of the batch (``batch.readouts``, in packed order), on the device."""

    def collect(
        self, rows: Any, positions: Sequence[Sequence[int]], items: Sequence[Item]
    ) -> list[list[Decision] | InfinityError]:
        """A ``Decision`` per question of each item; the sequences of item ``i`` lie at ``positions[i]``, in the order
        of its parts. Waits for the device. Errors: ``InferenceError`` for logits that are not finite."""
