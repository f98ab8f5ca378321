"""The table of families: which checkpoint is which, and what is refused with which sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity_bento.checkpoints.families import (
    BY_MODEL_TYPE,
    TABLE,
    family_of,
    length_limit,
    refuse_generative,
    supported,
)
from infinity_bento.core import Pooling
from infinity_bento.errors import LoadError

FILE = Path("some/config.json")


def test_the_table_needs_no_torch() -> None:
    code = (
        "import sys; import infinity_bento.checkpoints.families; "
        "assert not {'torch', 'transformers', 'bentoml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_model_types_are_unique() -> None:
    assert len(BY_MODEL_TYPE) == len(TABLE)


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.model_type)
def test_defaults_follow_the_direction(family: Any) -> None:
    assert family.default_pooling is (Pooling.LAST_TOKEN if family.decoder else Pooling.CLS)
    assert family.causal is family.decoder
    assert ("use_cache" in family.forward_kwargs) is family.decoder


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        ({"model_type": "bert"}, "bert"),
        ({"model_type": "new", "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"}}, "gte"),
        ({"model_type": "gte", "auto_map": {"AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel"}}, "gte"),
        ({"model_type": "llama_bidirec"}, "llama"),
        ({"model_type": "ministral3_bidirec"}, "ministral3"),
        (
            {"model_type": "bert", "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.X"}},
            "jina_bert",
        ),
        (
            {"model_type": "bert", "_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"},
            "jina_bert_code",
        ),
        (
            {
                "model_type": "xlm-roberta",
                "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
            },
            "jina_embeddings_v3",
        ),
        ({"model_type": "nomic_bert"}, "nomic_bert"),
        (
            {
                "model_type": "nomic_bert",
                "n_embd": 768,
                "activation_function": "swiglu",
                "qkv_proj_bias": False,
                "mlp_fc1_bias": False,
                "mlp_fc2_bias": False,
            },
            "nomic_bert",
        ),
        ({"model_type": "nomic_bert", "n_embd": 768, "num_experts": 8}, "nomic_bert_moe"),
        ({"model_type": "qwen2", "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}, "qwen2"),
        ({"model_type": "bert", "auto_map": {"AutoTokenizer": "tokenization.Own"}}, "bert"),
    ],
)
def test_family_of(config: dict[str, Any], model_type: str) -> None:
    assert family_of(config, FILE).model_type == model_type


def test_unknown_model_type_lists_the_supported_ones() -> None:
    with pytest.raises(LoadError, match=r"some/config.json: model_type 'mamba' is not supported") as caught:
        family_of({"model_type": "mamba"}, FILE)
    assert "modernbert" in str(caught.value) and "new" in str(caught.value)


def test_missing_model_type_is_refused() -> None:
    with pytest.raises(LoadError, match="no model_type"):
        family_of({"architectures": ["BertModel"]}, FILE)


@pytest.mark.parametrize("model_type", ["bert", "llama", "my_own"])
def test_unknown_remote_code_is_refused(model_type: str) -> None:
    config = {"model_type": model_type, "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    with pytest.raises(LoadError, match=r"runs code of its own repository \(own\.Model\).*never"):
        family_of(config, FILE)


def test_supported_is_sorted_and_complete() -> None:
    names = supported().split(", ")
    assert names == sorted(names)
    assert set(BY_MODEL_TYPE) <= set(names)


def test_generators_need_a_layout_or_a_pooling() -> None:
    config = {"architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(LoadError, match=r"Qwen3ForCausalLM generates text.*modules\.json.*pooling"):
        refuse_generative(config, FILE, has_modules=False, pooling=None)
    refuse_generative(config, FILE, has_modules=True, pooling=None)
    refuse_generative(config, FILE, has_modules=False, pooling=Pooling.LAST_TOKEN)
    refuse_generative({"architectures": ["Qwen3Model"]}, FILE, has_modules=False, pooling=None)
    refuse_generative({}, FILE, has_modules=False, pooling=None)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 0}, 513),
        ({"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 0}, 512),
        ({"model_type": "nomic_bert", "n_positions": 8192}, 8192),
        ({"model_type": "llama"}, None),
    ],
)
def test_length_limit(config: dict[str, Any], limit: int | None) -> None:
    assert length_limit(family_of(config, FILE), config) == limit


@pytest.mark.parametrize(
    ("model_type", "config", "causal"),
    [
        ("bert", {}, False),
        ("llama", {}, True),
        ("llama", {"is_causal": None}, True),
        ("llama", {"is_causal": False}, False),
        ("gemma3_text", {"use_bidirectional_attention": True}, False),
        ("gemma4_text", {"use_bidirectional_attention": "vision"}, True),
    ],
)
def test_direction(model_type: str, config: dict[str, Any], causal: bool) -> None:
    assert BY_MODEL_TYPE[model_type].is_causal(config) is causal


@pytest.mark.parametrize(
    ("model_type", "config", "calls"),
    [
        ("bert", {"num_hidden_layers": 12}, 12),
        ("distilbert", {"n_layers": 6}, 6),
        ("albert", {"num_hidden_layers": 12, "inner_group_num": 2}, 24),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 1),
    ],
)
def test_attention_layers(model_type: str, config: dict[str, Any], calls: int) -> None:
    assert BY_MODEL_TYPE[model_type].attention_layers(config) == calls
