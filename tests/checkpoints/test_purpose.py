from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity_bento.checkpoints.families import family_of
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.checkpoints.purpose import Activation, HeadKind, Purpose, Verdict, purpose_of
from infinity_bento.core import Pooling, Task
from infinity_bento.errors import ConfigError, LoadError

BERT = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
LM = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
SCORES = (Task.RERANK, Task.CLASSIFY)


def purpose(
    folder: Path,
    config: dict[str, Any],
    files: dict[str, Any] | None = None,
    *,
    names: str = "",
    pooling: Pooling | None = None,
) -> Purpose:
    """The purpose of a folder with these JSON files (and texts)."""
    for name, content in {"config.json": config, **(files or {})}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    layout = read_layout(folder)
    return purpose_of(layout, family_of(layout.config, folder / "config.json"), names=names, pooling=pooling)


def modules(*types: str) -> dict[str, Any]:
    chain = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}" if index else "", "type": f"st.{name}"}
        for index, name in enumerate(types)
    ]
    return {"modules.json": chain}


POOLING = {"1_Pooling/config.json": {"pooling_mode": "mean", "embedding_dimension": 8}}


def test_a_plain_model_is_for_embeddings(tmp_path: Path) -> None:
    found = purpose(tmp_path, {"model_type": "bert", "architectures": ["BertModel"]})
    assert (found.kind, found.tasks) == (HeadKind.EMBEDDING, (Task.EMBED, Task.EMBED_ALL))


def test_pooling_in_modules_json_outweighs_the_architecture(tmp_path: Path) -> None:
    found = purpose(tmp_path, BERT, {**modules("Transformer", "Pooling"), **POOLING})
    assert found.kind is HeadKind.EMBEDDING


@pytest.mark.parametrize(
    ("config", "tasks", "names", "activation"),
    [
        ({"id2label": {"0": "LABEL_0"}}, SCORES, {0: "LABEL_0"}, Activation.SIGMOID),
        ({"num_labels": 1}, SCORES, {0: "LABEL_0"}, Activation.SIGMOID),
        ({}, (Task.CLASSIFY,), {0: "LABEL_0", 1: "LABEL_1"}, Activation.SOFTMAX),
        (
            {"id2label": {"0": "no", "2": "yes"}},
            (Task.CLASSIFY,),
            {0: "no", 1: "LABEL_1", 2: "yes"},
            Activation.SOFTMAX,
        ),
        ({"num_labels": 1, "problem_type": "regression"}, SCORES, {0: "LABEL_0"}, Activation.IDENTITY),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, (Task.CLASSIFY,), None, Activation.SIGMOID),
        ({"num_labels": 2, "problem_type": "regression"}, (Task.CLASSIFY,), None, Activation.IDENTITY),
        (
            {
                "num_labels": 1,
                "problem_type": "regression",
                "sentence_transformers": {"activation_fn": "torch.x.Sigmoid"},
            },
            SCORES,
            None,
            Activation.SIGMOID,
        ),
        # What sentence-transformers writes by default for several labels.
        (
            {"num_labels": 3, "sentence_transformers": {"activation_fn": "torch.x.Identity"}},
            None,
            None,
            Activation.SOFTMAX,
        ),
        ({"num_labels": 3, "sbert_ce_default_activation_function": "torch.x.Sigmoid"}, None, None, Activation.SIGMOID),
    ],
)
def test_labels_and_activation(
    config: dict[str, Any], tasks: Any, names: Any, activation: Activation, tmp_path: Path
) -> None:
    found = purpose(tmp_path, {**BERT, **config})
    assert found.kind is HeadKind.CLASSIFIER
    assert found.activation is activation
    assert tasks is None or found.tasks == tasks
    assert names is None or found.id2label == names


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"id2label": {"a": "b"}}, "id2label"),
        ({"id2label": ["a", "b"]}, "id2label"),
        ({"problem_type": "hard"}, "problem_type"),
        ({"sentence_transformers": {"activation_fn": "mine.Curve"}}, "activation_fn"),
        ({"sbert_ce_default_activation_function": "torch.nn.GLU"}, "sbert_ce_default_activation_function"),
    ],
)
def test_what_nobody_understands_is_refused_with_file_and_key(config: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=rf"config\.json.*'{key}'"):
        purpose(tmp_path, {**BERT, "num_labels": 1, **config})


def test_a_cross_encoder_saved_by_sentence_transformers(tmp_path: Path) -> None:
    settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    files = {**modules("Transformer"), "config_sentence_transformers.json": settings}
    found = purpose(tmp_path, {**BERT, "num_labels": 1}, files)
    assert (found.kind, found.tasks, found.activation) == (HeadKind.CLASSIFIER, SCORES, Activation.IDENTITY)


def test_token_classification(tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "X"}}
    found = purpose(tmp_path, config)
    assert (found.kind, found.tasks) == (HeadKind.TOKEN_CLASSIFIER, (Task.CLASSIFY_TOKENS,))
    assert found.id2label == {0: "O", 1: "X"}


@pytest.mark.parametrize("architecture", ["NomicBertForSequenceClassification", "NomicBertForTokenClassification"])
def test_a_head_that_the_family_has_not_is_refused(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=architecture):
        purpose(tmp_path, {"model_type": "nomic_bert", "n_embd": 8, "num_experts": 4, "architectures": [architecture]})


@pytest.mark.parametrize("architecture", ["JinaForRanking", "Qwen2ForRewardModel"])
def test_heads_of_remote_code_are_refused(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=architecture):
        purpose(tmp_path, {"model_type": "qwen2", "architectures": [architecture]})


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_pooling_cannot_be_an_option_of_a_classifier(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pooling mean"):
        purpose(tmp_path, {"model_type": "bert", "architectures": [architecture]}, pooling=Pooling.MEAN)


# Language models ----------------------------------------------------------------------------------------------------


def test_a_language_model_is_not_a_reranker_by_itself(tmp_path: Path) -> None:
    assert purpose(tmp_path, LM, names="Qwen/Qwen3-0.6B").kind is HeadKind.EMBEDDING


@pytest.mark.parametrize(
    ("model_type", "name", "template", "verdict"),
    [
        ("qwen3", "Qwen/Qwen3-Reranker-0.6B", "qwen3-reranker", Verdict("yes", "no")),
        ("qwen2", "mixedbread-ai/mxbai-rerank-large-v2", "mxbai-rerank-v2", Verdict("1", "0")),
        ("gemma", "BAAI/bge-reranker-v2-gemma", "bge-reranker-v2-gemma", Verdict("Yes", None)),
    ],
)
def test_published_rerankers_by_name(
    model_type: str, name: str, template: str, verdict: Verdict, tmp_path: Path
) -> None:
    config = {"model_type": model_type, "architectures": ["SomethingForCausalLM"]}
    found = purpose(tmp_path, config, names=name)
    assert (found.kind, found.tasks, found.template, found.verdict) == (HeadKind.YES_NO, SCORES, template, verdict)
    assert found.activation is Activation.SIGMOID
    assert purpose(tmp_path, config, names=name, pooling=Pooling.LAST_TOKEN).kind is HeadKind.EMBEDDING
    other = purpose(tmp_path, {**config, "model_type": "mistral"}, names=name)
    assert other.kind is HeadKind.EMBEDDING


LOGIT_SCORE = {
    **modules("Transformer", "LogitScore"),
    "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 5},
}
ROLE_CHAT = "{% if messages[0].role == 'query' and messages[1]['role'] == \"document\" %}{{ messages }}{% endif %}"


def test_a_logit_score_module_says_which_tokens_count(tmp_path: Path) -> None:
    settings = {"config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    found = purpose(tmp_path, LM, {**LOGIT_SCORE, **settings})
    assert (found.kind, found.verdict) == (HeadKind.YES_NO, Verdict(7, 5))
    assert found.activation is Activation.IDENTITY
    assert found.template is None


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": ROLE_CHAT},
        {"tokenizer_config.json": {"chat_template": ROLE_CHAT}},
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": ROLE_CHAT}]}},
        {"sentence_bert_config.json": {"modality_config": {"text": {}, "message": {"format": "flat"}}}},
    ],
)
def test_the_files_say_that_the_chat_template_writes_pairs(files: dict[str, Any], tmp_path: Path) -> None:
    assert purpose(tmp_path, LM, {**LOGIT_SCORE, **files}, names="qwen3-reranker").template == "chat"


def test_a_chat_template_for_conversations_does_not(tmp_path: Path) -> None:
    chat = {"chat_template.jinja": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"}
    assert purpose(tmp_path, LM, {**LOGIT_SCORE, **chat}).template is None
    assert purpose(tmp_path, LM, chat, names="qwen3-reranker").template == "qwen3-reranker"


def test_converted_rerankers_keep_their_template(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    found = purpose(tmp_path, config, names="tomaarsen/Qwen3-Reranker-0.6B-seq-cls")
    assert (found.kind, found.template, found.contrast) == (HeadKind.CLASSIFIER, "qwen3-reranker", None)


def test_two_labels_named_after_the_verdict_can_rerank(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {"0": "0", "1": "1"},
    }
    found = purpose(tmp_path, config, names="michaelfeil/mxbai-rerank-base-v2-seq")
    assert (found.tasks, found.contrast) == (SCORES, (1, 0))
    assert purpose(tmp_path, config, names="something else").tasks == (Task.CLASSIFY,)


def test_nemotron_rerankers_have_their_template(tmp_path: Path) -> None:
    config = {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalForSequenceClassification"]}
    found = purpose(tmp_path, {**config, "num_labels": 1})
    assert (found.tasks, found.template) == (SCORES, "nemotron-rerank")
