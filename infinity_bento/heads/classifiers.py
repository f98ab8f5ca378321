"""The layers between hidden states and labels: one row per shape of ``families.Heads.classifier``, and their weights.

Built by ``heads.build``. Layers carry the names of their tensors in a checkpoint. Everything runs in float32.

Shape suffixes: T packed tokens, B sequences, D width, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.checkpoints.tensor_files import read_tensors
from infinity_bento.checkpoints.tensor_names import wrong_shape
from infinity_bento.core import Pooling
from infinity_bento.errors import LoadError, WeightMismatch
from infinity_bento.heads.pooling import pool

Config = Mapping[str, Any]
Pool = Callable[[Tensor, PackedBatch], Tensor]  # [T, D] -> [B, D]
Layer = tuple[str | None, nn.Module]  # with the name of its tensors, if it has some


@dataclass(frozen=True, slots=True)
class Plan:
    """A head: pooling, then layers; or layers on every token, then pooling; without pooling a row for each token."""

    layers: Sequence[Layer]
    before: Pool | None = None
    after: Pool | None = None


class Classifier(nn.Module):
    """Packed hidden states -> logits.

    Args:
        plan: Its layers, with weights.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.layers = nn.ModuleList(module for _, module in plan.layers)
        self._before, self._after = plan.before, plan.after

    def forward(self, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """``[T, D]`` hidden states of any dtype -> float32 logits ``[B, L]``, or ``[T, L]`` without pooling."""
        rows = hidden_TD.float() if self._before is None else self._before(hidden_TD, batch)
        for layer in self.layers:
            rows = layer(rows)
        return rows if self._after is None else self._after(rows, batch)


# Pooling ----------------------------------------------------------------------------------------------------------


def first_token(hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
    """The first token of each sequence, ``[B, D]`` float32."""
    return pool(hidden_TD, batch, (Pooling.CLS,))


def mean(hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
    """The mean over each sequence, ``[B, D]`` float32."""
    return pool(hidden_TD, batch, (Pooling.MEAN,))


def last_token(hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
    """The last token of each sequence, ``[B, D]`` float32."""
    return pool(hidden_TD, batch, (Pooling.LAST_TOKEN,))


def last_before_padding(pad_id: int | None) -> Pool:
    """The last token whose id is not that of padding, which is how transformers' decoders classify.

    It differs from the last token where a tokenizer ends its texts with the padding token. A sequence of nothing else
    is read at its first token.
    """
    if pad_id is None:
        return last_token

    def pick(hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        token = torch.arange(batch.tokens, device=batch.device)
        sequence = batch.sequence_ids()
        candidates = torch.where(batch.input_ids != pad_id, token, batch.starts()[sequence])
        chosen = batch.starts().scatter_reduce(0, sequence, candidates, "amax")
        return hidden_TD[chosen].float()

    return pick


# Shapes -----------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, rows: Tensor) -> Tensor:
        """Any shape."""
        return rows * self.factor


def activation(name: str) -> nn.Module:
    """An activation of a config, by transformers' name.

    Raises:
        LoadError: If there is none of this name.
    """
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise LoadError(f"config.json: activation {name!r} of the classification head is unknown.")
    made: nn.Module = ACT2FN[name]
    return made


def width(config: Config) -> int:
    """Width of the hidden states."""
    return int(config["hidden_size"] if "hidden_size" in config else config["dim"])


def square(config: Config) -> nn.Linear:
    """A layer that keeps the width."""
    return nn.Linear(width(config), width(config))


def output(config: Config, labels: int, *, bias: bool = True) -> nn.Linear:
    """A layer to the labels."""
    return nn.Linear(width(config), labels, bias=bias)


def bert(config: Config, labels: int) -> Plan:
    """BERT: the pooler, then the labels."""
    return Plan(
        [("pooler.dense", square(config)), (None, nn.Tanh()), ("classifier", output(config, labels))], first_token
    )


def albert(config: Config, labels: int) -> Plan:
    """As BERT, with the pooler's tensors one level higher."""
    return Plan([("pooler", square(config)), (None, nn.Tanh()), ("classifier", output(config, labels))], first_token)


def roberta(config: Config, labels: int, between: type[nn.Module] = nn.Tanh) -> Plan:
    """RoBERTa and MPNet: dense and out_proj."""
    layers = [("classifier.dense", square(config)), (None, between()), ("classifier.out_proj", output(config, labels))]
    return Plan(layers, first_token)


def electra(config: Config, labels: int) -> Plan:
    """As RoBERTa with GELU."""
    return roberta(config, labels, nn.GELU)


def distilbert(config: Config, labels: int) -> Plan:
    """A layer with ReLU before the labels."""
    return Plan(
        [("pre_classifier", square(config)), (None, nn.ReLU()), ("classifier", output(config, labels))], first_token
    )


def deberta(config: Config, labels: int) -> Plan:
    """The context pooler, whose activation the config names."""
    size = int(config.get("pooler_hidden_size") or width(config))
    act = activation(str(config.get("pooler_hidden_act") or "gelu"))
    layers = [("pooler.dense", nn.Linear(size, size)), (None, act), ("classifier", nn.Linear(size, labels))]
    return Plan(layers, first_token)


def modernbert_head(config: Config) -> list[Layer]:
    """ModernBERT's layers before the labels, the same for texts and tokens."""
    size = width(config)
    dense = nn.Linear(size, size, bias=bool(config.get("classifier_bias")))
    norm = nn.LayerNorm(size, eps=float(config.get("norm_eps", 1e-5)), bias=bool(config.get("norm_bias")))
    return [
        ("head.dense", dense),
        (None, activation(str(config.get("classifier_activation") or "gelu"))),
        ("head.norm", norm),
    ]


def modernbert(config: Config, labels: int) -> Plan:
    """Pooled by CLS or mean, as the config says."""
    return Plan([*modernbert_head(config), ("classifier", output(config, labels))], _pooling_named(config, "cls"))


def ultrabert(config: Config, labels: int) -> Plan:
    """As ModernBERT without layers in between."""
    return Plan([("classifier", output(config, labels))], _pooling_named(config, "cls"))


def eurobert(config: Config, labels: int) -> Plan:
    """Pooled before the layers, or after them ("late"), as the config says."""
    layers = [("dense", square(config)), (None, nn.GELU()), ("classifier", output(config, labels))]
    late = config.get("classifier_pooling", "late") == "late"
    return Plan(layers, after=mean) if late else Plan(layers, _pooling_named(config, "late"))


def decoder(config: Config, labels: int) -> Plan:
    """Decoders: one layer on the last token that is not padding.

    Those made bidirectional by remote code (``pooling`` and ``temperature`` in the config) pool as they say.
    """
    layers: list[Layer] = [("score", output(config, labels, bias=False))]
    if "pooling" not in config:
        return Plan(layers, last_before_padding(config.get("pad_token_id")))
    temperature = float(config.get("temperature") or 1.0)
    if temperature != 1.0:
        layers.append((None, Scale(1.0 / temperature)))
    return Plan(layers, _pooling_named(config, "avg", key="pooling"))


POOLINGS: Mapping[str, Pool] = {"cls": first_token, "bos": first_token, "mean": mean, "avg": mean, "last": last_token}
SHAPES: Mapping[str, Callable[[Config, int], Plan]] = {
    "bert": bert,
    "albert": albert,
    "roberta": roberta,
    "electra": electra,
    "distilbert": distilbert,
    "deberta-v2": deberta,
    "modernbert": modernbert,
    "ultrabert": ultrabert,
    "eurobert": eurobert,
    "last_token": decoder,
}


def token_plan(shape: str, config: Config, labels: int) -> Plan:
    """The layers from each token to its labels, for the families with this shape of classifier."""
    if shape == "last_token":
        return Plan([("score", output(config, labels, bias=bool(config.get("token_classification_bias", True))))])
    before = modernbert_head(config) if shape == "modernbert" else []
    return Plan([*before, ("classifier", output(config, labels))])


def _pooling_named(config: Config, default: str, key: str = "classifier_pooling") -> Pool:
    name = config.get(key) or default
    if name not in POOLINGS:
        raise LoadError(f"config.json: {key!r} is {name!r}; it must be one of {', '.join(POOLINGS)}.")
    return POOLINGS[name]


# Weights ----------------------------------------------------------------------------------------------------------


def load_classifier(
    build: Callable[[], Plan], folder: Path, device: torch.device | str, *, tensors: Mapping[str, Tensor] | None = None
) -> Classifier:
    """A head with the weights of a checkpoint, in float32.

    Args:
        build: Makes the layers; runs on the meta device.
        folder: Where the weight files lie. Names are taken with and without the prefix of the base model.
        device: Where the weights go.
        tensors: Weights made from those of the checkpoint; nothing is read then.

    Raises:
        WeightMismatch: If a tensor of the head is missing, has a wrong shape or is quantized.
    """
    with torch.device("meta"):
        plan = build()
    wanted = {f"{name}.{key}": value for name, layer in plan.layers if name for key, value in layer.named_parameters()}
    found = read_head(folder, set(wanted)) if tensors is None else dict(tensors)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise WeightMismatch(
            f"{folder}: the weights have no tensor {missing[0]!r}"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
            + " of the classification head that config.json describes; use a complete checkpoint, not that of a base "
            "model."
        )
    for name, layer in plan.layers:
        for key, expected in list(layer.named_parameters()) if name else ():
            tensor = found[f"{name}.{key}"]
            if tensor.shape != expected.shape:
                raise wrong_shape(str(folder), f"{name}.{key}", list(tensor.shape), list(expected.shape), 0)
            value = nn.Parameter(tensor.to(device, torch.float32), requires_grad=False)
            setattr(layer, key, value)
    return Classifier(plan).eval()


def read_head(folder: Path, names: set[str]) -> dict[str, Tensor]:
    """Tensors of a checkpoint by these names, on the CPU; stored with or without one component before the name.

    They are not searched for NaN: loading the backbone does that for all tensors of the folder.

    Raises:
        WeightMismatch: If one is quantized, or stands there under two names.
    """

    def place(stored: str) -> str | None:
        bare = stored.partition(".")[2]
        return stored if stored in names else bare if bare in names else None

    files = read_tensors(folder, wanted=lambda stored: place(stored) is not None)
    found: dict[str, Tensor] = {}
    for stored, tensor in files.tensors.items():
        name = place(stored)
        if name is None:  # pickles are read whole
            continue
        if name in found:
            raise WeightMismatch(f"{files.origin[stored]}: tensor {name!r} stands there twice; keep one of the two.")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise WeightMismatch(
                f"{files.origin[stored]}: tensor {stored!r} is stored as {str(tensor.dtype).removeprefix('torch.')}; "
                "quantized weights are not supported, so use the float16, bfloat16 or float32 weights of the model."
            )
        found[name] = tensor
    return found
