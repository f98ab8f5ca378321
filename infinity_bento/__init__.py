"""infinity-bento: embeddings, reranking and classification, packed without padding, served as a Bento."""

__version__ = "0.1.0"
