"""The sentence-transformers modules of a checkpoint as frozen specs. Called by layout; read by heads and families.

A module's class is named in several generations of dotted paths. Only the last component counts, looked up in the
table at the end of this file; nothing is ever imported by a name that stands in a checkpoint.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity_bento.checkpoints.json_files import JsonObject, relative_path
from infinity_bento.core import Pooling
from infinity_bento.errors import LoadError

SENTENCE = "sentence_embedding"
TOKENS = "token_embeddings"
FEATURES = (SENTENCE, TOKENS)

# torch.nn classes that need no argument and work on any shape.
ACTIVATIONS = (
    *("CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish"),
    *("ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh", "Tanhshrink"),
)

# In the order in which sentence-transformers concatenates them.
_LEGACY_POOLING = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_max_tokens": Pooling.MAX,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": Pooling.MEAN_SQRT,
    "pooling_mode_weightedmean_tokens": Pooling.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": Pooling.LAST_TOKEN,
}

_SETTINGS_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """The backbone: a folder with config.json and weights.

    ``settings`` is its sentence_bert_config.json as read, for heads that know more keys (query_expansion, ...).
    """

    path: Path
    task: str = "feature-extraction"
    max_seq_length: int | None = None
    do_lower_case: bool | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """Token vectors to one vector. ``modes`` concatenate in the order given; ``dimension`` is the width of a token."""

    modes: tuple[Pooling, ...]
    include_prompt: bool = True
    dimension: int | None = None


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """``activation(W x + b)``, plus ``x`` or ``W_r x`` with ``residual``. Weights lie in ``path``."""

    path: Path
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"  # a name of ACTIVATIONS
    residual: bool = False
    input_name: str = SENTENCE
    output_name: str = SENTENCE


@dataclass(frozen=True, slots=True)
class LayerNormSpec:
    """Layer normalization of the vector. Weights lie in ``path``."""

    path: Path
    dimension: int


@dataclass(frozen=True, slots=True)
class NormalizeSpec:
    """Unit length."""

    input_name: str = SENTENCE
    output_name: str = SENTENCE


@dataclass(frozen=True, slots=True)
class StaticEmbeddingSpec:
    """A bag of token vectors: tokenizer.json and one matrix in ``path``; takes the place of a transformer."""

    path: Path


@dataclass(frozen=True, slots=True)
class SparseStaticEmbeddingSpec:
    """A weight per vocabulary id for each token present; takes the place of a transformer.

    ``weights_file`` is a JSON file of token: weight, or None where the weights are tensors in ``path``.
    """

    path: Path
    weights_file: str | None = None


@dataclass(frozen=True, slots=True)
class SpladePoolingSpec:
    """Masked-language-model logits to one learned sparse vector."""

    strategy: str = "max"  # max or sum
    activation: str = "relu"  # relu or log1p_relu
    dimension: int | None = None


@dataclass(frozen=True, slots=True)
class LogitScoreSpec:
    """A relevance score from the last token's logits: ``true - false``, or ``true`` alone."""

    true_token_id: int
    false_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class MultiVectorMaskSpec:
    """Which token vectors of a late-interaction model are kept."""

    skiplist_words: tuple[str, ...] = ()
    skiplist_tasks: tuple[str, ...] = ("document",)
    keep_only_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """One chain of modules per route; ``mappings`` sends ``(task, modality)`` to a route."""

    path: Path
    routes: dict[str, tuple[ModuleSpec, ...]]
    default_route: str | None = None
    mappings: dict[tuple[str | None, str | tuple[str, ...] | None], str] = field(default_factory=dict)


ModuleSpec = (
    TransformerSpec
    | PoolingSpec
    | DenseSpec
    | LayerNormSpec
    | NormalizeSpec
    | StaticEmbeddingSpec
    | SparseStaticEmbeddingSpec
    | SpladePoolingSpec
    | LogitScoreSpec
    | MultiVectorMaskSpec
    | RouterSpec
)


def read_module(root: Path, subfolder: str, type_name: str, listed_in: Path) -> ModuleSpec | None:
    """The spec of one module, or None for a module that does nothing at inference (Dropout).

    Args:
        root: The checkpoint folder.
        subfolder: The module's folder below ``root``; "" is ``root`` itself.
        type_name: Dotted class path as it stands in the checkpoint.
        listed_in: The file that names the module, for error texts.

    Raises:
        LoadError: The class is not known, or its files are missing or malformed.
    """
    name = type_name.rsplit(".", 1)[-1]
    reader = _READERS.get(name)
    if reader is None:
        raise LoadError(
            f"{listed_in}: module type {type_name!r} is not supported; supported are {', '.join(sorted(_READERS))}."
        )
    return reader(root / relative_path(subfolder, listed_in, "path"))


def transformer_spec(folder: Path, task: str = "feature-extraction") -> TransformerSpec:
    """The transformer in a folder, with its settings file where there is one.

    Raises:
        LoadError: The settings file is malformed.
    """
    settings = JsonObject(folder / _SETTINGS_FILES[0], {})
    for name in _SETTINGS_FILES:
        settings = JsonObject.read_optional(folder / name)
        if settings.data:
            break
    return TransformerSpec(
        path=folder,
        task=settings.string("transformer_task", task),
        max_seq_length=settings.integer("max_seq_length", None),
        do_lower_case=settings.boolean("do_lower_case", None),
        settings=dict(settings.data),
    )


def read_dense(folder: Path) -> DenseSpec:
    """The Dense module in a folder.

    Raises:
        LoadError: config.json is missing or malformed, or names an activation outside ``ACTIVATIONS``.
    """
    config = JsonObject.read(folder / "config.json")
    source, target = _features(config)
    return DenseSpec(
        path=folder,
        in_features=config.integer("in_features"),
        out_features=config.integer("out_features"),
        bias=config.boolean("bias", True),
        activation=_activation(config),
        residual=config.boolean("use_residual", False),
        input_name=source,
        output_name=target,
    )


def _activation(config: JsonObject) -> str:
    key = "activation_function"
    if key in config.data and config.data[key] is None:
        return "Identity"
    path: str = config.string(key, "torch.nn.modules.activation.Tanh")
    name = path.rsplit(".", 1)[-1]
    if not path.startswith("torch.nn.") or name not in ACTIVATIONS:
        raise config.wrong(key, f"a class of torch.nn among {', '.join(ACTIVATIONS)}")
    return name


def _features(config: JsonObject) -> tuple[str, str]:
    source = config.choice("module_input_name", SENTENCE, FEATURES)
    return source, config.choice("module_output_name", source, FEATURES)


def _read_pooling(folder: Path) -> PoolingSpec:
    config = JsonObject.read(folder / "config.json")
    old = config.integer("word_embedding_dimension", None)
    return PoolingSpec(
        modes=_pooling_modes(config),
        include_prompt=config.boolean("include_prompt", True),
        dimension=config.integer("embedding_dimension", old),
    )


def _pooling_modes(config: JsonObject) -> tuple[Pooling, ...]:
    names = config.data.get("pooling_mode")
    if names is None:
        flags = [key for key in config.data if key.startswith("pooling_mode_") and config.boolean(key, False)]
        for key in flags:
            if key not in _LEGACY_POOLING:
                raise config.wrong(key, f"absent: known flags are {', '.join(_LEGACY_POOLING)}")
        # No flag at all is the default of sentence-transformers.
        return tuple(mode for key, mode in _LEGACY_POOLING.items() if key in flags) or (Pooling.MEAN,)
    listed = [names] if isinstance(names, str) else names
    known = [mode.value for mode in Pooling if mode is not Pooling.SPLADE]
    if not isinstance(listed, list) or not listed or any(name not in known for name in listed):
        raise config.wrong("pooling_mode", f"one of {', '.join(known)}, or a list of them")
    return tuple(Pooling(name) for name in listed)


def _read_layer_norm(folder: Path) -> LayerNormSpec:
    return LayerNormSpec(folder, JsonObject.read(folder / "config.json").integer("dimension"))


def _read_normalize(folder: Path) -> NormalizeSpec:
    # Most repositories name a folder for it and ship none.
    return NormalizeSpec(*_features(JsonObject.read_optional(folder / "config.json")))


def _read_splade(folder: Path) -> SpladePoolingSpec:
    config = JsonObject.read(folder / "config.json")
    old = config.integer("word_embedding_dimension", None)
    return SpladePoolingSpec(
        strategy=config.choice("pooling_strategy", "max", ("max", "sum")),
        activation=config.choice("activation_function", "relu", ("relu", "log1p_relu")),
        dimension=config.integer("embedding_dimension", old),
    )


def _read_logit_score(folder: Path) -> LogitScoreSpec:
    config = JsonObject.read(folder / "config.json")
    config.choice("module_input_name", "causal_logits", ("causal_logits",))
    return LogitScoreSpec(config.integer("true_token_id", minimum=0), config.integer("false_token_id", None, minimum=0))


def _read_mask(folder: Path) -> MultiVectorMaskSpec:
    config = JsonObject.read_optional(folder / "config.json")
    tasks = config.data.get("skiplist_tasks")
    ids = config.data.get("keep_only_token_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)):
        raise config.wrong("keep_only_token_ids", "null or a list of token ids")
    return MultiVectorMaskSpec(
        skiplist_words=config.strings("skiplist_words"),
        skiplist_tasks=(tasks,) if isinstance(tasks, str) else config.strings("skiplist_tasks") or ("document",),
        keep_only_token_ids=None if ids is None else tuple(ids),
    )


def _read_static(folder: Path) -> StaticEmbeddingSpec:
    if not (folder / "tokenizer.json").is_file():
        raise LoadError(f"{folder / 'tokenizer.json'} is missing; a StaticEmbedding module needs it.")
    return StaticEmbeddingSpec(folder)


def _read_sparse_static(folder: Path) -> SparseStaticEmbeddingSpec:
    config = JsonObject.read_optional(folder / "config.json")
    file = config.string("path", None)
    if file is not None:
        relative_path(file, config.file, "'path'")
        if not file.endswith(".json"):
            raise config.wrong("path", "the name of a .json file of token weights")
    return SparseStaticEmbeddingSpec(folder, file)


def _read_router(folder: Path) -> RouterSpec:
    config = JsonObject.read(_router_file(folder))
    types, structure = config.mapping("types"), config.mapping("structure")
    if not structure:
        raise config.wrong("structure", "an object of route names, each with a list of module names")
    parameters = JsonObject(config.file, config.mapping("parameters"))
    routes = {name: _route(config, folder, types, name) for name in structure}
    default = parameters.string("default_route", None)
    if default is None and parameters.boolean("allow_empty_key", True):
        default = next(iter(routes))
    if default is not None and default not in routes:
        raise parameters.wrong("default_route", f"one of {', '.join(routes)}")
    return RouterSpec(folder, routes, default, _route_mappings(parameters, tuple(routes)))


def _router_file(folder: Path) -> Path:
    # Asym, the older form of Router, wrote config.json.
    return folder / ("router_config.json" if (folder / "router_config.json").is_file() else "config.json")


def _route(config: JsonObject, folder: Path, types: dict[str, Any], route: str) -> tuple[ModuleSpec, ...]:
    names = JsonObject(config.file, config.mapping("structure")).strings(route)
    chain = []
    for name in names:
        if not isinstance(types.get(name), str):
            raise LoadError(f"{config.file}: 'types' has no class name for {name!r}, which 'structure' lists; add it.")
        chain.append(read_module(folder, name, types[name], config.file))
    if not chain:
        raise LoadError(f"{config.file}: route {route!r} of 'structure' has no modules; list at least one.")
    return tuple(spec for spec in chain if spec is not None)


def _route_mappings(
    parameters: JsonObject, routes: tuple[str, ...]
) -> dict[tuple[str | None, str | tuple[str, ...] | None], str]:
    mappings = {}
    for text, route in parameters.mapping("route_mappings").items():
        try:
            key = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            key = None
        if not isinstance(key, tuple) or len(key) != 2 or route not in routes:
            raise LoadError(
                f"{parameters.file}: 'route_mappings' has {text!r}: {route!r}; it must be \"('task', 'modality')\" "
                f"and one of the routes {', '.join(routes)}."
            )
        mappings[key] = route
    return mappings


def _read_mlm(folder: Path) -> TransformerSpec:
    return transformer_spec(folder, task="fill-mask")


_READERS: dict[str, Callable[[Path], ModuleSpec | None]] = {
    "Transformer": transformer_spec,
    "MLMTransformer": _read_mlm,
    "CLIPModel": transformer_spec,
    "Pooling": _read_pooling,
    "Dense": read_dense,
    "LayerNorm": _read_layer_norm,
    "Normalize": _read_normalize,
    "Dropout": lambda folder: None,
    "StaticEmbedding": _read_static,
    "SparseStaticEmbedding": _read_sparse_static,
    "SpladePooling": _read_splade,
    "LogitScore": _read_logit_score,
    "MultiVectorMask": _read_mask,
    "Router": _read_router,
    "Asym": _read_router,
}
