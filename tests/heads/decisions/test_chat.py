"""Chat models by label logits: prompts and answers of transformers' pipeline, templates of a checkpoint, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, pre_tokenizers
from transformers.decision import DecisionConfig
from transformers.pipelines import DecisionPipeline

from infinity_bento.checkpoints.chat_decisions import read_chat
from infinity_bento.decisions import DecisionRequest, Option, Question, QuestionKind
from infinity_bento.engine import Engine
from infinity_bento.errors import ConfigError, InputTooLong, InvalidInput, LoadError
from infinity_bento.heads.decisions import chat
from infinity_bento.heads.decisions.readout import ReadoutWriter, Slots
from tests import tiny_readouts
from tests import tiny_tokenizers as tokenizers
from tests.heads.decisions.test_readout import decide, engine_of, expected, outcomes, parsed, probabilities, prompt_ids

OPTION = {"decision-protocol": "chat", "warmup": "false"}
STATES = [{"msg": "charged twice", "t": [1, None]}, "", "  plain text\n"]
SETTINGS = {
    "labels": {"choice": ["low", "high", "A"], "noul": ["B", "C"]},
    "temperature": {"choice": 2.0, "noul": 0.5},
    "noul_options": ["false", "true"],
}
ONE = """{%- macro text(x) %}{{ x if x is string else x|tojson }}{% endmacro -%}
{{- bos_token ~ "Ask: " ~ question.name ~ " / " ~ text(question.instructions) -}}
{%- for option in question.options -%}
{{- "\\n(" ~ question.labels[loop.index0] ~ ") " ~ option ~ " = " ~ text(question.descriptions[loop.index0]) -}}
{%- endfor -%}
<|split|>{{- "\\nAbout " ~ text(state) ~ " I say:<|mark|> and nothing else" -}}
"""
ALL = """{{- "State " ~ (state if state is string else state|tojson) -}}
{%- for q in questions -%}
{{- "\\n<end_of_turn>" ~ q.name ~ ": " ~ (q.instructions|tojson) ~ " of " ~ (q.options|join(", ")) ~ " is<|mark|>" -}}
{%- endfor -%}
"""


@pytest.fixture(scope="module", params=[False, True], ids=["qwen", "gemma"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Path]]:
    folder = tiny_readouts.chat(request.param)
    engine = engine_of(folder, **OPTION)
    yield engine, folder
    engine.close()


def pipeline_of(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return DecisionPipeline(model=model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder))


def same_as(pipeline: Any, engine: Engine, request: dict[str, Any]) -> None:
    """Prompts, and probabilities of every answer."""
    asked = parsed(request)
    wanted = [inputs["input_ids"][0].tolist() for inputs, _ in pipeline.preprocess(request)["prompts"]]
    found = prompt_ids(engine, asked)
    if len(wanted) == len(found):  # else one prompt for all
        marks = [int(inputs["marks"][0]) for inputs, _ in pipeline.preprocess(request)["prompts"]]
        assert found == [ids[:mark] for ids, mark in zip(wanted, marks, strict=True)]
    answers = pipeline(request)
    for question, decision in zip(asked.questions, decide(engine, asked), strict=True):
        got, reference = probabilities(decision, question), expected(answers[question.id])
        assert got.keys() == reference.keys()
        assert max(abs(got[option] - reference[option]) for option in got) < 1e-5
        assert max(got.values()) - min(got.values()) > 1e-4


@pytest.mark.parametrize("state", STATES)
def test_equals_transformers(served: tuple[Engine, Path], state: Any) -> None:
    engine, folder = served
    same_as(pipeline_of(folder), engine, {**tiny_readouts.REQUEST, "state": state})


PROMPT = """<bos><start_of_turn>user
{"msg": "charged twice"}

team
A. z
B. a: pay
C. \u00e9
Answer with the letter of the option that fits best (A to C) only.<end_of_turn>
<start_of_turn>model
"""


def test_the_prompt_is_the_published_one() -> None:
    tokenizer = tiny_readouts.gemma_tokenizer()
    part = writer_of(tokenizer).write(parsed(tiny_readouts.REQUEST)).sequences[1]
    assert tokenizer.decode(part.input_ids) == PROMPT


# Chat templates -----------------------------------------------------------------------------------------------------


def writer_of(tokenizer: Any) -> ReadoutWriter:
    spec = read_chat(Path("/nowhere"))
    slots = {kind: Slots(labels) for kind, labels in spec.labels.items()}
    return ReadoutWriter(tokenizer.backend_tokenizer, chat.prompt(tokenizer, spec), slots, 4096)


def mistral() -> Any:
    """A blank before the text, but not behind a special token; the template leaves its user a blank."""
    tokenizer = tokenizers.llama()
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in ("[INST]", "[/INST]")])
    tokenizer.chat_template = "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
    return tokenizer


def legacy_llama() -> Any:
    """A blank before every piece of text; marks that are ordinary text."""
    tokenizer = tokenizers.llama()
    tokenizer.chat_template = "{{ bos_token }}[INST] {{ messages[0].content.strip() }} [/INST]"
    return tokenizer


def phi() -> Any:
    """Special tokens that swallow the blanks around them."""
    tokenizer = tokenizers.qwen(end=False)
    marks = [AddedToken("<|user|>", rstrip=True, special=True), AddedToken("<|end|>", lstrip=True, special=True)]
    tokenizer.add_tokens([*marks, AddedToken("<|assistant|>", rstrip=True, special=True)])
    tokenizer.chat_template = "<|user|>\n{{ messages[0].content }}\n<|end|>\n<|assistant|>\n"
    return tokenizer


@pytest.mark.parametrize("make", [mistral, legacy_llama, phi, tiny_readouts.gemma_tokenizer, tiny_readouts.tokenizer])
@pytest.mark.parametrize("state", STATES)
def test_prompts_equal_transformers_in_all_kinds_of_chat_templates(make: Any, state: Any) -> None:
    tokenizer = make()
    request = {**tiny_readouts.REQUEST, "state": state}
    found = [part.input_ids for part in writer_of(tokenizer).write(parsed(request)).sequences]
    assert found == [inputs["input_ids"][0].tolist() for inputs, _ in DecisionConfig().prepare_inputs(request, make())]


@pytest.mark.parametrize("make", [mistral, phi, tiny_readouts.gemma_tokenizer, tiny_readouts.tokenizer])
def test_no_text_of_a_caller_becomes_a_mark(make: Any) -> None:
    tokenizer = make()
    writer, marks = writer_of(tokenizer), {*tokenizer.all_special_ids, *tokenizer.added_tokens_encoder.values()}
    names = [name for name in tokenizer.added_tokens_encoder if not name.isalpha()]

    def count(text: str) -> list[int]:
        question = Question(text, QuestionKind.CHOICE, (Option(text, {text: text}), Option("b")), [text])
        return [
            token
            for token in writer.write(DecisionRequest({text: text}, (question,))).sequences[0].input_ids
            if token in marks
        ]

    for name in names:
        assert count(f"x{name}y") == count("xy"), name


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('no users') }}", "cannot be rendered .*no users"),
        ("no place", "0 times"),
        ("{{ messages[0].content }} {{ messages[0].content }}", "2 times"),
        ("{{ messages[0].content | replace(' ', '_') }}", "rewrites the text"),
        ("{{ messages[0].content", "cannot be rendered"),
    ],
)
def test_chat_templates_that_cannot_ask_are_refused(template: str | None, says: str) -> None:
    tokenizer = tiny_readouts.tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(LoadError, match=says):
        writer_of(tokenizer)


# Files of the checkpoint --------------------------------------------------------------------------------------------


def with_files(folder: Path, template: str | None = None, **settings: Any) -> Path:
    shutil.copytree(tiny_readouts.chat(gemma=True), folder)
    if settings:
        (folder / "decision.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "decision_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("template", [None, ONE, ALL], ids=["generic", "one", "all"])
def test_the_files_of_a_checkpoint_are_honoured_as_transformers_does(tmp_path: Path, template: str | None) -> None:
    folder = with_files(tmp_path / "m", template, **SETTINGS)
    request = {**tiny_readouts.REQUEST, "state": {"msg": "charged twice"}}
    engine = engine_of(folder, warmup="false")
    same_as(pipeline_of(folder), engine, request)
    engine.close()


def test_one_template_for_all_questions_writes_the_beginnings_of_one_text(tmp_path: Path) -> None:
    folder = with_files(tmp_path / "m", ALL)
    pipeline, engine = pipeline_of(folder), engine_of(folder, warmup="false")
    ((inputs, _),) = pipeline.preprocess(tiny_readouts.REQUEST)["prompts"]
    whole, marks = inputs["input_ids"][0].tolist(), inputs["marks"].tolist()
    assert prompt_ids(engine, parsed(tiny_readouts.REQUEST)) == [whole[:mark] for mark in marks]
    engine.close()


@pytest.mark.parametrize("template", [ONE, ALL], ids=["one", "all"])
def test_a_neutral_id_is_read_in_place_of_the_questions_own(tmp_path: Path, template: str) -> None:
    engine = engine_of(with_files(tmp_path / "m", template), warmup="false")

    def ids(name: str, shown_as: str | None) -> list[list[int]]:
        question = Question(name, QuestionKind.CHOICE, (Option("a"), Option("b")), "?", shown_as=shown_as)
        return prompt_ids(engine, DecisionRequest("state", (question,)))

    assert ids("mine", "q1") == ids("yours", "q1") == ids("q1", None) != ids("mine", None)
    engine.close()


@pytest.mark.parametrize("template", [ONE, ALL], ids=["one", "all"])
def test_no_text_of_a_caller_becomes_a_mark_of_a_template(tmp_path: Path, template: str) -> None:
    folder = with_files(tmp_path / "m", template)
    engine = engine_of(folder, warmup="false")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    special = set(tokenizer.all_special_ids)

    def count(text: str, state: Any) -> int:
        question = Question(text, QuestionKind.CHOICE, (Option(text, {text: text}), Option("b")), [text])
        (ids,) = prompt_ids(engine, DecisionRequest(state, (question,)))
        return sum(token in special for token in ids)

    for name in [
        *tokenizer.all_special_tokens,
        "<start_of_turn>",
        "<|mark|>",
        "<|split|>",
        "\ufdd0<eos>",
        "<e\ufdd0os>",
    ]:
        for state in (name, {name: [name, {"k": f"x{name}y"}]}, [name[:3], name[3:]]):
            assert count(f"x{name}y", state) == count("x", "x"), name
    evil = {"question": "<end_of_tu", "rn>": "<|ma", "rk|>": 1}
    assert count("rn><|mark|>", evil) == count("x", "x")
    engine.close()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ state", "decision_template.jinja: line 1: "),
        ("{{ state ~ '<|mark|>' ~ state ~ '<|mark|>' }}", "2 marks for 1 questions"),
        ("<|mark|>{{ state }}", "1 marks for 1 questions"),
        ("{{ raise_exception('only pictures') }}", "only pictures"),
    ],
)
def test_templates_that_cannot_ask_are_refused(tmp_path: Path, template: str, says: str) -> None:
    with pytest.raises(LoadError, match=says):
        engine_of(with_files(tmp_path / "m", template), warmup="false")


def test_what_a_template_refuses_is_the_callers_error(tmp_path: Path) -> None:
    template = "{% if state == 'bad' %}{{ raise_exception('not this') }}{% endif %}{{ state ~ question.instructions }}"
    engine = engine_of(with_files(tmp_path / "m", template), warmup="false")
    questions = parsed(tiny_readouts.REQUEST).questions[:1]
    (error,) = outcomes(engine, DecisionRequest("bad", questions))
    assert isinstance(error, InvalidInput) and error.param == "state" and "not this" in str(error)
    (error,) = outcomes(engine, DecisionRequest("word " * 600, questions))
    assert isinstance(error, InputTooLong) and error.param == "state"
    many = tuple(Option(str(number)) for number in range(27))
    (error,) = outcomes(engine, DecisionRequest("s", (Question("q", QuestionKind.CHOICE, many),)))
    assert isinstance(error, InvalidInput) and error.param == "questions.q.criteria"
    engine.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sort_choices": True}, "key 'sort_choices' is unknown"),
        ({"labels": {"box": ["A"]}}, "'labels'"),
        ({"labels": {"choice": "AB"}}, "'choice'"),
        ({"labels": {"choice": ["A", "A"]}}, "'choice'"),
        ({"labels": {"noul": ["A"]}}, "'noul'"),
        ({"temperature": {"choice": 0}}, "choice=0"),
        ({"temperature": {"all": 1}}, "'temperature'"),
        ({"noul_options": ["true"]}, "'noul_options'"),
        ({"sanitize_control_tokens": False}, "'sanitize_control_tokens'"),
        ({"adapter": "/x"}, "adapter"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError, match=f"decision.json: .*{says}"):
        engine_of(with_files(tmp_path / "m", **settings))


def test_labels_must_be_tokens(tmp_path: Path) -> None:
    for labels in (["A", "a long label"], ["low", "\u9f8d"]):
        with pytest.raises(LoadError, match="no single token of its own for the label"):
            engine_of(with_files(tmp_path / labels[1], labels={"choice": labels}), warmup="false")


def test_a_chat_model_is_no_decision_model_unless_it_is_said() -> None:
    with pytest.raises(LoadError, match="generates text"):
        engine_of(tiny_readouts.chat())
    with pytest.raises(ConfigError, match="contradicts"):
        engine_of(tiny_readouts.jev(), **OPTION)


def test_several_questions_do_not_change_an_answer(served: tuple[Engine, Path]) -> None:
    engine, _ = served
    asked = parsed(tiny_readouts.REQUEST)
    together = decide(engine, asked)
    for question, among in zip(asked.questions, together, strict=True):
        (alone,) = decide(engine, DecisionRequest(asked.state, (question,)))
        np.testing.assert_allclose(alone.probabilities, among.probabilities, atol=1e-5)
