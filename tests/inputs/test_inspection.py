from __future__ import annotations

import pytest

from infinity_bento.engine import Engine
from infinity_bento.errors import InvalidInput, UnknownModel
from tests.conftest import MINILM


async def test_tokens_have_ids_texts_and_byte_offsets(engine: Engine) -> None:
    (rows,) = await engine.tokenize(MINILM, ["Grüße, 日本!"])
    assert isinstance(rows, list)
    assert (rows[0], rows[-1]) == ((101, "[CLS]", True, None, None), (102, "[SEP]", True, None, None))
    text = "Grüße, 日本!".encode()
    for token, shown, special, start, stop in rows[1:-1]:
        assert token > 102
        assert not special
        assert text[start:stop].decode() == shown
    assert "".join(shown for _, shown, *_ in rows[1:-1]) == "Grüße,日本!"


async def test_without_special_tokens_and_beyond_the_length_limit(engine: Engine) -> None:
    (rows,) = await engine.tokenize(MINILM, ["word " * 1000], add_special_tokens=False)
    assert isinstance(rows, list)
    assert len(rows) == 1000


async def test_an_unknown_prompt_is_an_error_of_its_text(engine: Engine) -> None:
    (error,) = await engine.tokenize(MINILM, ["a"], prompt_name="nope")
    assert isinstance(error, InvalidInput)


async def test_decode_is_the_way_back(engine: Engine) -> None:
    text, outside, special = await engine.decode(MINILM, [[101, 7592, 2088, 102], [30522], []])
    assert text == "hello world"
    assert isinstance(outside, InvalidInput)
    assert "0 to 30521" in outside.message
    assert special == ""
    (kept,) = await engine.decode(MINILM, [[101, 7592, 102]], skip_special_tokens=False)
    assert kept == "[CLS] hello [SEP]"


async def test_an_unknown_model(engine: Engine) -> None:
    with pytest.raises(UnknownModel):
        await engine.tokenize("nope", ["a"])
    with pytest.raises(UnknownModel):
        await engine.decode("nope", [[1]])
