"""What five clients get from a server: ``python clients.py URL``. Exits 1 at the first that fails."""

from __future__ import annotations

import asyncio
import sys

import bentoml
import cohere
import numpy as np
from huggingface_hub import InferenceClient
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI

TEXTS = ["What is packed execution?", "Rows without padding.", "A recipe for soup."]


def near(left: object, right: object, tolerance: float = 1e-5) -> None:
    """Fail unless two arrays are equal up to rounding."""
    difference = np.abs(np.array(left) - np.array(right)).max()
    assert difference < tolerance, difference


def main(url: str) -> None:
    """Every client once."""
    with OpenAI(base_url=f"{url}/v1", api_key="any") as openai:
        vectors = [row.embedding for row in openai.embeddings.create(model="embedder", input=TEXTS).data]
    print("openai: embeddings")

    chain = OpenAIEmbeddings(base_url=f"{url}/v1", api_key="any", model="embedder", check_embedding_ctx_length=False)
    near(chain.embed_documents(TEXTS), vectors)
    near(chain.embed_query(TEXTS[0]), vectors[0])
    print("langchain-openai: embeddings")

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
    main(sys.argv[1])
