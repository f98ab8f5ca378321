"""Tiny random checkpoints of every family in their hub layout, tokenizer included; made once per test process.

``checkpoint("bert")`` is a sentence-transformers folder, ``checkpoint("bert", head="cls")`` a classifier. Weights come
from a fixed seed and are spread out, so that a swapped tensor, a lost bias or a leak between sequences shows.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests import tiny_tokenizers as tokenizers

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

Config = dict[str, Any]
VOCABULARY = 1024
WIDTH = 64

# Configurations -----------------------------------------------------------------------------------------------------

ENCODER: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
DECODER: Config = {**ENCODER, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
ROBERTA: Config = {**ENCODER, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
DEBERTA: Config = {
    **ENCODER,
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "max_relative_positions": -1,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "pad_token_id": 0,
}
LLAMA: Config = {**DECODER, "pad_token_id": 3}
QWEN: Config = {**DECODER, "pad_token_id": 0}
EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING: Config = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4: Config = {
    **DECODER,
    **SLIDING,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
}
DELTANET: Config = {
    **QWEN,
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}
MODERNBERT: Config = {
    **ENCODER,
    "num_hidden_layers": 4,
    "local_attention": 16,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one checkpoint is made."""

    config_class: str
    config: Config
    tokenizer: Callable[[], Any]
    pooling: str
    classifier_labels: int = 1
    dense: int | None = None  # width of a Dense module after pooling
    # Rewrites the saved folder into the layout of a remote-code repository.
    disguise: Callable[[Path], None] | None = None


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    config: Config = json.loads(file.read_text())
    config.update(changes)
    config = {key: value for key, value in config.items() if value is not None}
    file.write_text(json.dumps(config, indent=2))


def rename_tensors(folder: Path, rename: Callable[[str], str]) -> None:
    """Rename the tensors of model.safetensors."""
    file = folder / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def as_model_type(model_type: str) -> Callable[[Path], None]:
    """Only the model type differs, and the direction is implied by it."""

    def disguise(folder: Path) -> None:
        edit_config(folder, model_type=model_type, is_causal=None)

    return disguise


NOMIC_OLD_KEYS: Config = {
    "n_embd": WIDTH,
    "n_head": 4,
    "n_layer": 2,
    "n_inner": 96,
    "n_positions": 512,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
}


def old_nomic(folder: Path) -> None:
    """The keys of nomic-embed-text-v1."""
    kept = {"vocab_size": VOCABULARY, "type_vocab_size": 2, "model_type": "nomic_bert", "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(kept | NOMIC_OLD_KEYS, indent=2))


def alibaba_new(folder: Path) -> None:
    """model_type "new" with its prefix and fixed NTK scaling, as in gte-*-en-v1.5."""
    edit_config(
        folder,
        model_type="new",
        architectures=["NewModel"],
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling={"type": "ntk", "factor": 2.0},
        layer_norm_type="layer_norm",
        logn_attention_scale=False,
        pack_qkv=True,
        position_embedding_type="rope",
        auto_map={"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    )
    rename_tensors(folder, lambda name: f"new.{name}")


JINA_TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
JINA_RANK = 4


def jina_hub(folder: Path) -> None:
    """jina-embeddings-v3: XLM-RoBERTa's model type, adapters stacked as parametrizations of every weight."""
    edit_config(
        folder,
        model_type="xlm-roberta",
        architectures=["XLMRobertaModel"],
        rope_parameters=None,
        position_embedding_type="rotary",
        rotary_emb_base=20000.0,
        lora_adaptations=JINA_TASKS,
        lora_rank=JINA_RANK,
        lora_alpha=1,
        auto_map={"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    )
    generator = torch.Generator().manual_seed(5)
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        adapted = name.endswith(".weight") and tensor.ndim == 2
        if not adapted:
            tensors[f"roberta.{name}"] = tensor
            continue
        stem = f"roberta.{name}".removesuffix(".weight") + ".parametrizations.weight"
        tensors[f"{stem}.original"] = tensor
        rows, columns = tensor.shape
        embedding = "embeddings" in name
        first = (len(JINA_TASKS), rows, JINA_RANK) if embedding else (len(JINA_TASKS), JINA_RANK, columns)
        second = (len(JINA_TASKS), JINA_RANK, columns) if embedding else (len(JINA_TASKS), rows, JINA_RANK)
        tensors[f"{stem}.0.lora_A"] = torch.randn(first, generator=generator) * 0.2
        tensors[f"{stem}.0.lora_B"] = torch.randn(second, generator=generator) * 0.2
    save_file(tensors, file, metadata={"format": "pt"})


def jina_peft(folder: Path) -> None:
    """The converted jina-embeddings-v3: one PEFT folder for each task."""
    generator = torch.Generator().manual_seed(6)
    for task in ("retrieval_query", "text_matching"):
        target = folder / task
        target.mkdir()
        tensors = {}
        for layer in range(2):
            for name, shape in (("self_attn.q_proj", (WIDTH, WIDTH)), ("mlp.fc1", (96, WIDTH))):
                stem = f"base_model.model.layers.{layer}.{name}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(JINA_RANK, shape[1], generator=generator) * 0.2
                tensors[f"{stem}.lora_B.weight"] = torch.randn(shape[0], JINA_RANK, generator=generator) * 0.2
        stem = "base_model.model.embeddings.word_embeddings"
        tensors[f"{stem}.lora_embedding_A"] = torch.randn(JINA_RANK, VOCABULARY, generator=generator) * 0.2
        tensors[f"{stem}.lora_embedding_B"] = torch.randn(WIDTH, JINA_RANK, generator=generator) * 0.2
        save_file(tensors, target / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": JINA_RANK, "lora_alpha": 8}
        (target / "adapter_config.json").write_text(json.dumps(settings))


CLS, MEAN, LAST = "cls", "mean", "lasttoken"

RECIPES: dict[str, Recipe] = {
    "bert": Recipe("BertConfig", {**ENCODER, "pad_token_id": 0}, tokenizers.bert, MEAN),
    "roberta": Recipe("RobertaConfig", ROBERTA, tokenizers.roberta, CLS, classifier_labels=3),
    "xlm-roberta": Recipe("XLMRobertaConfig", ROBERTA, tokenizers.xlmr, CLS),
    "camembert": Recipe("CamembertConfig", ROBERTA, tokenizers.xlmr, MEAN),
    "distilbert": Recipe(
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
        tokenizers.bert_without_types,
        MEAN,
        classifier_labels=3,
    ),
    "electra": Recipe("ElectraConfig", {**ENCODER, "embedding_size": 32}, tokenizers.bert, CLS),
    "albert": Recipe("AlbertConfig", {**ENCODER, "embedding_size": 32}, tokenizers.bert, MEAN),
    "mpnet": Recipe("MPNetConfig", {**ENCODER, "max_position_embeddings": 514}, tokenizers.mpnet, MEAN),
    "deberta-v2": Recipe("DebertaV2Config", DEBERTA, tokenizers.deberta, CLS),
    "deberta-v2-xlarge": Recipe(
        "DebertaV2Config",
        {**DEBERTA, "share_att_key": False, "conv_kernel_size": 3, "conv_act": "gelu", "type_vocab_size": 2},
        tokenizers.deberta,
        CLS,
    ),
    "modernbert": Recipe("ModernBertConfig", MODERNBERT, tokenizers.modernbert, CLS),
    "modernbert-mean": Recipe(
        "ModernBertConfig",
        {**MODERNBERT, "classifier_pooling": "mean"},
        tokenizers.modernbert,
        MEAN,
        classifier_labels=3,
    ),
    "nomic_bert": Recipe("NomicBertConfig", ENCODER, tokenizers.bert, MEAN),
    "nomic_bert-old": Recipe(
        "NomicBertConfig",
        {**ENCODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        tokenizers.bert,
        MEAN,
        disguise=old_nomic,
    ),
    "gte": Recipe("GteConfig", ENCODER, tokenizers.xlmr, CLS),
    "gte-new": Recipe("GteConfig", {**ENCODER, "type_vocab_size": 0}, tokenizers.xlmr, CLS, disguise=alibaba_new),
    "jina_embeddings_v3": Recipe(
        "JinaEmbeddingsV3Config", {**ENCODER, "max_position_embeddings": 514}, tokenizers.xlmr, MEAN
    ),
    "jina_embeddings_v3-hub": Recipe(
        "JinaEmbeddingsV3Config",
        {**ENCODER, "max_position_embeddings": 514, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
        tokenizers.xlmr,
        MEAN,
        disguise=jina_hub,
    ),
    "jina_embeddings_v3-peft": Recipe(
        "JinaEmbeddingsV3Config",
        {**ENCODER, "max_position_embeddings": 514},
        tokenizers.xlmr,
        MEAN,
        disguise=jina_peft,
    ),
    "eurobert": Recipe(
        "EuroBertConfig",
        {**DECODER, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "mask_token_id": 4},
        tokenizers.roberta,
        MEAN,
    ),
    "ultrabert": Recipe(
        "UltrabertConfig",
        {**DECODER, "num_hidden_layers": 3, "sliding_window": 8, "prediction_head_size": 32},
        tokenizers.modernbert,
        MEAN,
    ),
    "llama": Recipe("LlamaConfig", LLAMA, tokenizers.llama, LAST),
    "llama-bidirec": Recipe("LlamaConfig", {**LLAMA, "is_causal": False}, tokenizers.llama, MEAN),
    "llama_bidirec": Recipe(
        "LlamaConfig", {**LLAMA, "is_causal": False}, tokenizers.llama, MEAN, disguise=as_model_type("llama_bidirec")
    ),
    "mistral": Recipe("MistralConfig", {**LLAMA, "sliding_window": 16}, tokenizers.llama, LAST),
    "ministral": Recipe("MinistralConfig", {**LLAMA, **SLIDING}, tokenizers.llama, LAST),
    "ministral3": Recipe("Ministral3Config", LLAMA, tokenizers.llama, LAST),
    "ministral3_bidirec": Recipe(
        "Ministral3Config",
        {**LLAMA, "is_causal": False},
        tokenizers.llama,
        MEAN,
        disguise=as_model_type("ministral3_bidirec"),
    ),
    "qwen2": Recipe(
        "Qwen2Config",
        {**QWEN, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        tokenizers.qwen,
        LAST,
    ),
    "qwen2-bidirec": Recipe("Qwen2Config", {**QWEN, "is_causal": False}, tokenizers.qwen, LAST),
    "qwen3": Recipe("Qwen3Config", QWEN, tokenizers.qwen, LAST),
    "qwen3-noeos": Recipe("Qwen3Config", QWEN, tokenizers.qwen_without_end, LAST),
    "qwen3-bidirec": Recipe("Qwen3Config", {**QWEN, "is_causal": False}, tokenizers.qwen, MEAN),
    "qwen3_moe": Recipe("Qwen3MoeConfig", {**QWEN, **EXPERTS, "norm_topk_prob": True}, tokenizers.qwen, LAST),
    "gemma": Recipe("GemmaConfig", DECODER, tokenizers.gemma, LAST),
    "gemma2": Recipe(
        "Gemma2Config",
        {**DECODER, "sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
        tokenizers.gemma,
        LAST,
    ),
    "gemma3_text": Recipe(
        "Gemma3TextConfig", {**DECODER, **SLIDING, "query_pre_attn_scalar": 16}, tokenizers.gemma, LAST
    ),
    "embeddinggemma": Recipe(
        "Gemma3TextConfig",
        {**DECODER, **SLIDING, "query_pre_attn_scalar": 16, "use_bidirectional_attention": True},
        tokenizers.gemma,
        MEAN,
        dense=48,
    ),
    "gemma4_text": Recipe("Gemma4TextConfig", GEMMA4, tokenizers.gemma, LAST),
    "gemma4_text-moe": Recipe(
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        tokenizers.gemma,
        LAST,
    ),
    "qwen3_5_text": Recipe("Qwen3_5TextConfig", DELTANET, tokenizers.qwen, LAST),
    "qwen3_5_moe_text": Recipe(
        "Qwen3_5MoeTextConfig", {**DELTANET, **EXPERTS, "shared_expert_intermediate_size": 16}, tokenizers.qwen, LAST
    ),
}

# Families without a transformers class: config.json as published, tensors made from the shapes of the native class.
JINA: Config = {**ENCODER, "model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
NATIVE: dict[str, Config] = {
    "jina_bert": {
        **JINA,
        "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    },
    "jina_bert-6-heads": {
        **JINA,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    },
    "jina_bert_code": {
        **JINA,
        "auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"},
    },
    "nomic_bert-moe": {
        **NOMIC_OLD_KEYS,
        "model_type": "nomic_bert",
        "vocab_size": VOCABULARY,
        "type_vocab_size": 1,
        "n_layer": 4,
        "activation_function": "gelu",
        "qkv_proj_bias": True,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "num_experts": 4,
        "moe_top_k": 2,
        "moe_every_n_layers": 2,
        "moe_normalize_expert_weights": False,
    },
}

HEADS = {
    "base": "AutoModel",
    "cls": "AutoModelForSequenceClassification",
    "mlm": "AutoModelForMaskedLM",
    "lm": "AutoModelForCausalLM",
    "token-cls": "AutoModelForTokenClassification",
}

# Making --------------------------------------------------------------------------------------------------------------


@functools.cache
def root() -> Path:
    """A folder that lasts as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-checkpoints-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def checkpoint(name: str, head: str = "base") -> Path:
    """The folder of a checkpoint, made at the first call.

    Args:
        name: A key of ``RECIPES`` or ``NATIVE``.
        head: A key of ``HEADS``; only "base" folders are sentence-transformers models.
    """
    folder = root() / (name if head == "base" else f"{name}-{head}")
    if name in NATIVE:
        make_native(name, folder)
    else:
        make(RECIPES[name], folder, head)
    return folder


@functools.cache
def plain(name: str) -> Path:
    """The checkpoint as transformers saves it, before any disguise: what its own classes load."""
    folder = root() / f"{name}-plain"
    recipe = RECIPES[name]
    model(recipe, "base").save_pretrained(folder)
    return folder


def model(recipe: Recipe, head: str) -> Any:
    """The transformers model of a recipe, in eval mode."""
    config = getattr(transformers, recipe.config_class)(**recipe.config)
    if head in ("cls", "token-cls"):
        labels = recipe.classifier_labels if head == "cls" else 5
        names = ["negative", "neutral", "positive"] if labels == 3 else [f"LABEL_{index}" for index in range(labels)]
        config.num_labels = labels
        config.id2label = dict(enumerate(names))
        config.label2id = {label: index for index, label in enumerate(names)}
    torch.manual_seed(0)
    built = getattr(transformers, HEADS[head]).from_config(config, dtype=torch.float32)
    return shake(built).eval()


def shake(module: nn.Module) -> nn.Module:
    """Make zero biases and unit norms distinct and spread the weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2 or parameter.std() < 1e-6:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.mul_(4.0)
    return module


def make(recipe: Recipe, folder: Path, head: str) -> None:
    """Save a recipe's model and tokenizer; base folders become sentence-transformers models."""
    model(recipe, head).save_pretrained(folder)
    recipe.tokenizer().save_pretrained(folder)
    if head == "base":
        write_modules(folder, recipe.pooling, WIDTH, recipe.dense)
    if recipe.disguise is not None:
        recipe.disguise(folder)


def make_native(name: str, folder: Path) -> None:
    """Save a published config with random tensors under the published names."""
    from infinity_bento.checkpoints.families import family_of
    from infinity_bento.checkpoints.remote_layouts import normalise
    from infinity_bento.models.backbone import native_builder

    config = NATIVE[name]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(0)
    built = native_builder(family_of(config, folder / "config.json"), normalise(config))()
    with torch.no_grad():
        for parameter in built.parameters():
            scale, mean = (0.1, 1.0) if parameter.ndim == 1 else (0.15, 0.0)
            parameter.normal_(mean, scale)
    save_file(built.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizers.bert().save_pretrained(folder)
    write_modules(folder, MEAN, config.get("hidden_size", WIDTH), None)


def write_modules(folder: Path, pooling: str, width: int, dense: int | None) -> None:
    """The files that make a folder a sentence-transformers model."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    chosen = {CLS: "cls_token", MEAN: "mean_tokens", LAST: "lasttoken"}[pooling]
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": width, "include_prompt": True}
        | {f"pooling_mode_{flag}": flag == chosen for flag in flags},
    )
    if dense is not None:
        identity = "torch.nn.modules.linear.Identity"
        settings = {"in_features": width, "out_features": dense, "bias": False, "activation_function": identity}
        write_json(folder / "2_Dense" / "config.json", settings)
        weight = torch.randn(dense, width, generator=torch.Generator().manual_seed(7)) * 0.1
        save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors", metadata={"format": "pt"})
        modules.append(("2_Dense", "Dense"))
    modules.append((f"{len(modules)}_Normalize", "Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": False})
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": {"sentence_transformers": "6.2.0", "transformers": transformers.__version__},
            "prompts": {"query": "query: ", "document": "passage: "},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    )


def write_json(file: Path, value: Any) -> None:
    """Write JSON, making the folder."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value, indent=2))
