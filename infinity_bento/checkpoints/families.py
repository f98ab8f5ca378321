"""One table of the model families served: how each is built, run packed and pooled. Read by backbones and heads.

Free of torch and transformers, so that the supervisor can judge a checkpoint by its ``config.json`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity_bento.checkpoints import remote_layouts
from infinity_bento.core import Pooling
from infinity_bento.errors import LoadError

Config = Mapping[str, Any]

PATCHES = "infinity_bento.models.patches"
BERT_LINE = "infinity_bento.models.packed_encoder:from_twin"


def no_offset(config: Config) -> int:
    """Positions start at 0."""
    return 0


def after_padding(config: Config) -> int:
    """RoBERTa's line: the position table begins with the rows up to the padding id."""
    padding = config.get("pad_token_id")
    return (1 if padding is None else int(padding)) + 1


def two(config: Config) -> int:
    """MPNet: the padding row of its position table is fixed at 1, whatever the padding id."""
    return 2


def every_layer(config: Config) -> int:
    """Each layer has one attention."""
    return int(config["n_layers"] if "n_layers" in config else config["num_hidden_layers"])


def full_attention_layers(config: Config) -> int:
    """Only the layers named ``full_attention``; the others are recurrent."""
    return list(config["layer_types"]).count("full_attention")


def albert_layers(config: Config) -> int:
    """A layer may repeat ``inner_group_num`` shared blocks."""
    return int(config["num_hidden_layers"]) * int(config.get("inner_group_num") or 1)


@dataclass(frozen=True, slots=True)
class Heads:
    """How the heads of a family's checkpoints are shaped; None or False: the family has none.

    ``classifier`` names the layers between hidden states and labels; ``masked_lm`` those between hidden states and
    vocabulary. The names are explained where they are used, in ``infinity_bento/heads``.
    """

    classifier: str | None = None
    masked_lm: str | None = None
    token_classifier: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """What one ``model_type`` needs to be built and run packed."""

    model_type: str
    title: str
    # Build. A dotted native class "module:Class", or None for transformers' own class of this model_type.
    native_class: str | None = None
    native_encoder: str | None = None  # "module:function" that rebuilds the loaded model for the CPU
    patch: str | None = None  # module with ``install(model)`` that teaches the built model packing
    eager_only_load: bool = False  # transformers refuses to build it with another attention
    since: str | None = None  # first transformers version known to have the class, where that is recent
    # Run.
    decoder: bool = False  # causal unless the config says otherwise
    takes_token_types: bool = False
    position_offset: Callable[[Config], int] = no_offset
    task_adapters: bool = False  # the checkpoint may bring LoRA adapters that a request chooses from
    attention_layers: Callable[[Config], int] = every_layer  # expected attention calls of one forward
    forward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # Read the result.
    default_pooling: Pooling = Pooling.CLS
    poolings: frozenset[Pooling] | None = None  # None: all
    heads: Heads = Heads()
    notes: str = ""

    @property
    def causal(self) -> bool:
        """Attention direction where the config is silent."""
        return self.decoder

    def is_causal(self, config: Config) -> bool:
        """Attention direction of a checkpoint with this (normalised) config."""
        if not self.decoder or config.get("use_bidirectional_attention") is True:
            return False
        given = config.get("is_causal")
        return True if given is None else bool(given)


def encoder(model_type: str, title: str, **kwargs: Any) -> Family:
    """A bidirectional family, pooled by CLS unless told otherwise."""
    return Family(model_type, title, **kwargs)


def decoder(model_type: str, title: str, **kwargs: Any) -> Family:
    """A causal family, pooled by its last token unless told otherwise."""
    kwargs.setdefault("heads", Heads(classifier="last_token", token_classifier=True))
    return Family(
        model_type,
        title,
        decoder=True,
        forward_kwargs={"use_cache": False},
        default_pooling=Pooling.LAST_TOKEN,
        **kwargs,
    )


ROBERTA_HEADS = Heads(classifier="roberta", masked_lm="roberta", token_classifier=True)
ROPE_ENCODER_HEADS = Heads(classifier="bert", masked_lm="bert", token_classifier=True)
MODERN_HEADS = Heads(classifier="modernbert", masked_lm="modernbert", token_classifier=True)


def roberta_like(model_type: str, title: str) -> Family:
    """BERT with positions after the padding id."""
    return encoder(
        model_type,
        title,
        takes_token_types=True,
        position_offset=after_padding,
        native_encoder=BERT_LINE,
        heads=ROBERTA_HEADS,
    )


TABLE: tuple[Family, ...] = (
    encoder(
        "bert",
        "BERT",
        takes_token_types=True,
        native_encoder=BERT_LINE,
        heads=Heads(classifier="bert", masked_lm="bert", token_classifier=True),
    ),
    roberta_like("roberta", "RoBERTa"),
    roberta_like("xlm-roberta", "XLM-RoBERTa"),
    roberta_like("camembert", "CamemBERT"),
    encoder(
        "distilbert",
        "DistilBERT",
        native_encoder=BERT_LINE,
        heads=Heads(classifier="distilbert", masked_lm="distilbert", token_classifier=True),
    ),
    encoder(
        "electra",
        "ELECTRA",
        takes_token_types=True,
        native_encoder=BERT_LINE,
        heads=Heads(classifier="electra", token_classifier=True),
    ),
    encoder(
        "albert",
        "ALBERT",
        takes_token_types=True,
        attention_layers=albert_layers,
        heads=Heads(classifier="albert", masked_lm="albert", token_classifier=True),
    ),
    encoder(
        "mpnet",
        "MPNet",
        patch=f"{PATCHES}.mpnet",
        eager_only_load=True,
        position_offset=two,
        heads=Heads(classifier="roberta", masked_lm="roberta", token_classifier=True),
        notes="own attention with a shared relative bias",
    ),
    encoder(
        "deberta-v2",
        "DeBERTa v2 and v3",
        patch=f"{PATCHES}.deberta",
        eager_only_load=True,
        takes_token_types=True,
        heads=Heads(classifier="deberta-v2", masked_lm="deberta-v2", token_classifier=True),
        notes="own disentangled attention, computed in query blocks",
    ),
    encoder("modernbert", "ModernBERT", heads=MODERN_HEADS),
    encoder("nomic_bert", "NomicBERT v1 and v1.5", takes_token_types=True, heads=ROPE_ENCODER_HEADS),
    encoder(
        "nomic_bert_moe",
        "NomicBERT v2 (mixture of experts)",
        native_class="infinity_bento.models.nomic_moe:NomicMoeModel",
        takes_token_types=True,
    ),
    encoder("gte", "GTE (Alibaba 'new')", takes_token_types=True, since="5.24", heads=ROPE_ENCODER_HEADS),
    encoder(
        "jina_bert",
        "Jina BERT v2",
        native_class="infinity_bento.models.jina_bert:JinaBertModel",
        takes_token_types=True,
        heads=Heads(classifier="bert"),
        notes="ALiBi",
    ),
    encoder(
        "jina_bert_code",
        "Jina BERT v2 code",
        native_class="infinity_bento.models.jina_code:JinaCodeModel",
        takes_token_types=True,
        notes="ALiBi",
    ),
    encoder(
        "jina_embeddings_v3",
        "Jina Embeddings v3",
        takes_token_types=True,
        task_adapters=True,
        heads=Heads(classifier="roberta", masked_lm=ROPE_ENCODER_HEADS.masked_lm, token_classifier=True),
        notes="task adapters",
    ),
    encoder("eurobert", "EuroBERT", heads=Heads(classifier="eurobert", masked_lm="linear", token_classifier=True)),
    encoder("ultrabert", "UltraBERT", since="5.24", heads=Heads(classifier="ultrabert", token_classifier=True)),
    decoder("llama", "Llama"),
    decoder("mistral", "Mistral"),
    decoder("ministral", "Ministral"),
    decoder("ministral3", "Ministral 3"),
    decoder("qwen2", "Qwen2"),
    decoder("qwen3", "Qwen3"),
    decoder("qwen3_moe", "Qwen3 MoE"),
    decoder("gemma", "Gemma"),
    decoder("gemma2", "Gemma 2", eager_only_load=True, notes="soft-capped attention scores"),
    decoder("gemma3_text", "Gemma 3 and EmbeddingGemma"),
    decoder("gemma4_text", "Gemma 4"),
    decoder(
        "qwen3_5_text",
        "Qwen3.5",
        patch=f"{PATCHES}.deltanet",
        attention_layers=full_attention_layers,
        notes="gated DeltaNet layers between the attention layers",
    ),
    decoder(
        "qwen3_5_moe_text",
        "Qwen3.5 MoE",
        patch=f"{PATCHES}.deltanet",
        attention_layers=full_attention_layers,
        notes="gated DeltaNet layers between the attention layers",
    ),
)

# Models that are a table of token vectors, without a transformer.
STATIC = Family(
    "static_embedding", "Static embeddings", default_pooling=Pooling.MEAN, poolings=frozenset({Pooling.MEAN})
)

BY_MODEL_TYPE: Mapping[str, Family] = {family.model_type: family for family in TABLE}


def family_of(config: Config, file: Path) -> Family:
    """The family of a checkpoint.

    Args:
        config: The content of its ``config.json``.
        file: Where that came from; named in errors.

    Raises:
        LoadError: If the model type is missing or unknown, or the checkpoint needs code from its own repository.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise LoadError(f"{file} has no model_type, so the architecture is unknown; it must be one of: {supported()}.")
    known = remote_layouts.known_model_type(config)
    if known is None:
        code = remote_layouts.remote_code(config)
        raise LoadError(
            f"{file}: model_type {model_type!r} runs code of its own repository ({code}), which infinity-bento never "
            f"executes; use a checkpoint of one of these model types without such code: {supported()}."
        )
    family = BY_MODEL_TYPE.get(known)
    if family is None:
        raise LoadError(f"{file}: model_type {model_type!r} is not supported; supported are: {supported()}.")
    return family


def supported() -> str:
    """The supported model types, comma-separated, remote aliases included."""
    return ", ".join(sorted({*BY_MODEL_TYPE, *remote_layouts.ALIASES}))


def refuse_generative(config: Config, file: Path, *, has_modules: bool, pooling: Pooling | None) -> None:
    """Stop a text generator that nothing declares to be an embedder.

    Args:
        config: The content of ``config.json``.
        file: Where that came from; named in the error.
        has_modules: Whether the checkpoint has a ``modules.json``.
        pooling: The pooling that the user asked for, if any.

    Raises:
        LoadError: If the architecture is a language model, there is no ``modules.json`` and no pooling was given.
    """
    if has_modules or pooling is not None:
        return
    for architecture in config.get("architectures") or ():
        if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            raise LoadError(
                f"{file}: architecture {architecture} generates text and the checkpoint has no modules.json that makes "
                "it an embedding model; serve an embedding checkpoint, or set the pooling option (for example to "
                "lasttoken) if its hidden states are meant as embeddings."
            )


def length_limit(family: Family, config: Config) -> int | None:
    """Tokens of the longest input the position table or the rotary range holds; None where the config is silent."""
    for key in ("max_position_embeddings", "n_positions", "max_trained_positions"):
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value - family.position_offset(config)
    return None
