"""What a checkpoint is for: its tasks, the kind of its head, labels and activation, and the file that says so.

Read by preflight before anything heavy is loaded; free of torch and transformers. ``purpose_of`` asks the rules in
order, and the first that knows the checkpoint answers.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infinity_bento.checkpoints.families import Family, Heads
from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.checkpoints.late_interaction import is_late_interaction, read_late_interaction
from infinity_bento.checkpoints.layout import Layout
from infinity_bento.checkpoints.learned_sparse import read_learned_sparse
from infinity_bento.checkpoints.remote_layouts import BIDIRECTIONAL_ALIASES
from infinity_bento.checkpoints.st_modules import LogitScoreSpec, PoolingSpec
from infinity_bento.core import Pooling, Task
from infinity_bento.errors import ConfigError, LoadError


class HeadKind(enum.StrEnum):
    """What stands behind the hidden states."""

    EMBEDDING = "embedding"
    CLASSIFIER = "classifier"  # scores of a text or a pair
    TOKEN_CLASSIFIER = "token classifier"
    LATE_INTERACTION = "late interaction"  # a matrix of token vectors, compared by MaxSim
    SPARSE = "learned sparse"  # one weight per vocabulary id
    STATIC = "static embedding"  # a table of token vectors, without a transformer
    DECISION = "decision model"  # typed questions about a state
    LISTWISE = "listwise reranker"  # reads all documents of a query in one sequence
    YES_NO = "yes/no reranker"  # a language model whose next token is the verdict


class Activation(enum.StrEnum):
    """From logits to scores."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    TANH = "tanh"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens of a yes/no reranker: ids, or words that its tokenizer turns into one token each."""

    true: int | str
    false: int | str | None = None  # None: the logit of ``true`` alone is the score


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a checkpoint is for."""

    kind: HeadKind
    tasks: tuple[Task, ...]
    reason: str  # the file and key that decided
    id2label: dict[int, str] | None = None
    activation: Activation = Activation.IDENTITY
    shape: str | None = None  # CLASSIFIER, TOKEN_CLASSIFIER: ``families.Heads.classifier``
    contrast: tuple[int, int] | None = None  # CLASSIFIER: RERANK scores are the first label's logit minus the second's
    verdict: Verdict | None = None  # YES_NO
    protocol: str | None = None  # DECISION: how it is asked, a value of ``decisions.Protocol``
    template: str | None = None  # how a pair becomes one text: a name of ``inputs.templates``; None: as a pair


@dataclass(frozen=True, slots=True)
class PublishedReranker:
    """A published reranker whose files do not say how its prompt reads."""

    name: re.Pattern[str]  # searched in the checkpoint's names, lower case
    model_types: tuple[str, ...]
    template: str
    verdict: Verdict | None  # of the language model


PUBLISHED = (
    PublishedReranker(re.compile("qwen3.{0,5}reranker"), ("qwen3",), "qwen3-reranker", Verdict("yes", "no")),
    PublishedReranker(re.compile("mxbai.{0,3}rerank.*v2"), ("qwen2",), "mxbai-rerank-v2", Verdict("1", "0")),
    PublishedReranker(re.compile("bge.reranker.v2.gemma"), ("gemma",), "bge-reranker-v2-gemma", Verdict("Yes")),
)
EMBEDDING_TASKS = (Task.EMBED, Task.EMBED_ALL)
CHAT = "chat"  # the template is the tokenizer's chat template, with the roles query and document
LANGUAGE_MODEL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
ROLES = tuple(re.compile(rf"""(['"]){role}\1""") for role in ("query", "document"))
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
ACTIVATIONS = {member.value: member for member in Activation}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at."""

    layout: Layout
    family: Family
    names: str  # the names of the checkpoint, lower case
    config: JsonObject = field(init=False)

    def __post_init__(self) -> None:
        file = self.layout.transformer_path / "config.json"
        object.__setattr__(self, "config", JsonObject(file, self.layout.config))

    def architecture(self, *endings: str) -> str | None:
        """The first architecture with one of these endings."""
        return next((name for name in self.layout.architectures if name.endswith(endings)), None)

    @property
    def heads(self) -> Heads:
        """The heads of the family."""
        return self.family.heads

    @property
    def published(self) -> PublishedReranker | None:
        """The published reranker that this is, by its names."""
        known = (row for row in PUBLISHED if self.family.model_type in row.model_types and row.name.search(self.names))
        return next(known, None)


def purpose_of(layout: Layout, family: Family, *, names: str, pooling: Pooling | None = None) -> Purpose:
    """What a checkpoint is for.

    Args:
        layout: The checkpoint.
        family: Its row in the table.
        names: How the user and the files call it, joined by blanks.
        pooling: The option of that name: it makes an embedding model of a language model.

    Raises:
        LoadError: If the checkpoint has a head that cannot be served, or describes it in a way nobody understands.
        ConfigError: If ``pooling`` is set for a classifier.
    """
    facts = Facts(layout, family, names.lower())
    for rule in RULES:
        purpose = rule(facts, pooling)
        if purpose is not None:
            return purpose
    return Purpose(HeadKind.EMBEDDING, EMBEDDING_TASKS, f"{facts.config.file} names no other head")


def _late_interaction(facts: Facts, pooling: Pooling | None) -> Purpose | None:
    layout = facts.layout
    if not is_late_interaction(layout):
        return None
    _refuse_pooling("a late-interaction model", pooling)
    stanford = read_late_interaction(layout).stanford
    reason = f"{facts.config.file}: architecture HF_ColBERT" if stanford else f"{layout.path / 'modules.json'}"
    return Purpose(HeadKind.LATE_INTERACTION, (Task.EMBED_ALL,), reason)


def _sparse(facts: Facts, pooling: Pooling | None) -> Purpose | None:
    if facts.layout.kind != "SparseEncoder" and pooling is not Pooling.SPLADE:
        return None
    if pooling is not Pooling.SPLADE:
        _refuse_pooling("a sparse model", pooling)
        read_learned_sparse(facts.layout)
        reason = f"{facts.layout.path / 'modules.json'} describes a sparse model"
    elif facts.architecture("ForMaskedLM") is None:
        raise ConfigError(
            f"--pooling splade needs a masked language model, but {facts.config.file} names architecture "
            f"{', '.join(facts.layout.architectures) or 'none'}: use a checkpoint that ends in ForMaskedLM."
        )
    else:
        reason = "the option pooling"
    return Purpose(HeadKind.SPARSE, (Task.EMBED_SPARSE,), reason)


def _static(facts: Facts, pooling: Pooling | None) -> Purpose | None:
    if facts.layout.transformer is not None:
        return None
    return Purpose(HeadKind.STATIC, (Task.EMBED,), f"{facts.layout.path / 'modules.json'} starts with StaticEmbedding")


def _pooled(facts: Facts, pooling: Pooling | None) -> Purpose | None:
    """A sentence-transformers folder that ends in vectors."""
    layout = facts.layout
    embedder = layout.kind not in (None, "CrossEncoder") and facts.architecture("Classification") is None
    if any(isinstance(spec, PoolingSpec) for spec in layout.modules) or embedder:
        return Purpose(
            HeadKind.EMBEDDING, EMBEDDING_TASKS, f"{layout.path / 'modules.json'} describes an embedding model"
        )
    return None


def _yes_no(facts: Facts, pooling: Pooling | None) -> Purpose | None:
    """A language model that is declared, or known, to be a reranker."""
    layout = facts.layout
    spec = next((spec for spec in layout.modules if isinstance(spec, LogitScoreSpec)), None)
    if spec is not None:
        verdict, reason = (
            Verdict(spec.true_token_id, spec.false_token_id),
            f"{layout.path / 'modules.json'}: LogitScore",
        )
    elif facts.architecture(*LANGUAGE_MODEL) is None or pooling is not None:
        return None
    elif facts.published is not None and facts.published.verdict is not None:
        verdict, reason = facts.published.verdict, f"the name of the checkpoint: {facts.published.template}"
    elif layout.kind == "CrossEncoder":
        verdict, reason = Verdict("yes", "no"), "a CrossEncoder of sentence-transformers over a language model"
    else:
        return None
    return Purpose(
        HeadKind.YES_NO,
        (Task.RERANK, Task.CLASSIFY),
        reason,
        id2label={0: "LABEL_0"},
        activation=_own_activation(facts) or Activation.SIGMOID,
        verdict=verdict,
        template=_template(facts),
    )


def _token_classifier(facts: Facts, pooling: Pooling | None) -> Purpose | None:
    architecture = facts.architecture("ForTokenClassification")
    if architecture is None:
        return None
    _refuse_pooling(architecture, pooling)
    heads = facts.heads
    if not heads.token_classifier:
        raise _no_head(facts, architecture)
    reason = f"{facts.config.file}: architecture {architecture}"
    tasks = (Task.CLASSIFY_TOKENS,)
    return Purpose(HeadKind.TOKEN_CLASSIFIER, tasks, reason, id2label=_labels(facts), shape=heads.classifier)


def _classifier(facts: Facts, pooling: Pooling | None) -> Purpose | None:
    architecture = facts.architecture("ForSequenceClassification")
    if architecture is None and facts.layout.kind != "CrossEncoder":
        return None
    title = architecture or "CrossEncoder"
    _refuse_pooling(title, pooling)
    shape = facts.heads.classifier
    if shape is None:
        raise _no_head(facts, title)
    id2label = _labels(facts, default=2 if architecture else 1)
    single, contrast = len(id2label) == 1, _contrast(facts, id2label)
    return Purpose(
        HeadKind.CLASSIFIER,
        (Task.RERANK, Task.CLASSIFY) if single or contrast else (Task.CLASSIFY,),
        f"{facts.config.file}: architecture {title} with {len(id2label)} label{'s' * (not single)}",
        id2label=id2label,
        activation=_activation(facts, len(id2label)),
        shape=shape,
        contrast=contrast,
        template=_template(facts),
    )


def _listwise(facts: Facts, pooling: Pooling | None) -> Purpose | None:
    architecture = facts.architecture("JinaForRanking")
    if architecture is None or facts.family.model_type != "qwen3":
        return None
    _refuse_pooling(architecture, pooling)
    if "sliding_attention" in (facts.config.data.get("layer_types") or ()):
        raise LoadError(
            f"{facts.config.file}: {architecture} with sliding attention (layer_types) is a later version than "
            "jina-reranker-v3, whose prompt and limits are not known here; serve jina-reranker-v3."
        )
    return Purpose(HeadKind.LISTWISE, (Task.RERANK,), f"{facts.config.file}: architecture {architecture}")


def _unknown_head(facts: Facts, pooling: Pooling | None) -> Purpose | None:
    """Scoring heads that only code of their own repository can run."""
    architecture = facts.architecture("ForRewardModel", "ForRanking")
    if architecture is not None and pooling is None:
        raise _no_head(facts, architecture)
    return None


Rule = Callable[[Facts, Pooling | None], Purpose | None]
RULES: tuple[Rule, ...] = (
    _late_interaction,
    _sparse,
    _static,
    _pooled,
    _yes_no,
    _token_classifier,
    _classifier,
    _listwise,
    _unknown_head,
)


def _refuse_pooling(architecture: str, pooling: Pooling | None) -> None:
    if pooling is not None:
        raise ConfigError(
            f"--pooling {pooling.value} cannot be used with {architecture}, whose head decides what it reads: leave it "
            "out."
        )


def _no_head(facts: Facts, architecture: str) -> LoadError:
    return LoadError(
        f"{facts.config.file}: architecture {architecture} has a head that {facts.family.title} has no code for; serve "
        "an embedding checkpoint of this family, or a classifier of another one."
    )


# Labels and activation --------------------------------------------------------------------------------------------


def _labels(facts: Facts, default: int = 2) -> dict[int, str]:
    """Label names by index, as transformers reads them: a missing map has ``LABEL_i``, a missing number is two."""
    names = facts.config.mapping("id2label")
    number = facts.config.integer("num_labels", None)
    if not names:
        return {index: f"LABEL_{index}" for index in range(number or default)}
    if any(not key.isdecimal() or not isinstance(label, str) for key, label in names.items()):
        raise facts.config.wrong("id2label", 'an object of label names by number, such as {"0": "negative"}')
    found = {int(key): label for key, label in names.items()}
    count = max(len(found), 1 + max(found))
    return {index: found.get(index, f"LABEL_{index}") for index in range(count)}


def _activation(facts: Facts, labels: int) -> Activation:
    """A cross-encoder's own setting, else what the kind of problem asks for.

    sentence-transformers writes Identity into every cross-encoder with several labels, so there it says nothing.
    """
    own = _own_activation(facts)
    if own is not None and (labels == 1 or own is not Activation.IDENTITY):
        return own
    problem = facts.config.string("problem_type", None)
    if problem is not None and problem not in PROBLEMS:
        raise facts.config.wrong("problem_type", f"null or one of {', '.join(PROBLEMS)}")
    if problem == "regression":
        return Activation.IDENTITY
    if labels == 1 or problem == "multi_label_classification":
        return Activation.SIGMOID
    return Activation.SOFTMAX


def _contrast(facts: Facts, id2label: Mapping[int, str]) -> tuple[int, int] | None:
    """A published yes/no reranker that was converted to two labels, named after its tokens."""
    verdict = facts.published.verdict if facts.published is not None else None
    if verdict is None or sorted(id2label.values()) != sorted((str(verdict.true), str(verdict.false))):
        return None
    index = {label: number for number, label in id2label.items()}
    return index[str(verdict.true)], index[str(verdict.false)]


def _own_activation(facts: Facts) -> Activation | None:
    """What sentence-transformers' files say; None: nothing."""
    layout = facts.layout
    nested = JsonObject(facts.config.file, facts.config.mapping("sentence_transformers"))
    places = (
        (nested, "activation_fn"),
        (facts.config, "sbert_ce_default_activation_function"),
        (JsonObject(layout.path / "config_sentence_transformers.json", layout.st_config), "activation_fn"),
    )
    for source, key in places:
        path = source.string(key, None)
        if path is not None:
            activation = ACTIVATIONS.get(path.rsplit(".", 1)[-1].lower())
            if activation is None or not path.startswith("torch."):
                allowed = ", ".join(member.name.capitalize() for member in Activation)
                raise source.wrong(key, f"a class of torch.nn among {allowed}")
            return activation
    return None


# Templates --------------------------------------------------------------------------------------------------------


def _template(facts: Facts) -> str | None:
    """How a query and a document become one text: by the files first, then by the published name."""
    if facts.layout.transformer is not None:
        modalities = facts.layout.transformer.settings.get("modality_config")
        if isinstance(modalities, Mapping) and "message" in modalities:
            return CHAT
    text = chat_template(facts.layout.transformer_path)
    if text is not None and all(role.search(text) for role in ROLES):
        return CHAT
    if facts.published is not None:
        return facts.published.template
    if facts.config.data.get("model_type") in BIDIRECTIONAL_ALIASES:
        return "nemotron-rerank"
    return None


def chat_template(folder: Path) -> str | None:
    """The source of a tokenizer's default chat template, or None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    value = JsonObject.read_optional(folder / "tokenizer_config.json").data.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
