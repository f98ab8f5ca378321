"""Small decision models that have learnt something: an encoder of Laya's kind, and a readout over random states.

The data is made up: a state names a colour and a size, and each label is wrong now and then. So nobody can be right
always; and both models are made too sure of themselves, so that there is something to calibrate.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from laya.common import DecisionModel, collate_items
from safetensors.torch import save_file

from infinity_bento.checkpoints.laya import read_laya
from infinity_bento.core import Item, Task
from infinity_bento.heads.decisions.laya_writer import LayaWriter
from tests import tiny, tiny_laya, tiny_readouts
from tests import tiny_tokenizers as tokenizers

COLOURS = ("red", "blue", "green")
SIZES = ("small", "middle", "large")
QUESTIONS: dict[str, Any] = {
    "warm": {"type": "noul", "instructions": "Is it red?"},
    "colour": {"type": "choice", "instructions": "Which colour?", "criteria": dict.fromkeys(COLOURS)},
    "size": {"type": "score", "instructions": "How big?", "criteria": list(SIZES)},
}
WRONG = 0.25  # share of labels that are drawn at random
SHARPER = 2.0  # what the logits are multiplied by after the training


def examples(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Lines of labelled data, as ``infinity-bento calibrate`` reads them."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        colour, size = generator.integers(3, size=2).tolist()
        right = {"warm": colour == 0, "colour": COLOURS[colour], "size": size}
        guess = {
            "warm": bool(generator.integers(2)),
            "colour": COLOURS[generator.integers(3)],
            "size": int(generator.integers(3)),
        }
        labels = {name: guess[name] if generator.random() < WRONG else right[name] for name in right}
        state = {"thing": f"a {SIZES[size]} {COLOURS[colour]} one", "number": int(generator.integers(100))}
        yield {"state": state, "questions": QUESTIONS, "labels": labels}


def write(file: Path, lines: Iterator[dict[str, Any]]) -> Path:
    """A JSONL file."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def label_index(name: str, label: Any) -> int:
    """The option that a label means."""
    return COLOURS.index(label) if name == "colour" else int(label)


@functools.cache
def laya(steps: int = 100, count: int = 32) -> Path:
    """A Laya checkpoint that was trained, all of it, on a few examples."""
    path = tiny.root() / "toy-laya"
    settings = {**tiny_laya.CONFIG, "temperature": [1.0, 1.0, 1.0], "temperature_by_options": {}}
    config = transformers.ModernBertConfig(**{**tiny.MODERNBERT, "num_hidden_layers": 2, "local_attention": 128})
    torch.manual_seed(0)
    encoder = transformers.AutoModel.from_config(config, attn_implementation="sdpa")
    model = DecisionModel(encoder, head_layers=2, n_act=2, dropout=0.0)
    tiny_laya.write(path, model, config, settings)
    tokenizer = tokenizers.modernbert()
    special = (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id)
    writer = LayaWriter(tokenizer.backend_tokenizer, special, read_laya(path), 512)
    items = []
    for line in examples(count, seed=1):
        request = tiny_laya.request(line["state"], QUESTIONS)
        for part, question in zip(writer.write(request).sequences, request.questions, strict=True):
            label = label_index(question.id, line["labels"][question.id])
            read = part.readout
            items.append({"ids": part.input_ids, "markers": list(read.markers), "qtype": read.kind, "label": label})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # training is chaotic: another order of additions gives another model
    try:
        train(model, items, steps)
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        model.scorer[3].weight.mul_(SHARPER)
        model.scorer[3].bias.mul_(SHARPER)
    tiny_laya.write(path, model.eval(), config, settings)
    return path


def train(model: DecisionModel, items: list[dict[str, Any]], steps: int) -> None:
    """On the examples, again and again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = np.random.default_rng(2)
    for _ in range(steps):
        chosen = [items[index] for index in generator.integers(len(items), size=16)]
        batch = collate_items([chosen], 0)
        inputs = [batch[key] for key in ("input_ids", "attention_mask", "marker_pos", "marker_mask", "qtype")]
        logits, _ = model(*inputs)
        loss = torch.nn.functional.cross_entropy(logits, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@functools.cache
def readout(count: int = 60) -> Path:
    """A D3 folder whose readout rows were fitted to the hidden states of a random language model."""
    from infinity_bento.engine import Engine
    from infinity_bento.settings import resolve

    path = tiny.root() / "toy-d3"
    shutil.copytree(tiny_readouts.readout("d3"), path)
    settings = json.loads((path / "decision_config.json").read_text()) | {"temperature": 1.0}
    (path / "decision_config.json").write_text(json.dumps(settings))
    lines = list(examples(count, seed=1))
    items = [Item(Task.DECIDE, decision=tiny_laya.request(line["state"], QUESTIONS)) for line in lines]
    states: list[torch.Tensor] = []
    options = {"model-id": str(path), "served-model-name": "m", "warmup": "false"}
    with Engine.from_settings(resolve(options)) as engine:
        model = engine._models["m"]
        for start in range(0, count, 20):
            batch = model.lanes[0]._runner.prepare(model.pool.tokenizer.encode(items[start : start + 20]))
            with torch.no_grad():
                hidden = model.lanes[0]._runner.backbone.forward(batch)[batch.ends()]
            states += [hidden[places].float() for places in batch.places()]
    labels = torch.tensor([label_index(name, line["labels"][name]) for line in lines for name in QUESTIONS])
    sizes = torch.tensor([2, 3, 3] * count)
    rows = fitted_rows(torch.cat(states), labels, sizes)
    weight = torch.zeros(len(tiny_readouts.CODES), tiny.WIDTH)
    weight[:3] = rows * SHARPER
    save_file({"weight": weight}, path / "readout.safetensors")
    return path


def fitted_rows(hidden: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Logistic regression without much restraint."""
    rows = torch.zeros(3, hidden.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([rows], max_iter=60, line_search_fn="strong_wolfe")
    absent = torch.arange(3)[None] >= sizes[:, None]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        logits = (hidden @ rows.T).masked_fill(absent, -1e4)
        loss = torch.nn.functional.cross_entropy(logits, labels) + 1e-5 * rows.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return rows.detach()
