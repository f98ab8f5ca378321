"""JEV: prompts byte for byte, probabilities of transformers' pipeline, its adapter, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.pipelines import DecisionPipeline

from infinity_bento.checkpoints.decisions import find_protocol
from infinity_bento.decisions import DecisionRequest, Option, Question, QuestionKind
from infinity_bento.engine import Engine
from infinity_bento.errors import InfinityError, InvalidInput, LoadError, WeightMismatch
from tests import tiny_readouts
from tests.heads.decisions.test_readout import decide, engine_of, expected, outcomes, parsed, probabilities, prompt_ids

PARTS = [{"type": "text", "text": "two "}, "parts", {"n": 1, "t": "\u00e9"}, None]
PROMPT = """[kind] choice
[state] {"msg": "charged twice"}
[question] team
[options]
A) z
B) a: pay
C) \u00e9
[decision]:"""


@pytest.fixture(scope="module", params=[False, True], ids=["qwen", "gemma"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Path]]:
    folder = tiny_readouts.jev(request.param)
    engine = engine_of(folder, warmup="false")
    yield engine, folder
    engine.close()


@pytest.mark.parametrize("state", [{"msg": "charged twice"}, "", "plain <bos> text<|im_end|>", PARTS])
def test_equals_transformers(served: tuple[Engine, Path], state: Any) -> None:
    engine, folder = served
    request = {**tiny_readouts.REQUEST, "state": state}
    model = transformers.JevForDecision.from_pretrained(folder, dtype=torch.float32)
    # Its layer has a bias, but the loader of this version knows no name for that of the file.
    model.proj.bias.data = load_file(folder / "head.safetensors")["bias"]
    pipeline = DecisionPipeline(model=model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder))
    asked = parsed(request)
    wanted = [inputs["input_ids"][0].tolist() for inputs, _ in pipeline.preprocess(request)["prompts"]]
    found = prompt_ids(engine, asked)
    tokenizer = pipeline.tokenizer
    assert [tokenizer.decode(ids) for ids in found] == [tokenizer.decode(ids) for ids in wanted]
    if "<" not in str(state):  # a mark in the text is cut off its neighbours by transformers, and not by us
        assert found == wanted
        answers = pipeline(request)
        for question, decision in zip(asked.questions, decide(engine, asked), strict=True):
            got, reference = probabilities(decision, question), expected(answers[question.id])
            assert got.keys() == reference.keys()
            assert max(abs(got[option] - reference[option]) for option in got) < 1e-5
            assert max(got.values()) - min(got.values()) > 1e-3  # it says something


def test_the_prompt_is_the_published_one(served: tuple[Engine, Path]) -> None:
    engine, folder = served
    asked = parsed(tiny_readouts.REQUEST)
    text = transformers.AutoTokenizer.from_pretrained(folder).decode(prompt_ids(engine, asked)[1])
    assert text == ("<bos>" if folder.name.endswith("gemma") else "") + PROMPT


def test_no_text_of_a_caller_becomes_a_special_token(served: tuple[Engine, Path]) -> None:
    engine, folder = served
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    special = set(tokenizer.all_special_ids)

    def count(text: str) -> int:
        question = Question("q", QuestionKind.CHOICE, (Option(text, text), Option("b")), text)
        (ids,) = prompt_ids(engine, DecisionRequest({"say": text}, (question,)))
        return sum(token in special for token in ids)

    for token in tokenizer.all_special_tokens:
        assert count(f"x{token}y") == count("x"), token


def test_a_kind_has_as_many_options_as_rows(served: tuple[Engine, Path]) -> None:
    engine, _ = served
    levels = tuple(Option(str(level), "text") for level in range(7))
    (error,) = outcomes(engine, DecisionRequest("s", (Question("q", QuestionKind.SCORE, levels),)))
    assert isinstance(error, InvalidInput) and error.param == "questions.q.criteria"
    assert "codes for 6 of a score" in str(error)
    sixteen = tuple(Option(str(label)) for label in range(16))
    (decision,) = decide(engine, DecisionRequest("s", (Question("q", QuestionKind.CHOICE, sixteen),)))
    assert len(decision.probabilities) == 16


@pytest.mark.parametrize("part", [{"image": "x"}, {"type": "image_url", "image_url": {"url": "x"}}])
def test_an_image_in_the_state_is_refused(served: tuple[Engine, Path], part: Any) -> None:
    engine, _ = served
    asked = DecisionRequest(["text", part], parsed(tiny_readouts.REQUEST).questions)
    (error,) = outcomes(engine, asked)
    assert isinstance(error, InvalidInput) and error.param == "state"


# The adapter --------------------------------------------------------------------------------------------------------

LAYERS = {
    "layers.3.self_attn.q_proj": "base_model.model.model.language_model.layers.3.self_attn.q_proj",
    "layers.0.linear_attn.out_proj": "base_model.model.layers.0.linear_attn.out_proj",
}
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False}


def with_adapter(folder: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copy a checkpoint to ``folder`` with an adapter; what it adds to each weight, by the names of the layers."""
    shutil.copytree(tiny_readouts.jev(), folder)
    edit(folder / "judge_config.json", adapter_subfolder=...)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    tensors, added = {}, {}
    for layer, name in LAYERS.items():
        out, width = weights[f"{layer}.weight"].shape
        down, up = torch.randn(4, width, generator=generator) * 0.3, torch.randn(out, 4, generator=generator) * 0.3
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = down, up
        scale = settings["lora_alpha"] / (2 if settings.get("use_rslora") else 4)
        added[layer] = up @ down * scale
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    return added


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; an ellipsis removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_an_adapter_is_merged(tmp_path: Path, rank_stabilised: bool) -> None:
    """As the same checkpoint with the sum as its weights."""
    added = with_adapter(tmp_path / "adapted", SETTINGS | {"use_rslora": rank_stabilised})
    shutil.copytree(tiny_readouts.jev(), tmp_path / "merged")
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    for layer, sum_of in added.items():
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + sum_of
    save_file(weights, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    asked = parsed(tiny_readouts.REQUEST)
    found = []
    for folder in (tmp_path / "adapted", tmp_path / "merged", tiny_readouts.jev()):
        engine = engine_of(folder, warmup="false")
        found.append([decision.probabilities for decision in decide(engine, asked)])
        engine.close()
    for adapted, merged in zip(found[0], found[1], strict=True):
        np.testing.assert_allclose(adapted, merged, atol=1e-5)
    assert np.abs(np.subtract(found[0][1], found[2][1])).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "'peft_type'"),
        ({"use_dora": True}, "'use_dora'"),
        ({"rank_pattern": {"q_proj": 8}}, "'rank_pattern'"),
        ({"modules_to_save": ["embed_tokens"]}, "'modules_to_save'"),
        ({"lora_alpha": None}, "'lora_alpha'"),
        ({"r": 0}, "'r'"),
    ],
)
def test_another_adapter_than_plain_lora_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with_adapter(tmp_path / "m", SETTINGS)
    edit(tmp_path / "m" / "adapter" / "adapter_config.json", **change)
    with pytest.raises(LoadError, match=f"adapter_config.json: .*{says}"):
        engine_of(tmp_path / "m")


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with_adapter(tmp_path / "m", SETTINGS)
    file = tmp_path / "m" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(name for name in tensors if name.endswith("lora_A.weight"))
    for change, says in (
        ({first: tensors[first][:, :5].contiguous()}, "cannot be added"),
        ({"base_model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 8)}, "is not one of a pair"),
        (
            {f"base_model.model.layers.99.q.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"},
            "has no linear in Qwen3_5TextModel",
        ),
        (  # of another tower, whose layers are called the same
            {
                f"base_model.model.model.visual.layers.3.self_attn.q_proj.lora_{side}.weight": torch.zeros(4, 4)
                for side in "AB"
            },
            "has no linear in Qwen3_5TextModel",
        ),
    ):
        save_file({**tensors, **change}, file)
        with pytest.raises((LoadError, WeightMismatch), match=says):
            engine_of(tmp_path / "m")
    file.unlink()
    with pytest.raises(LoadError, match=r"adapter_model\.safetensors is missing"):
        engine_of(tmp_path / "m")


# Files that do not fit ----------------------------------------------------------------------------------------------


def slots(**changes: Any) -> dict[str, Any]:
    return {"slots": tiny_readouts.JUDGE["slots"] | changes}


RANGES = tiny_readouts.JUDGE["slots"]["ranges"]


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("judge_config.json", {"slots": ...}, "'num_slots' is missing"),
        ("judge_config.json", slots(verbalizers=["a"]), "'verbalizers'"),
        ("judge_config.json", slots(ranges=RANGES | {"score": [2, 99]}), "'score'"),
        ("judge_config.json", slots(ranges=RANGES | {"score": None}), "'score'"),
        ("judge_config.json", slots(ranges=RANGES | {"noul": [0, 1]}), "'noul'"),
        ("judge_config.json", slots(ranges=RANGES | {"box": [0, 1]}), "'ranges'.*'box'"),
        ("judge_config.json", slots(verbalizers=["A"] * 24), "'noul'"),
        ("judge_config.json", {"softcap": 0}, "'softcap'"),
        ("judge_config.json", {"adapter_subfolder": "../x"}, "adapter_subfolder"),
        ("calibration.json", {"per_kind": {"noul": -1}}, "per_kind"),
        ("calibration.json", {"per_kind": {"box": 1}}, "'per_kind'"),
        ("calibration.json", {"per_kind": ...}, "'per_kind'"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, file: str, change: dict[str, Any], says: str) -> None:
    shutil.copytree(tiny_readouts.jev(), tmp_path / "m")
    edit(tmp_path / "m" / file, **change)
    with pytest.raises(LoadError, match=f"{file}: .*{says}"):
        engine_of(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda tensors: tensors.pop("weight"), WeightMismatch, r"'weight' is missing; it must be \[24, 64\]"),
        (lambda tensors: tensors.update(bias=tensors["bias"][:5].clone()), WeightMismatch, "'bias' has shape"),
        (lambda tensors: tensors.update(scale=torch.ones(1)), WeightMismatch, "'scale' has no place"),
        (
            lambda tensors: tensors.update(weight=tensors["weight"][:5].clone()),
            WeightMismatch,
            r"'weight' has shape \[5, 64\]; it must be \[24, 64\]",
        ),
        (lambda tensors: tensors["bias"].fill_(float("nan")), WeightMismatch, "NaN"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Any], Any], kind: type[InfinityError], says: str
) -> None:
    shutil.copytree(tiny_readouts.jev(), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "head.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "m" / "head.safetensors")
    with pytest.raises(kind, match=says):
        engine_of(tmp_path / "m")


def test_a_head_without_bias_equals_transformers(tmp_path: Path) -> None:
    shutil.copytree(tiny_readouts.jev(), tmp_path / "m")
    rows = load_file(tmp_path / "m" / "head.safetensors")["weight"]
    save_file({"weight": rows}, tmp_path / "m" / "head.safetensors")
    model = transformers.JevForDecision.from_pretrained(tmp_path / "m", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    answers = DecisionPipeline(model=model, tokenizer=tokenizer)(tiny_readouts.REQUEST)
    engine = engine_of(tmp_path / "m", warmup="false")
    asked = parsed(tiny_readouts.REQUEST)
    for question, decision in zip(asked.questions, decide(engine, asked), strict=True):
        reference = expected(answers[question.id])
        assert all(abs(p - reference[name]) < 1e-5 for name, p in probabilities(decision, question).items())
    engine.close()


def test_missing_files_are_named(tmp_path: Path) -> None:
    for name in ("calibration.json", "head.safetensors"):
        folder = tmp_path / name
        shutil.copytree(tiny_readouts.jev(), folder)
        (folder / name).unlink()
        found = find_protocol(folder)
        assert found is not None and found[0] == "jev"
        with pytest.raises(LoadError, match=f"{name} is missing"):
            engine_of(folder)
