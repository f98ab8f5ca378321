"""A tiny random Clef checkpoint in its published layout: Qwen3.5 with eight layers, joint head, tokenizer.

``tests/oracles/clef.py`` runs the vendored reference on this folder.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, normalizers

from tests import tiny
from tests import tiny_tokenizers as tokenizers

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEXT: dict[str, Any] = {
    **tiny.DELTANET,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": tiny.WIDTH,
    "num_position_embeddings": 16,
    "patch_size": 16,
}
IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
HEAD = {"hidden_size": tiny.WIDTH, "width": 32, "routing_layers": 2, "layers": 2, "heads": 2, "feedforward": 48}
REQUESTS: list[dict[str, Any]] = [
    {
        "model": "m",
        "state": {"msg": "charged twice", "b": [1, None]},
        "questions": {
            "a": {"type": "noul", "instructions": "refund?"},
            "b": {"type": "choice", "instructions": "team", "criteria": {"z": None, "a": "pay", "m": {"y": 1, "x": 2}}},
            "c": {"type": "score", "instructions": "mad?", "criteria": ["lo", "mid", "hi"]},
        },
    },
    {
        "model": "m",
        "state": "a plain text as the state, somewhat longer than the other one " * 3,
        "questions": {
            "asks": {"type": "choice", "instructions": "", "criteria": {"two": "2", "one": "", "\u00e9": "e"}},
            "sure": {"type": "noul", "instructions": {"b": 1, "a": 2}, "criteria": {"true": "it is"}},
        },
    },
    {
        "model": "m",
        "state": [],
        "questions": {"only": {"type": "choice", "criteria": {"one": None}}},
    },
]


def tokenizer() -> Any:
    """Qwen's special tokens and the two of its thinking block, which are none."""
    made = Tokenizer.from_str(tokenizers.byte_bpe_json(tuple(SPECIAL)))
    made.normalizer = normalizers.NFC()
    made.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return tokenizers.fast(made, {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}, 4096)


def language_model(seed: int = 0) -> Any:
    """The language model, with an untouched vision tower beside it."""
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False, **IDS)
    torch.manual_seed(seed)
    return tiny.shake(transformers.Qwen3_5ForConditionalGeneration(config)).float().eval()


@functools.cache
def folder() -> Path:
    """The checkpoint."""
    from infinity_bento.heads.decisions.clef_head import HeadShape, JointHead

    path = tiny.root() / "clef"
    language_model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    (path / "joint_head_config.json").write_text(json.dumps(HEAD))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, parameter in JointHead(HeadShape(**HEAD)).named_parameters():
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        tensors[name] = mean + 0.3 * torch.randn(parameter.shape, generator=generator)
    tensors |= {"residual_gate": torch.tensor(0.5), "joint_logit_scale": torch.tensor(1.0)}
    tensors["prior_logit_scale"] = torch.tensor(1.0)
    save_file(tensors, path / "joint_head.safetensors")
    return path
