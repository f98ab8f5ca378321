"""Everything that can be known about a model from its files and options, before anything heavy is loaded.

Run in the supervisor (which then refuses to start in a second, with one sentence) and again by each worker's loader.
Free of torch and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinity_bento.checkpoints.decisions import Protocol, decision_notes, find_protocol, language_model
from infinity_bento.checkpoints.families import STATIC, Family, family_of, length_limit, refuse_generative
from infinity_bento.checkpoints.late_interaction import is_late_interaction, read_late_interaction
from infinity_bento.checkpoints.layout import Layout, max_input_length, read_layout
from infinity_bento.checkpoints.purpose import HeadKind, Purpose, purpose_of
from infinity_bento.checkpoints.resolve import ResolvedModel, resolve
from infinity_bento.checkpoints.temperatures import CALIBRATION_FILE, Temperatures, in_force
from infinity_bento.core import Pooling, Task
from infinity_bento.errors import ConfigError
from infinity_bento.settings import ModelSettings, Settings


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What the files of a checkpoint and the options say together."""

    found: ResolvedModel
    layout: Layout
    family: Family
    purpose: Purpose
    max_input_length: int  # tokens
    default_prompt: str | None
    notes: tuple[str, ...]


def plan_model(settings: ModelSettings, server: Settings) -> ModelPlan:
    """Find the files of a model, read their layout, and check the options against it.

    Raises:
        LoadError: If the files cannot be found or served.
        ConfigError: If an option does not fit this checkpoint.
    """
    return read_plan(settings, find_files(settings, server))


def find_files(settings: ModelSettings, server: Settings) -> ResolvedModel:
    """Resolve the model id to a folder; downloads if need be."""
    return resolve(
        settings.model_id,
        revision=settings.revision,
        hub_cache=server.huggingface_hub_cache,
        token=server.hf_token.reveal() if server.hf_token else None,
        offline=server.offline,
    )


def read_plan(settings: ModelSettings, found: ResolvedModel) -> ModelPlan:
    """Read the layout of a folder and check the options against it. Raises as ``plan_model``."""
    layout = read_layout(found.path, dense_path=settings.dense_path)
    decides = find_protocol(layout.path, settings.decision_protocol)
    if decides is not None:
        layout = language_model(layout, decides[0])
    config_file = layout.transformer_path / "config.json"
    family = STATIC if layout.transformer is None else family_of(layout.config, config_file)
    calibration: tuple[str, ...] = ()
    if decides is not None:
        purpose = decision_purpose(*decides, pooling=settings.pooling)
        calibration = calibration_notes(settings, layout)
    elif settings.decision_calibration is not None:
        raise ConfigError(
            f"--decision-calibration is for decision models, and {settings.model_id} is none: leave it out."
        )
    else:
        purpose = purpose_of(layout, family, names=names_of(settings, layout), pooling=settings.pooling)
    if purpose.kind is HeadKind.EMBEDDING:
        refuse_generative(
            layout.config, config_file, has_modules=layout.has_sentence_transformers, pooling=settings.pooling
        )
    check_pooling(settings, layout, family)
    limit, notes = input_limit(settings, layout, family)
    notes += () if decides is None else decision_notes(layout.path, decides[0])
    prompt = default_prompt(settings, layout)
    return ModelPlan(found, layout, family, purpose, limit, prompt, (*found.notes, *notes, *calibration))


def decision_purpose(protocol: Protocol, reason: str, *, pooling: Pooling | None) -> Purpose:
    """What a decision model is for.

    Raises:
        ConfigError: If ``pooling`` is set.
    """
    if pooling is not None:
        raise ConfigError(f"--pooling {pooling.value} cannot be used with a decision model ({protocol}): leave it out.")
    return Purpose(HeadKind.DECISION, (Task.DECIDE,), reason, protocol=protocol)


def calibration_notes(settings: ModelSettings, layout: Layout) -> tuple[str, ...]:
    """Which calibration will be in force, if there is one; it is read, and can be.

    Raises:
        LoadError: Its file is missing or malformed.
    """
    file = calibration_file(settings)
    in_force(Temperatures(), layout.path, file)
    if file is None and not (layout.path / CALIBRATION_FILE).is_file():
        return ()
    return (f"calibrated: the temperatures of {file or CALIBRATION_FILE} win over the checkpoint's",)


def calibration_file(settings: ModelSettings) -> Path | None:
    """The option ``decision-calibration`` as a path."""
    name = settings.decision_calibration
    return None if name is None else Path(name).expanduser()


def names_of(settings: ModelSettings, layout: Layout) -> str:
    """All that the checkpoint is called: by the user, by its folder, by its config."""
    return " ".join((settings.model_id, layout.path.name, str(layout.config.get("_name_or_path") or "")))


def check_pooling(settings: ModelSettings, layout: Layout, family: Family) -> None:
    """Refuse a ``pooling`` that the family cannot honour."""
    if settings.pooling is not None and family.poolings is not None and settings.pooling not in family.poolings:
        raise ConfigError(
            f"--pooling {settings.pooling.value} is not possible for {layout.model_type}, which allows "
            f"{', '.join(sorted(mode.value for mode in family.poolings))}."
        )


def own_limit(layout: Layout, family: Family) -> int | None:
    """Tokens of one input by the checkpoint's files; None where they set no limit."""
    if layout.transformer is None:
        return None
    own = max_input_length(layout, family.position_offset(layout.config))
    if not is_late_interaction(layout):
        return own
    # The limit of documents replaces that of the tokenizer, but not that of the positions.
    limits = (read_late_interaction(layout).document_length or own, length_limit(family, layout.config))
    return min((limit for limit in limits if limit is not None), default=None)


def input_limit(settings: ModelSettings, layout: Layout, family: Family) -> tuple[int, list[str]]:
    """Tokens of one input, and what had to be said about it.

    The checkpoint's own limit holds unless ``max-sequence-length`` says otherwise; that may exceed the limit of its
    sentence-transformers files, but never what its positions allow.

    Raises:
        ConfigError: If an explicit limit exceeds the token budget, or the checkpoint's does and nothing may be cut.
    """
    notes: list[str] = []
    own = own_limit(layout, family)
    hard = length_limit(family, layout.config)
    budget = settings.max_batch_tokens
    wanted = settings.max_sequence_length
    if wanted is not None:
        if wanted > budget:
            raise ConfigError(
                f"--max-sequence-length {wanted} is more than max-batch-tokens {budget}, so such an input could never "
                "run: lower the one or raise the other."
            )
        if hard is not None and wanted > hard:
            notes.append(f"max-sequence-length {wanted} lowered to {hard}, the positions of the model")
        return min(wanted, hard or wanted), notes
    limit = own or budget
    if limit > budget:
        if not settings.auto_truncate:
            raise ConfigError(
                f"{settings.model_id} takes inputs of {limit} tokens, more than max-batch-tokens {budget}, and "
                "auto-truncate is off: raise max-batch-tokens, or set max-sequence-length."
            )
        notes.append(f"inputs are cut at {budget} tokens (max-batch-tokens); the model itself takes {limit}")
    return min(limit, budget), notes


def default_prompt(settings: ModelSettings, layout: Layout) -> str | None:
    """The prefix of inputs that name no prompt: by option, else by the checkpoint.

    Raises:
        ConfigError: If ``default-prompt-name`` is not a prompt of the checkpoint.
    """
    if settings.default_prompt is not None:
        return settings.default_prompt
    name = settings.default_prompt_name
    if name is not None and name not in layout.prompts:
        raise ConfigError(
            f"--default-prompt-name {name!r} is not a prompt of {settings.model_id}, which has "
            f"{', '.join(sorted(layout.prompts)) or 'none'} (config_sentence_transformers.json)."
        )
    name = name or layout.default_prompt_name
    return layout.prompts[name] if name is not None else None
