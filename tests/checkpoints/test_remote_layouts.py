"""Config keys of remote-code repositories rewritten to those of the class that is built."""

from __future__ import annotations

from typing import Any

import pytest

from infinity_bento.checkpoints.remote_layouts import normalise
from infinity_bento.errors import LoadError

NOMIC = {
    "model_type": "nomic_bert",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_inner": 3072,
    "n_positions": 8192,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "max_trained_positions": 2048,
}
GTE = {"model_type": "new", "hidden_size": 768, "num_attention_heads": 12, "rope_theta": 500000}
JINA_V3 = {
    "model_type": "xlm-roberta",
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
}


def test_the_input_is_left_alone() -> None:
    before = dict(GTE)
    normalise(GTE)
    assert before == GTE


def test_nomic() -> None:
    config = normalise(NOMIC)
    assert config["hidden_size"] == 768 and config["num_attention_heads"] == 12 and config["num_hidden_layers"] == 12
    assert config["intermediate_size"] == 3072 and config["layer_norm_eps"] == 1e-12
    assert config["hidden_act"] == "silu" and config["max_position_embeddings"] == 8192
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000.0}


def test_nomic_scaling_starts_at_the_trained_length() -> None:
    config = normalise({**NOMIC, "rotary_scaling_factor": 2})
    assert config["rope_parameters"] == {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    assert config["max_position_embeddings"] == 2048


def test_nomic_inner_width_defaults_to_four_times() -> None:
    assert normalise({**NOMIC, "n_inner": None})["intermediate_size"] == 3072


def test_nomic_with_new_keys_is_untouched() -> None:
    config = {"model_type": "nomic_bert", "hidden_size": 64, "rope_parameters": {"rope_type": "default"}}
    assert normalise(config) == config


@pytest.mark.parametrize("change", [{"prenorm": True}, {"rotary_emb_fraction": 0.5}, {"rotary_emb_interleaved": True}])
def test_nomic_refusals(change: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=next(iter(change))):
        normalise({**NOMIC, **change})


def test_gte() -> None:
    config = normalise(GTE)
    assert config["model_type"] == "gte"
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert "rope_theta" not in config


def test_gte_fixed_ntk_scaling() -> None:
    rope = normalise({**GTE, "rope_scaling": {"type": "ntk", "factor": 2.0}})["rope_parameters"]
    assert rope["rope_type"] == "linear" and rope["rope_theta"] == 1_000_000.0
    assert rope["factor"] == pytest.approx(2.0 ** (2 / 64))


def test_gte_with_new_keys_is_untouched() -> None:
    rope = {"rope_type": "default", "rope_theta": 7.0}
    assert normalise({"model_type": "gte", "rope_parameters": rope})["rope_parameters"] == rope


@pytest.mark.parametrize(
    "change",
    [
        {"logn_attention_scale": True},
        {"layer_norm_type": "rms_norm"},
        {"pack_qkv": False},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    ],
)
def test_gte_refusals(change: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="GTE"):
        normalise({**GTE, **change})


def test_jina_v3() -> None:
    config = normalise(JINA_V3)
    assert config["model_type"] == "jina_embeddings_v3"
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 20000.0}
    assert "auto_map" not in config


def test_jina_v3_with_absolute_positions_is_refused() -> None:
    with pytest.raises(LoadError, match=r"position_embedding_type='absolute'.*'rotary'"):
        normalise({**JINA_V3, "position_embedding_type": "absolute"})


@pytest.mark.parametrize(
    ("model_type", "target"),
    [("llama_bidirec", "llama"), ("ministral3_bidirec", "ministral3"), ("qwen3_bidirec", "qwen3")],
)
def test_bidirectional_aliases(model_type: str, target: str) -> None:
    assert normalise({"model_type": model_type}) == {"model_type": target, "is_causal": False}


def test_bidirectional_flag() -> None:
    assert normalise({"model_type": "qwen3", "use_bidirectional_attention": True})["is_causal"] is False
    assert "is_causal" not in normalise({"model_type": "qwen3", "use_bidirectional_attention": False})
    assert normalise({"model_type": "gemma3_text", "use_bidirectional_attention": True}) == {
        "model_type": "gemma3_text",
        "use_bidirectional_attention": True,
    }


def test_gte_qwen2_is_bidirectional_unless_it_says_otherwise() -> None:
    remote = {"model_type": "qwen2", "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}
    assert normalise(remote)["is_causal"] is False
    assert normalise({**remote, "is_causal": True})["is_causal"] is True
    assert "is_causal" not in normalise({"model_type": "qwen2"})
