"""The learned sparse head (SPLADE): vocabulary logits of each token, pooled to one sparse vector per sequence.

Called by the runner. Logits exist for a chunk of tokens at a time and pooled rows for a block of sequences, so memory
does not grow with the batch. Queries of inference-free models are looked up in a table instead.

Shape suffixes: T packed tokens, D width, V vocabulary, R sequences of a block, n sequences of a chunk, L their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinity_bento.batching.packing import PackedBatch
from infinity_bento.checkpoints.families import Family
from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.checkpoints.layout import Layout
from infinity_bento.checkpoints.learned_sparse import LearnedSparse
from infinity_bento.checkpoints.st_modules import SparseStaticEmbeddingSpec, SpladePoolingSpec
from infinity_bento.checkpoints.tensor_files import read_tensors, refuse_non_finite
from infinity_bento.core import FloatArray, Item, SparseRow
from infinity_bento.errors import InfinityError, InvalidInput, LoadError, WeightMismatch
from infinity_bento.heads.masked_lm import MaskedLM, MaskedLMBackbone, load_masked_lm
from infinity_bento.heads.rows import not_finite

# Elements of the logits of a chunk, and of the rows of a block: 32 MiB each in float32. On an accelerator larger chunks
# keep it busy.
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 25}
ROW_ELEMENTS = 1 << 23
# With a very large vocabulary a chunk still has enough tokens for a matrix product to be one.
MIN_CHUNK_TOKENS = 32


class Compressed(NamedTuple):
    """The positive entries of some rows, row after row, on the device."""

    counts: Tensor  # [R] entries of each row
    indices: Tensor  # [entries] int32, ascending within a row
    values: Tensor  # [entries] float32
    finite: Tensor  # [R] bool; False: the row holds NaN or infinity


class SparseRows(NamedTuple):
    """A batch's vectors: all blocks but the last are compressed; then the tokens of static queries."""

    blocks: list[Compressed]
    last_RV: Tensor | None
    static_ids: Tensor
    static_lengths: list[int]


class SparseHead:
    """One sparse vector over the vocabulary per sequence.

    Args:
        masked_lm: Hidden states -> logits.
        pooling: Maximum or sum over tokens, and the activation.
        query_weights: Weight of each token id for static queries, ``[V]``; None: the model has none.
    """

    def __init__(
        self, masked_lm: MaskedLM, pooling: SpladePoolingSpec, *, query_weights: FloatArray | None = None
    ) -> None:
        self.masked_lm = masked_lm
        self.pooling = pooling
        self.query_weights = query_weights

    @property
    def vocabulary_size(self) -> int:
        """Width of a vector, V."""
        return self.masked_lm.vocabulary_size

    def run(self, hidden_TD: Tensor, batch: PackedBatch) -> SparseRows:
        """``[T, D]`` hidden states of ``batch.without_static()`` -> rows in packed order."""
        lengths = batch.without_static().lengths
        limit = max(1, ROW_ELEMENTS // self.vocabulary_size)
        blocks: list[Compressed] = []
        last, start = None, 0
        for first in range(0, len(lengths), limit):
            if last is not None:
                blocks.append(compress(last))
            block = lengths[first : first + limit]
            end = start + sum(block)
            last, start = self._pool(hidden_TD[start:end], block), end
        return SparseRows(blocks, last, batch.input_ids[start:], batch.lengths[len(lengths) :])

    def collect(
        self, rows: SparseRows, positions: Sequence[int], items: Sequence[Item]
    ) -> list[SparseRow | InfinityError]:
        """Each item's vector. Arguments as for ``EmbeddingHead.collect``.

        Errors: ``InvalidInput`` for ``dimensions`` or ``normalize``, ``InferenceError`` for NaN or infinity.
        """
        outputs = [*_split(rows), *self._static(rows)]
        return [self._finish(outputs[position], item) for position, item in zip(positions, items, strict=True)]

    def _finish(self, row: SparseRow | None, item: Item) -> SparseRow | InfinityError:
        for name, given in (("dimensions", item.dimensions is not None), ("normalize", item.normalize is True)):
            if given:
                return InvalidInput(
                    f"{name} cannot be asked for here: a sparse vector has the {self.vocabulary_size} weights of the "
                    f"vocabulary as they are; leave {name} out.",
                    param=name,
                )
        return not_finite(item) if row is None else row

    def _pool(self, hidden_TD: Tensor, lengths: Sequence[int]) -> Tensor:
        """``[T, D]`` of a block of sequences, ascending lengths -> ``[R, V]`` float32."""
        rows = torch.empty((len(lengths), self.vocabulary_size), device=hidden_TD.device)
        elements = CHUNK_ELEMENTS.get(hidden_TD.device.type, CHUNK_ELEMENTS["cpu"])
        chunk = max(MIN_CHUNK_TOKENS, elements // self.vocabulary_size)
        row = token = 0
        for length, group in groupby(lengths):
            left = len(list(group))
            while left:
                count = min(left, max(1, chunk // length))
                tokens = hidden_TD[token : token + count * length]
                rows[row : row + count] = self._pool_chunk(tokens, count, chunk)
                row, token, left = row + count, token + count * length, left - count
        return self._activate(rows) if self.pooling.strategy == "max" else rows

    def _pool_chunk(self, hidden_TD: Tensor, count: int, chunk: int) -> Tensor:
        """Some sequences of one length, or one longer than a chunk, -> ``[n, V]``."""
        if len(hidden_TD) <= chunk:
            return self._reduce(self.masked_lm.logits(hidden_TD).view(count, -1, self.vocabulary_size))
        pooled: Tensor | None = None
        combine = torch.maximum if self.pooling.strategy == "max" else torch.add
        for piece in torch.split(hidden_TD, chunk):
            part = self._reduce(self.masked_lm.logits(piece)[None])
            pooled = part if pooled is None else combine(pooled, part)
        assert pooled is not None
        return pooled

    def _reduce(self, logits_nLV: Tensor) -> Tensor:
        """``[n, L, V]`` -> ``[n, V]`` float32. The activation is monotone, so it can follow a maximum."""
        if self.pooling.strategy == "max":
            return logits_nLV.amax(1).float()
        return self._activate(logits_nLV.float()).sum(1)

    def _activate(self, values: Tensor) -> Tensor:
        """``log(1 + relu(x))`` in place, the logarithm twice for ``log1p_relu``."""
        values = values.relu_().log1p_()
        return values.log1p_() if self.pooling.activation == "log1p_relu" else values

    def _static(self, rows: SparseRows) -> list[SparseRow]:
        """The look-ups: a token counts once, however often it stands in the query."""
        if not rows.static_lengths:
            return []
        assert self.query_weights is not None
        ids = np.split(rows.static_ids.cpu().numpy(), np.cumsum(rows.static_lengths)[:-1])
        found = [np.unique(own).astype(np.int32) for own in ids]
        values = [self.query_weights[own] for own in found]
        return [SparseRow(own[weights != 0], weights[weights != 0]) for own, weights in zip(found, values, strict=True)]


def compress(dense_RV: Tensor) -> Compressed:
    """The positive entries of dense rows; waits for the device."""
    row, column = (dense_RV > 0).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(dense_RV))
    # NaN and infinity both survive a maximum.
    return Compressed(counts, column.int(), dense_RV[row, column], dense_RV.amax(1).isfinite())


def _split(rows: SparseRows) -> list[SparseRow | None]:
    """Compressed rows as one vector per sequence; None for one that is not finite."""
    outputs: list[SparseRow | None] = []
    for block in (*rows.blocks, *([] if rows.last_RV is None else [compress(rows.last_RV)])):
        counts, indices, values, finite = (tensor.cpu().numpy() for tensor in block)
        bounds = np.cumsum(counts)[:-1]
        for own, weights, good in zip(np.split(indices, bounds), np.split(values, bounds), finite, strict=True):
            outputs.append(SparseRow(own, weights) if good else None)
    return outputs


def build_sparse_head(layout: Layout, family: Family, backbone: MaskedLMBackbone, sparse: LearnedSparse) -> SparseHead:
    """The sparse head of a checkpoint.

    Args:
        layout: The checkpoint.
        family: Of its transformer.
        backbone: Its transformer, whose word embeddings the decoder shares.
        sparse: Its rules.

    Raises:
        LoadError: There is no masked-language-model head, or the table of query weights cannot be read.
        WeightMismatch: A tensor is missing, has a wrong shape, or holds NaN or Inf.
    """
    weights = None if sparse.query is None else load_query_weights(sparse.query)
    return SparseHead(load_masked_lm(layout.transformer_path, family, backbone), sparse.pooling, query_weights=weights)


def load_query_weights(spec: SparseStaticEmbeddingSpec) -> FloatArray:
    """The weight of each token id in a SparseStaticEmbedding module, ``[V]``.

    Raises:
        LoadError: A file is missing or malformed.
        WeightMismatch: There is no tensor ``weight`` of one dimension.
    """
    if spec.weights_file is not None:
        return _weights_by_token(spec)
    read = read_tensors(spec.path)
    refuse_non_finite(read)
    weight = read.tensors.get("weight")
    if weight is None or weight.ndim != 1:
        raise WeightMismatch(
            f"{read.files[0]}: there is no tensor 'weight' of one dimension; a SparseStaticEmbedding module needs one."
        )
    table: FloatArray = weight.float().numpy()
    return table


def _weights_by_token(spec: SparseStaticEmbeddingSpec) -> FloatArray:
    from tokenizers import Tokenizer

    assert spec.weights_file is not None
    by_token = JsonObject.read(spec.path / spec.weights_file)
    tokenizer = Tokenizer.from_file(str(spec.path / "tokenizer.json"))
    table = np.zeros(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.float32)
    for token, weight in by_token.data.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise LoadError(f"{by_token.file}: the weight of {token!r} is {weight!r}; it must be a number.")
        index = tokenizer.token_to_id(token)
        if index is not None:
            table[index] = weight
    return table
