"""The BERT line, written for packed execution on the CPU: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT.

Built by ``backbone`` from transformers' loaded module (its twin), whose weights it takes over. The same numbers up to
rounding: query, key and value are one product, attention reads it as a strided view, activation and residual run behind
the product, and all layers are one call that runs without Python's lock (``scripted``).

Shape suffixes: T packed tokens, D width, F feed-forward width, N heads, H head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from infinity_bento.attention import sdpa
from infinity_bento.attention.interface import AttentionSpec, CallCounter
from infinity_bento.batching.packing import PackedBatch
from infinity_bento.models import scripted
from infinity_bento.models.linears import ACTIVATIONS, FastLinear, LinearPlan
from infinity_bento.models.scripted import LayerTensors


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The modules of one post-norm layer of a twin."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    norm: nn.LayerNorm


class PackedLayer(nn.Module):
    """The parts of one layer: attention and feed-forward, each followed by residual and norm."""

    def __init__(self, parts: LayerParts, activation: str, plan: LinearPlan) -> None:
        super().__init__()
        self.qkv = FastLinear([parts.query, parts.key, parts.value], plan)
        self.out = FastLinear([parts.out], plan)
        self.attention_norm = parts.attention_norm
        self.up = FastLinear([parts.up], plan, activation=activation)
        self.down = FastLinear([parts.down], plan)
        self.norm = parts.norm

    def tensors(self) -> LayerTensors:
        """What the scripted layers read."""
        return LayerTensors(
            qkv=self.qkv.product(),
            out=self.out.product(),
            up=self.up.product(),
            down=self.down.product(),
            attention_scale=self.attention_norm.weight,
            attention_shift=self.attention_norm.bias,
            scale=self.norm.weight,
            shift=self.norm.bias,
        )


def _normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class PackedEmbeddings(nn.Module):
    """Words, positions and token types, summed and normed; token type 0 is part of the positions."""

    def __init__(self, embeddings: Any, projection: nn.Linear | None) -> None:
        super().__init__()
        self.word_embeddings: nn.Embedding = embeddings.word_embeddings
        types = getattr(embeddings, "token_type_embeddings", None)
        positions = embeddings.position_embeddings.weight.detach()
        self.types = None
        if types is not None:
            rows = types.weight.detach()
            positions = positions + rows[0]
            self.types = nn.Parameter(rows - rows[0], requires_grad=False)  # what a type adds to type 0
        self.positions = nn.Parameter(positions, requires_grad=False)
        self.norm: nn.LayerNorm = embeddings.LayerNorm
        self.projection = projection

    def forward(self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """``[T]`` each -> ``[T, D]``."""
        x = F.embedding(input_ids, self.word_embeddings.weight)
        x = x.add_(F.embedding(position_ids, self.positions))
        if token_type_ids is not None and self.types is not None:
            x = x.add_(F.embedding(token_type_ids, self.types))
        x = _normed(x, self.norm)
        return x if self.projection is None else self.projection(x)


class PackedEncoder(nn.Module):
    """The whole encoder. Build it with ``from_twin``."""

    def __init__(self, config: Any, embeddings: PackedEmbeddings, layers: Sequence[PackedLayer]) -> None:
        super().__init__()
        self.config = config
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)
        self._heads: int = config.num_attention_heads
        self._spec = AttentionSpec(scale=(config.hidden_size // self._heads) ** -0.5, causal=False)
        self._eps = layers[0].norm.eps
        self._tensors = [layer.tensors() for layer in layers]
        self._run = scripted.compiled()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packed: PackedBatch,
        token_type_ids: Tensor | None = None,
        attention_calls: CallCounter | None = None,
    ) -> Tensor:
        """``[1, T]`` ids -> ``[1, T, D]`` hidden states."""
        types = None if token_type_ids is None else token_type_ids[0]
        x = self.embeddings(input_ids[0], position_ids[0], types)
        groups = [tuple(group) for group in packed.groups]
        masks = [sdpa.allowed(group, packed, self._spec)[0] for group in packed.groups]
        x = self._run(x, self._tensors, groups, masks, self._heads, self._spec.scale, self._eps)
        if attention_calls is not None:
            attention_calls.calls += len(self.layers)
        return x[None]

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embeddings, as transformers' models give them; heads may be tied to them."""
        return self.embeddings.word_embeddings


def from_twin(twin: Any, plan: LinearPlan) -> PackedEncoder | None:
    """The packed encoder of a loaded transformers model of the BERT line; the twin is emptied layer by layer.

    Returns:
        None where the twin has something that is not written here: it then runs as it is.
    """
    config = twin.config
    activation = getattr(config, "hidden_act", None) or getattr(config, "activation", None)
    if activation not in ACTIVATIONS or getattr(config, "is_decoder", False):
        return None
    embeddings = PackedEmbeddings(twin.embeddings, getattr(twin, "embeddings_project", None))
    return PackedEncoder(config, embeddings, [PackedLayer(parts, activation, plan) for parts in _emptied(twin)])


def _emptied(twin: Any) -> Iterator[LayerParts]:
    """The layers of a twin, each let go once it was taken over: the weights are held once."""
    stack: nn.ModuleList = twin.transformer.layer if hasattr(twin, "transformer") else twin.encoder.layer
    for index in range(len(stack)):
        layer: Any = stack[index]
        yield _distilbert_parts(layer) if hasattr(twin, "transformer") else _bert_parts(layer)
        stack[index] = nn.Identity()
        del layer


def _bert_parts(layer: Any) -> LayerParts:
    attention = layer.attention.self
    return LayerParts(
        query=attention.query,
        key=attention.key,
        value=attention.value,
        out=layer.attention.output.dense,
        attention_norm=layer.attention.output.LayerNorm,
        up=layer.intermediate.dense,
        down=layer.output.dense,
        norm=layer.output.LayerNorm,
    )


def _distilbert_parts(layer: Any) -> LayerParts:
    return LayerParts(
        query=layer.attention.q_lin,
        key=layer.attention.k_lin,
        value=layer.attention.v_lin,
        out=layer.attention.out_lin,
        attention_norm=layer.sa_layer_norm,
        up=layer.ffn.lin1,
        down=layer.ffn.lin2,
        norm=layer.output_layer_norm,
    )
