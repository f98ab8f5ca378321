"""Which texts are encoded where they arrive, and which by the workers."""

from __future__ import annotations

import threading

import pytest

from infinity_bento.core import Encoded, Item, Task
from infinity_bento.decisions import DecisionRequest
from infinity_bento.errors import InvalidInput
from infinity_bento.inputs.pool import INLINE_CHARACTERS, Encodings, TokenizerPool, is_short


class FakeTokenizer:
    """One token per character; refuses the text "bad"."""

    def encode(self, items: list[Item]) -> Encodings:
        if any(item.text == "bad" for item in items):
            raise ValueError("no such text")
        return [Encoded([0] * len(item.text or "x")) for item in items]


def item(characters: int, pair: str | None = None) -> Item:
    return Item(Task.EMBED, text="a" * characters, text_pair=pair)


@pytest.mark.parametrize(
    ("items", "short"),
    [
        ([item(1)], True),
        ([item(INLINE_CHARACTERS)], True),
        ([item(INLINE_CHARACTERS + 1)], False),
        ([item(INLINE_CHARACTERS, "b")], False),
        ([item(10)] * (INLINE_CHARACTERS // 10), True),
        ([item(10)] * (INLINE_CHARACTERS // 10 + 1), False),
        ([Item(Task.EMBED, token_ids=[1, 2])], False),
        ([Item(Task.DECIDE, decision=DecisionRequest("s", ()))], False),
    ],
)
def test_short(items: list[Item], short: bool) -> None:
    assert is_short(items) is short


@pytest.mark.parametrize("characters", [5, INLINE_CHARACTERS + 1])
def test_who_encodes(characters: int) -> None:
    pool = TokenizerPool(FakeTokenizer(), 1)  # type: ignore[arg-type]
    done, seen = threading.Event(), []

    def on_encoded(encodings: Encodings, seconds: float) -> None:
        seen.append((threading.current_thread(), [len(e) for e in encodings if isinstance(e, Encoded)], seconds))
        done.set()

    pool.submit([item(characters)], on_encoded)
    assert done.wait(10)
    pool.close()
    thread, lengths, seconds = seen[0]
    assert (thread is threading.current_thread()) is (characters == 5)
    assert lengths == [characters] and seconds >= 0


def test_a_text_that_the_tokenizer_cannot_take_harms_only_itself_inline_too() -> None:
    pool = TokenizerPool(FakeTokenizer(), 1)  # type: ignore[arg-type]
    found: list[Encodings] = []
    items = [item(3), Item(Task.EMBED, text="bad"), item(4)]
    pool.submit(items, lambda encodings, seconds: found.append(encodings))
    pool.close()
    assert isinstance(found[0][1], InvalidInput) and "no such text" in str(found[0][1])
    assert [len(e) for e in found[0] if isinstance(e, Encoded)] == [3, 4]
