"""The layers between hidden states and vocabulary of masked language models, as tensors. Called by the sparse head.

All families compute the same, ``decoder(norm(act(dense(h)))) + bias``; they differ in names, and EuroBERT has the
decoder only. The decoder is the table of word embeddings unless the checkpoint brings another.

Shape suffixes: T tokens, D width, E width of a word embedding, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infinity_bento.checkpoints.families import Family
from infinity_bento.checkpoints.tensor_files import TensorFiles, read_tensors, refuse_non_finite
from infinity_bento.errors import LoadError, WeightMismatch


class MaskedLMBackbone(Protocol):
    """What is needed of the backbone (``models.backbone.Backbone``)."""

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def module(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def hidden_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Names:
    """Where a layout stores the layers; of several names the first that is there counts."""

    dense: str | None  # None: the decoder alone
    norms: tuple[str, ...]
    decoder: str
    biases: tuple[str, ...]
    activation: str | None = None  # key of config.json; None: gelu
    epsilon: str | None = "layer_norm_eps"  # key of config.json; None: 1e-12

    def all(self) -> set[str]:
        """Every tensor name it may use."""
        affine = {f"{norm}.{part}" for norm in self.norms for part in ("weight", "bias", "gamma", "beta")}
        dense = {f"{self.dense}.weight", f"{self.dense}.bias"} if self.dense else set()
        return affine | dense | {f"{self.decoder}.weight", *self.biases}


def _bert(activation: str | None) -> Names:
    stem = "cls.predictions"
    return Names(
        f"{stem}.transform.dense",
        (f"{stem}.transform.LayerNorm", f"{stem}.transform.layer_norm"),
        f"{stem}.decoder",
        (f"{stem}.bias", f"{stem}.decoder.bias"),
        activation,
    )


_LM_HEAD = Names(
    "lm_head.dense", ("lm_head.layer_norm", "lm_head.norm"), "lm_head.decoder", ("lm_head.bias", "lm_head.decoder.bias")
)

# By ``Heads.masked_lm`` of the table of families. GTE and Jina v3 write RoBERTa's names.
LAYOUTS: Mapping[str, tuple[Names, ...]] = {
    "bert": (_bert("hidden_act"), _LM_HEAD),
    "roberta": (_LM_HEAD,),
    "distilbert": (
        Names(
            "vocab_transform",
            ("vocab_layer_norm",),
            "vocab_projector",
            ("vocab_projector.bias",),
            "activation",
            epsilon=None,
        ),
    ),
    "albert": (
        Names(
            "predictions.dense",
            ("predictions.LayerNorm",),
            "predictions.decoder",
            ("predictions.bias", "predictions.decoder.bias"),
            "hidden_act",
        ),
    ),
    "deberta-v2": (
        _bert("hidden_act"),
        Names(
            "lm_predictions.lm_head.dense",
            ("lm_predictions.lm_head.LayerNorm",),
            "lm_predictions.lm_head.decoder",
            ("lm_predictions.lm_head.bias",),
            "hidden_act",
        ),
    ),
    "modernbert": (
        Names("head.dense", ("head.norm",), "decoder", ("decoder.bias",), "classifier_activation", epsilon="norm_eps"),
    ),
    "linear": (Names(None, (), "lm_head", ("lm_head.bias",)),),
}


@dataclass(frozen=True, slots=True)
class MaskedLM:
    """The layers, ready to run on any number of tokens."""

    decoder_VE: Tensor
    bias_V: Tensor | None
    dense: tuple[Tensor, Tensor | None] | None = None  # [E, D], [E]
    norm: tuple[Tensor, Tensor | None] | None = None  # [E], [E]
    activation: Callable[[Tensor], Tensor] = F.gelu
    epsilon: float = 1e-12

    @property
    def vocabulary_size(self) -> int:
        """Logits of a token, V."""
        return int(self.decoder_VE.shape[0])

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """``[T, D]`` hidden states -> ``[T, V]`` in their dtype."""
        states = hidden_TD
        if self.dense is not None and self.norm is not None:
            states = self.activation(F.linear(states, *self.dense))
            states = F.layer_norm(states, self.norm[0].shape, *self.norm, self.epsilon)
        return F.linear(states, self.decoder_VE, self.bias_V)


def load_masked_lm(folder: Path, family: Family, backbone: MaskedLMBackbone) -> MaskedLM:
    """The masked-language-model layers of a checkpoint, in the backbone's dtype and on its device.

    Raises:
        LoadError: The family or the checkpoint has none.
        WeightMismatch: A tensor is missing, has a wrong shape, or holds NaN or Inf.
    """
    layouts = LAYOUTS.get(family.heads.masked_lm or "")
    if layouts is None:
        raise LoadError(
            f"{family.title} has no masked-language-model head, which learned sparse vectors (SPLADE) are made from; "
            "use a checkpoint of another family, or another pooling."
        )
    wanted = set[str]().union(*(names.all() for names in layouts))
    files = read_tensors(folder, device=backbone.device, wanted=wanted.__contains__)
    refuse_non_finite(files)
    marks = [f"{names.dense or names.decoder}.weight" for names in layouts]
    names = next((names for names, mark in zip(layouts, marks, strict=True) if mark in files.tensors), None)
    if names is None and family.heads.masked_lm == "linear" and _tied(backbone):
        names = layouts[0]  # the decoder is all there is, and it is the word embeddings
    if names is None:
        raise LoadError(
            f"{folder} has no masked-language-model head (no tensor {' or '.join(marks)}), which learned sparse "
            "vectors (SPLADE) are made from; use a checkpoint whose architecture ends in ForMaskedLM."
        )
    return _assemble(names, _Picker(files, backbone.dtype), backbone)


def _assemble(names: Names, pick: _Picker, backbone: MaskedLMBackbone) -> MaskedLM:
    config = backbone.config
    decoder = _decoder(names, pick, backbone)
    vocabulary, width = decoder.shape
    bias = pick.any(names.biases, (vocabulary,))
    if names.dense is None:
        return MaskedLM(decoder, bias)
    from transformers.activations import ACT2FN

    weight = pick.needed((f"{names.dense}.weight",), (width, backbone.hidden_size))
    scale = pick.needed([f"{norm}.{part}" for norm in names.norms for part in ("weight", "gamma")], (width,))
    shift = pick.any([f"{norm}.{part}" for norm in names.norms for part in ("bias", "beta")], (width,))
    return MaskedLM(
        decoder,
        bias,
        dense=(weight, pick.any((f"{names.dense}.bias",), (width,))),
        norm=(scale, shift),
        activation=ACT2FN[config[names.activation] if names.activation else "gelu"],
        epsilon=float(config[names.epsilon]) if names.epsilon else 1e-12,
    )


def _tied(backbone: MaskedLMBackbone) -> bool:
    return backbone.config.get("tie_word_embeddings", True) is not False


def _decoder(names: Names, pick: _Picker, backbone: MaskedLMBackbone) -> Tensor:
    """The stored decoder where it differs from the word embeddings, else these themselves, shared with the backbone."""
    embeddings: Tensor = backbone.module.get_input_embeddings().weight
    name = f"{names.decoder}.weight"
    if name not in pick.files.tensors and _tied(backbone):
        return embeddings
    stored = pick.needed((name,), tuple(embeddings.shape))
    return embeddings if torch.equal(stored, embeddings) else stored


class _Picker:
    """Tensors by name, in one dtype, with their shapes checked."""

    def __init__(self, files: TensorFiles, dtype: torch.dtype) -> None:
        self.files = files
        self._dtype = dtype

    def any(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor | None:
        """The first that is there, or None."""
        name = next((name for name in names if name in self.files.tensors), None)
        if name is None:
            return None
        tensor = self.files.tensors[name]
        if tuple(tensor.shape) != shape:
            raise WeightMismatch(
                f"{self.files.origin[name]}: tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for "
                f"{list(shape)}; use the config.json that belongs to these weights."
            )
        return tensor.to(self._dtype)

    def needed(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """As ``any``, but one must be there."""
        tensor = self.any(names, shape)
        if tensor is None:
            raise WeightMismatch(
                f"{self.files.files[0]}: tensor {names[0]!r} is missing; use a complete checkpoint whose architecture "
                "ends in ForMaskedLM."
            )
        return tensor
