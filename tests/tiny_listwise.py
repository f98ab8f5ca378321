"""A tiny checkpoint in the layout of jina-reranker-v3, and its published way of ranking over transformers' own model.

Called by the tests of listwise reranking.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

from tests import tiny, tiny_tokenizers

WIDTH, HIDDEN, PROJECTED = 32, 24, 16
MARKS = ("<|embed_token|>", "<|rerank_token|>")


@functools.cache
def checkpoint() -> Path:
    """Its folder, made at the first call."""
    folder = tiny.root() / "listwise"
    tokenizer = tiny_tokenizers.qwen_without_end()
    tokenizer.model_max_length = 4096
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", *MARKS]})
    config = Qwen3Config(**{**tiny.QWEN, "vocab_size": len(tokenizer), "max_position_embeddings": 4096})
    torch.manual_seed(0)
    model = tiny.shake(Qwen3Model(config)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(1)
    tensors["projector.0.weight"] = torch.randn(HIDDEN, config.hidden_size, generator=generator) * 0.3
    tensors["projector.2.weight"] = torch.randn(PROJECTED, HIDDEN, generator=generator) * 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code = {"AutoModel": "modeling.JinaForRanking", "AutoModelForCausalLM": "modeling.JinaForRanking"}
    tiny.edit_config(folder, architectures=["JinaForRanking"], auto_map=code)
    return folder


class Reference:
    """The published code's algorithm: what it asks, reads and combines."""

    def __init__(self, folder: Path, *, most_tokens: int, document_tokens: int = 2048, query_tokens: int = 512) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        config = Qwen3Config(**json.loads((folder / "config.json").read_text()))
        self.model = Qwen3Model(config).eval()
        tensors = load_file(folder / "model.safetensors")
        names = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(names)
        self.first, self.second = tensors["projector.0.weight"], tensors["projector.2.weight"]
        self.marks = [self.tokenizer.convert_tokens_to_ids(mark) for mark in MARKS]
        self.most_tokens, self.document_tokens, self.query_tokens = most_tokens, document_tokens, query_tokens

    def cut(self, text: str, limit: int) -> tuple[str, int]:
        ids = self.tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        return (self.tokenizer.decode(ids) if len(ids) >= limit else text), len(ids)

    def ids(self, query: str, documents: list[str], instruction: str | None = None) -> list[int]:
        query, documents = self._clean(query), [self._clean(document) for document in documents]
        lines = [
            f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. "
            f"Rank the passages based on their relevance to query: {query}"
        ]
        if instruction:
            lines.append(f"<instruct>\n{instruction}\n</instruct>")
        for number, document in enumerate(documents):
            lines.append(f'<passage id="{number}">\n{document}<|embed_token|>\n</passage>')
        lines.append(f"<query>\n{query}<|rerank_token|>\n</query>")
        system = (
            "You are a search relevance expert who can determine a ranking of the passages based on how relevant they "
            "are to the query. If the query is a question, how relevant a passage is depends on how well it answers "
            "the question. If not, try to analyze the intent of the query and assess how well each passage satisfies "
            "the intent. If an instruction is provided, you should follow the instruction when determining the ranking."
        )
        text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n" + "\n".join(lines)
        text += "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def scores(self, query: str, documents: list[str], instruction: str | None = None) -> np.ndarray[Any, Any]:
        query, query_length = self.cut(query, self.query_tokens)
        rows: list[np.ndarray[Any, Any]] = []
        queries, weights = [], []
        for block in self._blocks(documents, query_length):
            asked, found = self._block(query, block, instruction)
            rows.append(found)
            queries.append(asked)
            weights.append(((1 + self._cosines(asked, found)) / 2).max())
        merged = np.average(np.array(queries), axis=0, weights=weights)
        return self._cosines(merged, np.concatenate(rows))

    def _clean(self, text: str) -> str:
        for mark in MARKS:
            text = text.replace(mark, "")
        return text

    def _blocks(self, documents: list[str], query_length: int) -> list[list[str]]:
        blocks: list[list[str]] = []
        block: list[str] = []
        left = self.most_tokens - 2 * query_length
        for document in documents:
            text, length = self.cut(document, self.document_tokens)
            block.append(text)
            left -= length
            if len(block) >= 125 or left <= self.document_tokens:
                blocks.append(block)
                block, left = [], self.most_tokens - 2 * query_length
        return [*blocks, block] if block else blocks

    @torch.no_grad()
    def _block(self, query: str, documents: list[str], instruction: str | None) -> tuple[Any, Any]:
        ids = torch.tensor([self.ids(query, documents, instruction)])
        hidden = self.model(ids).last_hidden_state[0]
        projected = torch.relu(hidden @ self.first.T) @ self.second.T
        found = [projected[ids[0] == mark].double().numpy() for mark in self.marks]
        return found[1][0], found[0]

    @staticmethod
    def _cosines(query: Any, rows: Any) -> Any:
        return rows @ query / (np.linalg.norm(query) * np.linalg.norm(rows, axis=1))
