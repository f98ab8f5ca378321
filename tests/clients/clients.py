"""What five clients get from a server: ``python clients.py URL DECODER_URL DECODER_TOKENIZER``.

Exits 1 at the first that fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import bentoml
import cohere
import numpy as np
import tiktoken.model
import tiktoken.registry
from huggingface_hub import InferenceClient
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI

TEXTS = ["What is packed execution?", "Rows without padding.", "A recipe for soup."]


def near(left: object, right: object, tolerance: float = 1e-5) -> None:
    """Fail unless two arrays are equal up to rounding."""
    difference = np.abs(np.array(left) - np.array(right)).max()
    assert difference < tolerance, difference


def as_tiktoken(file: Path) -> tiktoken.Encoding:
    """A byte-level BPE of a ``tokenizer.json`` as tiktoken has it: its ids are in the order of its merges."""
    content = json.loads(file.read_text())
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    # GPT-2's table of printable characters that stand for bytes.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    ranks = {
        bytes(byte_of[character] for character in token): rank
        for token, rank in content["model"]["vocab"].items()
        if token not in special
    }
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return tiktoken.Encoding("decoder", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def main(url: str, decoder_url: str, tokenizer: str) -> None:
    """Every client once."""
    with OpenAI(base_url=f"{url}/v1", api_key="any") as openai:
        vectors = [row.embedding for row in openai.embeddings.create(model="embedder", input=TEXTS).data]
    print("openai: embeddings")

    chain = OpenAIEmbeddings(base_url=f"{url}/v1", api_key="any", model="embedder", check_embedding_ctx_length=False)
    near(chain.embed_documents(TEXTS), vectors)
    near(chain.embed_query(TEXTS[0]), vectors[0])
    # Token arrays, which is what it sends unless told not to, in the vocabulary of a served model.
    tiktoken.registry.ENCODINGS["decoder"] = as_tiktoken(Path(tokenizer))
    tiktoken.model.MODEL_TO_ENCODING["decoder"] = "decoder"
    there = {"base_url": f"{decoder_url}/v1", "api_key": "any", "model": "decoder"}
    arrays = OpenAIEmbeddings(**there)
    texts = OpenAIEmbeddings(**there, check_embedding_ctx_length=False)
    near(arrays.embed_documents(TEXTS), texts.embed_documents(TEXTS))
    print("langchain-openai: embeddings, of texts and of token arrays")

    client = cohere.ClientV2(api_key="any", base_url=url)
    embedded = client.embed(model="embedder", texts=TEXTS, input_type="search_document", embedding_types=["float"])
    near(embedded.embeddings.float_, vectors)
    ranked = client.rerank(model="reranker", query=TEXTS[0], documents=TEXTS[1:], top_n=2)
    assert sorted(result.index for result in ranked.results) == [0, 1]
    assert ranked.results[0].relevance_score >= ranked.results[1].relevance_score
    print("cohere: embed, rerank")

    inference = InferenceClient(model=url)
    # The bare address is TEI's default route, which answers for the first model.
    near(inference.feature_extraction(TEXTS[0])[0], vectors[0])
    cosines = inference.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:], model=f"{url}/similarity")
    near(cosines, [np.dot(vectors[0], other) for other in vectors[1:]])
    print("huggingface_hub: feature_extraction, sentence_similarity")

    asked = [{"text": text, "model": "embedder"} for text in TEXTS]
    with bentoml.SyncHTTPClient(url) as bento:
        near([answer["embedding"] for answer in bento.embed(items=asked)], vectors)
        (scores,) = bento.rerank(items=[{"query": TEXTS[0], "documents": TEXTS[1:], "model": "reranker"}])
        assert {entry["index"] for entry in scores["results"]} == {0, 1}
        (labels,) = bento.classify(items=[{"text": TEXTS[0], "model": "classifier"}])
        assert abs(sum(label["score"] for label in labels["labels"]) - 1) < 1e-5
        (similar,) = bento.similarity(items=[{"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}])
        near(similar["similarities"], cosines)

    async def both() -> None:
        async with bentoml.AsyncHTTPClient(url) as bento:
            near([answer["embedding"] for answer in await bento.embed(items=asked)], vectors)

    asyncio.run(both())
    print("bentoml: embed, rerank, classify, similarity")


if __name__ == "__main__":
    main(*sys.argv[1:])
