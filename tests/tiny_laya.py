"""A tiny random Laya checkpoint in its published layout: ModernBERT, decision head, tokenizer, config.

Made with the reference package's own model class; ``oracle`` is that package on the same folder.
"""

from __future__ import annotations

import functools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import laya
import torch
import transformers
from laya.common import DecisionModel
from safetensors.torch import save_model

from infinity_bento.decisions import DecisionRequest, Option, Question, QuestionKind
from tests import tiny
from tests import tiny_tokenizers as tokenizers

CONFIG: dict[str, Any] = {
    "encoder": "tiny",
    "max_len": 512,
    "head_max_len": 192,
    "head_layers": 2,
    "act_costs": {"escalate": 0.1},
    "temperature": [1.1, 1.2, 0.9],
    "temperature_by_options": {"choice:2": 1.5, "score:3-5": 0.7},
    "option_layout": "sequential",
}
STATE = {"msg": "charged twice", "when": ["Monday", 3]}
QUESTIONS: dict[str, dict[str, Any]] = {
    "a": {"type": "noul", "instructions": "refund?"},
    "b": {"type": "choice", "instructions": "team", "criteria": {"z": None, "a": "pay"}},
    "c": {"type": "score", "instructions": "mad?", "criteria": ["lo", "mid", "hi"]},
    "d": {
        "type": "choice",
        "instructions": {"ask": "which \u00fc part", "of": ["a", "b"]},
        "criteria": {"one": "", "two": {"k": [1, 2]}, "three": "the third", "four": "x " * 70, "five": 5},
    },
    "e": {"type": "noul", "instructions": "really?", "criteria": {"true": "it does", "false": ""}},
    "f": {"type": "choice", "instructions": "only one", "criteria": {"alone": "no choice at all"}},
}


@functools.cache
def folder(layout: str = "sequential", seed: int = 0) -> Path:
    """The checkpoint with this option layout."""
    path = tiny.root() / f"laya-{layout}-{seed}"
    config = transformers.ModernBertConfig(**tiny.MODERNBERT)
    torch.manual_seed(seed)
    encoder = transformers.AutoModel.from_config(config, attn_implementation="sdpa")
    model = DecisionModel(encoder, head_layers=2, n_act=2).eval()
    spread(model, encoder)
    write(path, model, config, {**CONFIG, "option_layout": layout})
    return path


@functools.cache
def long_folder() -> Path:
    """A checkpoint whose head has room for 255 options, as published ones have."""
    path = tiny.root() / "laya-long"
    shutil.copytree(folder(), path)
    settings = {**CONFIG, "max_len": 4096, "head_max_len": 3072}
    (path / "rl_agent_config.json").write_text(json.dumps(settings))
    return path


def spread(model: DecisionModel, encoder: Any) -> None:
    """Answers that differ, from weights that keep rounding small; biases and norms distinct."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for parameter in encoder.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
        model.scorer[3].weight.mul_(20.0)
        model.act_head[2].weight.mul_(3.0)


def write(path: Path, model: DecisionModel, config: Any, settings: dict[str, Any]) -> None:
    """The published layout of a model."""
    config.save_pretrained(path / "encoder")
    tokenizers.modernbert().save_pretrained(path / "tokenizer")
    save_model(model, str(path / "model.safetensors"), metadata={"format": "pt"})
    (path / "rl_agent_config.json").write_text(json.dumps(settings))


@functools.cache
def oracle(path: Path) -> Any:
    """The reference package on a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return laya.load(str(path), device="cpu")


def request(state: Any, questions: dict[str, dict[str, Any]]) -> DecisionRequest:
    """A request body as the wire layer hands it on."""
    return DecisionRequest(state, tuple(question(name, asked) for name, asked in questions.items()))


def question(name: str, asked: dict[str, Any]) -> Question:
    """One question of a body."""
    kind, criteria = QuestionKind(asked["type"]), asked.get("criteria")
    if kind is QuestionKind.NOUL:
        options = tuple(Option(key, (criteria or {}).get(key)) for key in ("false", "true"))
    elif kind is QuestionKind.CHOICE:
        options = tuple(Option(key, value) for key, value in (criteria or {}).items())
    else:
        options = tuple(Option(str(level), value) for level, value in enumerate(criteria or ()))
    return Question(name, kind, options, asked.get("instructions"))
