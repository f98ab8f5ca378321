"""Reference outputs of every tiny checkpoint, one text at a time: transformers, or plain formulas without it.

Called by the parity tests. Nothing here is shared with the package but the files it reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel

from tests import tiny

Reference = Callable[[list[int]], Tensor]  # token ids -> hidden states [n, D]
Weights = dict[str, Tensor]

# Disguised checkpoints whose weights are those of the plain one, unchanged.
SAME_WEIGHTS = ("nomic_bert-old", "llama_bidirec", "ministral3_bidirec", "jina_embeddings_v3-hub")


def reference(name: str) -> Reference:
    """The reference of one tiny checkpoint, without task adapters."""
    if name in tiny.NATIVE:
        folder = tiny.checkpoint(name)
        formula = FORMULAS[name]
        config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        return lambda ids: formula(torch.tensor(ids), config, weights)
    if name == "gte-new":
        return fixed_ntk(load(tiny.plain(name)), theta=10000.0, factor=2.0)
    return one_by_one(load(tiny.plain(name) if name in SAME_WEIGHTS else tiny.checkpoint(name)))


def load(folder: Path) -> Any:
    """Transformers' own model of a folder, with its plain attention: not every version soft-caps in another one."""
    return AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def one_by_one(model: Any) -> Reference:
    """A transformers model on one sequence."""

    def run(ids: list[int]) -> Tensor:
        tensor = torch.tensor([ids])
        with torch.inference_mode():
            output = model(input_ids=tensor, attention_mask=torch.ones_like(tensor))
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    return run


def fixed_ntk(model: Any, theta: float, factor: float) -> Reference:
    """GTE with the frequencies of Alibaba's NTK scaling, which apply at every length."""
    size = model.config.hidden_size // model.config.num_attention_heads
    exponents = torch.arange(0, size, 2).float() / size
    model.rotary_emb.inv_freq.copy_(1.0 / ((theta * factor) ** exponents) / factor ** (2 / size))
    return one_by_one(model)


# Formulas ------------------------------------------------------------------------------------------------------------


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """A linear layer by its stored name; the bias is optional."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    """A layer norm by its stored name."""
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)


def alibi(heads: int, length: int) -> Tensor:
    """The bias of ALiBi's paper, ``[N, n, n]``, with its recursion for head counts that are no power of two."""

    def slopes(count: int) -> list[float]:
        if math.log2(count).is_integer():
            start = 2 ** (-(2 ** -(math.log2(count) - 3)))
            return [start * start**index for index in range(count)]
        lower = 2 ** math.floor(math.log2(count))
        return slopes(lower) + slopes(2 * lower)[0::2][: count - lower]

    bias = torch.empty(heads, length, length)
    for head, slope in enumerate(slopes(heads)):
        for row in range(length):
            for column in range(length):
                bias[head, row, column] = -slope * abs(row - column)
    return bias


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Tensor | float = 0.0) -> Tensor:
    """Softmax attention in full, ``[n, D]`` each."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q, k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def jina_embeddings(ids: Tensor, weights: Weights) -> Tensor:
    """Word plus first token type, normalised."""
    words = weights["embeddings.word_embeddings.weight"][ids]
    return norm(weights, "embeddings.LayerNorm", words + weights["embeddings.token_type_embeddings.weight"][0])


def jina_bert(ids: Tensor, config: dict[str, Any], weights: Weights) -> Tensor:
    """Jina BERT v2: the gate is the first half."""
    heads, width = config["num_attention_heads"], config["intermediate_size"]
    x, bias = jina_embeddings(ids, weights), alibi(heads, len(ids))
    for layer in range(config["num_hidden_layers"]):
        p = f"encoder.layer.{layer}"
        q, k, v = (linear(weights, f"{p}.attention.self.{part}", x) for part in ("query", "key", "value"))
        context = linear(weights, f"{p}.attention.output.dense", attend(q, k, v, heads, bias))
        x = norm(weights, f"{p}.attention.output.LayerNorm", context + x)
        gated = linear(weights, f"{p}.mlp.gated_layers", x)
        out = linear(weights, f"{p}.mlp.wo", F.gelu(gated[:, :width]) * gated[:, width:])
        x = norm(weights, f"{p}.mlp.layernorm", out + x)
    return x


def jina_code(ids: Tensor, config: dict[str, Any], weights: Weights) -> Tensor:
    """Jina BERT v2 code: normalised queries and keys, the gate is the second half."""
    heads, width = config["num_attention_heads"], config["intermediate_size"]
    x, bias = jina_embeddings(ids, weights), alibi(heads, len(ids))
    for layer in range(config["num_hidden_layers"]):
        p = f"encoder.layer.{layer}"
        q = norm(weights, f"{p}.attention.self.layer_norm_q", linear(weights, f"{p}.attention.self.query", x))
        k = norm(weights, f"{p}.attention.self.layer_norm_k", linear(weights, f"{p}.attention.self.key", x))
        v = linear(weights, f"{p}.attention.self.value", x)
        context = linear(weights, f"{p}.attention.output.dense", attend(q, k, v, heads, bias))
        attended = norm(weights, f"{p}.attention.output.LayerNorm", context + x)
        x = norm(weights, f"{p}.layer_norm_1", attended + x)
        gated = linear(weights, f"{p}.mlp.up_gated_layer", x)
        out = linear(weights, f"{p}.mlp.down_layer", gated[:, :width] * F.gelu(gated[:, width:]))
        x = norm(weights, f"{p}.layer_norm_2", x + out)
    return x


def nomic_moe(ids: Tensor, config: dict[str, Any], weights: Weights) -> Tensor:
    """NomicBERT v2: every second layer routes each token to its best experts, token by token here."""
    heads, size = config["n_head"], config["n_embd"] // config["n_head"]
    angles = torch.outer(
        torch.arange(len(ids)).float(), config["rotary_emb_base"] ** (-torch.arange(0, size, 2).float() / size)
    )
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.unflatten(-1, (heads, 2, size // 2)).unbind(-2)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), dim=-1).flatten(1)

    def experts(p: str, x: Tensor) -> Tensor:
        count, inner = config["num_experts"], config["n_inner"]
        up = weights[f"{p}.mlp.experts.mlp.w1"].view(count, inner, -1)
        down = weights[f"{p}.mlp.experts.mlp.w2"].view(count, inner, -1)
        rows = []
        for row in x:
            shares = linear(weights, f"{p}.mlp.router.layer", row).softmax(-1)
            best = shares.argsort(descending=True)[: config["moe_top_k"]].tolist()
            rows.append(sum(shares[e] * (F.gelu(up[e] @ row) @ down[e]) for e in best))
        return torch.stack(rows) + weights[f"{p}.mlp.experts.bias"]

    words = weights["embeddings.word_embeddings.weight"][ids]
    x = norm(weights, "emb_ln", words + weights["embeddings.token_type_embeddings.weight"][0])
    for layer in range(config["n_layer"]):
        p = f"encoder.layers.{layer}"
        q, k, v = linear(weights, f"{p}.attn.Wqkv", x).chunk(3, dim=-1)
        context = attend(rotate(q), rotate(k), v, heads)
        x = norm(weights, f"{p}.norm1", x + linear(weights, f"{p}.attn.out_proj", context))
        if layer % config["moe_every_n_layers"] == 1:
            out = experts(p, x)
        else:
            out = linear(weights, f"{p}.mlp.fc2", F.gelu(linear(weights, f"{p}.mlp.fc1", x)))
        x = norm(weights, f"{p}.norm2", x + out)
    return x


FORMULAS = {
    "jina_bert": jina_bert,
    "jina_bert-6-heads": jina_bert,
    "jina_bert_code": jina_code,
    "nomic_bert-moe": nomic_moe,
}
