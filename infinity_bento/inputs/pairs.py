"""Pairs of texts as one input: what is a pair, and how an overlong one is cut. Called by the tokenizer.

The cut is that of the tokenizers library's strategy ``longest_first``, made after encoding so that it can be reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity_bento.core import Item, Task, TruncationDirection
from infinity_bento.errors import EmptyInput, InputTooLong, InvalidInput


def pair_of(item: Item) -> tuple[str, str] | None:
    """The two texts of an item, or None for a single input. One side may be empty.

    Raises:
        EmptyInput: If both sides are empty.
        InvalidInput: If the task needs a pair and there is none, or takes single texts only.
    """
    if item.text_pair is None:
        if item.task is Task.RERANK and item.token_ids is None:
            raise InvalidInput("Reranking needs a query and a document: send both.")
        return None
    if item.task is not Task.RERANK and item.task is not Task.CLASSIFY:
        raise InvalidInput(f"{item.task.value} takes single texts, not pairs: send one text per input.")
    if item.token_ids is not None or item.text is None:
        raise InvalidInput("A pair needs two texts: token ids cannot be one of them.")
    if not item.text and not item.text_pair:
        raise EmptyInput("Both texts of the pair are empty: send at least one character in one of them.")
    return item.text, item.text_pair


def refuse_prompt(item: Item) -> None:
    """Stop a prompt that was asked for by name, because prompts are for single texts.

    Raises:
        InvalidInput: If the item names a prompt or has an instruction.
    """
    for name in ("prompt_name", "prompt", "instruction"):
        if getattr(item, name) is not None:
            raise InvalidInput(
                f"{name} cannot be used with a pair of texts on this model, which has no place for it: leave it out.",
                param=name,
            )


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that each side keeps so that both fit: the longer side gives way, and past half of the room both do.

    Args:
        first: Tokens of the first text.
        second: Tokens of the second text.
        room: Tokens for both, without special tokens.
    """
    if first + second <= room:
        return first, second
    short, long = min(first, second), max(first, second)
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (short, long) if first <= second else (long, short)


def kept_tokens(sides: Sequence[int | None], limit: int, direction: TruncationDirection) -> list[int]:
    """Indices of the tokens that remain of an overlong pair; special tokens always do.

    Args:
        sides: For each token 0 or 1, the text it is from, or None for a special token.
        limit: Tokens that may remain.
        direction: The end of each text that is cut off.

    Raises:
        InputTooLong: If the special tokens alone are more than ``limit``.
    """
    places: tuple[list[int], list[int]] = ([], [])
    special: list[int] = []
    for index, side in enumerate(sides):
        (special if side is None else places[side]).append(index)
    if len(special) > limit:
        raise InputTooLong(
            f"The limit of {limit} tokens leaves no room for a pair, which takes {len(special)} special tokens: raise "
            "max-sequence-length."
        )
    kept = list(special)
    counts = longest_first(len(places[0]), len(places[1]), limit - len(special))
    for place, count in zip(places, counts, strict=True):
        kept += place[:count] if direction == "right" else place[len(place) - count :]
    return sorted(kept)
