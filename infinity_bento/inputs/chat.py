"""What a chat template writes around the text of a user. Called by decision protocols that ask in a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infinity_bento.errors import LoadError

# Private-use characters, so that no template treats it as anything but text.
_TEXT = "\ue000text\ue001"
_BLANKS = "  "


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The texts before and behind that of the user."""

    before: str
    after: str
    strips: bool  # the template takes blanks off the beginning of the user's text


def surroundings(tokenizer: Any, system: str | None, family: str) -> Surroundings:
    """Render a chat of one user message, without thinking, once.

    Args:
        tokenizer: A transformers tokenizer.
        system: A message of the role system before it; None: there is none.
        family: Who asks, for errors.

    Raises:
        LoadError: There is no chat template, it cannot be rendered, or it does not write the text once, as it is.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise LoadError(
            f"The tokenizer has no chat template, in which the prompt of {family} is written; add the chat template of "
            "the original checkpoint."
        )
    before, after = _split(_render(tokenizer, system, _TEXT, family), family)
    blank_before, blank_after = _split(_render(tokenizer, system, f"{_BLANKS}{_TEXT}{_BLANKS}", family), family)
    if blank_before not in (before, before + _BLANKS) or blank_after not in (after, _BLANKS + after):
        raise LoadError(
            f"The chat template of the tokenizer rewrites the text of the user, so the prompt of {family} cannot be "
            "written in it; use a template that leaves the text as it is."
        )
    return Surroundings(before, after, strips=blank_before == before)


def template_marks(tokenizer: Any, *templates: str) -> tuple[str, ...]:
    """Added tokens that are part of the tokenizer's chat template or others, blanks aside: no caller may write them."""
    texts = [str(getattr(tokenizer, "chat_template", None) or ""), *templates]
    added = (token.content for token in tokenizer.added_tokens_decoder.values())
    return tuple(mark for mark in added if not mark.isspace() and any(mark in text for text in texts))


def _render(tokenizer: Any, system: str | None, text: str, family: str) -> str:
    messages: Sequence[dict[str, str]] = [
        *([] if system is None else [{"role": "system", "content": system}]),
        {"role": "user", "content": text},
    ]
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        )
    except Exception as error:  # jinja's errors, and whatever a template raises on purpose
        raise LoadError(
            f"The chat template of the tokenizer cannot be rendered for the prompt of {family} ({error}); use one that "
            f"takes {'a user message' if system is None else 'a system and a user message'}."
        ) from error


def _split(written: str, family: str) -> tuple[str, str]:
    if written.count(_TEXT) != 1:
        raise LoadError(
            f"The chat template of the tokenizer writes the text of the user {written.count(_TEXT)} times; the prompt "
            f"of {family} needs one that writes it once."
        )
    before, _, after = written.partition(_TEXT)
    return before, after
