"""Questions written by a checkpoint's own ``decision_template.jinja``, for chat models. Read by ``readout``.

A template writes one question, or all of them and marks where each is answered. Chat models look back only, so what
stands behind a mark changes nothing before it: each question becomes the sequence up to its mark, and sequences with a
common beginning share its computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infinity_bento.core import Encoded
from infinity_bento.decisions import DecisionRequest, Json, Option, Question, QuestionKind
from infinity_bento.errors import InvalidInput, LoadError
from infinity_bento.heads.decisions.readout import Slots, checked_length, slots_of
from infinity_bento.inputs.chat import template_marks
from infinity_bento.inputs.marked_text import SIGN, MarkedText
from infinity_bento.inputs.plain_text import PlainText

MARK, SPLIT = "<|mark|>", "<|split|>"


class TemplateWriter:
    """Writes the questions of a request by a Jinja template.

    Args:
        tokenizer: Of transformers; renders the template.
        template: Its source.
        file: Where that lies, for errors.
        slots: Labels of the options, in order, by kind of question.
        true_first: Order of a noul's options.
        max_length: Tokens of a sequence.

    Raises:
        LoadError: The template cannot be parsed or rendered, or has another number of marks than one per question.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        file: str,
        slots: Mapping[QuestionKind, Slots],
        *,
        true_first: bool,
        max_length: int,
    ) -> None:
        self.slots = dict(slots)
        self.true_first = true_first
        self._tokenizer, self._template, self._file = tokenizer, template, file
        self._max_length = max_length
        self._joint = "questions" in _variables(template, file)
        backend = tokenizer.backend_tokenizer
        plain = PlainText(backend, template_marks(tokenizer, template))
        self._text = MarkedText(backend, plain, (MARK, SPLIT))
        for probe in _probes():
            try:
                self.write(probe)
            except InvalidInput as error:
                raise LoadError(f"{file} cannot ask a {probe.questions[0].kind}: {error}") from error

    def write(self, request: DecisionRequest) -> Encoded:
        """The sequences of a request, in the order of its questions.

        Raises:
            InvalidInput: A question has more options than there are labels, or the template refuses the request.
            InputTooLong: A sequence exceeds the length limit; nothing is cut.
        """
        asked = [self._question(question) for question in request.questions]
        state = self._text.sign(request.state)
        groups = [asked] if self._joint else [[question] for question in asked]
        sequences = [found for group in groups for found in self._render(state, group)]
        parts = []
        for question, (ids, characters) in zip(request.questions, sequences, strict=True):
            checked_length(len(ids), self._max_length, question.id)
            rows = self.slots[question.kind].first + len(question.options)
            parts.append(Encoded(ids, characters=characters, readout=rows))
        return Encoded([], parts=parts, characters=sum(part.characters for part in parts))

    def _render(self, state: Json, group: Sequence[dict[str, Any]]) -> list[tuple[list[int], int]]:
        """The sequence of each question of a group that is written as one text, and the characters of that text."""
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": ""}],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
                state=state,
                question=group[0],
                questions=list(group),
            )
        except Exception as error:  # jinja's errors, and whatever a template raises on purpose
            raise InvalidInput(
                f"This model's template cannot write the request ({error}): write the state and questions as the "
                "model's card says.",
                param="state",
            ) from error
        ids, signals = self._text.encode(text)
        marks = [place for signal, place in signals if signal == MARK] or [len(ids)]
        if len(marks) != len(group) or not all(marks):
            raise InvalidInput(
                f"This model's template has {len(marks)} marks for {len(group)} questions, and needs one for each, "
                "behind some text: serve a checkpoint whose answers are labels.",
                param="questions",
            )
        characters = len(text) - text.count(SIGN)
        return [(ids[:mark], characters) for mark in marks]

    def _question(self, question: Question) -> dict[str, Any]:
        """What the template gets of a question; texts of the caller are signed."""
        slots = slots_of(self.slots, question)
        options: tuple[Option, ...] = question.options
        if question.kind is QuestionKind.NOUL and self.true_first:
            options = options[::-1]
        named = question.kind is QuestionKind.CHOICE
        return {
            "name": self._text.sign(question.shown_id),
            "type": question.kind.value,
            "instructions": self._text.sign(question.instructions),
            "options": [self._text.sign(option.name) if named else option.name for option in options],
            "labels": list(slots.codes[: len(options)]),
            "descriptions": [self._text.sign(option.description) for option in options],
        }


def _variables(template: str, file: str) -> set[str]:
    """What the template reads."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    try:
        return meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    except TemplateSyntaxError as error:
        raise LoadError(f"{file}: line {error.lineno}: {error.message}; repair or replace the template.") from error


def _probes() -> list[DecisionRequest]:
    """A request of each kind."""
    options = {
        QuestionKind.NOUL: (Option("false"), Option("true")),
        QuestionKind.CHOICE: (Option("one"), Option("two")),
        QuestionKind.SCORE: (Option("0", "low"), Option("1", "high")),
    }
    return [DecisionRequest("state", (Question("question", kind, options[kind], "Is it?"),)) for kind in QuestionKind]
