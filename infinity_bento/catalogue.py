"""What can be served: every family and every preset. Behind ``infinity-bento models`` and ``docs/models.md``.

Made from the families table, the rules that say what a checkpoint is for, the files in ``configs/``, and the results of
the parity tests. Free of torch and transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity_bento.checkpoints import remote_layouts
from infinity_bento.checkpoints.families import BY_MODEL_TYPE, TABLE, Family
from infinity_bento.checkpoints.layout import Kind, Layout
from infinity_bento.checkpoints.purpose import purpose_of
from infinity_bento.checkpoints.st_modules import ModuleSpec, PoolingSpec, SpladePoolingSpec, TransformerSpec
from infinity_bento.core import Pooling, Task
from infinity_bento.errors import ConfigError, LoadError
from infinity_bento.settings import ModelSettings, resolve
from infinity_bento.sources import preset_files

# What a preset says about its checkpoint, in comments of the form "# key: text", beside the options that it sets. Each
# "# source: keys: place" names where those keys were read; "# unverified: keys" those that nobody has looked up.
FACTS = ("task", "family", "licence", "pooling", "prompts", "length", "dimensions", "note")
REQUIRED = {"task", "family", "licence"}
VECTOR_FACTS = {"pooling", "prompts", "dimensions"}
OWN_WORDS = {"task", "note"}  # need no source
FACT = re.compile(r"# (" + "|".join((*FACTS, "source", "unverified")) + r"): (.+)")


@dataclass(frozen=True, slots=True)
class Preset:
    """One file of ``configs/``. Set by ``read_preset``."""

    name: str
    model: ModelSettings
    facts: Mapping[str, str]  # by the names of FACTS
    sources: Mapping[str, str]  # fact -> the page or file where it was read
    unverified: frozenset[str] = frozenset()  # facts without such a place

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest input: by option, else as published; None where the checkpoint alone says it."""
        published = self.facts.get("length")
        return self.model.max_sequence_length or (int(published) if published else None)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What the checkpoint is for."""
        return tuple(Task(name) for name in self.facts["task"].split(", "))


@dataclass(frozen=True, slots=True)
class Parity:
    """How far one family is from its reference, in float32. Set by ``read_results``."""

    largest_difference: float
    tolerance: float
    variants: tuple[str, ...]  # the tiny checkpoints measured


@dataclass(frozen=True, slots=True)
class Results:
    """What the parity tests measured. Set by ``read_results``."""

    date: str
    torch: str
    transformers: str
    families: Mapping[str, Parity]  # by model_type


# Reading ----------------------------------------------------------------------------------------------------------


def configs_folder() -> Path:
    """The presets: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent
    return next((folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()), package)


def results_file() -> Path:
    """The results of the parity tests; only a checkout has them."""
    return Path(__file__).parent.parent / "tests" / "parity" / "results.json"


def read_presets(folder: Path) -> tuple[Preset, ...]:
    """The presets of a folder, by name. Raises as ``read_preset``."""
    return tuple(read_preset(file) for file in preset_files(folder))


def read_preset(file: Path) -> Preset:
    """One preset of one model, with what its comments say.

    Raises:
        ConfigError: If it does not resolve, serves several models, lacks a fact that the catalogue needs, or says
            something without the place where it was read.
    """
    settings = resolve(preset=str(file))
    if len(settings.models) != 1:
        raise ConfigError(f"{file.name} serves {len(settings.models)} models; a preset of the catalogue serves one.")
    model = settings.models[0]
    matches = [match for match in map(FACT.fullmatch, file.read_text(encoding="utf-8").splitlines()) if match]
    facts = {match[1]: match[2] for match in matches if match[1] in FACTS}
    _check_facts(file.name, facts, limited=model.max_sequence_length is not None)
    sources: dict[str, str] = {}
    for match in matches:
        if match[1] == "source":
            names, _, place = match[2].partition(": ")
            sources |= dict.fromkeys(names.split(", "), place)
    unverified = frozenset(name for match in matches if match[1] == "unverified" for name in match[2].split(", "))
    _check_sources(file.name, set(facts) | ({"length"} if model.max_sequence_length else set()), sources, unverified)
    return Preset(file.stem, model, facts, sources, unverified)


def _check_facts(name: str, facts: Mapping[str, str], *, limited: bool) -> None:
    unfit = set() if facts.get("task") == Task.EMBED else VECTOR_FACTS & set(facts)
    unfit |= {"length"} & set(facts) if limited else set()
    if wrong := sorted(REQUIRED - set(facts) | unfit):
        raise ConfigError(
            f"{name} needs a comment '# key: text' for each of {', '.join(sorted(REQUIRED))}, one for the length only "
            f"without max-sequence-length, and those of vectors only for the task embed; look at: {', '.join(wrong)}."
        )


def _check_sources(name: str, claims: set[str], sources: Mapping[str, str], unverified: frozenset[str]) -> None:
    """Each claim has one web address or is marked; what has either is a claim."""
    needed = claims - OWN_WORDS
    wrong = (needed - set(sources) - unverified) | (set(sources) & unverified) | ((set(sources) | unverified) - claims)
    wrong |= {key for key, place in sources.items() if not re.fullmatch(r"https://\S+", place)}
    if wrong:
        raise ConfigError(
            f"{name} needs a comment '# source: keys: https://...' with the page or file where they were read, or "
            f"'# unverified: keys', for each of {', '.join(sorted(needed))}; look at: {', '.join(sorted(wrong))}."
        )


def read_results(file: Path) -> Results:
    """What ``tests.parity.report`` wrote.

    Raises:
        ConfigError: If the file is not there.
    """
    if not file.is_file():
        raise ConfigError(f"{file} is not there: the page is made in a checkout, after python -m tests.parity.report.")
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    families = {
        name: Parity(entry["largest_difference"], entry["tolerance"], tuple(entry["variants"]))
        for name, entry in data["families"].items()
    }
    return Results(data["date"], data["torch"], data["transformers"], families)


# Families ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """A checkpoint as it may be published, for asking the rules what it is for."""

    architecture: str
    kind: Kind | None = None
    modules: tuple[ModuleSpec, ...] = ()


SAMPLES = (
    Sample("Model", "SentenceTransformer", (PoolingSpec((Pooling.MEAN,)),)),
    Sample("ForMaskedLM", "SparseEncoder", (SpladePoolingSpec(),)),
    Sample("ForSequenceClassification"),
    Sample("ForTokenClassification"),
)


def tasks_of(family: Family) -> tuple[Task, ...]:
    """What checkpoints of a family can be served for, in the order of ``Task``; asked of the loading rules."""
    found: set[Task] = set()
    folder = Path(family.model_type)
    for sample in SAMPLES:
        layout = Layout(
            path=folder,
            config={"model_type": family.model_type, "num_labels": 1},
            model_type=family.model_type,
            architectures=(sample.architecture,),
            transformer_path=folder,
            transformer=TransformerSpec(folder),
            modules=sample.modules,
            has_sentence_transformers=bool(sample.modules),
            kind=sample.kind,
        )
        try:
            found.update(purpose_of(layout, family, names="").tasks)
        except LoadError:  # this family has no such head
            continue
    if family.heads.masked_lm is None:  # found missing only when the head is built
        found.discard(Task.EMBED_SPARSE)
    return tuple(task for task in Task if task in found)


# Families whose name is ours, since their files carry another one: what those say instead.
PUBLISHED_OTHERWISE: Mapping[str, str] = {
    "nomic_bert_moe": "`nomic_bert` with experts, biases or an ungated feed-forward"
}


def published_as(family: Family) -> tuple[str, ...]:
    """What ``model_type`` checkpoints of a family carry in config.json, with the remote code that tells them apart."""
    remote = [f"`{name}`" for name, target in remote_layouts.ALIASES.items() if target == family.model_type]
    remote += [
        f"`{name}` with `{marker}`" for name, marker, target in remote_layouts.KNOWN_CODE if target == family.model_type
    ]
    if family.model_type in PUBLISHED_OTHERWISE:
        return (PUBLISHED_OTHERWISE[family.model_type], *remote)
    return (*(() if family.native_class else (f"`{family.model_type}`",)), *remote)


def direction_of(family: Family) -> str:
    """Which way attention looks."""
    return "causal or bidirectional" if family.decoder else "bidirectional"


# Text -------------------------------------------------------------------------------------------------------------


def models_text(presets: Sequence[Preset]) -> str:
    """Families and presets, as aligned text."""
    families = [(family.model_type, family.title, ", ".join(tasks_of(family))) for family in TABLE]
    listed = [(preset.name, preset.model.model_id, preset.facts["task"]) for preset in presets]
    return (
        f"Families (model_type in config.json):\n{_aligned(families)}\n"
        f"Presets (infinity-bento serve --preset NAME):\n{_aligned(listed)}"
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"  {line.rstrip()}\n" for line in lines)


def models_markdown(results: Results, presets: Sequence[Preset]) -> str:
    """``docs/models.md``.

    Raises:
        ConfigError: If a family has not been measured.
    """
    conditions = f"Measured on {results.date} with transformers {results.transformers} and torch {results.torch}."
    families = _table(
        ("family", "`model_type`", "tasks", "attention", "default pooling", "largest difference", "notes"),
        [_family_row(family, results) for family in TABLE],
    )
    facts = ("family", "task", "pooling", "prompts", "max length", "dimensions", "licence", "notes")
    listed = _table(("preset", "checkpoint", *facts), [_preset_row(preset) for preset in presets])
    return f"{_INTRODUCTION}\n{families}\n{conditions}\n\n{_READING}\n{listed}"


def _family_row(family: Family, results: Results) -> tuple[str, ...]:
    parity = results.families.get(family.model_type)
    if parity is None:
        raise ConfigError(f"{family.model_type} has not been measured; run python -m tests.parity.report.")
    notes = [family.notes] if family.notes else []
    if family.native_class:
        notes.append("native class: transformers has none")
    if family.since:
        notes.append(f"needs transformers {family.since}")
    return (
        family.title,
        ", ".join(published_as(family)),
        ", ".join(tasks_of(family)),
        direction_of(family),
        family.default_pooling,
        f"{parity.largest_difference:.1e} of {parity.tolerance:.0e}",
        "; ".join(notes),
    )


def _preset_row(preset: Preset) -> tuple[str, ...]:
    shown = dict(preset.facts)
    shown["family"] = BY_MODEL_TYPE[shown["family"]].title
    if preset.max_length:
        shown["length"] = str(preset.max_length)
    shown |= {name: f"{shown[name]} (unverified)" for name in preset.unverified}
    names = ("family", "task", "pooling", "prompts", "length", "dimensions", "licence", "note")
    return (
        f"[`{preset.name}`](../configs/{preset.name}.yaml)",
        f"`{preset.model.model_id}`",
        *(shown.get(name, "" if name == "note" else "-") for name in names),
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


_INTRODUCTION = """# Models

<!-- Generated: infinity-bento models --markdown > docs/models.md. Edit infinity_bento/checkpoints/families.py or
configs/ instead; measure anew with python -m tests.parity.report. -->

A checkpoint is served if its `config.json` names one of these families. Weights, tokenizer, pooling, prompts, Dense
layers and normalization come from its files; what cannot be honoured is refused at start with the file and the key.
Code from a checkpoint's repository is never run: where a family is published with such code, the table says which is
known to equal a class we have. A checkpoint whose `modules.json` starts with StaticEmbedding needs no family.

## Families
"""

_READING = """How to read it:

- **`model_type`**: as in `config.json`. "with" names the code of its own repository that such a checkpoint asks for
  in `auto_map`: it is known to equal a class we have, and is not run.
- **tasks**: what checkpoints can be served for, if they bring the trained head: `embed` and `embed_all` (a vector for
  each token) embedding models, `embed_all` late-interaction models, `embed_sparse` SPLADE models, `rerank` classifiers
  with one label, language models known as rerankers, and jina-reranker-v3 (below), `classify` any classifier,
  `classify_tokens` token classifiers. A generative checkpoint that nothing declares to be one of these is refused.
- **attention**: a family that can be both is causal unless `config.json` says `"is_causal": false` or
  `"use_bidirectional_attention": true`, or comes with code that is known to be bidirectional.
- **default pooling**: only for checkpoints whose files name none; `--pooling` overrides both.
- **largest difference**: of any value of the last hidden states, to transformers' own class (for a native class: to
  plain formulas) run one text at a time. Texts of 1 to 70 tokens run alone, in one batch and in a shuffled batch, in
  float32; behind it the tolerance that the tests enforce. The checkpoints are small and random, in the layout of the
  hub, several for some families. It shows that the architecture is right, not that each published checkpoint has been
  tried.
- **jina-reranker-v3** reads all documents of a query in one sequence, so a score depends on the other documents of
  its request: scores of different requests cannot be compared. Lists of more than 125 documents, or of more tokens than
  `--max-batch-tokens` (16384; its own code allows 131072), are several sequences, whose query is averaged as its own
  code does. Documents are cut at 2048 tokens, queries at 512. Text that spells a marker of its prompt stays text.
- **notes**: a transformers version is named where a family needs a newer one than the package itself.

The longest input is `--max-sequence-length`, else the limit in the checkpoint's files, and never more than the
positions of the model or `--max-batch-tokens`. With relative or ALiBi positions too (DeBERTa, MPNet, Jina BERT v2),
memory grows linearly with the length.

## Presets

`infinity-bento serve --preset NAME` or `bentoml serve --arg preset=NAME`. A preset is a file of options in
`configs/`: the checkpoint, its public name, and what its model card defines and its files lack. Options given beside
it win. The columns repeat what was published: each preset names the page or file where every fact was read, and what
could not be looked up is marked "unverified" or left out ("-"). The checkpoint decides: at start the server prints,
and `/info` answers, what its files really define.

A prompt **by name** is saved in the checkpoint: choose it with `prompt_name` in a request or with
`--default-prompt-name`. A **literal** one is the text itself: the client writes it before its texts or sends it as
`prompt`, or the server is started with `--default-prompt`. Some checkpoints save theirs by name as well; `x_prompts`
in `GET /v1/models` lists the names.
"""
