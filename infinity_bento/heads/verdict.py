"""Language models as rerankers: the logits of one or two tokens that may follow, without the rest of the vocabulary.

Built by ``heads.build``. The rows of the output matrix that count become one row, true minus false, at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity_bento.errors import LoadError, WeightMismatch
from infinity_bento.heads.classifiers import Classifier, Layer, Plan, last_token, load_classifier, read_head

OUTPUT = "lm_head.weight"
EMBEDDINGS = "embed_tokens.weight"  # the same matrix where the config ties the two


class Softcap(nn.Module):
    """``cap * tanh(x / cap)``, Gemma's bound on logits."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, rows: Tensor) -> Tensor:
        """Any shape."""
        return self.cap * torch.tanh(rows / self.cap)


class Difference(nn.Module):
    """The first column minus the second."""

    def forward(self, rows: Tensor) -> Tensor:
        """``[B, 2]`` to ``[B, 1]``."""
        return rows[:, :1] - rows[:, 1:]


def load_verdict(
    folder: Path,
    config: Mapping[str, Any],
    token_ids: tuple[int, int | None],
    device: torch.device | str,
) -> Classifier:
    """The score of a yes/no reranker as a network with one logit.

    Args:
        folder: Where the weight files lie.
        config: Of the model, with the defaults of its class.
        token_ids: Of the true and the false token; None: the logit of the true one is the score.
        device: Where the row goes.

    Raises:
        LoadError: If a token is outside the vocabulary.
        WeightMismatch: If there is no output matrix.
    """
    matrix_VD = output_matrix(folder, bool(config.get("tie_word_embeddings")))
    true, false = token_ids
    for token in (true, false):
        if token is not None and token >= matrix_VD.shape[0]:
            raise LoadError(
                f"{folder}: token id {token} of the reranker is outside the vocabulary of {matrix_VD.shape[0]}; use "
                "the tokenizer and the LogitScore settings that belong to these weights."
            )
    rows = matrix_VD[[token for token in (true, false) if token is not None]].float()
    cap = config.get("final_logit_softcapping")
    tail: list[Layer] = []
    if cap:  # bends each logit, so the two cannot be one row
        tail = [(None, Softcap(float(cap))), *([(None, Difference())] if len(rows) == 2 else [])]
    elif len(rows) == 2:
        rows = rows[:1] - rows[1:]
    count, width = rows.shape
    plan = Plan([("verdict", nn.Linear(width, count, bias=False, device="meta")), *tail], last_token)
    return load_classifier(lambda: plan, folder, device, tensors={"verdict.weight": rows})


def output_matrix(folder: Path, tied: bool) -> Tensor:
    """``[V, D]`` as stored."""
    embeddings = (f"model.{EMBEDDINGS}", f"language_model.{EMBEDDINGS}", EMBEDDINGS)
    found = read_head(folder, {OUTPUT, *embeddings})
    names = (OUTPUT, *embeddings) if tied else (OUTPUT,)
    matrix = next((found[name] for name in names if name in found), None)
    if matrix is None:
        raise WeightMismatch(
            f"{folder}: the weights have no tensor {OUTPUT!r}, whose rows are read; use the complete "
            "checkpoint of the language model."
        )
    return matrix
