"""Checkpoints published with code of their own repository, mapped to classes we have. Called by families and backbones.

Nothing here runs remote code: a table names the layouts that are known to equal a native class, and ``normalise``
rewrites their config keys to that class's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from infinity_bento.errors import LoadError

Config = Mapping[str, Any]
ConfigDict = dict[str, Any]

# model_type in the file -> model_type of ours; these names exist only with remote code.
ALIASES: Mapping[str, str] = {
    "new": "gte",
    "llama_bidirec": "llama",
    "ministral3_bidirec": "ministral3",
    "qwen2_bidirec": "qwen2",
    "qwen3_bidirec": "qwen3",
}
BIDIRECTIONAL_ALIASES = frozenset(name for name in ALIASES if name.endswith("_bidirec"))

# (model_type in the file, part of an auto_map value or of _name_or_path) -> our model_type.
KNOWN_CODE: tuple[tuple[str, str, str], ...] = (
    ("bert", "jina-bert-v2-qk-post-norm", "jina_bert_code"),
    ("bert", "jina-bert-implementation", "jina_bert"),
    ("xlm-roberta", "xlm-roberta-flash-implementation", "jina_embeddings_v3"),
    ("qwen2", "modeling_qwen.Qwen2Model", "qwen2"),  # gte-Qwen2: Qwen2, bidirectional unless the config says otherwise
    ("qwen3", "JinaForRanking", "qwen3"),  # jina-reranker-v3: Qwen3 with a projector, which is a head of ours
)

# Families that began as remote code and whose layout is the one we have; a leftover auto_map says nothing more.
NATIVE_SUCCESSORS = frozenset(
    ("new", "gte", "nomic_bert", "eurobert", "ultrabert", "jina_embeddings_v3", "modernbert", *BIDIRECTIONAL_ALIASES)
)

SWIGLU = ("swiglu", "silu")
NOMIC_BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")


def remote_code(config: Config) -> str | None:
    """The remote model class that a config names in ``auto_map``, or None. Remote tokenizers do not count."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    for key in sorted(auto_map, key=lambda name: name != "AutoModel"):
        if key.startswith("AutoModel") or key == "AutoConfig":
            value = auto_map[key]
            return str(value[0] if isinstance(value, list) else value)
    return None


def known_model_type(config: Config) -> str | None:
    """The model type to build: the alias's target, a known remote layout's, or the config's own.

    Returns:
        None if the config names remote model code that is in no table. The name may still be unknown to the table of
        families; that is judged there.
    """
    model_type = str(config.get("model_type"))
    code = f"{config.get('auto_map', '')} {config.get('_name_or_path', '')}"
    for source, marker, target in KNOWN_CODE:
        if model_type == source and marker in code:
            return target
    if model_type == "nomic_bert" and needs_native_nomic(config):
        return "nomic_bert_moe"
    if model_type in NATIVE_SUCCESSORS or remote_code(config) is None:
        return ALIASES.get(model_type, model_type)
    return None


def needs_native_nomic(config: Config) -> bool:
    """Whether a NomicBERT has what transformers' class lacks: experts, biases or an ungated feed-forward."""
    if "n_embd" not in config:
        return False
    return (
        bool(config.get("num_experts"))
        or any(config.get(key, True) for key in NOMIC_BIASES)
        or config.get("activation_function", "gelu") not in SWIGLU
    )


def normalise(config: Config) -> ConfigDict:
    """The config with the keys of the class that will be built; a new dict, without remote-code keys.

    Raises:
        LoadError: If the config asks for something that the class does not do.
    """
    source = str(config.get("model_type"))
    target = known_model_type(config) or source
    result = {key: value for key, value in config.items() if key not in ("auto_map", "_name_or_path")}
    result["model_type"] = target
    if source in BIDIRECTIONAL_ALIASES:
        result["is_causal"] = False
    rewrite = REWRITES.get(target)
    return rewrite(result, config) if rewrite else result


def refuse(config: Config, title: str, **allowed: Any) -> None:
    """Raise LoadError unless each key is missing, null or has the one value that the class implements."""
    for key, wanted in allowed.items():
        value = config.get(key)
        if value is not None and value != wanted:
            raise LoadError(f"config.json: {key}={value!r} is not supported for {title}; it must be {wanted!r}.")


NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
}


def nomic(config: ConfigDict, original: Config) -> ConfigDict:
    """NomicBERT's first keys -> transformers' own."""
    if "n_embd" not in config:
        return config
    refuse(
        config, "NomicBERT", prenorm=False, rotary_emb_interleaved=False, rotary_emb_fraction=1.0, use_rms_norm=False
    )
    renamed = {NOMIC_KEYS.get(key, key): value for key, value in config.items()}
    if renamed.get("intermediate_size") is None:
        renamed["intermediate_size"] = 4 * renamed["hidden_size"]
    renamed["hidden_act"] = "silu"
    rope: ConfigDict = {"rope_type": "default", "rope_theta": float(config.get("rotary_emb_base", 10000.0))}
    renamed["max_position_embeddings"] = config.get("n_positions") or config.get("max_position_embeddings") or 2048
    if config.get("rotary_scaling_factor"):
        rope |= {"rope_type": "dynamic", "factor": float(config["rotary_scaling_factor"])}
        renamed["max_position_embeddings"] = int(config.get("max_trained_positions") or 2048)
    renamed["rope_parameters"] = rope
    return renamed


def nomic_native(config: ConfigDict, original: Config) -> ConfigDict:
    """The native class reads the first keys; the common ones are added for everybody else."""
    return config | {new: config[old] for old, new in NOMIC_KEYS.items() if old in config}


def gte(config: ConfigDict, original: Config) -> ConfigDict:
    """Alibaba's remote keys -> transformers' own, fixed NTK scaling included."""
    refuse(
        config,
        "GTE",
        position_embedding_type="rope",
        layer_norm_type="layer_norm",
        logn_attention_scale=False,
        pack_qkv=True,
    )
    scaling = config.pop("rope_scaling", None)
    theta = config.pop("rope_theta", None)
    if config.get("rope_parameters") is not None or (theta is None and scaling is None):
        return config
    base = float(theta if theta is not None else 10000.0)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    if scaling is not None:
        refuse(scaling, "GTE rope_scaling", type="ntk", rope_type="ntk", mixed_b=None)
        factor = float(scaling["factor"])
        size = config["hidden_size"] // config["num_attention_heads"]
        # The remote code divides all frequencies by factor ** (2 / size) besides scaling the base.
        config["rope_parameters"] = {
            "rope_type": "linear",
            "rope_theta": base * factor,
            "factor": factor ** (2 / size),
        }
    return config


def jina_v3(config: ConfigDict, original: Config) -> ConfigDict:
    """XLM-RoBERTa with Jina's flash code -> transformers' Jina Embeddings v3."""
    if original.get("model_type") != "xlm-roberta":
        return config
    if config.get("position_embedding_type") != "rotary":
        raise LoadError(
            f"config.json: position_embedding_type={config.get('position_embedding_type')!r} is not supported for "
            "checkpoints of xlm-roberta-flash-implementation; it must be 'rotary'."
        )
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": float(config.get("rotary_emb_base", 10000.0))}
    return config


def qwen2(config: ConfigDict, original: Config) -> ConfigDict:
    """gte-Qwen2's remote class attends in both directions unless told otherwise."""
    if remote_code(original) is not None:
        config.setdefault("is_causal", False)
    return config


def bidirectional_flag(config: ConfigDict, original: Config) -> ConfigDict:
    """``use_bidirectional_attention`` of classes that do not read it -> ``is_causal``, which all decoders read."""
    if config.pop("use_bidirectional_attention", None) is True:
        config["is_causal"] = False
    return config


REWRITES: Mapping[str, Callable[[ConfigDict, Config], ConfigDict]] = {
    "nomic_bert": nomic,
    "nomic_bert_moe": nomic_native,
    "gte": gte,
    "jina_embeddings_v3": jina_v3,
    "qwen2": qwen2,
    "llama": bidirectional_flag,
    "mistral": bidirectional_flag,
    "ministral3": bidirectional_flag,
    "qwen3": bidirectional_flag,
}
