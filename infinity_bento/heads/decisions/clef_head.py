"""Clef's joint schema head, run packed over several requests: options gather evidence, fields look at each other.

Called by ``clef``. Projections and norms run on the rows of all requests at once; only attention is cut by request.
Everything runs in float32. The names of the tensors are those of the published ``joint_head.safetensors``.

Shape suffixes: T tokens, R requests, Q questions, O options (each of all requests), D hidden size, W head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Span = tuple[int, int]  # first token, and the one behind the last
HIGHEST_SCALE = math.log(100.0)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """``joint_head_config.json``."""

    hidden_size: int
    width: int
    routing_layers: int
    layers: int
    heads: int
    feedforward: int


@dataclass(frozen=True, slots=True)
class Fields:
    """Where the questions of a request lie, by token of its sequence."""

    kinds: tuple[int, ...]  # rows of the type embedding
    questions: tuple[Span, ...]
    options: tuple[tuple[Span, ...], ...]  # of each question

    @property
    def option_count(self) -> int:
        """Options of all questions together."""
        return sum(map(len, self.options))


class Attention(nn.Module):
    """Multi-head attention from rows to a memory, each request to its own; named as torch's module."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, rows_QW: Tensor, memory_TW: Tensor, row_sizes: list[int], memory_sizes: list[int]) -> Tensor:
        """``[Q, W]`` and ``[T, W]``, cut by request into ``row_sizes`` and ``memory_sizes`` -> ``[Q, W]``."""
        width = rows_QW.shape[-1]
        query = F.linear(rows_QW, self.in_proj_weight[:width], self.in_proj_bias[:width])
        key_value = F.linear(memory_TW, self.in_proj_weight[width:], self.in_proj_bias[width:])
        mixed = []
        for q, kv in zip(torch.split(query, row_sizes), torch.split(key_value, memory_sizes), strict=True):
            k, v = (self._split(x) for x in kv.chunk(2, dim=-1))
            mixed.append(F.scaled_dot_product_attention(self._split(q), k, v)[0].transpose(0, 1).flatten(1))
        out: Tensor = self.out_proj(torch.cat(mixed))
        return out

    def _split(self, rows: Tensor) -> Tensor:
        """``[n, W]`` -> ``[1, heads, n, W / heads]``."""
        return rows.reshape(1, rows.shape[0], self.heads, -1).transpose(1, 2)


class EvidenceLayer(nn.Module):
    """Options look at the tokens, not at each other."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width = shape.width
        self.query_norm = nn.LayerNorm(width)
        self.memory_norm = nn.LayerNorm(width)
        self.attention = Attention(width, shape.heads)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, shape.feedforward), nn.GELU(), nn.Identity(), nn.Linear(shape.feedforward, width)
        )

    def forward(self, rows: Tensor, memory: Tensor, row_sizes: list[int], memory_sizes: list[int]) -> Tensor:
        """Shapes as in ``Attention``."""
        rows = rows + self.attention(self.query_norm(rows), self.memory_norm(memory), row_sizes, memory_sizes)
        out: Tensor = rows + self.feedforward(self.feedforward_norm(rows))
        return out


class FieldLayer(nn.Module):
    """Questions look at each other, then at the tokens; a pre-norm decoder layer with torch's names."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width = shape.width
        self.self_attn = Attention(width, shape.heads)
        self.multihead_attn = Attention(width, shape.heads)
        self.linear1 = nn.Linear(width, shape.feedforward)
        self.linear2 = nn.Linear(shape.feedforward, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))

    def forward(self, rows: Tensor, memory: Tensor, row_sizes: list[int], memory_sizes: list[int]) -> Tensor:
        """Shapes as in ``Attention``."""
        normed = self.norm1(rows)
        rows = rows + self.self_attn(normed, normed, row_sizes, row_sizes)
        rows = rows + self.multihead_attn(self.norm2(rows), memory, row_sizes, memory_sizes)
        out: Tensor = rows + self.linear2(F.gelu(self.linear1(self.norm3(rows))))
        return out


class JointHead(nn.Module):
    """Hidden states -> one logit per option of each question."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        hidden, width = shape.hidden_size, shape.width
        self.hidden_norm = nn.LayerNorm(hidden)
        self.memory_projection = nn.Linear(hidden, width, bias=False)
        self.question_projection = nn.Linear(hidden, width, bias=False)
        self.option_question_projection = nn.Linear(hidden, width, bias=False)
        self.global_projection = nn.Linear(hidden, width, bias=False)
        self.option_context_projection = nn.Linear(hidden, width, bias=False)
        self.option_lexical_projection = nn.Linear(hidden, width, bias=False)
        self.type_embedding = nn.Embedding(3, width)
        self.evidence_layers = nn.ModuleList(EvidenceLayer(shape) for _ in range(shape.routing_layers))
        self.option_summary_norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(FieldLayer(shape) for _ in range(shape.layers))
        self.field_norm = nn.LayerNorm(width)
        self.option_norm = nn.LayerNorm(width)
        self.residual_scorer = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Identity(), nn.Linear(width, 1))
        self.prior_logit_scale = nn.Parameter(torch.empty(()))
        self.joint_logit_scale = nn.Parameter(torch.empty(()))
        self.residual_gate = nn.Parameter(torch.empty(()))

    def forward(self, hidden_TD: Tensor, lexical_OD: Tensor, lengths: list[int], fields: Sequence[Fields]) -> Tensor:
        """Logits of all options, ``[O]``, by request, question, option.

        Args:
            hidden_TD: Of the backbone, the requests end to end.
            lexical_OD: The mean output row over the tokens of each option.
            lengths: Tokens of each request.
            fields: Of each request.
        """
        device = hidden_TD.device
        starts = list(accumulate(lengths[:-1], initial=0))
        questions, options = spans_of(starts, fields)
        question_sizes = [len(request.kinds) for request in fields]
        option_sizes = [request.option_count for request in fields]
        request_of_Q = repeated(question_sizes, device)
        question_of_O = repeated([len(group) for request in fields for group in request.options], device)
        kinds_Q = torch.tensor([kind for request in fields for kind in request.kinds], device=device)

        hidden_TD = self.hidden_norm(hidden_TD.float())
        memory_TW = self.memory_projection(hidden_TD)
        last = torch.tensor([start + length - 1 for start, length in zip(starts, lengths, strict=True)], device=device)
        global_RD = hidden_TD[last]
        question_QD, context_OD = span_means(hidden_TD, questions), span_means(hidden_TD, options)

        option_OW = self.option_context_projection(context_OD) + self.option_lexical_projection(lexical_OD)
        option_OW = option_OW + self.option_question_projection(question_QD)[question_of_O]
        for layer in self.evidence_layers:
            option_OW = layer(option_OW, memory_TW, option_sizes, lengths)

        base_QW = self.question_projection(question_QD)
        field_QW = base_QW + self.option_summary_norm(summaries(base_QW, option_OW, question_of_O))
        field_QW = field_QW + self.global_projection(global_RD)[request_of_Q] + self.type_embedding(kinds_Q)
        for layer in self.layers:
            field_QW = layer(field_QW, memory_TW, question_sizes, lengths)

        anchor_QD = question_QD + global_RD[request_of_Q]
        prior = cosine(lexical_OD, anchor_QD[question_of_O])
        prior = self.prior_logit_scale.clamp(max=HIGHEST_SCALE).exp() * prior
        joint = self._joint(self.field_norm(field_QW)[question_of_O], self.option_norm(option_OW))
        return prior + torch.sigmoid(self.residual_gate) * joint

    def _joint(self, field_OW: Tensor, option_OW: Tensor) -> Tensor:
        """How well each option fits its field, ``[O]``."""
        features = torch.cat([field_OW, option_OW, field_OW * option_OW, (field_OW - option_OW).abs()], dim=-1)
        scale = self.joint_logit_scale.clamp(max=HIGHEST_SCALE).exp()
        fit: Tensor = scale * F.cosine_similarity(field_OW, option_OW, dim=-1)
        residual: Tensor = self.residual_scorer(features)
        return fit + residual.squeeze(-1)


def spans_of(starts: Sequence[int], fields: Sequence[Fields]) -> tuple[list[Span], list[Span]]:
    """The spans of all questions and of all options, by packed token."""
    questions, options = [], []
    for start, request in zip(starts, fields, strict=True):
        questions += [(start + first, start + end) for first, end in request.questions]
        options += [(start + first, start + end) for group in request.options for first, end in group]
    return questions, options


def repeated(sizes: Sequence[int], device: torch.device) -> Tensor:
    """``[2, 1]`` -> ``[0, 0, 1]``: to whom each row belongs."""
    return torch.tensor([owner for owner, size in enumerate(sizes) for _ in range(size)], device=device)


def span_means(rows: Tensor, spans: Sequence[Span]) -> Tensor:
    """The mean of the rows of each span, ``[spans, width]``."""
    index = torch.tensor([row for first, end in spans for row in range(first, end)], device=rows.device)
    lengths = torch.tensor([end - first for first, end in spans], device=rows.device)
    means: Tensor = torch.segment_reduce(rows[index], "mean", lengths=lengths, axis=0)
    return means


def summaries(field_QW: Tensor, option_OW: Tensor, question_of_O: Tensor) -> Tensor:
    """For each question the mean of its options, weighted by how well they fit it, ``[Q, W]``."""
    counts = torch.bincount(question_of_O, minlength=len(field_QW))
    fit_O = (option_OW * field_QW[question_of_O]).sum(-1) / math.sqrt(option_OW.shape[-1])
    highest = torch.segment_reduce(fit_O, "max", lengths=counts)
    power_O = (fit_O - highest[question_of_O]).exp()
    total = torch.segment_reduce(power_O, "sum", lengths=counts)
    weighted = option_OW * (power_O / total[question_of_O])[:, None]
    total_QW: Tensor = torch.segment_reduce(weighted, "sum", lengths=counts, axis=0)
    return total_QW


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """Of each pair of rows; their lengths count as 1e-12 at least."""
    products: Tensor = F.normalize(left, dim=-1) * F.normalize(right, dim=-1)
    return products.sum(-1)
