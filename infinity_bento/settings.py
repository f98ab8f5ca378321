"""Settings of a server: command line, ``INFINITY_*`` environment and YAML preset resolve to one frozen object.

Read by the command line, by ``service.py`` and by the start-up report; nothing reads the environment after this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity_bento.core import Pooling
from infinity_bento.decisions import DecisionRules
from infinity_bento.errors import ConfigError
from infinity_bento.options import MODEL_OPTIONS, OPTIONS, SERVER_OPTIONS, Option, Secret
from infinity_bento.sources import (
    Given,
    Origin,
    RawValues,
    Source,
    from_bentoml_arguments,
    handed_on_options,
    read_command_line,
    read_environment,
    read_preset,
)

__all__ = [
    "ModelSettings",
    "Origin",
    "Secret",
    "Settings",
    "Source",
    "available_cpus",
    "default_tokenization_workers",
    "from_bentoml_arguments",
    "resolve",
]

_PRESET = next(option for option in SERVER_OPTIONS if option.name == "preset")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The options of one served model. Set by ``resolve``; the field names are the option names."""

    model_id: str
    served_model_name: str
    tokenization_workers: int
    revision: str | None = None
    torch_device: str = "auto"
    dtype: str = "auto"
    cpu_linear: str = "auto"
    native_encoders: bool = True
    pooling: Pooling | None = None
    decision_protocol: str | None = None
    decision_calibration: str | None = None
    max_batch_tokens: int = 16384
    max_batch_requests: int | None = None
    max_concurrent_requests: int = 512
    max_client_batch_size: int = 2048
    max_sequence_length: int | None = None  # tokens
    auto_truncate: bool = True
    default_prompt: str | None = None
    default_prompt_name: str | None = None
    dense_path: str | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a server was told. Set by ``resolve``; the field names are the option names."""

    models: tuple[ModelSettings, ...]
    hostname: str = "0.0.0.0"
    port: int = 3000
    grpc_port: int | None = None
    grpc_max_parallel_stream_requests: int = 1024
    workers: int = 1
    payload_limit: int = 16_000_000  # bytes
    request_timeout_seconds: float = 60.0
    api_key: Secret | None = None
    cors_allow_origin: tuple[str, ...] = ()
    decision_alias: tuple[str, ...] = ()  # ALIAS=NAME
    decision_max_questions: int = 64
    decision_max_options: int = 255
    decision_max_levels: int = 10
    decision_max_total_options: int = 512
    decision_max_images: int = 4
    decision_neutral_ids: bool = False
    huggingface_hub_cache: str | None = None
    hf_token: Secret | None = None
    offline: bool = False
    warmup: bool = True
    access_log: bool = False
    tracing: bool = False
    json_output: bool = False
    log_level: str = "info"
    preset: str | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)  # option name -> where its value comes from
    notes: tuple[str, ...] = ()  # what the user should know but need not act on: nothing is silent

    @property
    def decisions(self) -> DecisionRules:
        """The options ``decision-*`` of the server."""
        return DecisionRules(
            questions=self.decision_max_questions,
            options=self.decision_max_options,
            levels=self.decision_max_levels,
            total_options=self.decision_max_total_options,
            images=self.decision_max_images,
            neutral_ids=self.decision_neutral_ids,
            aliases=dict(_alias(text) for text in self.decision_alias),
        )


def resolve(
    cli: RawValues | None = None,
    environ: Mapping[str, str] | None = None,
    preset: str | None = None,
    *,
    source: Source = Source.COMMAND_LINE,
) -> Settings:
    """The settings of a server.

    Args:
        cli: Command-line values by option name, with dashes or underscores.
        environ: The environment; None: an empty one.
        preset: YAML file (a path, or a name in ``configs/``); None: as the option ``preset`` says, if it is given.
        source: Where the values of ``cli`` were written.

    Raises:
        ConfigError: If an option is unknown, not supported, or has a value or a number of values that is not allowed.
    """
    from_environment, notes = read_environment(environ or {})
    given = {**from_environment, **read_command_line(cli or {}, source, handed_on_options(environ or {}))}
    if preset is not None:
        given["preset"] = Given((preset,), Origin(Source.COMMAND_LINE))
    preset_name = _server_value(_PRESET, given)
    if preset_name is not None:
        from_preset = read_preset(preset_name)
        notes += _preset_notes(from_preset, given)
        given = {**from_preset, **given}

    models = _models(given)
    server = {option.field: _server_value(option, given) for option in SERVER_OPTIONS}
    _check_aliases(server["decision_alias"], models)
    default = Origin(Source.DEFAULT)
    origins = {option.name: given[option.name].origin if option.name in given else default for option in OPTIONS}
    return Settings(models=models, origins=origins, notes=tuple(notes), **server)


def default_tokenization_workers() -> int:
    """One thread less than the CPUs this process may use, from 2 to 8: a long text must not hold up the short ones."""
    return min(max(available_cpus() - 1, 2), 8)


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs this process may use: its affinity, and the quota of its control group (a container's CPU limit)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:  # version 1
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return cpus
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max", or -1: no quota
        return cpus
    return max(1, min(cpus, int(quota) // int(period)))


def _preset_notes(from_preset: Mapping[str, Given], given: Mapping[str, Given]) -> list[str]:
    """A note where another model takes over what a preset says about its own."""
    tuned = [option.name for option in MODEL_OPTIONS[1:] if option.name in from_preset and option.name not in given]
    if "model-id" not in from_preset or "model-id" not in given or not tuned:
        return []
    theirs, ours = from_preset["model-id"], given["model-id"]
    return [
        f"--model-id comes from another place ({ours.origin}); {', '.join(tuned)} still come from the "
        f"{theirs.origin}, which was made for {', '.join(theirs.values)}."
    ]


def _parse(option: Option, text: str, origin: Origin) -> Any:
    """The value of one text; an empty one means the default."""
    if text == "":
        if option.secret:  # a missing shell variable must not open the server
            raise ConfigError(f"{option.flag} is empty ({origin}); give a value or leave it out.", param=option.name)
        return option.default
    shown = "***" if option.secret else repr(text if len(text) <= 80 else text[:77] + "...")
    reason = option.kind.refused.get(text.strip().lower())
    if reason is not None:
        raise ConfigError(f"{option.flag} is {shown} ({origin}); {reason}.", param=option.name)
    try:
        return option.kind.parse(text)
    except ValueError:
        message = f"{option.flag} is {shown} ({origin}); it must be {option.kind.allowed}."
        raise ConfigError(message, param=option.name) from None


def _server_value(option: Option, given: Mapping[str, Given]) -> Any:
    if option.name not in given:
        return option.default
    values, origin = given[option.name].values, given[option.name].origin
    if option.many:
        return tuple(_parse(option, text, origin) for text in values if text)
    if len(values) != 1:
        message = f"{option.flag} has {len(values)} values ({origin}); it applies to the whole server and takes one."
        raise ConfigError(message, param=option.name)
    return _parse(option, values[0], origin)


def _model_ids(given: Mapping[str, Given]) -> tuple[str, ...]:
    option = MODEL_OPTIONS[0]
    if option.name not in given:
        return (option.default,)
    values, origin = given[option.name].values, given[option.name].origin
    if len(values) > 1 and values[-1] == "":
        values = values[:-1]
    if "" in values or not values:
        raise ConfigError(f"--model-id has an empty value ({origin}); name a model or remove it.", param=option.name)
    return tuple(_parse(option, text, origin) for text in values)


def _model_values(option: Option, given: Mapping[str, Given], model_ids: Sequence[str]) -> list[Any]:
    """One value for each model."""
    count = len(model_ids)
    if option.name not in given:
        return [option.default] * count
    values, origin = given[option.name].values, given[option.name].origin
    if len(values) == count + 1 and values[-1] == "":  # "a;b;" for two models
        values = values[:-1]
    if len(values) not in (1, count):  # an empty list in a preset has 0
        raise ConfigError(
            f"{option.flag} has {len(values)} values ({origin}) for {count} models ({', '.join(model_ids)}); "
            "give one value for all models or one for each, in the same order"
            + (r" (a semicolon inside a value is written \;)." if option.kind.metavar == "TEXT" else "."),
            param=option.name,
        )
    parsed = [_parse(option, text, origin) for text in values]
    return parsed * count if len(parsed) == 1 else parsed


def _models(given: Mapping[str, Given]) -> tuple[ModelSettings, ...]:
    model_ids = _model_ids(given)
    columns = {option.field: _model_values(option, given, model_ids) for option in MODEL_OPTIONS[1:]}
    models = []
    for index, model_id in enumerate(model_ids):
        row = {name: values[index] for name, values in columns.items()}
        row["served_model_name"] = row["served_model_name"] or model_id
        row["tokenization_workers"] = row["tokenization_workers"] or default_tokenization_workers()
        models.append(ModelSettings(model_id=model_id, **row))
    for model in models:
        _check_model(model, given)
    _check_names(models)
    return tuple(models)


def _check_model(model: ModelSettings, given: Mapping[str, Given]) -> None:
    if model.default_prompt is not None and model.default_prompt_name is not None:
        raise ConfigError(
            f"--default-prompt ({given['default-prompt'].origin}) and --default-prompt-name "
            f"({given['default-prompt-name'].origin}) are both set for {model.served_model_name}; "
            "they exclude each other: leave one out or give it an empty value.",
            param="default-prompt",
        )
    length, budget = model.max_sequence_length, model.max_batch_tokens
    if length is not None and length > budget and not model.auto_truncate:
        raise ConfigError(
            f"--max-sequence-length is {length} for {model.served_model_name}, above --max-batch-tokens {budget}, and "
            "--auto-truncate is false: such an input fits no batch; raise --max-batch-tokens, lower "
            "--max-sequence-length or allow truncation.",
            param="max-sequence-length",
        )


def _alias(text: str) -> tuple[str, str]:
    """``ALIAS=NAME`` as alias and name."""
    alias, _, name = text.partition("=")
    return alias, name


def _check_aliases(aliases: Sequence[str], models: Sequence[ModelSettings]) -> None:
    served, seen = [model.served_model_name for model in models], set()
    for text in aliases:
        alias, name = _alias(text)
        fault = ""
        if name not in served:
            fault = f"no served model has the name {name!r}; name one of {', '.join(served)}"
        elif alias in served:
            fault = f"{alias!r} is the name of a served model; choose another alias"
        elif alias in seen:
            fault = f"{alias!r} is there twice; give every alias once"
        if fault:
            raise ConfigError(f"--decision-alias is {text!r}; {fault}.", param="decision-alias")
        seen.add(alias)


def _check_names(models: Sequence[ModelSettings]) -> None:
    seen: dict[str, ModelSettings] = {}
    for model in models:
        other = seen.setdefault(model.served_model_name, model)
        if other is not model:
            raise ConfigError(
                f"Two models ({other.model_id}, {model.model_id}) would be served as {model.served_model_name!r}; "
                "give each its own --served-model-name.",
                param="served-model-name",
            )
