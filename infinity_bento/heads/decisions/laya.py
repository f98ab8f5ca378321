"""Laya: an encoder reads question, options and state; each option is read at its own ``[MASK]``.

One sequence per question. Behind the encoder lie a type embedding, a few full-attention layers (run packed), a scorer
for each option and an act head, which tells how likely the answer is good enough to act on.

Shape suffixes: T packed tokens, B sequences, K most options, D width, N heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity_bento.attention.interface import packed_attention
from infinity_bento.batching.packing import PackedBatch
from infinity_bento.checkpoints.laya import ENCODER_PREFIX, KINDS, LayaSpec
from infinity_bento.checkpoints.temperatures import Temperatures
from infinity_bento.checkpoints.tensor_files import read_tensors
from infinity_bento.core import Encoded, Item
from infinity_bento.decisions import Decision, DecisionRequest, Question, QuestionKind
from infinity_bento.errors import InfinityError, LoadError
from infinity_bento.heads.decisions.answers import answer
from infinity_bento.heads.decisions.laya_writer import LayaReadout, LayaWriter
from infinity_bento.heads.decisions.weights import fill
from infinity_bento.heads.rows import not_finite

TEMPERATURE = "temperature"  # a tensor of the weight file; the one in the config counts
ABSENT = -1e4  # logit of an option that a question with fewer does not have


class LayaRows(NamedTuple):
    """What ``run`` gives."""

    values: Tensor  # [B, K + 1] float32 on the device: logits, and the act probability behind them
    readouts: list[LayaReadout]  # [B]


# Network ------------------------------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """Attention of each sequence to itself, without positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x_TD: Tensor, batch: PackedBatch) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        qkv = F.linear(x_TD, self.in_proj_weight, self.in_proj_bias)
        query, key, value = qkv.view(1, x_TD.shape[0], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed, _ = packed_attention(self, query, key, value, None, is_causal=False, packed=batch)
        out: Tensor = self.out_proj(mixed.flatten(-2)[0].to(x_TD.dtype))
        return out


class Layer(nn.Module):
    """A pre-norm transformer layer with ReLU; the names of its tensors are those of torch's encoder layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width, heads)
        self.linear1 = nn.Linear(width, 4 * width)
        self.linear2 = nn.Linear(4 * width, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x_TD: Tensor, batch: PackedBatch) -> Tensor:
        """``[T, D]`` -> ``[T, D]``."""
        x_TD = x_TD + self.self_attn(self.norm1(x_TD), batch)
        out: Tensor = x_TD + self.linear2(torch.relu(self.linear1(self.norm2(x_TD))))
        return out


class LayaNetwork(nn.Module):
    """From hidden states to the logits of all options and the act probability of each question."""

    def __init__(self, width: int, layers: int, actions: int) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.head = nn.ModuleDict({"layers": nn.ModuleList(Layer(width, heads) for _ in range(layers))})
        self.type_emb = nn.Embedding(len(KINDS), width)
        self.scorer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        self.act_head = nn.Sequential(nn.Linear(width + 4, 256), nn.GELU(), nn.Linear(256, actions))

    def in_dtype(self, dtype: torch.dtype) -> LayaNetwork:
        """The layers in the backbone's dtype; what reads single rows stays in float32."""
        self.head.to(dtype)
        self.type_emb.to(dtype)
        return self

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, readouts: Sequence[LayaReadout]) -> Tensor:
        """``[T, D]`` hidden states -> ``[B, K + 1]`` float32: logits, act probability last."""
        device = hidden_TD.device
        kinds = torch.tensor([readout.kind for readout in readouts], device=device)
        x = hidden_TD + self.type_emb(kinds)[batch.sequence_ids()]
        if batch.blocks is not None:  # the options are apart in the encoder only
            batch = replace(batch, blocks=None, cache={})
        for layer in self.head["layers"].children():
            x = layer(x, batch)
        starts = accumulate(batch.lengths[:-1], initial=0)
        places = [
            (start + marker, row, column)
            for row, (start, readout) in enumerate(zip(starts, readouts, strict=True))
            for column, marker in enumerate(readout.markers)
        ]
        tokens, rows, columns = torch.tensor(places, device=device).unbind(1)
        counts = torch.tensor([len(readout.markers) for readout in readouts], device=device)
        logits = torch.full((len(readouts), max(len(r.markers) for r in readouts)), ABSENT, device=device)
        logits[rows, columns] = self.scorer(x[tokens].float()).squeeze(-1)
        first = x[batch.starts()].float()
        return torch.cat([logits, self._act(first, logits, counts)], dim=-1)

    def _act(self, first_BD: Tensor, logits_BK: Tensor, counts_B: Tensor) -> Tensor:
        """``[B, 1]``: how likely the answer is good enough to act on, from the state and how the options stand."""
        p = logits_BK.softmax(-1)
        count = counts_B.clamp_min(2).float()
        entropy = -(p * p.clamp_min(1e-9).log()).sum(-1) / count.log()
        top = F.pad(p, (0, 1)).topk(2, dim=-1).values  # a lone option leads by its whole probability
        figures = torch.stack([top[:, 0], top[:, 0] - top[:, 1], entropy, count / 255], dim=-1)
        outputs: Tensor = self.act_head(torch.cat([first_BD, figures], dim=-1))
        return outputs.softmax(-1)[:, :1]


# Protocol -----------------------------------------------------------------------------------------------------------


class LayaProtocol:
    """Laya as a decision protocol.

    Args:
        writer: Writes the sequences.
        network: The decision head, on the backbone's device.
        temperatures: In force.
    """

    name = "laya"

    def __init__(self, writer: LayaWriter, network: LayaNetwork, temperatures: Temperatures) -> None:
        self.writer = writer
        self.network = network
        self.temperatures = temperatures

    def encode(self, request: DecisionRequest) -> Encoded:
        """See ``DecisionProtocol``. A state or question that is too long is cut, as the reference does."""
        return self.writer.write(request)

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> LayaRows:
        """See ``DecisionProtocol``."""
        assert batch.readouts is not None
        return LayaRows(self.network(hidden_TD, batch, batch.readouts), batch.readouts)

    def collect(
        self, rows: LayaRows, positions: Sequence[Sequence[int]], items: Sequence[Item]
    ) -> list[list[Decision] | InfinityError]:
        """See ``DecisionProtocol``."""
        values = rows.values.cpu().numpy()
        outputs: list[list[Decision] | InfinityError] = []
        for places, item in zip(positions, items, strict=True):
            assert item.decision is not None
            decisions = []
            for place, question in zip(places, item.decision.questions, strict=True):
                logits, act = values[place, : len(question.options)], float(values[place, -1])
                if not np.isfinite(logits).all() or not math.isfinite(act):
                    break
                extras = {"act_probability": act, **rows.readouts[place].extras}
                decisions.append(self._decision(question, logits.tolist(), extras))
            complete = len(decisions) == len(item.decision.questions)
            outputs.append(decisions if complete else not_finite(item))
        return outputs

    def _decision(self, question: Question, logits: list[float], extras: dict[str, float]) -> Decision:
        decision = answer(question, logits, self.temperatures)
        top = max(decision.probabilities)
        native = top if question.kind is QuestionKind.NOUL else certainty(decision.probabilities)
        return replace(decision, native_confidence=native, extras={**extras, "answer_confidence": top})


def certainty(probabilities: Sequence[float]) -> float:
    """1 minus the entropy in units of a uniform answer's; 1 where there is one option."""
    if len(probabilities) < 2:
        return 1.0
    entropy = -sum(p * math.log(max(p, 1e-12)) for p in probabilities)
    return min(1.0, max(0.0, 1 - entropy / math.log(len(probabilities))))


def load_laya(
    folder: Path,
    spec: LayaSpec,
    tokenizer: Any,
    temperatures: Temperatures,
    *,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> LayaProtocol:
    """The protocol of a Laya checkpoint.

    Args:
        folder: The checkpoint.
        spec: What its ``rl_agent_config.json`` says.
        tokenizer: Its transformers tokenizer.
        temperatures: In force: ``spec.temperatures``, or a calibration.
        max_length: Tokens of a sequence, at most ``spec.max_length``.
        dtype: Of the backbone.
        device: Of the backbone.

    Raises:
        LoadError: The tokenizer lacks a special token.
        WeightMismatch: A tensor of the head is missing, left over or of a wrong shape.
    """
    special = (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id)
    if None in special:
        raise LoadError(
            f"{folder / 'tokenizer'} has no [CLS], [SEP] or [MASK] token, of which Laya's sequences are made; use the "
            "tokenizer that belongs to this checkpoint."
        )
    files = read_tensors(folder, wanted=lambda name: not name.startswith(ENCODER_PREFIX) and name != TEMPERATURE)
    width = files.tensors["type_emb.weight"].shape[-1] if "type_emb.weight" in files.tensors else 1
    network = fill(lambda: LayaNetwork(width, spec.layers, spec.actions), files.tensors, files.files[0], device)
    writer = LayaWriter(tokenizer.backend_tokenizer, special, spec, min(max_length, spec.max_length))
    return LayaProtocol(writer, network.in_dtype(dtype), temperatures)
