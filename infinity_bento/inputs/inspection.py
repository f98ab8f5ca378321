"""Tokens as people look at them: the rows of ``/tokenize`` and the texts of ``/decode``. Called by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinity_bento.core import Item, Task
from infinity_bento.errors import InfinityError, InvalidInput
from infinity_bento.inputs.tokenization import TextTokenizer

# id, text, whether it is special, and where its text starts and stops in the prompted input, in UTF-8 bytes.
TokenRow = tuple[int, str, bool, int | None, int | None]


def token_rows(
    tokenizer: TextTokenizer, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
) -> list[list[TokenRow] | InfinityError]:
    """The tokens of each text, in order, untruncated, with its prompt.

    Args:
        tokenizer: Of the model.
        texts: None of them empty.
        add_special_tokens: As when the model runs.
        prompt_name: A key of the checkpoint's prompts; None for its default prompt.

    Errors: ``InvalidInput`` for an unknown prompt name.
    """
    rows: list[list[TokenRow] | InfinityError] = []
    for text in texts:
        try:
            whole = tokenizer.prompted(Item(Task.EMBED, text=text, prompt_name=prompt_name))
        except InfinityError as error:
            rows.append(error)
            continue
        rows.append(_rows(tokenizer.backend.encode(whole, add_special_tokens=add_special_tokens), whole))
    return rows


def _rows(encoding: Any, text: str) -> list[TokenRow]:
    byte_at = [0]
    for character in text:
        byte_at.append(byte_at[-1] + len(character.encode("utf-8", "surrogatepass")))
    columns = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    return [
        (token, name, True, None, None) if special else (token, text[start:stop], False, byte_at[start], byte_at[stop])
        for token, name, special, (start, stop) in columns
    ]


def decoded(
    tokenizer: TextTokenizer, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool
) -> list[str | InfinityError]:
    """The text of each list of token ids; ``InvalidInput`` as the value of a list with an id outside the vocabulary."""
    highest = tokenizer.rules.vocabulary_size - 1
    texts: list[str | InfinityError] = []
    for row in ids:
        outside = next((token for token in row if not 0 <= token <= highest), None)
        if outside is not None:
            texts.append(InvalidInput(f"Token id {outside} is outside the vocabulary: 0 to {highest}."))
        else:
            texts.append(tokenizer.backend.decode(list(row), skip_special_tokens=skip_special_tokens))
    return texts
