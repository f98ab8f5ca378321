"""Late-interaction checkpoints in every layout against sentence-transformers' MultiVectorEncoder on the same files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize
from transformers import AutoModel, AutoTokenizer

from infinity_bento.checkpoints.families import family_of, length_limit
from infinity_bento.checkpoints.late_interaction import is_late_interaction, read_late_interaction
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.core import FloatArray, InputType, Item, Task
from infinity_bento.heads.late_interaction import build_late_interaction_head
from infinity_bento.inputs.late_interaction import LateInteractionTokenizer, load_late_interaction_tokenizer
from infinity_bento.inputs.tokenization import TextRules
from infinity_bento.maxsim import maxsim
from infinity_bento.models.backbone import load_backbone
from infinity_bento.runners.runner import Runner
from tests import tiny
from tests import tiny_retrieval as made
from tests.tiny_retrieval import DOCUMENTS, QUERIES

TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Sums over several threads may differ in the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def served(folder: Path, limit: int = 128) -> tuple[Runner, LateInteractionTokenizer]:
    """Our runner and tokenizer of a checkpoint."""
    layout = read_layout(folder)
    assert is_late_interaction(layout)
    late = read_late_interaction(layout)
    family = family_of(layout.config, folder / "config.json")
    backbone = load_backbone(layout, family, dtype=torch.float32)
    head = build_late_interaction_head(layout, late, family, hidden_size=backbone.hidden_size, device=backbone.device)
    rules = TextRules(
        max_input_length=late.document_length or limit,
        vocabulary_size=layout.config["vocab_size"],
        prompts=layout.prompts,
    )
    tokenizer = load_late_interaction_tokenizer(
        layout, late, rules, position_limit=length_limit(family, layout.config), token_budget=16384
    )
    return Runner(backbone, {Task.EMBED_ALL: head}), tokenizer


def items(**kwargs: Any) -> list[Item]:
    queries = [Item(Task.EMBED_ALL, text=text, input_type=InputType.QUERY, **kwargs) for text in QUERIES]
    return queries + [Item(Task.EMBED_ALL, text=text, input_type=InputType.DOCUMENT, **kwargs) for text in DOCUMENTS]


def reference(folder: Path) -> list[FloatArray]:
    model = MultiVectorEncoder(str(folder), device="cpu")
    return [
        *[model.encode_query([text])[0].float().numpy() for text in QUERIES],
        *[model.encode_document([text])[0].float().numpy() for text in DOCUMENTS],
    ]


def difference(ours: list[FloatArray], theirs: list[FloatArray]) -> float:
    assert [matrix.shape for matrix in ours] == [matrix.shape for matrix in theirs]
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(left - right).max(initial=0.0)) for left, right in pairs)


def check(folder: Path, expected: list[FloatArray]) -> list[FloatArray]:
    """Alone, together and shuffled equal the reference."""
    runner, tokenizer = served(folder)
    assert difference(made.alone(runner, tokenizer, items()), expected) < TOLERANCE
    together = made.run(runner, tokenizer, items())
    assert difference(together, expected) < TOLERANCE
    order = random.Random(1).sample(range(len(items())), len(items()))
    assert difference(made.run(runner, tokenizer, items(), order), expected) < TOLERANCE
    return together


@pytest.mark.parametrize(
    "metadata",
    [{}, {"attend_to_mask_tokens": True}, {"mask_punctuation": False, "query_maxlen": 12}],
    ids=["plain", "attend", "no skiplist, short queries"],
)
def test_stanford(metadata: dict[str, Any]) -> None:
    folder = made.stanford(**metadata)
    check(folder, reference(folder))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"attend_to_expansion_tokens": True},
        {"do_query_expansion": False, "query_length": 10},
        {"skiplist_words": []},
        {"prompts": {"query": "search: "}},
        {"model_type": None},
    ],
    ids=["plain", "attend", "no expansion", "no skiplist", "prompt", "no model type"],
)
def test_pylate(config: dict[str, Any]) -> None:
    folder = made.pylate(**config)
    check(folder, reference(folder))


@pytest.mark.parametrize("tokens", [(), ("[Q]", "[D]")], ids=["text", "bare words"])
def test_pylate_markers_that_are_not_in_the_vocabulary_as_they_stand(tokens: tuple[str, ...]) -> None:
    folder = made.pylate(tokens=tokens)
    check(folder, reference(folder))


def test_sliding_windows_beyond_which_an_expanded_row_sees_nothing() -> None:
    folder = made.pylate("modernbert", query_length=40)
    check(folder, reference(folder))


@pytest.mark.parametrize("name", ["xlm-roberta", "mpnet", "nomic_bert"])
def test_other_families(name: str) -> None:
    folder = made.pylate(name)
    check(folder, reference(folder))


def native(folder: Path, **expansion: Any) -> Path:
    """A MultiVectorEncoder as sentence-transformers itself saves it."""
    model = MultiVectorEncoder(str(made.pylate()), device="cpu")
    model[0].query_expansion = expansion or None
    model.save(str(folder))
    return folder


@pytest.mark.parametrize(
    "expansion",
    [
        {"strategy": "fixed", "length": 24},
        {"strategy": "min", "length": 12, "attend": True},
        {"strategy": "min", "length": 12, "token": "[UNK]"},
        {},
    ],
    ids=["fixed", "floor", "another token", "none"],
)
def test_native(expansion: dict[str, Any], tmp_path: Path) -> None:
    folder = native(tmp_path, **expansion)
    check(folder, reference(folder))


def test_native_with_masks_on_both_sides_and_a_chain_of_projections(tmp_path: Path) -> None:
    model = MultiVectorEncoder(str(made.pylate()), device="cpu")
    torch.manual_seed(5)
    mask = MultiVectorMask(list("?,."), skiplist_tasks=["query", "document"])
    dense = [
        Dense(made.WIDTH, 48, activation_function=torch.nn.GELU(), module_input_name="token_embeddings"),
        Dense(48, 48, use_residual=True, module_input_name="token_embeddings"),
    ]
    normalize = Normalize(module_input_name="token_embeddings")
    MultiVectorEncoder(modules=[model[0], model[1], *dense, mask, normalize], prompts=model.prompts).save(str(tmp_path))
    check(tmp_path, reference(tmp_path))


def test_native_that_keeps_some_tokens_only(tmp_path: Path) -> None:
    model = MultiVectorEncoder(str(made.pylate()), device="cpu")
    ids = model.tokenizer(DOCUMENTS[0])["input_ids"][1:4]
    mask = MultiVectorMask(keep_only_token_ids=ids)
    MultiVectorEncoder(modules=[model[0], model[1], mask], prompts=model.prompts).save(str(tmp_path))
    expected = reference(tmp_path)
    assert len(expected[len(QUERIES)]) == 4  # the first document, of 12 tokens or more
    assert min(map(len, expected)) == 0
    check(tmp_path, expected)


def test_jina_colbert() -> None:
    """The encoder of Jina v3 under its own names, without adapters; the reference is transformers' class."""
    folder = made.jina_colbert()
    runner, tokenizer = served(folder)
    ours = made.run(runner, tokenizer, items())
    model = AutoModel.from_pretrained(tiny.plain("jina_embeddings_v3"), dtype=torch.float32).eval()
    marks = {side: tokenizer.token_id(f"[{side}Marker]") for side in ("Query", "Document")}
    mask, end = tokenizer.token_id("<mask>"), tokenizer.token_id("</s>")
    skipped = {tokenizer.token_id(word) for word in ",.!?:()-/\"';"}
    for item, matrix in zip(items(), ours, strict=True):
        words = AutoTokenizer.from_pretrained(folder)(item.text)["input_ids"]
        ids = [words[0], marks["Query" if item.input_type is InputType.QUERY else "Document"], *words[1:]]
        if item.input_type is InputType.QUERY:
            ids = ids if len(ids) <= 32 else [*ids[:31], end]
            ids += [mask] * (32 - len(ids))
        with torch.inference_mode():
            rows = model(input_ids=torch.tensor([ids])).last_hidden_state[0] @ made.projection().T
        rows = torch.nn.functional.normalize(rows, dim=-1)
        if item.input_type is InputType.DOCUMENT:
            rows = rows[[token not in skipped for token in ids]]
        assert difference([matrix], [rows.numpy()]) < TOLERANCE
    assert difference(made.alone(runner, tokenizer, items()), ours) < TOLERANCE


def test_the_order_of_maxsim_scores() -> None:
    folder = made.stanford()
    outputs = check(folder, reference(folder))
    model = MultiVectorEncoder(str(folder), device="cpu")
    queries, documents = outputs[: len(QUERIES)], outputs[len(QUERIES) :]
    expected = model.similarity(model.encode_query(QUERIES), model.encode_document(DOCUMENTS)).numpy()
    scores = np.stack([maxsim(query, documents) for query in queries])
    assert np.abs(scores - expected).max() < 32 * TOLERANCE
    assert np.ptp(expected, axis=1).min() > 0.1  # documents differ
