"""The command: help, tables, errors, and the process that serve becomes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import infinity_bento
from infinity_bento import cli
from infinity_bento.errors import ConfigError
from infinity_bento.options import OPTIONS, UNSUPPORTED
from infinity_bento.settings import Source, from_bentoml_arguments, resolve
from infinity_bento.sources import HANDED_ON_VARIABLE

PACKAGE = Path(infinity_bento.__file__).parent
REPOSITORY = PACKAGE.parent


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A current directory, and a service that lies elsewhere."""
    monkeypatch.setattr(cli, "service_target", lambda: ("service.py", Path("/elsewhere")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(words, environ=None, directory=None):
    parsed, unknown = cli._parser().parse_known_args(["serve", *words])
    assert not unknown
    return cli.plan_launch(cli._given_options(parsed), environ or {}, directory or Path.cwd())


def handed_on(arguments):
    """What the service reads of ``--arg``."""
    pairs = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--arg"]
    return from_bentoml_arguments(dict(pair.split("=", 1) for pair in pairs))


def test_help_lists_every_option_with_its_variables_and_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for option in OPTIONS:
        variables = ", ".join((option.env, *option.env_aliases))
        assert f"{option.help} [env: {variables}] [default: {option.describe_default()}]" in text
        assert f"  {option.flag} " in text


def test_options_prints_every_option(capsys):
    assert cli.main(["options"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[option.flag, option.env] for option in OPTIONS]


def test_configuration_page_is_current(capsys):
    assert cli.main(["options", "--markdown"]) == 0
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert capsys.readouterr().out == page, "run: infinity-bento options --markdown > docs/configuration.md"
    for name in [option.name for option in OPTIONS] + list(UNSUPPORTED):
        assert f"| `--{name}` |" in page


def test_version(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"infinity-bento {infinity_bento.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--api-kye=sesame"], "--api-kye is not an option; did you mean --api-key?"),
        (["serve", "--api-kye", "sesame"], "--api-kye is not an option; did you mean --api-key?"),
        (["serve", "--qqqq"], "--qqqq is not an option; see 'infinity-bento serve --help' for all of them."),
        (["serve", "--max-batch-token", "1"], "did you mean --max-batch-tokens?"),
        (["serve", "org/model"], "'org/model' belongs to no option; name a model with --model-id."),
        (["serve", "--device-id", "0"], "--device-id is not supported yet; name the device with"),
        (["serve", "--port"], "argument --port: expected one argument; see 'infinity-bento serve --help'."),
        (["serve", "--port=x"], "--port is 'x' (command line); it must be an integer from 1 to 65535."),
        (["serve", "--port=1", "--port=2"], "--port has 2 values (command line)"),
        (["--port", "1", "version"], "--port is an option of 'serve'; write it after that word."),
        (["srve"], "invalid choice: 'srve'"),
        ([], "the following arguments are required: COMMAND; see 'infinity-bento --help'."),
    ],
)
def test_misuse_is_one_sentence_and_exit_code_2(words, message, capsys, checkout):
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("infinity-bento: ") and output.err.count("\n") == 1
    assert message in output.err and "sesame" not in output.err


def test_serve_hands_every_given_option_on(checkout):
    words = ["--model-id", "a", "--model-id=b", "--revision", "main", "--revision", "", "--port", "81"]
    words += ["--hostname", "127.0.0.1", "--auto-truncate", "--warmup=false", "--default-prompt", r"x\; y=z: "]
    words += ["--cors-allow-origin", "http://a", "--cors-allow-origin", "http://b"]
    environ = {"INFINITY_DTYPE": "float32"}
    plan = launch(words, environ)
    assert plan.arguments[:5] == [sys.executable, "-m", "bentoml", "serve", "service.py"]
    assert plan.arguments[5:11] == ["--working-dir", "/elsewhere", "--host", "127.0.0.1", "--port", "81"]
    assert {name: plan.environ[name] for name in environ} == environ

    settings = resolve(handed_on(plan.arguments), plan.environ, source=Source.ARGUMENT)
    assert [(m.model_id, m.revision, m.default_prompt) for m in settings.models] == [
        ("a", "main", "x; y=z: "),
        ("b", None, "x; y=z: "),
    ]
    assert (settings.port, settings.hostname, settings.warmup) == (81, "127.0.0.1", False)
    assert settings.cors_allow_origin == ("http://a", "http://b")
    assert settings.models[0].auto_truncate
    given = {name for name, origin in settings.origins.items() if origin.source is Source.COMMAND_LINE}
    assert given == {word.removeprefix("--").split("=")[0] for word in words if word.startswith("--")}
    assert str(settings.origins["dtype"]) == "environment INFINITY_DTYPE" and settings.notes == ()


def test_booleans_take_a_separate_word_too(checkout):
    settings = resolve(handed_on(launch(["--auto-truncate", "false", "--tracing"]).arguments))
    assert (settings.models[0].auto_truncate, settings.tracing) == (False, True)


def test_address_and_port_of_the_environment_reach_bentoml(checkout):
    plan = launch([], {"INFINITY_PORT": "8000", "INFINITY_HOSTNAME": "::1"})
    assert plan.arguments[7:] == ["--host", "::1", "--port", "8000"]


def test_secrets_go_through_the_environment_only(checkout):
    plan = launch(["--api-key", "sesame-1", "--hf-token=sesame-2"], {"HF_TOKEN": "other"})
    assert not any("sesame" in word for word in [*plan.arguments, plan.environ[HANDED_ON_VARIABLE]])
    settings = resolve(handed_on(plan.arguments), plan.environ)
    assert settings.api_key is not None and settings.api_key.reveal() == "sesame-1"
    assert settings.hf_token is not None and settings.hf_token.reveal() == "sesame-2"
    assert "sesame" not in repr(plan)
    assert str(settings.origins["api-key"]) == str(settings.origins["hf-token"]) == "command line"


def test_a_secret_of_the_environment_says_so(checkout):
    plan = launch(["--port", "81"], {"INFINITY_API_KEY": "sesame-1"})
    settings = resolve(handed_on(plan.arguments), plan.environ, source=Source.ARGUMENT)
    assert str(settings.origins["api-key"]) == "environment INFINITY_API_KEY"


def test_a_taken_port_is_refused_before_anything_starts(checkout, capsys):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert cli.main(["serve", "--hostname", "127.0.0.1", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"infinity-bento: Port {port} of 127.0.0.1 is in use") and error.count("\n") == 1


def test_relative_paths_survive_the_change_of_directory(checkout):
    (checkout / "models" / "a;b").mkdir(parents=True)
    (checkout / "configs").mkdir()
    (checkout / "configs" / "mine.yaml").write_text("dtype: float32\n")
    words = ["--preset", "mine", "--model-id", r"models/a\;b", "--model-id", "org/b", "--huggingface-hub-cache", "hub"]
    settings = resolve(handed_on(launch(words).arguments))
    assert [model.model_id for model in settings.models] == [str(checkout / "models" / "a;b"), "org/b"]
    assert [model.served_model_name for model in settings.models] == ["models/a;b", "org/b"]
    assert settings.huggingface_hub_cache == str(checkout / "hub")
    assert settings.preset == str(checkout / "configs" / "mine.yaml")
    assert settings.models[0].dtype == "float32"


def test_an_installed_package_is_served_by_module_name(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "infinity_bento" / "cli.py"))
    (tmp_path / "infinity_bento").mkdir()
    with pytest.raises(ConfigError, match=r"There is no service\.py"):
        cli.service_target()
    (tmp_path / "service.py").touch()
    assert cli.service_target() == ("service.py", tmp_path)
    (tmp_path / "infinity_bento" / "service.py").touch()
    assert cli.service_target() == ("infinity_bento.service", None)


def test_serve_replaces_the_process_and_imports_nothing_heavy(tmp_path):
    (tmp_path / "infinity_bento").symlink_to(PACKAGE)
    (tmp_path / "service.py").touch()
    (tmp_path / "bentoml").mkdir()
    (tmp_path / "bentoml" / "__init__.py").touch()
    report = "import json, os, sys; print(json.dumps([os.getpid(), sys.argv[1:], os.environ['INFINITY_API_KEY']]))"
    (tmp_path / "bentoml" / "__main__.py").write_text(report)
    command = [sys.executable, "-X", "importtime", "-m", "infinity_bento.cli", "serve", "--api-key", "k", "--port=81"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate(timeout=60)
    pid, arguments, key = json.loads(out)
    assert process.returncode == 0 and pid == process.pid and key == "k"
    assert arguments[:4] == ["serve", "service.py", "--working-dir", str(tmp_path)]
    assert arguments[4:] == ["--host", "0.0.0.0", "--port", "81", "--arg", "port=81"]
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in err.splitlines()}
    assert "infinity_bento" in imported
    assert not imported & {"torch", "transformers", "bentoml", "starlette", "huggingface_hub"}
