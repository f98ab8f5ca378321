"""What a checkpoint folder says about itself: config.json, modules.json, prompts, limits. Called at model load.

Plain JSON reading, cheap enough for the supervisor process: no torch, no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from infinity_bento.checkpoints import laya
from infinity_bento.checkpoints.json_files import JsonObject, read_json, relative_path
from infinity_bento.checkpoints.st_modules import (
    SENTENCE,
    TOKENS,
    DenseSpec,
    LayerNormSpec,
    LogitScoreSpec,
    ModuleSpec,
    MultiVectorMaskSpec,
    PoolingSpec,
    RouterSpec,
    SparseStaticEmbeddingSpec,
    SpladePoolingSpec,
    StaticEmbeddingSpec,
    TransformerSpec,
    read_dense,
    read_module,
    transformer_spec,
)
from infinity_bento.errors import LoadError

Kind = Literal["SentenceTransformer", "SparseEncoder", "CrossEncoder", "MultiVectorEncoder"]

# PyLate wrote "ColBERT" before sentence-transformers had a class for late interaction.
_KINDS: dict[str, Kind] = {
    "SentenceTransformer": "SentenceTransformer",
    "SparseEncoder": "SparseEncoder",
    "CrossEncoder": "CrossEncoder",
    "MultiVectorEncoder": "MultiVectorEncoder",
    "ColBERT": "MultiVectorEncoder",
}
_CROSS_ENCODER_KEYS = ("sbert_ce_default_activation_function", "sentence_transformers")
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan", "MaxSim", "maxsim", "meanmaxsim")
# Tokenizers without a limit say 10^30.
_UNLIMITED = 10_000_000


@dataclass(frozen=True, slots=True)
class Layout:
    """A checkpoint as its files describe it.

    ``config`` and ``st_config`` are the files as read. A model that starts with StaticEmbedding has no config.json
    of a transformer: ``config`` is then empty and ``model_type`` is "static_embedding".
    """

    path: Path
    config: dict[str, Any]  # config.json of the transformer
    model_type: str
    architectures: tuple[str, ...]
    transformer_path: Path  # the folder with config.json, weights and tokenizer, unless the next two say otherwise
    weights_folder: Path | None = None
    tokenizer_folder: Path | None = None
    tensor_prefix: str = ""  # of the transformer's tensors; those without it belong to a head
    adapter_path: Path | None = None  # folder of a LoRA that belongs to the weights; None: there is none
    modules: tuple[ModuleSpec, ...] = ()  # what follows the transformer
    has_sentence_transformers: bool = False  # there is a modules.json
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str | None = None
    truncate_dim: int | None = None
    kind: Kind | None = None
    transformer: TransformerSpec | None = None
    tokenizer_max_length: int | None = None  # None: not given, or not a limit
    st_config: dict[str, Any] = field(default_factory=dict)  # config_sentence_transformers.json

    @property
    def weights_path(self) -> Path:
        """The folder with the transformer's weights."""
        return self.weights_folder or self.transformer_path

    @property
    def tokenizer_path(self) -> Path:
        """The folder with the tokenizer."""
        return self.tokenizer_folder or self.transformer_path

    @property
    def max_seq_length(self) -> int | None:
        """Tokens per input by sentence_bert_config.json, special tokens included."""
        return self.transformer.max_seq_length if self.transformer else None

    @property
    def do_lower_case(self) -> bool | None:
        """Lower-case the text before tokenizing, by sentence_bert_config.json."""
        return self.transformer.do_lower_case if self.transformer else None

    @property
    def pooling(self) -> PoolingSpec | None:
        """The Pooling module, if there is one."""
        return next((spec for spec in self.modules if isinstance(spec, PoolingSpec)), None)


def read_layout(path: Path, *, dense_path: str | None = None) -> Layout:
    """Read the layout of a checkpoint folder.

    Args:
        path: The folder.
        dense_path: A folder such as ``2_Dense_768`` that replaces the checkpoint's only Dense module.

    Raises:
        LoadError: A needed file is missing or malformed, a module is not supported, or ``dense_path`` does not fit.
    """
    if not path.is_dir():
        raise LoadError(f"{path} is not a directory; give the folder of a checkpoint.")
    if laya.is_laya(path):
        return _laya_layout(path, dense_path)
    chain = _read_modules(path)
    if chain is not None and dense_path is not None:
        chain = _replace_dense(path, chain, dense_path)
    elif dense_path is not None:
        raise LoadError(f"--dense-path {dense_path!r} cannot be used: {path} has no modules.json with a Dense module.")
    transformer, rest = _split(path, chain)
    _check_chain(path / "modules.json", rest)
    config, model_type = _read_config(transformer, rest)
    settings = JsonObject.read_optional(path / "config_sentence_transformers.json")
    prompts, default_prompt = _prompts(settings)
    folder = transformer.path if transformer else _first_folder(path, rest)
    return Layout(
        path=path,
        config=dict(config.data),
        model_type=model_type,
        architectures=config.strings("architectures"),
        transformer_path=folder,
        modules=rest,
        has_sentence_transformers=chain is not None,
        prompts=prompts,
        default_prompt_name=default_prompt,
        similarity=_similarity(settings),
        truncate_dim=settings.integer("truncate_dim", None),
        kind=_kind(settings, rest, config.data, chain is not None),
        transformer=transformer,
        tokenizer_max_length=_tokenizer_max_length(folder),
        st_config=dict(settings.data),
    )


def _laya_layout(path: Path, dense_path: str | None) -> Layout:
    """A Laya checkpoint: its parts lie in folders of their own."""
    if dense_path is not None:
        raise LoadError(f"--dense-path {dense_path!r} cannot be used: {path} is a Laya checkpoint; leave it out.")
    folder = path / laya.ENCODER_FOLDER
    config = JsonObject.read(folder / "config.json")
    return Layout(
        path=path,
        config=dict(config.data),
        model_type=config.string("model_type"),
        architectures=config.strings("architectures"),
        transformer_path=folder,
        weights_folder=path,
        tokenizer_folder=path / laya.TOKENIZER_FOLDER,
        tensor_prefix=laya.ENCODER_PREFIX,
        transformer=TransformerSpec(folder, max_seq_length=laya.read_laya(path).max_length),
    )


def max_input_length(layout: Layout, position_offset: int) -> int | None:
    """Tokens one input may have, special tokens included; None where nothing in the checkpoint limits it.

    An explicit max_seq_length counts, bounded by the number of positions. Without it the smallest of the positions,
    the trained positions and the tokenizer's limit counts, as in sentence-transformers, which writes the length into
    the tokenizer since version 5.4.

    Args:
        layout: The checkpoint.
        position_offset: First position id of the family: 2 for RoBERTa-like models, else 0.

    Raises:
        LoadError: A limit in config.json is not a whole number of at least 1.
    """
    positions = _config_integer(layout, "max_position_embeddings")
    if positions is not None:
        positions -= position_offset
    else:
        positions = _config_integer(layout, "n_positions")
    if layout.max_seq_length is not None:
        return layout.max_seq_length if positions is None else min(layout.max_seq_length, positions)
    limits = (positions, _config_integer(layout, "max_trained_positions"), layout.tokenizer_max_length)
    return min((limit for limit in limits if limit is not None), default=None)


def _read_modules(path: Path) -> tuple[ModuleSpec, ...] | None:
    file = path / "modules.json"
    if not file.is_file():
        return None
    entries = read_json(file)
    if not isinstance(entries, list) or not entries:
        raise LoadError(f"{file} must hold a list of at least one module; replace the file.")
    chain = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise LoadError(f"{file}: entry {number} is {entry!r}; it must be an object with 'type' and 'path'.")
        module = JsonObject(file, entry)
        chain.append(read_module(path, module.string("path", ""), module.string("type"), file))
    return tuple(spec for spec in chain if spec is not None)


def _split(path: Path, chain: tuple[ModuleSpec, ...] | None) -> tuple[TransformerSpec | None, tuple[ModuleSpec, ...]]:
    """The transformer and what follows it; a Router or a static embedding stays at the head of the rest."""
    if chain is None:
        return transformer_spec(path), ()
    first = chain[0] if chain else None
    if isinstance(first, TransformerSpec):
        return first, chain[1:]
    if isinstance(first, RouterSpec):
        nested = (spec for route in first.routes.values() for spec in route)
        return next((spec for spec in nested if isinstance(spec, TransformerSpec)), None), chain
    if isinstance(first, StaticEmbeddingSpec | SparseStaticEmbeddingSpec):
        return None, chain
    raise LoadError(
        f"{path / 'modules.json'}: the first module must be a Transformer, a StaticEmbedding, a SparseStaticEmbedding "
        "or a Router; this checkpoint starts with something else and cannot be served."
    )


def _first_folder(path: Path, rest: tuple[ModuleSpec, ...]) -> Path:
    first = rest[0]
    return first.path if isinstance(first, StaticEmbeddingSpec | SparseStaticEmbeddingSpec) else path


def _read_config(transformer: TransformerSpec | None, rest: tuple[ModuleSpec, ...]) -> tuple[JsonObject, str]:
    if transformer is None:
        sparse = isinstance(rest[0], SparseStaticEmbeddingSpec)
        return JsonObject(Path("config.json"), {}), "sparse_static_embedding" if sparse else "static_embedding"
    config = JsonObject.read(transformer.path / "config.json")
    return config, config.string("model_type")


def _check_chain(file: Path, rest: tuple[ModuleSpec, ...]) -> None:
    """Refuse a second input module or pooling, and widths that do not fit."""
    inputs = (TransformerSpec, StaticEmbeddingSpec, SparseStaticEmbeddingSpec, RouterSpec)
    for number, spec in enumerate(rest):
        if isinstance(spec, inputs) and not (number == 0 and not isinstance(spec, TransformerSpec)):
            raise LoadError(f"{file}: {_name(spec)} follows other modules; it can only be the first module.")
    if sum(isinstance(spec, PoolingSpec) for spec in rest) > 1:
        raise LoadError(f"{file}: there is more than one Pooling module; at most one is supported.")
    widths: dict[str, int | None] = {SENTENCE: None, TOKENS: None}
    for spec in rest:
        _check_width(widths, spec, file)


def _check_width(widths: dict[str, int | None], spec: ModuleSpec, file: Path) -> None:
    if isinstance(spec, PoolingSpec):
        widths[SENTENCE] = None if spec.dimension is None else spec.dimension * len(spec.modes)
    elif isinstance(spec, DenseSpec):
        _same_width(widths[spec.input_name], spec.in_features, spec.path, "in_features")
        widths[spec.output_name] = spec.out_features
    elif isinstance(spec, LayerNormSpec):
        _same_width(widths[SENTENCE], spec.dimension, spec.path, "dimension")


def _same_width(before: int | None, width: int, folder: Path, key: str) -> None:
    if before is not None and before != width:
        raise LoadError(
            f"{folder / 'config.json'}: {key!r} is {width}, but the module before it gives vectors of width {before}; "
            "the two must be equal."
        )


def _name(spec: ModuleSpec) -> str:
    return type(spec).__name__.removesuffix("Spec")


def _replace_dense(path: Path, chain: tuple[ModuleSpec, ...], dense_path: str) -> tuple[ModuleSpec, ...]:
    places = [number for number, spec in enumerate(chain) if isinstance(spec, DenseSpec)]
    if len(places) != 1:
        raise LoadError(
            f"--dense-path {dense_path!r} cannot be used: {path / 'modules.json'} has {len(places)} Dense modules, and "
            "it replaces exactly one; leave it out."
        )
    folder = path / relative_path(dense_path, Path("dense_path"), "value")
    if not (folder / "config.json").is_file():
        found = sorted(file.parent.name for file in path.glob("*Dense*/config.json"))
        raise LoadError(f"--dense-path {dense_path!r} does not exist in {path}; there are {', '.join(found)}.")
    old = chain[places[0]]
    assert isinstance(old, DenseSpec)
    new = replace(read_dense(folder), input_name=old.input_name, output_name=old.output_name)
    return (*chain[: places[0]], new, *chain[places[0] + 1 :])


def _prompts(settings: JsonObject) -> tuple[dict[str, str], str | None]:
    prompts = {}
    for name, text in settings.mapping("prompts").items():
        if text is not None and not isinstance(text, str):
            raise LoadError(f"{settings.file}: prompt {name!r} of 'prompts' is {text!r}; it must be a string.")
        prompts[name] = text or ""
    default = settings.string("default_prompt_name", None)
    if default is not None and default not in prompts:
        raise settings.wrong("default_prompt_name", f"null or a name of 'prompts' ({', '.join(prompts) or 'empty'})")
    return prompts, default


def _similarity(settings: JsonObject) -> str | None:
    name = settings.string("similarity_fn_name", None)
    if name is not None and name not in _SIMILARITIES:
        raise settings.wrong("similarity_fn_name", f"null or one of {', '.join(_SIMILARITIES)}")
    return "MaxSim" if name == "maxsim" else name


def _kind(
    settings: JsonObject, modules: tuple[ModuleSpec, ...], config: Mapping[str, Any], listed: bool
) -> Kind | None:
    name = settings.string("model_type", None)
    if name is not None:
        if name not in _KINDS:
            raise settings.wrong("model_type", f"one of {', '.join(_KINDS)}")
        return _KINDS[name]
    if not listed:
        return "CrossEncoder" if any(key in config for key in _CROSS_ENCODER_KEYS) else None
    nested = [spec for m in modules if isinstance(m, RouterSpec) for route in m.routes.values() for spec in route]
    return _kind_of_modules((*modules, *nested))


def _kind_of_modules(modules: tuple[ModuleSpec, ...]) -> Kind:
    if any(isinstance(spec, SpladePoolingSpec | SparseStaticEmbeddingSpec) for spec in modules):
        return "SparseEncoder"
    if any(isinstance(spec, LogitScoreSpec) for spec in modules):
        return "CrossEncoder"
    pooled = any(isinstance(spec, PoolingSpec | StaticEmbeddingSpec) for spec in modules)
    late = any(isinstance(spec, DenseSpec) and spec.output_name == TOKENS for spec in modules)
    if any(isinstance(spec, MultiVectorMaskSpec) for spec in modules) or (late and not pooled):
        return "MultiVectorEncoder"
    return "SentenceTransformer"


def _tokenizer_max_length(folder: Path) -> int | None:
    value = JsonObject.read_optional(folder / "tokenizer_config.json").data.get("model_max_length")
    sane = isinstance(value, int) and not isinstance(value, bool) and 0 < value < _UNLIMITED
    return value if sane else None


def _config_integer(layout: Layout, key: str) -> int | None:
    """A limit of config.json, or of its ``text_config`` in multimodal checkpoints."""
    config = JsonObject(layout.transformer_path / "config.json", layout.config)
    if config.data.get(key) is None:
        config = JsonObject(config.file, config.mapping("text_config"))
    # -1 is how some configs write "relative positions only".
    value: int | None = config.integer(key, None, minimum=-1)
    return value if value is None or value > 0 else None
