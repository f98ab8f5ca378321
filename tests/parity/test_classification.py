"""Scores of tiny checkpoints as they are served, from their files to an item's output, against transformers and
sentence-transformers on the same files: alone, batched and shuffled."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from infinity_bento.checkpoints.preflight import ModelPlan, find_files, read_plan
from infinity_bento.checkpoints.purpose import HeadKind
from infinity_bento.core import Aggregation, Encoded, Item, Result, Task, TokenLabel
from infinity_bento.engine import Engine
from infinity_bento.errors import EmptyInput, LoadError, WeightMismatch
from infinity_bento.loading import build_heads, load_tokenizer
from infinity_bento.models.backbone import load_backbone
from infinity_bento.runners.runner import Runner
from infinity_bento.settings import resolve
from tests import references, tiny, tiny_tokenizers

TOLERANCE = 2e-5
TEXTS = (
    "what is deep learning?",
    "The capital of France is Paris. A plane is taking off; an air plane is flying over the sea.",
    "no",
    "I like you. I am not having a great day.",
    "def add(a, b): return a + b",
)
PAIRS = tuple((TEXTS[0], text) for text in (*TEXTS, ""))
RERANKERS = (
    "bert",
    "xlm-roberta",
    "camembert",
    "electra",
    "albert",
    "mpnet",
    "deberta-v2",
    "modernbert",
    "gte",
    "eurobert",
)
LABELLERS = ("roberta", "distilbert", "modernbert-mean", "jina_embeddings_v3", "nomic_bert", "ultrabert")
DECODERS = (
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "qwen3_5_text",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums over several threads may differ in the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Served:
    """A checkpoint loaded as the engine does it, without its threads."""

    def __init__(self, folder: Path, **options: str) -> None:
        settings = resolve({"model_id": [str(folder)], **options})
        self.plan: ModelPlan = read_plan(settings.models[0], find_files(settings.models[0], settings))
        self.tokenizer = load_tokenizer(self.plan, settings.models[0])
        backbone = load_backbone(self.plan.layout, self.plan.family, dtype=torch.float32)
        self.runner = Runner(backbone, build_heads(self.plan, settings.models[0], backbone, self.tokenizer))

    def encode(self, items: list[Item]) -> list[Encoded]:
        """The tokens of items without errors."""
        encoded = self.tokenizer.encode(items)
        assert all(isinstance(each, Encoded) for each in encoded), encoded
        return [each for each in encoded if isinstance(each, Encoded)]

    def run(self, items: list[Item]) -> list[Any]:
        """The outputs of one batch."""
        batch = self.runner.prepare(self.encode(items))
        return self.runner.collect(self.runner.run(batch, items), batch, items)

    def every_way(self, items: list[Item]) -> Iterator[list[Any]]:
        """Outputs in the order of ``items``: alone, in one batch, in a shuffled batch."""
        yield [self.run([item])[0] for item in items]
        yield self.run(items)
        order = random.Random(1).sample(range(len(items)), len(items))
        shuffled = self.run([items[index] for index in order])
        yield [shuffled[order.index(index)] for index in range(len(items))]


def pair_items(task: Task = Task.RERANK, **kwargs: Any) -> list[Item]:
    return [Item(task, text=query, text_pair=document, **kwargs) for query, document in PAIRS]


def text_items(task: Task = Task.CLASSIFY, **kwargs: Any) -> list[Item]:
    return [Item(task, text=text, **kwargs) for text in TEXTS]


def assert_close(outputs: list[Any], expected: Any) -> None:
    found = np.stack(outputs)
    assert found.dtype == np.float32
    assert found == pytest.approx(np.asarray(expected, dtype=np.float64).reshape(found.shape), abs=TOLERANCE)


def reference(folder: Path, inputs: Any) -> np.ndarray[Any, Any]:
    """Logits of transformers' own class, one input at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for given in inputs:
        # In lists, because a lone pair with an empty side is taken for a single text.
        texts = ([given],) if isinstance(given, str) else ([given[0]], [given[1]])
        with torch.inference_mode():
            rows.append(model.eval()(**tokenizer(*texts, return_tensors="pt", truncation=True)).logits[0].numpy())
    return np.stack(rows)


@functools.cache
def served(name: str, head: str = "cls") -> Served:
    return Served(tiny.checkpoint(name, head))


def varied(name: str, folder: Path, head: str = "cls", **changes: Any) -> Path:
    """A copy of a tiny checkpoint with another config."""
    shutil.copytree(tiny.checkpoint(name, head), folder)
    tiny.edit_config(folder, **changes)
    return folder


# Encoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RERANKERS)
def test_rerankers_equal_cross_encoder(name: str) -> None:
    model = served(name)
    assert model.plan.purpose.tasks == (Task.RERANK, Task.CLASSIFY)
    oracle = CrossEncoder(str(tiny.checkpoint(name, "cls")), device="cpu")
    expected = oracle.predict(list(PAIRS))
    assert np.ptp(expected) > 1e-4
    for outputs in model.every_way(pair_items()):
        assert outputs[0].shape == (1,)
        assert_close(outputs, expected)
    raw = oracle.predict(list(PAIRS), activation_fn=torch.nn.Identity())
    assert_close(model.run(pair_items(raw_scores=True)), raw)
    assert_close(model.run(pair_items(Task.CLASSIFY)), expected)


@pytest.mark.parametrize("name", (*LABELLERS, *RERANKERS))
def test_classifiers_equal_transformers(name: str) -> None:
    model, logits = served(name), torch.from_numpy(reference(tiny.checkpoint(name, "cls"), TEXTS))
    labels = logits.shape[1]
    assert model.plan.purpose.id2label is not None and len(model.plan.purpose.id2label) == labels
    expected = logits.softmax(-1) if labels > 1 else logits.sigmoid()
    for outputs in model.every_way(text_items()):
        assert_close(outputs, expected)
    assert_close(model.run(text_items(raw_scores=True)), logits)


def test_the_pipeline_names_the_same_labels() -> None:
    folder = tiny.checkpoint("roberta", "cls")
    pipeline = transformers.pipeline("text-classification", model=str(folder), top_k=None)
    model = served("roberta")
    names = model.plan.purpose.id2label
    assert names == {0: "negative", 1: "neutral", 2: "positive"}
    for output, expected in zip(model.run(text_items()), pipeline(list(TEXTS)), strict=True):
        ours = {names[index]: score for index, score in enumerate(output)}
        assert ours == pytest.approx({entry["label"]: entry["score"] for entry in expected}, abs=TOLERANCE)


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
def test_eurobert_pools_as_its_config_says(pooling: str, tmp_path: Path) -> None:
    folder = varied("eurobert", tmp_path / "made", classifier_pooling=pooling)
    assert_close(Served(folder).run(text_items(raw_scores=True)), reference(folder, TEXTS))


def test_modernbert_with_biases(tmp_path: Path) -> None:
    config = transformers.ModernBertConfig(**tiny.MODERNBERT, num_labels=2, classifier_bias=True, norm_bias=True)
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    tiny.shake(made).save_pretrained(tmp_path)
    tiny_tokenizers.modernbert().save_pretrained(tmp_path)
    assert_close(Served(tmp_path).run(text_items(raw_scores=True)), reference(tmp_path, TEXTS))


def test_the_remote_layout_of_gte_rerankers(tmp_path: Path) -> None:
    plain = tiny.checkpoint("gte", "cls")
    folder = tmp_path / "made"
    shutil.copytree(plain, folder)
    theta = json.loads((plain / "config.json").read_text())["rope_parameters"]["rope_theta"]
    rope = {"rope_theta": theta, "rope_parameters": None}
    code = {"AutoModelForSequenceClassification": "Alibaba-NLP/new-impl--modeling.NewForSequenceClassification"}
    tiny.edit_config(folder, model_type="new", architectures=["NewForSequenceClassification"], auto_map=code, **rope)
    tiny.rename_tensors(folder, lambda name: name.replace("gte.", "new.", 1))
    assert any(name.startswith("new.") for name in load_file(folder / "model.safetensors"))
    model = Served(folder)
    assert model.plan.purpose.tasks == (Task.RERANK, Task.CLASSIFY)
    assert_close(model.run(pair_items(raw_scores=True)), reference(plain, PAIRS))


@pytest.mark.parametrize(
    ("problem", "activate"),
    [
        ("regression", lambda logits: logits),
        ("multi_label_classification", torch.sigmoid),
        ("single_label_classification", lambda logits: logits.softmax(-1)),
    ],
)
def test_the_kind_of_problem_decides_the_activation(
    problem: str, activate: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    folder = varied("distilbert", tmp_path / "made", problem_type=problem)
    logits = torch.from_numpy(reference(folder, TEXTS))
    assert_close(Served(folder).run(text_items()), activate(logits))


@pytest.mark.parametrize(
    "changes",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
    ],
)
def test_a_cross_encoders_activation_setting(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = varied("bert", tmp_path / "made", **changes)
    expected = CrossEncoder(str(folder), device="cpu").predict(list(PAIRS))
    assert_close(Served(folder).run(pair_items()), expected)


def test_a_folder_saved_by_sentence_transformers(tmp_path: Path) -> None:
    oracle = CrossEncoder(str(tiny.checkpoint("bert", "cls")), device="cpu", activation_fn=torch.nn.Identity())
    oracle.save_pretrained(str(tmp_path))
    model = Served(tmp_path)
    assert model.plan.layout.kind == "CrossEncoder"
    assert_close(model.run(pair_items()), oracle.predict(list(PAIRS)))


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "deberta-v2"])
def test_overlong_pairs_are_cut_as_the_library_does(name: str) -> None:
    folder, long = tiny.checkpoint(name, "cls"), " ".join(TEXTS) * 20
    pairs = [(TEXTS[0], long), (long, TEXTS[0]), (long, long)]
    items = [Item(Task.CLASSIFY, text=a, text_pair=b, raw_scores=True) for a, b in pairs]
    model = served(name)
    limit = model.tokenizer.rules.max_input_length
    encoded = model.encode(items)
    assert all(len(each) == limit and each.truncated_from is not None for each in encoded)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for each, pair in zip(encoded, pairs, strict=True):
        assert each.input_ids == tokenizer(*pair, truncation=True, max_length=limit)["input_ids"]
    assert_close(model.run(items), reference(folder, pairs))


def test_jina_rerankers_with_the_native_class(tmp_path: Path) -> None:
    base = tiny.checkpoint("jina_bert")
    folder = tmp_path / "made"
    shutil.copytree(base, folder)
    for name in ("modules.json", "config_sentence_transformers.json"):
        (folder / name).unlink()
    tiny.edit_config(folder, architectures=["JinaBertForSequenceClassification"], id2label={"0": "LABEL_0"})
    tiny.rename_tensors(folder, lambda name: f"bert.{name}")
    generator = torch.Generator().manual_seed(1)
    head = {
        "bert.pooler.dense.weight": torch.randn(tiny.WIDTH, tiny.WIDTH, generator=generator) * 0.2,
        "bert.pooler.dense.bias": torch.randn(tiny.WIDTH, generator=generator),
        "classifier.weight": torch.randn(1, tiny.WIDTH, generator=generator),
        "classifier.bias": torch.randn(1, generator=generator),
    }
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **head}, folder / "model.safetensors", metadata={"format": "pt"})
    model, hidden = Served(folder), references.reference("jina_bert")
    assert model.plan.purpose.tasks == (Task.RERANK, Task.CLASSIFY)
    dense, pooler_bias, output, bias = head.values()
    expected = []
    for each in model.encode(text_items()):
        first = hidden(each.input_ids)[0]
        expected.append((output @ (dense @ first + pooler_bias).tanh() + bias).numpy())
    for outputs in model.every_way(text_items(raw_scores=True)):
        assert_close(outputs, np.stack(expected))


# Decoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_read_the_last_token_that_is_not_padding(name: str) -> None:
    model, folder = served(name), tiny.checkpoint(name, "cls")
    expected = reference(folder, TEXTS)
    for outputs in model.every_way(text_items(raw_scores=True)):  # a reward is the raw score
        assert_close(outputs, expected)
    assert_close(model.run(pair_items(raw_scores=True)), reference(folder, PAIRS))


def test_the_padding_token_at_the_end_is_not_read() -> None:
    model = served("qwen3")
    ids = model.encode(text_items())[0].input_ids
    padding = model.runner.backbone.config["pad_token_id"]  # type: ignore[attr-defined]
    assert ids[-1] == padding
    with_end, without = model.run([Item(Task.CLASSIFY, token_ids=given, raw_scores=True) for given in (ids, ids[:-1])])
    assert with_end == pytest.approx(without, abs=TOLERANCE)
    assert all(np.isfinite(model.run([Item(Task.CLASSIFY, token_ids=[padding, padding])])[0]))


@pytest.mark.parametrize(("pooling", "temperature"), [("avg", 1.0), ("avg", 0.2), ("cls", 1.0), ("last", 1.0)])
def test_nemotron_reranker(pooling: str, temperature: float, tmp_path: Path) -> None:
    plain = tiny.checkpoint("llama-bidirec", "cls")
    folder = varied(
        "llama-bidirec",
        tmp_path / "made",
        model_type="llama_bidirec",
        architectures=["LlamaBidirectionalForSequenceClassification"],
        is_causal=None,
        pooling=pooling,
        temperature=temperature,
    )
    model = Served(folder)
    assert model.plan.purpose.template == "nemotron-rerank"
    oracle = AutoModelForSequenceClassification.from_pretrained(plain, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(plain)
    rows = []
    for query, document in PAIRS:
        encoded = tokenizer(f"question:{query} \n \n passage:{document}", return_tensors="pt")
        with torch.inference_mode():
            hidden = oracle.model(**encoded).last_hidden_state[0]
            pooled = {"avg": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
            rows.append((oracle.score(pooled) / temperature).numpy())
    for outputs in model.every_way(pair_items(raw_scores=True)):
        assert_close(outputs, np.stack(rows))


# Language models as rerankers ---------------------------------------------------------------------------------------

QUERY_DOCUMENT_CHAT = (
    "{%- set ns = namespace(instruction='Find what answers the query') -%}"
    "{%- for m in messages if m['role'] == 'system' %}{% set ns.instruction = m['content'] %}{% endfor -%}"
    "<|im_start|>user\n<Instruct>: {{ ns.instruction }}\n"
    "{%- for m in messages if m['role'] == 'query' %}\n<Query>: {{ m['content'] }}{% endfor -%}"
    "{%- for m in messages if m['role'] == 'document' %}\n<Document>: {{ m['content'] }}{% endfor -%}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def words(folder: Path, *new: str) -> Any:
    """The tokenizer of a folder with words added as tokens of their own, saved there."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(new))
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) <= tiny.VOCABULARY
    return tokenizer


def language_model(name: str, folder: Path, *new: str) -> tuple[Any, Any]:
    """A tiny language model in a folder of its own, and its tokenizer."""
    shutil.copytree(tiny.checkpoint(name, "lm"), folder)
    tokenizer = words(folder, *new)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), tokenizer


def next_token_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0, -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("template", [None, QUERY_DOCUMENT_CHAT], ids=["chatml", "roles"])
@pytest.mark.parametrize("false", [True, False], ids=["true-false", "true-only"])
def test_logit_score_modules_equal_cross_encoder(template: str | None, false: bool, tmp_path: Path) -> None:
    source = tmp_path / "lm"
    _, tokenizer = language_model("qwen3-noeos", source, "yes", "no")
    if template is not None:
        tokenizer.chat_template = template
        tokenizer.save_pretrained(source)
    ids = tokenizer.convert_tokens_to_ids(["yes", "no"])
    modules = [
        Transformer(str(source), transformer_task="text-generation"),
        LogitScore(ids[0], ids[1] if false else None),
    ]
    oracle = CrossEncoder(modules=modules, device="cpu", prompts={"rank": "Rank these"})
    oracle.save_pretrained(str(tmp_path / "made"))
    model = Served(tmp_path / "made")
    assert model.plan.purpose.kind is HeadKind.YES_NO
    assert model.plan.purpose.template == "chat"
    for outputs in model.every_way(pair_items()):
        assert_close(outputs, oracle.predict(list(PAIRS)))
    raw = oracle.predict(list(PAIRS), activation_fn=torch.nn.Identity())
    assert np.ptp(raw) > 1e-2
    assert_close(model.run(pair_items(Task.CLASSIFY, raw_scores=True)), raw)
    prompted = oracle.predict(list(PAIRS), prompt_name="rank")
    assert np.abs(prompted - oracle.predict(list(PAIRS))).max() > 1e-4
    assert_close(model.run(pair_items(prompt_name="rank")), prompted)
    assert_close(model.run(pair_items(instruction="Rank these")), prompted)


def test_a_logit_score_without_chat_template_takes_the_tokenizers_pair(tmp_path: Path) -> None:
    source = tmp_path / "lm"
    language_model("llama", source)
    oracle = CrossEncoder(
        modules=[Transformer(str(source), transformer_task="text-generation"), LogitScore(300, 301)], device="cpu"
    )
    oracle.save_pretrained(str(tmp_path / "made"))
    model = Served(tmp_path / "made")
    assert model.plan.purpose.template is None
    assert_close(model.run(pair_items(raw_scores=True)), oracle.predict(list(PAIRS), activation_fn=torch.nn.Identity()))


def test_soft_capped_logits(tmp_path: Path) -> None:
    source = tmp_path / "bge-reranker-v2-gemma"
    lm, tokenizer = language_model("gemma2", source, "Yes", "No")
    assert lm.config.final_logit_softcapping
    lm.config.final_logit_softcapping = 0.5
    lm.save_pretrained(source)
    ids = tokenizer.convert_tokens_to_ids(["Yes", "No"])
    oracle = CrossEncoder(
        modules=[Transformer(str(source), transformer_task="text-generation"), LogitScore(*ids)], device="cpu"
    )
    oracle.save_pretrained(str(tmp_path / "made"))
    expected = oracle.predict(list(PAIRS), activation_fn=torch.nn.Identity())
    assert_close(Served(tmp_path / "made").run(pair_items(raw_scores=True)), expected)


QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
WEB = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.mark.parametrize("instruction", [None, "Find the code"])
def test_qwen3_reranker_by_name(instruction: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-0.6B"
    lm, tokenizer = language_model("qwen3-noeos", folder, "yes", "no")
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    expected = []
    for query, document in PAIRS:
        text = QWEN3.format(instruction=instruction or WEB, query=query, document=document)
        logits = next_token_logits(lm, tokenizer(text, add_special_tokens=False)["input_ids"])
        expected.append(logits[[no, yes]].softmax(-1)[1].item())
    model = Served(folder)
    assert model.plan.purpose.template == "qwen3-reranker"
    for outputs in model.every_way(pair_items(instruction=instruction)):
        assert_close(outputs, expected)


def test_qwen3_reranker_converted_to_a_classifier_scores_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-0.6B"
    lm, tokenizer = language_model("qwen3-noeos", folder, "yes", "no")
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    lm.config.num_labels = 1
    converted = transformers.Qwen3ForSequenceClassification(lm.config)
    converted.model.load_state_dict(lm.model.state_dict())
    with torch.no_grad():
        converted.score.weight.copy_((lm.lm_head.weight[yes] - lm.lm_head.weight[no])[None])
    made = tmp_path / "Qwen3-Reranker-0.6B-seq-cls"
    converted.save_pretrained(made)
    tokenizer.save_pretrained(made)
    original, seq_cls = Served(folder), Served(made)
    assert seq_cls.plan.purpose.kind is HeadKind.CLASSIFIER
    assert_close(seq_cls.run(pair_items()), np.stack(original.run(pair_items())))


MXBAI = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n",
    "\n",
    "You are a search relevance expert who evaluates how well documents match search queries. For each "
    "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
    "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
    "<|im_end|>\n<|im_start|>assistant\n",
)


def mxbai_ids(tokenizer: Any, query: str, document: str, instruction: str | None) -> list[int]:
    """Part by part, as mixedbread's package does it."""
    asked = f"query: {query}" if instruction is None else f"instruction: {instruction}\nquery: {query}"
    before, separator, task, after = MXBAI
    parts = [before, asked, separator, f"document: {document}", separator, task, after]
    return [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("instruction", [None, "Find the code"])
def test_mxbai_rerank_v2_by_name(instruction: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "mxbai-rerank-base-v2"
    lm, tokenizer = language_model("qwen2", folder)
    one, zero = (tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in "10")
    expected = []
    for query, document in PAIRS:
        logits = next_token_logits(lm, mxbai_ids(tokenizer, query, document, instruction))
        expected.append((logits[one] - logits[zero]).sigmoid().item())
    for outputs in Served(folder).every_way(pair_items(instruction=instruction)):
        assert_close(outputs, expected)


def test_mxbai_rerank_v2_with_two_labels_can_rerank(tmp_path: Path) -> None:
    folder = tmp_path / "mxbai-rerank-base-v2-seq"
    lm = tiny.model(tiny.RECIPES["qwen2"], "lm")
    lm.config.id2label = {0: "0", 1: "1"}
    converted = transformers.Qwen2ForSequenceClassification(lm.config)
    tiny.shake(converted).save_pretrained(folder)
    tokenizer = tiny_tokenizers.qwen_without_end()
    tokenizer.save_pretrained(folder)
    model = Served(folder)
    assert model.plan.purpose.tasks == (Task.RERANK, Task.CLASSIFY)
    rows = []
    for query, document in PAIRS:
        with torch.inference_mode():
            ids = torch.tensor([mxbai_ids(tokenizer, query, document, None)])
            rows.append(converted.eval()(input_ids=ids).logits[0])
    logits = torch.stack(rows)
    assert_close(model.run(pair_items(Task.CLASSIFY)), logits.softmax(-1))
    assert_close(model.run(pair_items()), logits.softmax(-1)[:, 1])
    assert_close(model.run(pair_items(raw_scores=True)), logits[:, 1] - logits[:, 0])


def test_bge_reranker_v2_gemma_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "bge-reranker-v2-gemma"
    lm, tokenizer = language_model("gemma", folder, "Yes")
    yes = tokenizer.convert_tokens_to_ids("Yes")
    question = (
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
        "prediction of either 'Yes' or 'No'."
    )
    expected = []
    for query, document in PAIRS:
        ids = [tokenizer.bos_token_id]
        for part in (f"A: {query}", "\n", f"B: {document}", "\n", question):
            ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        expected.append(next_token_logits(lm, ids)[yes].item())
    for outputs in Served(folder).every_way(pair_items(raw_scores=True)):
        assert_close(outputs, expected)


def test_tied_output_weights(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3-reranker"
    lm, tokenizer = language_model("qwen3-noeos", folder, "yes", "no")
    config = transformers.Qwen3Config(**{**lm.config.to_dict(), "tie_word_embeddings": True})
    torch.manual_seed(0)
    tied = tiny.shake(transformers.Qwen3ForCausalLM(config)).eval()
    tied.save_pretrained(folder)  # type: ignore[operator]
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    text = QWEN3.format(instruction=WEB, query=PAIRS[1][0], document=PAIRS[1][1])
    logits = next_token_logits(tied, tokenizer(text, add_special_tokens=False)["input_ids"])
    assert_close(Served(folder).run(pair_items(raw_scores=True)[1:2]), logits[yes] - logits[no])


# Tokens ------------------------------------------------------------------------------------------------------------

NER = {"0": "O", "1": "B-PER", "2": "I-PER", "3": "B-LOC", "4": "I-LOC"}
ENTITIES = (*TEXTS, "Zebra \u00fcber \u65e5\u672c\u8a9e \U0001f600 unbelievable capital-of-France")


@functools.cache
def token_checkpoint(name: str) -> Path:
    folder = tiny.root() / f"{name}-ner"
    shutil.copytree(tiny.checkpoint(name, "token-cls"), folder)
    tiny.edit_config(folder, id2label=NER, label2id={label: int(key) for key, label in NER.items()})
    return folder


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("name", ["bert", "roberta", "deberta-v2", "modernbert", "llama", "qwen3"])
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_token_labels_equal_the_pipeline(name: str, aggregation: Aggregation) -> None:
    folder = token_checkpoint(name)
    pipeline = transformers.pipeline("token-classification", model=str(folder), aggregation_strategy=aggregation.value)
    model = Served(folder)
    assert model.plan.purpose.tasks == (Task.CLASSIFY_TOKENS,)
    items = [Item(Task.CLASSIFY_TOKENS, text=text, aggregation=aggregation) for text in ENTITIES]
    expected = [pipeline(text) for text in ENTITIES]
    assert sum(map(len, expected)) > 10
    for outputs in model.every_way(items):
        for ours, theirs in zip(outputs, expected, strict=True):
            assert [as_pipeline(label) for label in ours] == [
                (entry.get("entity") or entry["entity_group"], entry["start"], entry["end"], entry["word"])
                for entry in theirs
            ]
            assert [label.score for label in ours] == pytest.approx(
                [float(entry["score"]) for entry in theirs], abs=TOLERANCE
            )


def as_pipeline(label: TokenLabel) -> tuple[str, int | None, int | None, str]:
    return label.label, label.start, label.end, label.word


@pytest.mark.parametrize(
    "name", ["distilbert", "electra", "albert", "mpnet", "nomic_bert", "gte", "eurobert", "mistral"]
)
def test_token_logits_equal_transformers(name: str) -> None:
    folder = tiny.checkpoint(name, "token-cls")
    oracle = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = served(name, "token-cls")
    for text in TEXTS:
        item = Item(Task.CLASSIFY_TOKENS, text=text, raw_scores=True, ignore_labels=())
        (encoded,) = model.encode([item])
        with torch.inference_mode():
            logits = oracle.eval()(input_ids=torch.tensor([encoded.input_ids])).logits[0]
        special = encoded.readout.special
        kept = [row for row, skip in zip(logits, special, strict=True) if not skip]
        (labels,) = model.run([item])
        assert [label.score for label in labels] == pytest.approx([row.max().item() for row in kept], abs=TOLERANCE)
        assert [label.label for label in labels] == [f"LABEL_{int(row.argmax())}" for row in kept]


def test_offsets_are_those_of_the_callers_text_whatever_was_cut_or_put_before() -> None:
    folder = token_checkpoint("bert")
    model = Served(folder)
    long = " ".join(ENTITIES) * 30
    everything = {"ignore_labels": ()}
    (right,) = model.run([Item(Task.CLASSIFY_TOKENS, text=long, **everything)])
    (left,) = model.run([Item(Task.CLASSIFY_TOKENS, text=long, truncation_direction="left", **everything)])
    assert right[0].start == 0 and right[-1].end is not None and right[-1].end < len(long)
    assert left[-1].end == len(long) and left[0].start > 0
    (prompted,) = model.run([Item(Task.CLASSIFY_TOKENS, text=TEXTS[0], prompt="query: ", **everything)])
    assert [TEXTS[0][label.start : label.end].lower() for label in prompted if "#" not in label.word] == [
        label.word for label in prompted if "#" not in label.word
    ]
    (given,) = model.run([Item(Task.CLASSIFY_TOKENS, token_ids=[2, 30, 242, 3], **everything)])
    assert [(label.start, label.end) for label in given] == [(None, None)] * 2


# Through the engine -------------------------------------------------------------------------------------------------


def test_an_engine_serves_all_kinds_of_scores(tmp_path: Path) -> None:
    reranker = tmp_path / "Qwen3-Reranker-0.6B"
    language_model("qwen3-noeos", reranker, "yes", "no")
    folders = {
        "cross-encoder": tiny.checkpoint("bert", "cls"),
        "classifier": tiny.checkpoint("roberta", "cls"),
        "ner": token_checkpoint("deberta-v2"),
        "yes-no": reranker,
        "embedder": tiny.checkpoint("bert"),
    }
    settings = resolve({"model_id": [str(path) for path in folders.values()], "served_model_name": list(folders)})
    with Engine.from_settings(settings) as engine:
        infos = {info.name: info for info in engine.infos()}
        assert [infos[name].tasks for name in folders] == [
            (Task.RERANK, Task.CLASSIFY),
            (Task.CLASSIFY,),
            (Task.CLASSIFY_TOKENS,),
            (Task.RERANK, Task.CLASSIFY),
            (Task.EMBED, Task.EMBED_ALL),
        ]
        assert infos["classifier"].id2label == {0: "negative", 1: "neutral", 2: "positive"}
        assert infos["embedder"].id2label is None
        for name, items in (
            ("cross-encoder", pair_items() + text_items()),
            ("classifier", text_items()),
            ("ner", text_items(Task.CLASSIFY_TOKENS)),
            ("yes-no", pair_items()),
        ):
            outcomes = engine.submit_sync(name, items, timeout_seconds=60)
            outputs = [outcome.output for outcome in outcomes if isinstance(outcome, Result)]
            assert len(outputs) == len(items), outcomes
            if name == "ner":
                assert sum(map(len, outputs)) > 0
            else:
                shapes = {output.shape for output in outputs}
                assert shapes == ({(3,)} if name == "classifier" else {(1,)})
        bad, good = engine.submit_sync("cross-encoder", [Item(Task.RERANK, text="", text_pair=""), pair_items()[0]])
        assert isinstance(bad, EmptyInput)
        assert isinstance(good, Result) and good.usage.tokens > 3


# What cannot be served ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head", "dropped"),
    [
        ("bert", "cls", "classifier.bias"),
        ("bert", "cls", "bert.pooler.dense.weight"),
        ("llama", "token-cls", "score.bias"),
    ],
)
def test_a_head_with_missing_tensors_is_refused(name: str, head: str, dropped: str, tmp_path: Path) -> None:
    folder = varied(name, tmp_path / "made", head)
    drop(folder, dropped)
    with pytest.raises(WeightMismatch, match=dropped.removeprefix("bert.")):
        Served(folder)


def drop(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    labels = {str(index): f"LABEL_{index}" for index in range(4)}
    folder = varied("roberta", tmp_path / "made", id2label=labels, label2id=None)
    with pytest.raises(WeightMismatch, match=r"classifier\.out_proj\.weight.*\[3, 64\].*\[4, 64\]"):
        Served(folder)


def test_a_verdict_that_is_no_token_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker"
    shutil.copytree(tiny.checkpoint("qwen3-noeos", "lm"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    assert "no" not in tokenizer["model"]["vocab"]
    with pytest.raises(LoadError, match="no token 'no'"):
        Served(folder)
