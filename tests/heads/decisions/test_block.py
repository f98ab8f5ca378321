"""Elephant and Mammoth: OneJev's prompt under the block mask, against transformers under the same mask; their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from infinity_bento.batching.packing import pack
from infinity_bento.checkpoints.decisions import decision_notes, find_protocol
from infinity_bento.checkpoints.slot_lm import NOTE
from infinity_bento.core import Item, Task
from infinity_bento.decisions import DecisionRequest, QuestionKind
from infinity_bento.engine import Engine
from infinity_bento.errors import ConfigError, LoadError
from tests import tiny, tiny_readouts
from tests.heads.decisions.test_readout import decide, engine_of, outcomes, parsed, prompt_ids

REQUEST = parsed(tiny_readouts.REQUEST)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = engine_of(tiny_readouts.block(), warmup="false")
    yield made
    made.close()


def blocks_of(engine: Engine, request: DecisionRequest) -> list[np.ndarray[Any, Any]]:
    (encoded,) = engine._models["m"].pool.tokenizer.encode([Item(Task.DECIDE, decision=request)])
    return [part.blocks for part in encoded.sequences]


def test_equals_transformers_under_the_same_mask(engine: Engine) -> None:
    folder = tiny_readouts.block()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    letters = tokenizer.convert_tokens_to_ids(tiny_readouts.CODES)
    rows = model.lm_head.weight[letters].detach()
    ids = prompt_ids(engine, REQUEST)
    found = decide(engine, REQUEST)
    for question, row, blocks, decision in zip(REQUEST.questions, ids, blocks_of(engine, REQUEST), found, strict=True):
        block = torch.from_numpy(blocks)
        assert "</state>" in tokenizer.decode(np.array(row)[blocks == 0])
        assert tokenizer.decode(np.array(row)[blocks == 1]).startswith(("Question: ", "Rate the state: "))
        answers = {}
        for name, mask in (
            ("block", (block[:, None] == block[None]) | (block[None] == 0)),
            ("causal", torch.ones(len(row), len(row), dtype=torch.bool).tril()),
            ("noncausal", torch.ones(len(row), len(row), dtype=torch.bool)),
        ):
            with torch.no_grad():
                hidden = model.model.language_model(
                    input_ids=torch.tensor([row]),
                    attention_mask={"full_attention": mask[None, None], "linear_attention": None},
                    use_cache=False,
                ).last_hidden_state[0, -1]
            logits = (rows @ hidden)[: len(question.options)] / tiny_readouts.TEMPERATURE
            wanted = logits.softmax(-1).tolist()
            answers[name] = wanted[::-1] if question.kind is QuestionKind.NOUL else wanted
        np.testing.assert_allclose(decision.probabilities, answers["block"], atol=1e-5)
        for other in ("causal", "noncausal"):
            assert np.abs(np.subtract(answers["block"], answers[other])).max() > 1e-4


def test_the_prompt_is_onejevs(engine: Engine) -> None:
    plain = engine_of(tiny_readouts.onejev(), **{"decision-protocol": "onejev", "warmup": "false"})
    assert prompt_ids(engine, REQUEST) == prompt_ids(plain, REQUEST)
    assert prompt_ids(engine, replace(REQUEST, state="text\n\n")) == prompt_ids(
        plain, replace(REQUEST, state="text\n\n")
    )
    plain.close()


def test_one_question_alone_equals_among_ten_and_other_states(engine: Engine) -> None:
    ten = replace(
        REQUEST,
        questions=tuple(
            replace(q, id=f"{q.id}{n}", instructions=f"{n} {q.id}") for n in (1, 2) for q in REQUEST.questions
        ),
    )
    first, other, again = outcomes(engine, ten, replace(ten, state="another"), ten)
    assert np.abs(np.subtract(first[1].probabilities, other[1].probabilities)).max() > 1e-4
    for index, question in enumerate(ten.questions):
        (alone,) = decide(engine, replace(ten, questions=(question,)))  # not folded
        np.testing.assert_allclose(alone.probabilities, first[index].probabilities, atol=1e-5)
        np.testing.assert_allclose(alone.probabilities, again[index].probabilities, atol=1e-5)


def test_the_state_is_computed_once(engine: Engine) -> None:
    (encoded,) = engine._models["m"].pool.tokenizer.encode([Item(Task.DECIDE, decision=REQUEST)])
    batch = pack(encoded.sequences, causal=False)
    states = sum(int((blocks == 0).sum()) for blocks in blocks_of(engine, REQUEST))
    assert batch.fold is not None and batch.tokens - batch.rows == states * 4 // 5


# Files --------------------------------------------------------------------------------------------------------------


def with_files(folder: Path, readout: dict[str, Any] | None = None, **files: Any) -> Path:
    shutil.copytree(tiny_readouts.onejev(), folder)
    if readout is not None:
        (folder / "readout.json").write_text(json.dumps(readout))
    for name, content in files.items():
        if name == "own":
            (folder / "infinity_decision.json").write_text(json.dumps(content))
        else:
            tiny.edit_config(folder, **{name: content})
    return folder


OVERRIDES = {"attention": "block_bidirectional"}
SLOTS = {"readout": "slot_lm"}


@pytest.mark.parametrize(
    ("readout", "files", "protocol"),
    [
        (SLOTS, {"baseten_modeling_overrides": OVERRIDES}, "block"),
        (SLOTS, {"modeling_overrides": OVERRIDES}, "block"),
        (None, {"baseten_modeling_overrides": OVERRIDES}, "block"),
        (SLOTS, {}, "onejev"),
        (SLOTS | {"prompt": "qev-labels-v2"}, {"modeling_overrides": {"attention": "causal"}}, "onejev"),
        (None, {"own": {"format_version": 1, "protocol": "block"}}, "block"),
        (SLOTS, {"own": {"format_version": 1, "attention": "block_bidirectional"}}, "block"),
        (
            SLOTS | {"prompt": "new", "extra": 1},
            {"own": {"format_version": 1, "allow_unverified": True}, "modeling_overrides": OVERRIDES | {"x": 1}},
            "block",
        ),
    ],
)
def test_the_files_decide(tmp_path: Path, readout: Any, files: dict[str, Any], protocol: str) -> None:
    folder = with_files(tmp_path / "m", readout, **files)
    found = find_protocol(folder)
    assert found is not None and found[0] == protocol
    notes = decision_notes(folder, found[0])
    assert (NOTE in notes) == (protocol == "block") and "contract-only" in NOTE
    assert any("extra" in note and "x" in note for note in notes) == ("extra" in (readout or {}))


def test_what_is_served_says_that_it_is_contract_only() -> None:
    engine = engine_of(tiny_readouts.onejev(), **{"decision-protocol": "block", "warmup": "false"})
    (info,) = engine.infos()
    assert info.decision_protocol == "block" and NOTE in info.notes
    engine.close()


@pytest.mark.parametrize(
    ("readout", "files", "says"),
    [
        ({"readout": "rows"}, {}, r"readout.json: 'readout' is 'rows'"),
        ({}, {"modeling_overrides": OVERRIDES | {"rope": 1}}, r"config.json: key 'rope' is unknown"),
        (SLOTS | {"version": 3}, {}, r"readout.json: key 'version' is unknown"),
        (SLOTS | {"prompt": "other"}, {}, r"readout.json: 'prompt' is 'other'"),
        (SLOTS | {"temperature": -1}, {}, r"readout.json: 'temperature' has default=-1"),
        (SLOTS, {"modeling_overrides": {"attention": "sideways"}}, r"config.json: 'attention' is 'sideways'"),
        (SLOTS, {"modeling_overrides": 7}, r"config.json: 'modeling_overrides' is 7"),
        (SLOTS, {"own": {"format_version": 2}}, r"infinity_decision.json: 'format_version' is 2"),
        (None, {"own": {"format_version": 1, "protocol": "block", "marker": "x"}}, r"key 'marker' is unknown"),
        (None, {"own": {"format_version": 1, "protocol": "block", "pooling": "mean"}}, r"'pooling' is 'mean'"),
        (None, {"own": {"format_version": 1, "protocol": "block", "readout": {"kind": "rows"}}}, r"'kind' is 'rows'"),
        (
            SLOTS,
            {"own": {"format_version": 1, "protocol": "onejev"}, "modeling_overrides": OVERRIDES},
            r"'protocol' is 'onejev', but .*config.json.* the mask block_bidirectional",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, readout: Any, files: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError, match=says):
        engine_of(with_files(tmp_path / "m", readout, **files))


def test_the_option_cannot_change_the_mask_of_the_files() -> None:
    with pytest.raises(ConfigError, match=r"--decision-protocol onejev contradicts .*config.json.*, which says block"):
        engine_of(tiny_readouts.block(), **{"decision-protocol": "onejev"})
