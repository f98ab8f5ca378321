"""Equal sequences of a batch, to be computed once. Called by the runner.

Rows never depend on neighbours, so equal sequences have equal rows; users send the same text surprisingly often (empty
fields, boilerplate, a query beside itself).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from infinity_bento.core import Encoded, TokenSpans


def distinct(sequences: Sequence[Encoded], marks: Sequence[Hashable] | None = None) -> tuple[list[Encoded], list[int]]:
    """The distinct ones in order of their first appearance, and which of these each sequence is.

    Args:
        sequences: Any.
        marks: What else tells sequences apart, such as the adapter each runs with; None: nothing.
    """
    seen: dict[Hashable, int] = {}
    kept: list[Encoded] = []
    copies: list[int] = []
    for index, sequence in enumerate(sequences):
        key = (_key(sequence), marks[index] if marks is not None else None)
        place = seen.setdefault(key, len(kept))
        if place == len(kept):
            kept.append(sequence)
        copies.append(place)
    return kept, copies


def _key(sequence: Encoded) -> Hashable:
    """All that the model and its heads can see of a sequence."""
    spans = sequence.readout if isinstance(sequence.readout, TokenSpans) else None
    if sequence.readout is not spans or sequence.blocks is not None or sequence.position_ids is not None:
        return id(sequence)  # part of a decision or a list: never a copy of another
    return (
        tuple(sequence.input_ids),
        None if sequence.token_type_ids is None else tuple(sequence.token_type_ids),
        sequence.prompt_length,
        sequence.attended,
        None if sequence.kept is None else sequence.kept.tobytes(),
        sequence.static,
        None if spans is None else (tuple(spans.tokens), tuple(spans.offsets or ())),
    )
