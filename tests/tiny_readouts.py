"""Tiny random decision models that are read at the last token: D3 and Perplexity Decider folders, and OneJev's."""

from __future__ import annotations

import functools
import json
import shutil
import string
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, normalizers

from infinity_bento.heads.decisions.onejev import PAIRS
from tests import tiny
from tests import tiny_clef as clef
from tests import tiny_tokenizers as tokenizers

TEMPERATURE = 1.7
CODES = [*string.ascii_uppercase, *PAIRS][:255]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TEXT = {**clef.TEXT, "max_position_embeddings": 32768}
REQUEST: dict[str, Any] = {
    "state": {"msg": "charged twice"},
    "questions": {
        "a": {"type": "noul", "instructions": "refund?"},
        "b": {"type": "choice", "instructions": "team", "criteria": {"z": None, "a": "pay", "\u00e9": ""}},
        "c": {"type": "score", "instructions": "mad?", "criteria": ["lo", {"x": 1}, "hi"]},
        "d": {"type": "noul", "criteria": {"true": "it is"}},
        "e": {"type": "choice", "criteria": {"one": "1", "two": "2"}},
    },
}


def tokenizer(pairs: int = 230) -> Any:
    """Qwen's special tokens, the two of its thinking block, and some labels of two letters."""
    made = Tokenizer.from_str(tokenizers.byte_bpe_json(tuple(clef.SPECIAL)))
    made.normalizer = normalizers.NFC()
    made.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    made.add_tokens([AddedToken(pair, single_word=True, normalized=False) for pair in PAIRS[:pairs]])
    fast = tokenizers.fast(made, {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}, 32768)
    fast.chat_template = CHAT
    return fast


@functools.cache
def readout(prompt: str = "d3", mode: str = "causal") -> Path:
    """A folder of D3 or of Perplexity Decider v1: the bare model, its readout, ``decision_config.json``."""
    path = tiny.root() / f"decision-{prompt}-{mode}"
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=clef.VISION, **clef.IDS)
    torch.manual_seed(1)
    model = tiny.shake(transformers.Qwen3_5Model(config)).float().eval()
    model.config.architectures = ["Qwen3_5Model"]
    model.save_pretrained(path)
    fast = tokenizer()
    fast.save_pretrained(path)
    rows = torch.randn(len(CODES), tiny.WIDTH, generator=torch.Generator().manual_seed(9)) * 0.3
    save_file({"weight": rows}, path / "readout.safetensors")
    content = {
        "format_version": 1,
        "codes": CODES,
        "token_ids": fast.convert_tokens_to_ids(CODES),
        "temperature": TEMPERATURE,
        "attention_mode": mode,
        "pooling": "last",
    }
    (path / "decision_config.json").write_text(json.dumps(content | ({"prompt": "d3"} if prompt == "d3" else {})))
    return path


VERBALIZERS = ["no", "yes", *"012345", *"ABCDEFGHIJKLMNOP"]
JUDGE: dict[str, Any] = {
    "softcap": 2.0,
    "adapter_subfolder": None,
    "slots": {
        "num_slots": len(VERBALIZERS),
        "verbalizers": VERBALIZERS,
        "ranges": {"noul": [0, 2], "score": [2, 8], "choice": [8, 24]},
    },
}


@functools.cache
def jev(gemma: bool = False) -> Path:
    """A folder of JEV: the model, ``judge_config.json``, ``calibration.json``, ``head.safetensors``; no adapter."""
    path = tiny.root() / f"decision-jev-{'gemma' if gemma else 'qwen'}"
    torch.manual_seed(3)
    config: Any
    if gemma:
        config = transformers.Gemma2Config(**tiny.DECODER, sliding_window=16, pad_token_id=0, bos_token_id=2)
        tiny.shake(transformers.Gemma2Model(config)).float().eval().save_pretrained(path)
        tokenizers.gemma().save_pretrained(path)
    else:
        config = transformers.Qwen3_5TextConfig(**TEXT)
        tiny.shake(transformers.Qwen3_5TextModel(config)).float().eval().save_pretrained(path)
        tokenizer().save_pretrained(path)
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(len(VERBALIZERS), tiny.WIDTH, generator=generator) * 0.3
    bias = torch.randn(len(VERBALIZERS), generator=generator) * 0.1
    save_file({"weight": rows, "bias": bias}, path / "head.safetensors")
    (path / "judge_config.json").write_text(json.dumps(JUDGE))
    (path / "calibration.json").write_text(json.dumps({"per_kind": {"noul": 1.1, "choice": 1.2, "score": 0.9}}))
    return path


@functools.cache
def block() -> Path:
    """OneJev's folder with the files of Elephant: they name the readout and the mask."""
    path = tiny.root() / "decision-block"
    shutil.copytree(onejev(), path)
    tiny.edit_config(path, baseten_modeling_overrides={"attention": "block_bidirectional"})
    (path / "readout.json").write_text(json.dumps({"readout": "slot_lm", "temperature": TEMPERATURE}))
    return path


RUNE_MARKS = ("<|turn>", "<turn|>", "<|channel>", "<channel|>")


def rune_tokenizer() -> Any:
    """Gemma 4's marks of a chat, and the labels of two letters."""
    fast = tokenizers.gemma()
    fast.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in RUNE_MARKS])
    fast.add_tokens([AddedToken(pair, single_word=True, normalized=False) for pair in PAIRS[:230]])
    return fast


@functools.cache
def rune(kind: str = "text") -> Path:
    """A Gemma 4 with soft-capped output rows that are its embeddings: dense, of experts, or inside a whole model."""
    path = tiny.root() / f"decision-rune-{kind}"
    recipe = tiny.RECIPES["gemma4_text-moe" if kind == "experts" else "gemma4_text"]
    settings = {**recipe.config, "final_logit_softcapping": 2.0, "tie_word_embeddings": True, "pad_token_id": 0}
    settings |= {"max_position_embeddings": 4096, "bos_token_id": 2, "eos_token_id": 1}
    config: Any = transformers.Gemma4TextConfig(**settings)
    torch.manual_seed(5)
    if kind == "whole":
        whole = transformers.Gemma4Config(text_config=config, tie_word_embeddings=True)
        tiny.shake(transformers.Gemma4ForConditionalGeneration(whole)).float().eval().save_pretrained(path)
    else:
        tiny.shake(transformers.Gemma4ForCausalLM(config)).float().eval().save_pretrained(path)
    rune_tokenizer().save_pretrained(path)
    return path


GEMMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TURNS = ("<start_of_turn>", "<end_of_turn>")


def gemma_tokenizer() -> Any:
    """Gemma's with the turns of a chat, and words that are labels."""
    fast = tokenizers.gemma()
    fast.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in TURNS])
    fast.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in ("Yes", "No", "high", "low")])
    fast.chat_template = GEMMA_CHAT
    return fast


@functools.cache
def chat(gemma: bool = False) -> Path:
    """A language model with nothing but a chat template; Gemma's has tied and soft-capped output rows."""
    path = tiny.root() / f"decision-chat-{'gemma' if gemma else 'qwen'}"
    torch.manual_seed(4)
    if gemma:
        settings = {
            **tiny.DECODER,
            "sliding_window": 16,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "query_pre_attn_scalar": 16,
        }
        config: Any = transformers.Gemma2Config(**settings, final_logit_softcapping=2.0, tie_word_embeddings=True)
        tiny.shake(transformers.Gemma2ForCausalLM(config)).float().eval().save_pretrained(path)
        gemma_tokenizer().save_pretrained(path)
        return path
    config = transformers.Qwen3Config(**tiny.QWEN, tie_word_embeddings=False)
    tiny.shake(transformers.Qwen3ForCausalLM(config)).float().eval().save_pretrained(path)
    fast = tokenizer()
    fast.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in ("Yes", "No")])
    fast.save_pretrained(path)
    return path


@functools.cache
def onejev(tied: bool = False) -> Path:
    """A whole language model with its vision tower and no file that says what it is for."""
    path = tiny.root() / f"decision-onejev{'-tied' * tied}"
    config = transformers.Qwen3_5Config(
        text_config={**TEXT, "tie_word_embeddings": tied},
        vision_config=clef.VISION,
        tie_word_embeddings=tied,
        **clef.IDS,
    )
    torch.manual_seed(2)
    tiny.shake(transformers.Qwen3_5ForConditionalGeneration(config)).float().eval().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path
