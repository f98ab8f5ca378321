"""Clef against what its vendored reference gave, and Perplexity Decider v1.2 against its own contract."""

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
from safetensors.torch import save_file

from infinity_bento.decisions import DecisionRequest, QuestionKind
from infinity_bento.engine import Engine
from infinity_bento.errors import LoadError
from tests import tiny, tiny_clef, tiny_readouts
from tests.heads.decisions.test_readout import decide, engine_of, outcomes, parsed, prompt_ids

ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "clef.json").read_text())
TEMPLATE = {
    "format_version": 1,
    "protocol": "pplx-joint",
    "marker": "<|image_pad|>",
    "codes": tiny_readouts.CODES[:8],
    "template": {
        "system": "Classify the shared state for each numbered question.",
        "state": "State:\n{state}",
        "question": "{n}. {instructions}\n{options}\nAnswer: {marker}",
        "option": "{code}: {text}",
    },
}


def joint_folder(folder: Path) -> Path:
    """Perplexity Decider v1.2's layout, with a prompt of our own."""
    shutil.copytree(tiny_readouts.readout("pplx"), folder)
    rows = torch.randn(8, tiny.WIDTH, generator=torch.Generator().manual_seed(4)) * 0.5
    save_file({"weight": rows}, folder / "readout.safetensors")
    (folder / "infinity_decision.json").write_text(json.dumps(TEMPLATE))
    (folder / "decision_config.json").unlink()
    return folder


@pytest.fixture(scope="module")
def clef() -> Iterator[Engine]:
    with engine_of(tiny_clef.folder()) as engine:
        yield engine


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_of(joint_folder(tmp_path_factory.mktemp("joint") / "model")) as engine:
        yield engine


@pytest.mark.parametrize("index", range(len(ORACLE)))
def test_clef_equals_its_reference(clef: Engine, index: int) -> None:
    asked, wanted = parsed(tiny_clef.REQUESTS[index]), ORACLE[index]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_clef.folder())
    (ids,) = prompt_ids(clef, asked)
    assert ids == wanted["input_ids"] and tokenizer.decode(ids) == wanted["prompt"]
    for question, decision, options, logits in zip(
        asked.questions, decide(clef, asked), wanted["option_ids"], wanted["logits"], strict=True
    ):
        reference = dict(zip(options, torch.tensor(logits).softmax(-1).tolist(), strict=True))
        for option, probability in zip(question.options, decision.probabilities, strict=True):
            assert abs(probability - reference[option.name]) < 1e-5


def test_clef_among_other_requests(clef: Engine) -> None:
    requests = [parsed(request) for request in tiny_clef.REQUESTS]
    for alone, together in zip((decide(clef, one) for one in requests), outcomes(clef, *requests), strict=True):
        for left, right in zip(alone, together, strict=True):
            np.testing.assert_allclose(left.probabilities, right.probabilities, atol=1e-5)


@pytest.mark.parametrize("family", ["clef", "joint"])
def test_joint_families_see_the_other_questions(family: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(family)
    asked = parsed(tiny_readouts.REQUEST)
    whole = decide(engine, asked)
    alone = decide(engine, DecisionRequest(asked.state, asked.questions[1:2]))
    assert np.abs(np.subtract(whole[1].probabilities, alone[0].probabilities)).max() > 1e-4
    assert [sum(decision.probabilities) for decision in whole] == pytest.approx([1.0] * len(whole))


def test_the_joint_contract_reads_each_question_at_its_marker(joint: Engine, tmp_path: Path) -> None:
    folder = joint_folder(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = parsed(tiny_readouts.REQUEST)
    (ids,) = prompt_ids(joint, asked)
    marker = tokenizer.convert_tokens_to_ids(TEMPLATE["marker"])
    places = [place for place, token in enumerate(ids) if token == marker]
    assert len(places) == len(asked.questions)
    model = transformers.Qwen3_5Model.from_pretrained(folder, dtype=torch.float32).eval()
    full = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool)
    with torch.inference_mode():
        states = model.language_model(
            input_ids=torch.tensor([ids]),
            attention_mask={"full_attention": full, "linear_attention": None},
            use_cache=False,
        ).last_hidden_state[0, places]
    rows: Any = torch.randn(8, tiny.WIDTH, generator=torch.Generator().manual_seed(4)) * 0.5
    for question, decision, logits in zip(asked.questions, decide(joint, asked), states @ rows.T, strict=True):
        wanted = logits[: len(question.options)].softmax(-1).tolist()
        assert question.kind in QuestionKind
        np.testing.assert_allclose(decision.probabilities, wanted, atol=1e-5)


def test_a_joint_model_without_its_prompt_is_refused(tmp_path: Path) -> None:
    folder = joint_folder(tmp_path / "model")
    (folder / "infinity_decision.json").write_text(json.dumps({**TEMPLATE, "template": {}}))
    with pytest.raises(LoadError, match="'system' is missing"):
        engine_of(folder)
