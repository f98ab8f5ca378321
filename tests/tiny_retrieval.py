"""Tiny late-interaction, sparse and static checkpoints, made of those in ``tests.tiny``; once per test process."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from transformers import AutoTokenizer

from infinity_bento.core import Encoded, Item
from infinity_bento.errors import InfinityError
from infinity_bento.inputs.tokenization import TextTokenizer
from infinity_bento.runners.runner import Runner
from tests import tiny

WIDTH = 32
NUMBERS = itertools.count()
QUERIES = [
    "what is deep learning?",
    "paris",
    "how do embeddings work, and why?",
    "a b c d e f g h yes no true false 1 2 3",
]
DOCUMENTS = [
    "Deep learning is a part of machine learning.",
    "The capital of France is Paris!",
    "no",
    'A plane is taking off. An air plane is flying over the sea, (and) "sinking"; or not?',
    "vectors, of numbers: 3.14 " * 12,
    "...",
]


def copied(name: str, target: str, head: str = "base", *, keep_modules: bool = False) -> Path:
    """A copy of a tiny checkpoint, by default without the files that make it a dense embedding model."""
    folder = tiny.root() / target
    shutil.copytree(tiny.checkpoint(name, head), folder, dirs_exist_ok=True)
    if not keep_modules:
        for part in ("1_Pooling", "2_Normalize"):
            shutil.rmtree(folder / part, ignore_errors=True)
        for file in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
            (folder / file).unlink(missing_ok=True)
    return folder


def add_tokens(folder: Path, names: list[str], *, special: bool = False) -> None:
    """Put words into the tokenizer's vocabulary; the embedding tables of ``tests.tiny`` have room."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(names, special_tokens=special)
    assert len(tokenizer) <= tiny.VOCABULARY
    tokenizer.save_pretrained(folder)


def projection(seed: int = 3) -> torch.Tensor:
    """``[WIDTH, 64]``."""
    return torch.randn(WIDTH, tiny.WIDTH, generator=torch.Generator().manual_seed(seed)) * 0.1


def new_folder(stem: str) -> str:
    """A name that no other checkpoint of this process has."""
    return f"{stem}-{next(NUMBERS)}"


def stanford(name: str = "bert", **metadata: Any) -> Path:
    """ColBERT as colbert-ir publishes it."""
    folder = copied(name, new_folder("stanford"))
    add_tokens(folder, ["[unused0]", "[unused1]"])
    tiny.edit_config(folder, architectures=["HF_ColBERT"])
    weights = {f"bert.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    save_file({**weights, "linear.weight": projection()}, folder / "model.safetensors", metadata={"format": "pt"})
    markers = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]"}
    settings = {**markers, "query_maxlen": 32, "doc_maxlen": 60, "dim": 32}
    tiny.write_json(folder / "artifact.metadata", settings | metadata)
    return folder


def pylate(name: str = "bert", *, tokens: tuple[str, ...] = ("[Q] ", "[D] "), **config: Any) -> Path:
    """ColBERT as PyLate saves it: a Transformer, a Dense, and keys of its own; None leaves a key out."""
    folder = copied(name, new_folder("pylate"))
    if tokens:
        add_tokens(folder, list(tokens))
    identity = "torch.nn.modules.linear.Identity"
    dense = {"in_features": tiny.WIDTH, "out_features": WIDTH, "bias": False, "activation_function": identity}
    tiny.write_json(folder / "1_Dense" / "config.json", dense)
    save_file({"linear.weight": projection()}, folder / "1_Dense" / "model.safetensors", metadata={"format": "pt"})
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    listed = [{"idx": idx, "name": str(idx), "path": path, "type": kind} for idx, (path, kind) in enumerate(modules)]
    tiny.write_json(folder / "modules.json", listed)
    tiny.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False})
    settings = {
        "model_type": "ColBERT",
        "prompts": {},
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 32,
        "document_length": 48,
    }
    settings = {key: value for key, value in (settings | config).items() if value is not None}
    tiny.write_json(folder / "config_sentence_transformers.json", settings)
    return folder


def jina_colbert() -> Path:
    """jina-colbert-v2: XLM-RoBERTa's model type and Jina's names, the projection beside them, expansion attended to."""
    folder = copied("jina_embeddings_v3", new_folder("jina-colbert"))
    add_tokens(folder, ["[QueryMarker]", "[DocumentMarker]"], special=True)
    tiny.edit_config(
        folder,
        model_type="xlm-roberta",
        architectures=["HF_ColBERT"],
        rope_parameters=None,
        position_embedding_type="rotary",
        rotary_emb_base=20000.0,
        auto_map={"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaModel"},
    )
    weights = {f"roberta.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    save_file({**weights, "linear.weight": projection()}, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"query_token_id": "[QueryMarker]", "doc_token_id": "[DocumentMarker]", "query_maxlen": 32}
    tiny.write_json(folder / "artifact.metadata", settings | {"doc_maxlen": 300, "attend_to_mask_tokens": True})
    return folder


def splade(name: str = "bert", *, pooling: str = "max", activation: str = "relu") -> Path:
    """A masked language model with SpladePooling, as sentence-transformers saves it."""
    folder = tiny.root() / new_folder("splade")
    transformer = Transformer(str(tiny.checkpoint(name, "mlm")), transformer_task="fill-mask")
    SparseEncoder(modules=[transformer, SpladePooling(pooling, activation)]).save(str(folder))
    return folder


def inference_free(*, by_token: bool = False) -> Path:
    """A Router: queries are looked up in a table, documents run through the model."""
    folder = tiny.root() / new_folder("inference-free")
    transformer = Transformer(str(tiny.checkpoint("bert", "mlm")), transformer_task="fill-mask")
    tokenizer = transformer.tokenizer
    weight = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(8))
    weight[::7] = 0.0
    router = Router.for_query_document(
        query_modules=[SparseStaticEmbedding(tokenizer, weight)],
        document_modules=[transformer, SpladePooling("max", "log1p_relu")],
    )
    SparseEncoder(modules=[router]).save(str(folder))
    if by_token:
        (static,) = folder.glob("*SparseStaticEmbedding")
        (static / "model.safetensors").unlink()
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        tiny.write_json(static / "idf.json", dict(zip(names, weight.tolist(), strict=True)))
        tiny.write_json(static / "config.json", {"frozen": True, "path": "idf.json"})
    return folder


def static_embedding(*, normalize: bool = True) -> Path:
    """A bag of token vectors under a tokenizer that would add special tokens."""
    folder = tiny.root() / new_folder("static")
    backend = AutoTokenizer.from_pretrained(tiny.checkpoint("bert")).backend_tokenizer
    weights = torch.randn(tiny.VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(4))
    static = StaticEmbedding(backend, embedding_weights=weights)
    SentenceTransformer(modules=[static, *([Normalize()] if normalize else [])]).save(str(folder))
    return folder


def run(runner: Runner, tokenizer: TextTokenizer, items: list[Item], order: list[int] | None = None) -> list[Any]:
    """The outputs of items as one batch, packed in the order given."""
    order = order if order is not None else list(range(len(items)))
    encoded = tokenizer.encode([items[index] for index in order])
    assert not any(isinstance(one, InfinityError) for one in encoded), encoded
    batch = runner.prepare([one for one in encoded if isinstance(one, Encoded)])
    chosen = [items[index] for index in order]
    outputs = runner.collect(runner.run(batch, chosen), batch, chosen)
    restored: list[Any] = [None] * len(items)
    for index, output in zip(order, outputs, strict=True):
        restored[index] = output
    return restored


def alone(runner: Runner, tokenizer: TextTokenizer, items: list[Item]) -> list[Any]:
    """The outputs of items, each in a batch of its own."""
    return [run(runner, tokenizer, [item])[0] for item in items]
