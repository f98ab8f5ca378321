"""Rune: the described prompt, and transformers' soft-capped logits of a Gemma 4 behind it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from infinity_bento.checkpoints.decisions import RUNE_NOTE
from infinity_bento.decisions import DecisionRequest, Option, Question, QuestionKind
from infinity_bento.engine import Engine
from infinity_bento.errors import ConfigError, InvalidInput, LoadError
from infinity_bento.heads.decisions import rune
from tests import tiny_readouts
from tests.heads.decisions.test_readout import decide, engine_of, outcomes, parsed, prompt_ids

OPTION = {"decision-protocol": "rune", "warmup": "false"}
CLASSES = {"text": "Gemma4ForCausalLM", "experts": "Gemma4ForCausalLM", "whole": "Gemma4ForConditionalGeneration"}
REQUEST = parsed(tiny_readouts.REQUEST)
PROMPT = (
    "<bos><|turn>system\n" + rune.SYSTEM + "<turn|>\n<|turn>user\n"
    'SHARED STATE (JSON string):\n{"msg": "charged twice"}\n\nQUESTION:\nteam\nOPTIONS:\nA: z\nB: pay\nC: \n'
    "Answer with one option letter only.<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
)


@pytest.fixture(scope="module", params=CLASSES)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Path, str]]:
    folder = tiny_readouts.rune(request.param)
    engine = engine_of(folder, **OPTION)
    yield engine, folder, CLASSES[request.param]
    engine.close()


def test_the_prompt_is_the_described_one(served: tuple[Engine, Path, str]) -> None:
    engine, folder, _ = served
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = prompt_ids(engine, REQUEST)[1]
    assert tokenizer.decode(ids) == PROMPT
    assert ids == tokenizer(PROMPT, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("state", [{"msg": "charged twice"}, 'a "quoted" text\n'])
def test_equals_transformers(served: tuple[Engine, Path, str], state: Any) -> None:
    engine, folder, name = served
    asked = DecisionRequest(state, REQUEST.questions)
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    letters = tokenizer.convert_tokens_to_ids(tiny_readouts.CODES)
    cap = model.config.get_text_config().final_logit_softcapping
    assert cap == 2.0
    for question, row, decision in zip(asked.questions, prompt_ids(engine, asked), decide(engine, asked), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row])).logits[0, -1, letters[: len(question.options)]].double()
        np.testing.assert_allclose(decision.probabilities, logits.softmax(-1).numpy(), atol=1e-5)
        bare = cap * torch.atanh((logits / cap).clamp(-1 + 1e-6, 1 - 1e-6))
        assert float((bare - logits).abs().max()) > 1e-3  # the cap does something


def test_the_state_is_quoted_and_options_go_by_their_descriptions() -> None:
    question = Question("q", QuestionKind.NOUL, (Option("false"), Option("true", {"if": 1})), None)
    assert rune.body('say "hi"', question, "AB") == (
        'SHARED STATE (JSON string):\n"say \\"hi\\""\n\nQUESTION:\n\nOPTIONS:\nA: false\nB: {"if": 1}\n'
        "Answer with one option letter only."
    )


def test_more_options_than_letters_have_codes(served: tuple[Engine, Path, str]) -> None:
    engine, folder, _ = served
    question = Question("q", QuestionKind.CHOICE, tuple(Option(str(number)) for number in range(40)), "which?")
    asked = DecisionRequest("s", (question,))
    text = transformers.AutoTokenizer.from_pretrained(folder).decode(prompt_ids(engine, asked)[0])
    assert "\nZ: 25\nAA: 26\n" in text and "Answer with one option code only." in text
    (decision,) = decide(engine, asked)
    assert len(decision.probabilities) == 40 and math.isclose(sum(decision.probabilities), 1)
    many = tuple(Option(str(number)) for number in range(257))
    (error,) = outcomes(engine, DecisionRequest("s", (Question("q", QuestionKind.CHOICE, many),)))
    assert isinstance(error, InvalidInput) and error.param == "questions.q.criteria"


def test_a_temperature_of_the_server_holds(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text('{"format_version": 1, "temperature": {"default": 2.0}}')
    folder = tiny_readouts.rune()
    plain, flat = engine_of(folder, **OPTION), engine_of(folder, **OPTION, **{"decision-calibration": str(file)})
    for sharp, flatter in zip(decide(plain, REQUEST), decide(flat, REQUEST), strict=True):
        roots = np.sqrt(sharp.probabilities)
        np.testing.assert_allclose(flatter.probabilities, roots / roots.sum(), atol=1e-6)
    plain.close()
    flat.close()


def test_it_says_that_its_prompt_is_not_verified(served: tuple[Engine, Path, str]) -> None:
    (info,) = served[0].infos()
    assert info.decision_protocol == "rune" and RUNE_NOTE in info.notes


def test_a_tokenizer_without_the_marks_is_refused(tmp_path: Path) -> None:
    shutil.copytree(tiny_readouts.rune(), tmp_path / "m")
    tiny_readouts.gemma_tokenizer().save_pretrained(tmp_path / "m")
    with pytest.raises(LoadError, match=r"has no token '<\|turn>', which the prompt of rune is made of"):
        engine_of(tmp_path / "m", **OPTION)


def test_it_is_only_served_when_it_is_named() -> None:
    with pytest.raises(LoadError, match="generates text"):
        engine_of(tiny_readouts.rune())
    with pytest.raises(ConfigError, match="contradicts"):
        engine_of(tiny_readouts.jev(), **OPTION)
