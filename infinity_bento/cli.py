"""The command ``infinity-bento``: ``serve`` checks the options and becomes ``bentoml serve``; the others print tables.

Imports neither torch nor BentoML, so that a wrong option is answered at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from infinity_bento import __version__, calibrate, catalogue, importing
from infinity_bento.errors import ConfigError, LoadError
from infinity_bento.grpc_door import require_grpc
from infinity_bento.listening import Address, require_free
from infinity_bento.options import BOOLEAN, MODEL_OPTIONS, OPTIONS, SERVER_OPTIONS, UNSUPPORTED, Option, closest
from infinity_bento.settings import Settings, resolve
from infinity_bento.sources import HANDED_ON_VARIABLE, join_values, preset_file

CommandLine = dict[str, list[str]]  # option name -> texts as written


@dataclass(frozen=True, slots=True)
class Launch:
    """The process that ``serve`` becomes."""

    arguments: list[str]
    environ: dict[str, str] = field(repr=False)  # holds the secrets
    address: Address
    settings: Settings = field(repr=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. ``serve`` does not return: the process becomes the server."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0].startswith("-") and words[0] not in {"-h", "--help", "--version"}:
            raise _unknown_argument(words[0])
        parsed, unknown = _parser().parse_known_args(words)
        if unknown:
            raise _unknown_argument(unknown[0])
        if parsed.command == "serve":
            _serve(_given_options(parsed))
        if parsed.command == "options":
            print(options_markdown() if parsed.markdown else options_table(), end="")
        elif parsed.command == "models":
            print(_models(markdown=parsed.markdown), end="")
        elif parsed.command == "import":
            return importing.run_command(parsed, os.environ)
        elif parsed.command == "calibrate":
            return calibrate.run_command(parsed, os.environ)
        else:
            print(f"infinity-bento {__version__}")
    except (ConfigError, LoadError) as error:
        print(f"infinity-bento: {error.message}", file=sys.stderr)
        return 2
    return 0


def plan_launch(cli: Mapping[str, Sequence[str]], environ: Mapping[str, str], directory: Path) -> Launch:
    """The ``bentoml serve`` process for some options.

    Args:
        cli: Command-line texts by option name.
        environ: The environment the server starts in.
        directory: The current directory; relative paths in the settings are meant from there.

    Raises:
        ConfigError: If the options do not resolve.
    """
    settings = resolve(cli, environ)
    given = {name: list(texts) for name, texts in cli.items()}
    environment = {**environ, HANDED_ON_VARIABLE: ",".join(cli)}
    target, working_directory = service_target()
    if working_directory is not None:
        _pin_local_paths(given, directory, settings)
    for option in OPTIONS:
        if option.secret and option.name in given:  # a process list shows arguments, not the environment
            environment[option.env] = given.pop(option.name)[0]
    arguments = [sys.executable, "-m", "bentoml", "serve", target]
    if working_directory is not None:
        arguments += ["--working-dir", str(working_directory)]
    arguments += ["--host", settings.hostname, "--port", str(settings.port)]
    for name, texts in given.items():
        arguments += ["--arg", f"{name.replace('-', '_')}={';'.join(texts)}"]
    return Launch(arguments, environment, Address(settings.hostname, settings.port), settings)


def service_target() -> tuple[str, Path | None]:
    """What ``bentoml serve`` is given: a module of the installed package, or ``service.py`` of a checkout.

    Returns:
        The target and its working directory; None: the current directory stays.

    Raises:
        ConfigError: If neither is there.
    """
    package = Path(__file__).absolute().parent
    if (package / "service.py").is_file():
        return "infinity_bento.service", None
    if (package.parent / "service.py").is_file():
        return "service.py", package.parent
    raise ConfigError(f"There is no service.py in {package} or beside it; install infinity-bento again.")


def options_table() -> str:
    """Every option with its variable and default, as aligned text."""
    rows = [(option.flag, option.env, option.describe_default(), option.help) for option in OPTIONS]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) + "\n"
        for row in rows
    )


def options_markdown() -> str:
    """``docs/configuration.md``, generated from the option table."""
    parts = [_INTRODUCTION]
    for title, options in (("Model options", MODEL_OPTIONS), ("Server options", SERVER_OPTIONS)):
        parts.append(f"## {title}\n\n| option | environment | value | default | meaning |\n|---|---|---|---|---|\n")
        for option in options:
            names = ", ".join(f"`{name}`" for name in (option.env, *option.env_aliases))
            cells = (f"`{option.flag}`", names, option.kind.allowed, option.describe_default(), option.help)
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
        parts.append("\n")
    parts.append("## Known, but refused\n\nThese names stop the start with an explanation, from every source.\n\n")
    parts.append("| option | answer |\n|---|---|\n")
    parts += [f"| `--{name}` | {answer} |\n" for name, answer in UNSUPPORTED.items()]
    return "".join(parts)


_INTRODUCTION = r"""# Configuration

<!-- Generated: infinity-bento options --markdown > docs/configuration.md. Edit infinity_bento/options.py instead. -->

Every option can be given in four places. A place wins over the ones below it:

1. the command line, `infinity-bento serve --port 8000`, or `bentoml serve --arg port=8000`;
2. the environment, `INFINITY_PORT=8000`; where other names are listed, the first one that is set counts;
3. a preset, `--preset NAME` for `configs/NAME.yaml` or `--preset path/to/file.yaml`: option names and their values;
4. the default.

`bentoml serve` has flags of its own: `--host` and `--port` (`BENTOML_HOST`, `BENTOML_PORT`) win over `hostname` and
`port`.

The server prints at start which values are in force and where each comes from. A wrong value, an unknown option and an
option that is not supported stop the start with exit code 2 and one sentence; an unknown `INFINITY_*` variable is
noted with the closest name.

**Several models.** Repeat a model option on the command line, separate values by `;` in the environment and in `--arg`
(also accepted on the command line), or write a list in a preset. One value applies to every model; otherwise there must
be one value for each `--model-id`, in the same order. An empty value means the default: `INFINITY_REVISION="main;"`
pins the first of two models only. A semicolon inside a value is written `\;`.

```
infinity-bento serve --model-id sentence-transformers/all-MiniLM-L6-v2 --served-model-name embeddings \
                     --model-id BAAI/bge-reranker-base --served-model-name reranker --dtype float32
```

```
INFINITY_MODEL_ID="sentence-transformers/all-MiniLM-L6-v2;BAAI/bge-reranker-base" \
INFINITY_SERVED_MODEL_NAME="embeddings;reranker" INFINITY_DTYPE=float32 infinity-bento serve
```

**Booleans.** `--auto-truncate` means true; `--auto-truncate=false` or `--auto-truncate false` means false.

**Secrets** (`--api-key`, `--hf-token`) are never printed. Prefer the environment: a process list shows command lines.
`infinity-bento serve` hands them on through the environment; `bentoml serve --arg` cannot.

"""


class _Parser(argparse.ArgumentParser):
    """Reports a misuse as our own error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="infinity-bento", description="Serve embeddings, reranking and classification.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"infinity-bento {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="start the server",
        allow_abbrev=False,
        epilog="Model options may be repeated: one value applies to all models, several align with --model-id. "
        "The command line wins over the environment, the environment over the preset.",
    )
    for title, options in (("model options", MODEL_OPTIONS), ("server options", SERVER_OPTIONS)):
        group = serve.add_argument_group(title)
        for option in options:
            _add_option(group, option)
    table = commands.add_parser("options", help="list all options", allow_abbrev=False)
    table.add_argument("--markdown", action="store_true", help="as docs/configuration.md")
    models = commands.add_parser("models", help="list model families and presets", allow_abbrev=False)
    models.add_argument("--markdown", action="store_true", help="as docs/models.md")
    importing.add_command(commands)
    calibrate.add_command(commands)
    commands.add_parser("version", help="print the version", allow_abbrev=False)
    return parser


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    variables = ", ".join((option.env, *option.env_aliases))
    text = f"{option.help} [env: {variables}] [default: {option.describe_default()}]"
    group.add_argument(
        option.flag,
        dest=option.field,
        action="append",
        nargs="?" if option.kind is BOOLEAN else None,
        const="true" if option.kind is BOOLEAN else None,
        metavar=option.kind.metavar,
        help=text.replace("%", "%%"),
    )


def _given_options(parsed: argparse.Namespace) -> CommandLine:
    values = {option.name: getattr(parsed, option.field) for option in OPTIONS}
    return {name: texts for name, texts in values.items() if texts is not None}


def _unknown_argument(argument: str) -> ConfigError:
    if not argument.startswith("-"):
        return ConfigError(f"{argument!r} belongs to no option; name a model with --model-id.")
    name = argument.split("=", 1)[0].lstrip("-")  # the value is not shown: it may be a secret
    if name in UNSUPPORTED:
        return ConfigError(f"--{name} {UNSUPPORTED[name]}.", param=name)
    if name in {option.name for option in OPTIONS}:
        return ConfigError(f"--{name} is an option of 'serve'; write it after that word.", param=name)
    near = closest(name, [option.name for option in OPTIONS])
    advice = f"did you mean --{near}?" if near else "see 'infinity-bento serve --help' for all of them."
    return ConfigError(f"--{name} is not an option; {advice}", param=name)


def _models(*, markdown: bool) -> str:
    presets = catalogue.read_presets(catalogue.configs_folder())
    if markdown:
        return catalogue.models_markdown(catalogue.read_results(catalogue.results_file()), presets)
    return catalogue.models_text(presets)


def _pin_local_paths(given: CommandLine, directory: Path, settings: Settings) -> None:
    """Make relative paths absolute, since BentoML changes the directory; public names stay as they were."""
    named = [model.model_id for model in settings.models]
    pinned = [str(directory / name) if (directory / name).is_dir() else name for name in named]
    if pinned != named:
        given["model-id"] = [join_values(pinned)]
        given["served-model-name"] = [join_values(model.served_model_name for model in settings.models)]
    calibrations = [model.decision_calibration for model in settings.models]
    if any(calibrations):
        given["decision-calibration"] = [
            join_values(str(directory / Path(name).expanduser()) if name else "" for name in calibrations)
        ]
    if settings.huggingface_hub_cache is not None:
        given["huggingface-hub-cache"] = [str(directory / Path(settings.huggingface_hub_cache).expanduser())]
    if settings.preset is not None:
        given["preset"] = [str(directory / preset_file(settings.preset))]


def _serve(cli: CommandLine) -> NoReturn:
    launch = plan_launch(cli, os.environ, Path.cwd())
    require_free(launch.address)
    require_grpc(launch.settings, launch.address)
    sys.stdout.flush()
    os.execve(launch.arguments[0], launch.arguments, launch.environ)


if __name__ == "__main__":
    sys.exit(main())
