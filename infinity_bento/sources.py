"""The three sources of settings, each read into texts by option name: command line, environment, YAML preset.

Called by ``settings.py``, which decides between them and turns the texts into values.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infinity_bento.errors import ConfigError
from infinity_bento.options import ENVIRONMENT_PREFIX, OPTIONS, PORT, UNSUPPORTED, Option, closest

# Set by `infinity-bento serve` for the `bentoml serve` it becomes: the options of its own command line, by name.
HANDED_ON_VARIABLE = "INFINITY_BENTO_HANDED_ON"
_INTERNAL_PREFIX = "INFINITY_BENTO_"

# Files in ``configs/`` that are read by others.
NOT_PRESETS = frozenset({"bentocloud"})

# Option name -> text, or several texts in the order of the models. A text may hold several values, separated by ";".
RawValues = Mapping[str, str | Sequence[str]]


class Source(enum.StrEnum):
    """Where a value comes from; each wins over the ones below it."""

    COMMAND_LINE = "command line"
    ARGUMENT = "--arg"  # of `bentoml serve`
    FLAG = "bentoml serve"  # one of its own flags
    ENVIRONMENT = "environment"
    PRESET = "preset"
    BENTO = "this Bento"  # what was built into it
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from; ``detail`` is the variable, the file, or the name as it was written."""

    source: Source
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Given:
    """The texts one source holds for one option."""

    values: tuple[str, ...]
    origin: Origin


def from_bentoml_arguments(arguments: Mapping[str, Any], ignore: Collection[str] = ()) -> dict[str, str]:
    """Command-line values from the arguments of ``bentoml serve --arg NAME=VALUE`` (or of a built Bento).

    Args:
        arguments: Names with dashes or underscores; values are texts, numbers, booleans or lists. None counts as
            not given.
        ignore: Arguments that are not options, such as those of the image build.
    """
    values: dict[str, str] = {}
    ignored = {name.replace("-", "_") for name in ignore}
    for name, value in arguments.items():
        if name.replace("-", "_") in ignored or value is None:
            continue
        parts = value if isinstance(value, (list, tuple)) else [value]
        values[name] = ";".join(str(part) for part in parts)
    return values


def _known_option(written: str, shown: str) -> Option:
    """The option a user wrote as ``written``; errors call it ``shown``, and spell another one alike."""
    name = written.replace("_", "-").lower()
    for option in OPTIONS:
        if option.name == name:
            return option
    if name in UNSUPPORTED:
        raise ConfigError(f"{shown} {UNSUPPORTED[name]}.", param=name)
    near = closest(name, [option.name for option in OPTIONS])
    if near and "_" in written:
        near = near.replace("-", "_")
    advice = f"did you mean {near}?" if near else "see 'infinity-bento options' for all of them."
    raise ConfigError(f"{shown} is not an option; {advice}", param=written)


def join_values(values: Iterable[str]) -> str:
    r"""The values as one text, separated by ``;``; a semicolon of a value becomes ``\;``."""
    return ";".join(value.replace(";", "\\;") for value in values)


def _split(text: str) -> tuple[str, ...]:
    r"""Values separated by ``;``, where ``\;`` is a semicolon of the value."""
    return tuple(part.replace("\\;", ";") for part in re.split(r"(?<!\\);", text))


def _texts(option: Option, value: str | Sequence[str]) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not option.per_model and not option.many:
        return texts
    return tuple(part for text in texts for part in _split(text))


def read_command_line(
    cli: RawValues, source: Source = Source.COMMAND_LINE, handed_on: Collection[str] = ()
) -> dict[str, Given]:
    """Texts by option name.

    Args:
        cli: Values by name.
        source: Where they were written: our command line, BentoML's ``--arg``, or a Bento at its build.
        handed_on: Options that come from our command line, whatever brought them here.

    Raises:
        ConfigError: If a name is unknown, not supported, or given in two spellings.
    """
    given: dict[str, Given] = {}
    for written, value in cli.items():
        option = _known_option(written, _as_written(written, source))
        if option.name in given:
            raise ConfigError(
                f"{option.flag} is given twice, with dashes and with underscores; keep one.", param=option.name
            )
        if source is Source.COMMAND_LINE or option.name in handed_on:
            origin = Origin(Source.COMMAND_LINE)
        else:
            origin = Origin(source, written if source is Source.ARGUMENT else "")
        given[option.name] = Given(_texts(option, value), origin)
    return given


def _as_written(name: str, source: Source) -> str:
    return f"--{name.replace('_', '-')}" if source is Source.COMMAND_LINE else f"{source} {name}"


def handed_on_options(environ: Mapping[str, str]) -> frozenset[str]:
    """The options that ``infinity-bento serve`` read from its command line before it became this process."""
    return frozenset(environ.get(HANDED_ON_VARIABLE, "").split(",")) - {""}


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Given], list[str]]:
    """Texts by option name, and notes on ``INFINITY_*`` variables that have no effect. Empty counts as not given.

    Raises:
        ConfigError: If a variable names an option that is not supported.
    """
    given: dict[str, Given] = {}
    notes = _environment_notes(environ)
    handed_on = handed_on_options(environ)  # secrets arrive by a variable, so that no process list shows them
    for option in OPTIONS:
        for variable in (option.env, *option.env_aliases):
            text = environ.get(variable, "")
            if text.startswith("tcp://") and option.kind is PORT:
                service = variable.removesuffix("_PORT").lower().replace("_", "-")
                raise ConfigError(
                    f"{variable} is {text!r}, which Kubernetes sets for a Service named {service!r}; "
                    "rename the Service or set enableServiceLinks: false in the pod.",
                    param=option.name,
                )
            if text:
                is_ours = option.name in handed_on and variable == option.env
                origin = Origin(Source.COMMAND_LINE) if is_ours else Origin(Source.ENVIRONMENT, variable)
                given[option.name] = Given(_texts(option, text), origin)
                break
    return given, notes


def _environment_notes(environ: Mapping[str, str]) -> list[str]:
    """Notes on ``INFINITY_*`` variables without an effect; an option that is not supported is an error."""
    known = {option.name: option.env for option in OPTIONS}
    notes = []
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(_INTERNAL_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).replace("_", "-").lower()
        if not environ[variable]:
            notes.append(f"{variable} is empty and counts as not given.")
        elif name in UNSUPPORTED:
            raise ConfigError(f"{variable} (--{name}) {UNSUPPORTED[name]}.", param=name)
        elif variable not in known.values():
            near = closest(name, known)
            advice = f"; did you mean {known[near]}?" if near else "."
            notes.append(f"{variable} is not an option and is ignored{advice}")
    return notes


def preset_files(folder: Path) -> list[Path]:
    """The presets of a folder, by name; a deployment's settings beside them are none."""
    return sorted(file for file in folder.glob("*.yaml") if file.stem not in NOT_PRESETS)


def preset_file(preset: str) -> Path:
    """The file a user means by ``preset``: a path, or the name of a file in ``configs/``.

    Raises:
        ConfigError: If there is no such file.
    """
    package = Path(__file__).parent
    folders = [Path("configs"), package / "configs", package.parent / "configs"]
    path = Path(preset).expanduser()
    is_path = path.suffix in {".yaml", ".yml"} or path.name != preset
    candidates = [path] if is_path else [folder / f"{preset}.yaml" for folder in folders]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = sorted({file.stem for folder in folders for file in preset_files(folder)})
    near = difflib.get_close_matches(preset, names, n=3, cutoff=0.5)
    advice = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"--preset is {preset!r}, and there is no such file; give the path of a .yaml file, or a name that "
        f"'infinity-bento models' lists.{advice}",
        param="preset",
    )


def _yaml_entries(file: Path, shown: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Key and texts of each entry. Texts stay as written: ``revision: 0123`` is not a number."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{shown} cannot be read as YAML: {reason}.", param="preset") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{shown} must be a mapping of option names to values.", param="preset")
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{shown} has a key that is not a text; keys are option names.", param="preset")
        nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(node, yaml.ScalarNode) for node in nodes):
            raise ConfigError(
                f"{key.value} in {shown} is nested; it must be one value or a list of values.", param=key.value
            )
        null = "tag:yaml.org,2002:null"
        yield key.value, tuple("" if node.tag == null else node.value for node in nodes)


def read_preset(preset: str) -> dict[str, Given]:
    """Texts by option name, from a YAML file or the name of one in ``configs/``.

    Raises:
        ConfigError: If there is no such file, it is not a mapping of values, or a key is unknown or repeated.
    """
    file = preset_file(preset)
    origin = Origin(Source.PRESET, f"{file.parent.name}/{file.name}".lstrip("/"))
    shown = str(origin)
    given: dict[str, Given] = {}
    for key, texts in _yaml_entries(file, shown):
        option = _known_option(key, f"{key} in {shown}")
        if option.name in given:
            raise ConfigError(f"{key} is in {shown} twice; keep one.", param=option.name)
        if option.name == "preset":
            raise ConfigError(f"{shown} names another preset; a preset cannot build on one.", param="preset")
        given[option.name] = Given(texts, origin)
    return given
