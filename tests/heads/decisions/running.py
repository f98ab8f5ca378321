"""Decision protocols run as the server runs them: encoded, packed by a runner, collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity_bento.checkpoints.families import family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.core import Encoded, Item, Task
from infinity_bento.decisions import Decision, DecisionRequest
from infinity_bento.errors import InfinityError
from infinity_bento.models.backbone import Backbone, load_backbone
from infinity_bento.runners.runner import Runner


def outcomes(
    backbone: Backbone, protocol: Any, requests: Sequence[DecisionRequest]
) -> list[list[Decision] | InfinityError]:
    """What one batch of these requests gives."""
    items = [Item(Task.DECIDE, decision=request) for request in requests]
    runner = Runner(backbone, {Task.DECIDE: protocol})
    batch = runner.prepare([protocol.encode(request) for request in requests])
    return runner.collect(runner.run(batch, items), batch, items)


def decide(backbone: Backbone, protocol: Any, requests: Sequence[DecisionRequest]) -> list[list[Decision]]:
    """The decisions of one batch, all of which must be there."""
    found = outcomes(backbone, protocol, requests)
    for outcome in found:
        assert isinstance(outcome, list), outcome
    return found  # type: ignore[return-value]


def decide_one(backbone: Backbone, protocol: Any, request: DecisionRequest) -> list[Decision]:
    """The decisions of a request that is alone in its batch."""
    return decide(backbone, protocol, [request])[0]


def furthest(got: Sequence[Decision], wanted: Sequence[Sequence[float]]) -> float:
    """The largest difference of a probability."""
    return max(
        float((torch.tensor(decision.probabilities) - torch.as_tensor(list(row))).abs().max())
        for decision, row in zip(got, wanted, strict=True)
    )


def probabilities(decisions: Sequence[Decision]) -> list[tuple[float, ...]]:
    """Those of each question."""
    return [decision.probabilities for decision in decisions]


def special_count(encoded: Encoded, special: set[int]) -> int:
    """How many tokens of the sequences are special."""
    return sum(token in special for sequence in encoded.sequences for token in sequence.input_ids)


def text_backbone(folder: Path, *, causal: bool = True) -> Backbone:
    """The language model of a Qwen3.5 checkpoint with a vision tower."""
    layout = read_layout(folder)
    config = {**layout.config["text_config"], **({} if causal else {"is_causal": False})}
    text = replace(layout, config=config, model_type=config["model_type"], tensor_prefix=prefix_of(layout.config))
    return load_backbone(text, family_of(config, folder), dtype=torch.float32)


def prefix_of(config: dict[str, Any]) -> str:
    """Where the language model's tensors are."""
    return "language_model." if config["architectures"] == ["Qwen3_5Model"] else "model.language_model."


def spoiled(hidden_TD: Tensor) -> Tensor:
    """Hidden states with one value that is not a number."""
    bad = hidden_TD.clone()
    bad[-1, 0] = float("nan")
    return bad
