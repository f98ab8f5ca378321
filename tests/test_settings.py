"""Settings: every option from every source, lists for several models, errors, secrets."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from infinity_bento.core import Pooling
from infinity_bento.errors import ConfigError
from infinity_bento.options import BOOLEAN, DEFAULT_MODEL, MODEL_OPTIONS, OPTIONS, SERVER_OPTIONS, UNSUPPORTED, Option
from infinity_bento.settings import (
    ModelSettings,
    Origin,
    Secret,
    Settings,
    Source,
    available_cpus,
    default_tokenization_workers,
    from_bentoml_arguments,
    resolve,
)

# Two different non-default texts for every option, with the values they mean.
EXAMPLES: dict[str, tuple[tuple[str, Any], tuple[str, Any]]] = {
    "model-id": (("org/a", "org/a"), ("org/b", "org/b")),
    "revision": (("main", "main"), ("refs/pr/2", "refs/pr/2")),
    "served-model-name": (("embeddings", "embeddings"), ("reranker", "reranker")),
    "torch-device": (("cpu", "cpu"), ("cuda:1", "cuda:1")),
    "dtype": (("float32", "float32"), ("BFloat16", "bfloat16")),
    "cpu-linear": (("torch", "torch"), ("BOTH", "both")),
    "native-encoders": (("false", False), ("NO", False)),
    "decision-protocol": (("d3", "d3"), ("OneJev", "onejev")),
    "decision-calibration": (("a.json", "a.json"), ("/b/c.json", "/b/c.json")),
    "pooling": (("last-token", Pooling.LAST_TOKEN), ("mean_sqrt_len_tokens", Pooling.MEAN_SQRT)),
    "max-batch-tokens": (("32_768", 32768), ("1", 1)),
    "max-batch-requests": (("4", 4), ("8", 8)),
    "max-concurrent-requests": (("2", 2), ("3", 3)),
    "max-client-batch-size": (("32", 32), ("64", 64)),
    "max-sequence-length": (("128", 128), ("8192", 8192)),
    "auto-truncate": (("false", False), ("NO", False)),
    "default-prompt": (("query: ", "query: "), (" x", " x")),
    "default-prompt-name": (("query", "query"), ("passage", "passage")),
    "tokenization-workers": (("3", 3), ("64", 64)),
    "dense-path": (("2_Dense_1024", "2_Dense_1024"), ("2_Dense_256", "2_Dense_256")),
    "hostname": (("127.0.0.1", "127.0.0.1"), ("::1", "::1")),
    "port": (("8000", 8000), ("65535", 65535)),
    "grpc-port": (("50051", 50051), ("50052", 50052)),
    "grpc-max-parallel-stream-requests": (("8", 8), ("2048", 2048)),
    "workers": (("2", 2), ("64", 64)),
    "payload-limit": (("1000", 1000), ("33554432", 33554432)),
    "request-timeout-seconds": (("0.5", 0.5), ("10", 10.0)),
    "api-key": (("sesame", Secret("sesame")), ("open\n", Secret("open"))),
    "cors-allow-origin": (("*", ("*",)), ("https://a.example;http://b:81", ("https://a.example", "http://b:81"))),
    "decision-alias": (
        (f"jev-latest={DEFAULT_MODEL}", (f"jev-latest={DEFAULT_MODEL}",)),
        (f"a={DEFAULT_MODEL};b={DEFAULT_MODEL}", (f"a={DEFAULT_MODEL}", f"b={DEFAULT_MODEL}")),
    ),
    "decision-max-questions": (("1", 1), ("400", 400)),
    "decision-max-options": (("2", 2), ("26", 26)),
    "decision-max-levels": (("32", 32), ("2", 2)),
    "decision-max-total-options": (("16_320", 16320), ("2", 2)),
    "decision-max-images": (("1", 1), ("16", 16)),
    "decision-neutral-ids": (("true", True), ("on", True)),
    "huggingface-hub-cache": (("/data", "/data"), ("cache", "cache")),
    "hf-token": (("hf_abc", Secret("hf_abc")), ("hf_def", Secret("hf_def"))),
    "offline": (("1", True), ("on", True)),
    "warmup": (("0", False), ("off", False)),
    "access-log": (("true", True), ("y", True)),
    "tracing": (("true", True), ("t", True)),
    "json-output": (("true", True), ("yes", True)),
    "log-level": (("debug", "debug"), ("WARNING", "warning")),
}
ALL_BUT_PRESET = [option for option in OPTIONS if option.name != "preset"]


def value_of(settings: Settings, option: Option) -> Any:
    return getattr(settings.models[0] if option.per_model else settings, option.field)


def error_of(cli: Any = None, environ: Any = None, preset: str | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(cli, environ, preset)
    return caught.value


def write_preset(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_every_option_is_one_field_and_one_example():
    assert [field.name for field in dataclasses.fields(ModelSettings)][:1] == ["model_id"]
    assert {field.name for field in dataclasses.fields(ModelSettings)} == {option.field for option in MODEL_OPTIONS}
    server_fields = {field.name for field in dataclasses.fields(Settings)} - {"models", "origins", "notes"}
    assert server_fields == {option.field for option in SERVER_OPTIONS}
    assert set(EXAMPLES) == {option.name for option in ALL_BUT_PRESET}
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    assert not set(UNSUPPORTED) & {option.name for option in OPTIONS}


def test_field_defaults_agree_with_the_table():
    fields = {field.name: field for owner in (ModelSettings, Settings) for field in dataclasses.fields(owner)}
    for option in OPTIONS:
        default = fields[option.field].default
        if default is not dataclasses.MISSING:
            assert default == option.default, option.name


def test_nothing_given_serves_the_default_model():
    settings = resolve()
    assert settings.models == (
        ModelSettings(
            model_id="sentence-transformers/all-MiniLM-L6-v2",
            served_model_name="sentence-transformers/all-MiniLM-L6-v2",
            tokenization_workers=default_tokenization_workers(),
        ),
    )
    assert (settings.hostname, settings.port, settings.payload_limit) == ("0.0.0.0", 3000, 16_000_000)
    assert settings.api_key is None and settings.hf_token is None
    assert settings.notes == ()
    assert set(settings.origins.values()) == {Origin(Source.DEFAULT)}


@pytest.mark.parametrize("option", ALL_BUT_PRESET, ids=lambda option: option.name)
def test_each_source_and_its_precedence(option, tmp_path):
    (first, first_value), (second, second_value) = EXAMPLES[option.name]
    preset = write_preset(tmp_path, f"{option.name}: {json.dumps(first.split(';'))}\n")

    by_preset = resolve(preset=preset)
    assert value_of(by_preset, option) == first_value
    assert str(by_preset.origins[option.name]) == f"preset {tmp_path.name}/mine.yaml"

    by_environment = resolve(environ={option.env: second}, preset=preset)
    assert value_of(by_environment, option) == second_value
    assert str(by_environment.origins[option.name]) == f"environment {option.env}"

    by_command_line = resolve({option.name: first}, {option.env: second}, preset)
    assert value_of(by_command_line, option) == first_value
    assert str(by_command_line.origins[option.name]) == "command line"


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.env_aliases], ids=lambda option: option.name)
def test_other_variables_count_after_our_own(option):
    (first, first_value), (second, second_value) = EXAMPLES[option.name]
    alias = option.env_aliases[-1]
    settings = resolve(environ={alias: second})
    assert value_of(settings, option) == second_value
    assert str(settings.origins[option.name]) == f"environment {alias}"
    assert value_of(resolve(environ={alias: second, option.env: first}), option) == first_value


BAD = {
    "torch-device": "gpu",
    "dtype": "int8",
    "cpu-linear": "mkl",
    "native-encoders": "perhaps",
    "decision-protocol": "oracle",
    "pooling": "median",
    "max-batch-tokens": "0",
    "max-batch-requests": "-1",
    "max-concurrent-requests": "many",
    "max-client-batch-size": "1.5",
    "max-sequence-length": "0",
    "auto-truncate": "maybe",
    "tokenization-workers": "65",
    "hostname": "localhost",
    "port": "65536",
    "grpc-port": "0",
    "grpc-max-parallel-stream-requests": "0",
    "workers": "0",
    "payload-limit": "2MB",
    "request-timeout-seconds": "inf",
    "cors-allow-origin": "example.org",
    "decision-alias": "jev-latest",
    "decision-max-questions": "401",
    "decision-max-options": "256",
    "decision-max-levels": "33",
    "decision-max-total-options": "1",
    "decision-max-images": "0",
    "decision-neutral-ids": "perhaps",
    "offline": "2",
    "warmup": "nope",
    "access-log": "-",
    "tracing": "x",
    "json-output": "json",
    "log-level": "loud",
    "revision": "a\nb",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_names_option_value_source_and_what_is_allowed(name):
    option = next(option for option in OPTIONS if option.name == name)
    error = error_of(environ={option.env: BAD[name]})
    assert error.param == name
    for part in (option.flag, repr(BAD[name]), f"environment {option.env}", option.kind.allowed):
        assert part in error.message


def test_every_boolean_has_a_bad_value_case():
    assert {option.name for option in OPTIONS if option.kind is BOOLEAN} <= set(BAD)


@pytest.mark.parametrize(
    ("text", "pooling"),
    [
        ("cls", Pooling.CLS),
        ("Mean", Pooling.MEAN),
        ("max", Pooling.MAX),
        ("last_token", Pooling.LAST_TOKEN),
        ("lasttoken", Pooling.LAST_TOKEN),
        ("weighted-mean", Pooling.WEIGHTED_MEAN),
        ("weightedmean", Pooling.WEIGHTED_MEAN),
        ("mean-sqrt", Pooling.MEAN_SQRT),
    ],
)
def test_pooling_names(text, pooling):
    assert resolve({"pooling": text}).models[0].pooling is pooling


def test_splade_is_a_pooling():
    assert resolve({"pooling": "splade"}).models[0].pooling is Pooling.SPLADE


# Several models.


def test_lists_align_in_the_order_of_the_models():
    settings = resolve({"model-id": ["a", "b"], "served-model-name": ["x", "y"], "max-batch-tokens": ["10", "20"]})
    rows = [(model.model_id, model.served_model_name, model.max_batch_tokens) for model in settings.models]
    assert rows == [("a", "x", 10), ("b", "y", 20)]


def test_one_value_applies_to_all_models():
    settings = resolve(environ={"INFINITY_MODEL_ID": "a;b;c", "INFINITY_DTYPE": "float32"})
    assert [model.dtype for model in settings.models] == ["float32"] * 3


@pytest.mark.parametrize("values", [("main", "v1"), ("main", "v1", "v2", "v3"), ("main", "v1", "", "", "")])
def test_another_count_names_both_counts(values):
    message = error_of({"model-id": ["a", "b", "c"], "revision": values}).message
    assert f"--revision has {len(values)} values (command line) for 3 models (a, b, c)" in message


def test_an_empty_list_in_a_preset_is_a_wrong_count(tmp_path):
    assert "--revision has 0 values" in error_of(preset=write_preset(tmp_path, "revision: []")).message


@pytest.mark.parametrize("text", ["a;b", "a;b;"])
def test_semicolons_separate_and_a_last_one_is_dropped(text):
    expected = ["a", "b"]
    assert [model.model_id for model in resolve(environ={"INFINITY_MODEL_ID": text}).models] == expected
    assert [model.model_id for model in resolve({"model_id": text}).models] == expected
    assert [model.revision for model in resolve({"model-id": "x;y", "revision": text}).models] == expected


def test_an_empty_element_means_the_default_of_that_model():
    settings = resolve({"model-id": ["a", "b"]}, {"INFINITY_REVISION": "main;", "INFINITY_MAX_BATCH_TOKENS": ";8"})
    assert [model.revision for model in settings.models] == ["main", None]
    assert [model.max_batch_tokens for model in settings.models] == [16384, 8]


def test_a_semicolon_of_a_value_is_escaped():
    assert resolve(environ={"INFINITY_DEFAULT_PROMPT": r"a\; b: "}).models[0].default_prompt == "a; b: "


def test_a_preset_takes_texts_as_they_are(tmp_path):
    preset = write_preset(tmp_path, 'default_prompt: "a; b: "\nrevision: 0123\nmax_batch_tokens: 1_000\n')
    model = resolve(preset=preset).models[0]
    assert (model.default_prompt, model.revision, model.max_batch_tokens) == ("a; b: ", "0123", 1000)


@pytest.mark.parametrize("cli", [{"model-id": ["a", "a"]}, {"model-id": "a;b", "served-model-name": "x"}])
def test_equal_public_names_are_refused(cli):
    error = error_of(cli)
    assert error.param == "served-model-name" and "give each its own --served-model-name" in error.message


@pytest.mark.parametrize("value", ["", "a;;b", ";"])
def test_an_empty_model_id_is_refused(value):
    assert "--model-id has an empty value" in error_of({"model-id": value}).message


def test_a_server_option_takes_one_value():
    message = error_of({"port": ["1", "2"]}).message
    assert message.startswith("--port has 2 values (command line); it applies to the whole server")


# Combinations.


def test_the_two_prompt_options_exclude_each_other_per_model(tmp_path):
    preset = write_preset(tmp_path, "default-prompt-name: query\n")
    error = error_of(environ={"INFINITY_DEFAULT_PROMPT": "q: "}, preset=preset)
    assert "environment INFINITY_DEFAULT_PROMPT" in error.message and f"preset {tmp_path.name}/mine" in error.message
    emptied = resolve({"default-prompt-name": ""}, {"INFINITY_DEFAULT_PROMPT": "q: "}, preset).models[0]
    assert (emptied.default_prompt, emptied.default_prompt_name) == ("q: ", None)
    split = resolve({"model-id": "a;b", "default-prompt": "q: ;", "default-prompt-name": ";query"})
    assert [model.default_prompt_name for model in split.models] == [None, "query"]


def test_a_length_that_fits_no_batch_is_refused_unless_inputs_may_be_cut():
    cli = {"max-sequence-length": "101", "max-batch-tokens": "100"}
    assert resolve(cli).models[0].max_sequence_length == 101
    error = error_of({**cli, "auto-truncate": "false"})
    assert "--max-sequence-length is 101" in error.message and "--max-batch-tokens 100" in error.message
    assert resolve({**cli, "max-sequence-length": "100", "auto-truncate": "false"}).models[0].auto_truncate is False


# Unknown and unsupported names.


def test_an_unknown_command_line_option_is_an_error_with_the_closest_name():
    assert error_of({"max-batch-token": "1"}).message == (
        "--max-batch-token is not an option; did you mean max-batch-tokens?"
    )
    assert "see 'infinity-bento options'" in error_of({"qqqq": "1"}).message


def test_unknown_variables_are_noted_without_their_value():
    settings = resolve(environ={"INFINITY_PROT": "hush", "INFINITY_QQQQ": "1", "INFINITY_PORT": "", "PROT": "1"})
    assert settings.notes == (
        "INFINITY_PORT is empty and counts as not given.",
        "INFINITY_PROT is not an option and is ignored; did you mean INFINITY_PORT?",
        "INFINITY_QQQQ is not an option and is ignored.",
    )
    assert settings.port == 3000 and settings.origins["port"].source is Source.DEFAULT


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_options_are_refused_from_every_source(name, tmp_path):
    variable = "INFINITY_" + name.replace("-", "_").upper()
    assert error_of({name: "1"}).message == f"--{name} {UNSUPPORTED[name]}."
    assert error_of(environ={variable: "1"}).message == f"{variable} (--{name}) {UNSUPPORTED[name]}."
    assert UNSUPPORTED[name] in error_of(preset=write_preset(tmp_path, f"{name}: 1")).message


def test_the_port_variable_of_a_kubernetes_service_is_explained():
    message = error_of(environ={"INFINITY_PORT": "tcp://10.0.0.1:3000"}).message
    assert "Kubernetes" in message and "enableServiceLinks: false" in message


# Presets.


def test_a_preset_by_name_and_by_option(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.yaml").write_text("model_id: [org/a, org/b]\nrevision: [null, main]\nport: 81\n")
    monkeypatch.chdir(tmp_path)
    for settings in (resolve({"preset": "tiny"}), resolve(environ={"INFINITY_PRESET": "configs/tiny.yaml"})):
        assert [(model.model_id, model.revision) for model in settings.models] == [("org/a", None), ("org/b", "main")]
        assert str(settings.origins["port"]) == "preset configs/tiny.yaml"
    assert "Did you mean tiny" in error_of({"preset": "tinny"}).message
    assert "no such file" in error_of({"preset": "other/tiny.yaml"}).message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max-batch-token: 1", "max-batch-token in preset {folder}/mine.yaml is not an option; did you mean"),
        ("port: 1\nport: 2", "port is in preset {folder}/mine.yaml twice"),
        ("model-id: a\nmodel_id: b", "model_id is in preset {folder}/mine.yaml twice"),
        ("- 1", "must be a mapping"),
        ("just text", "must be a mapping"),
        ("port: {a: 1}", "port in preset {folder}/mine.yaml is nested"),
        ("model-id: [[a]]", "is nested"),
        ("[1]: 2", "a key that is not a text"),
        ("port: [", "cannot be read as YAML"),
        ("preset: other", "names another preset"),
        ("port: x", "--port is 'x' (preset {folder}/mine.yaml)"),
    ],
)
def test_bad_presets(text, part, tmp_path):
    assert part.format(folder=tmp_path.name) in error_of(preset=write_preset(tmp_path, text)).message


def test_yaml_tags_are_never_acted_on(tmp_path):
    assert resolve(preset=write_preset(tmp_path, "port: !!python/object/apply:os.getpid 81\n")).port == 81


def test_an_empty_preset_changes_nothing(tmp_path):
    preset = write_preset(tmp_path, "# nothing\n")
    assert resolve(preset=preset).models == resolve().models


def test_another_model_under_a_preset_is_noted(tmp_path):
    preset = write_preset(tmp_path, "model-id: org/a\nrevision: main\npooling: cls\n")
    (note,) = resolve({"model-id": "org/b", "pooling": "mean"}, preset=preset).notes
    assert "revision still come from the preset" in note and "org/a" in note and "pooling" not in note
    assert resolve(preset=preset).notes == ()


# BentoML arguments.


def test_bentoml_arguments_win_over_the_environment():
    arguments = {
        "model_id": "a;b",
        "dtype": ["float32", "auto"],
        "port": 81,
        "warmup": False,
        "preset": None,
        "arch": 1,
    }
    read = from_bentoml_arguments(arguments, ignore=["arch"])
    settings = resolve(read, {"INFINITY_PORT": "82"}, source=Source.ARGUMENT)
    assert [(model.model_id, model.dtype) for model in settings.models] == [("a", "float32"), ("b", "auto")]
    assert (settings.port, settings.warmup) == (81, False)
    assert str(settings.origins["port"]) == "--arg port" and str(settings.origins["model-id"]) == "--arg model_id"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("modle_id", "--arg modle_id is not an option; did you mean model_id?"),
        ("modle-id", "--arg modle-id is not an option; did you mean model-id?"),
        ("batch_size", "--arg batch_size is not an option here; use --max-batch-tokens or --max-batch-requests."),
        ("dtype", "--dtype is 'x' (--arg dtype); it must be one of auto, "),
    ],
)
def test_a_wrong_argument_is_spelled_as_it_was_written(written, message):
    with pytest.raises(ConfigError) as caught:
        resolve({written: "x"}, source=Source.ARGUMENT)
    assert caught.value.message.startswith(message)


def test_an_argument_in_two_spellings_is_refused():
    assert "--model-id is given twice" in error_of({"model-id": "a", "model_id": "b"}).message


# Secrets.


def test_secrets_never_print():
    settings = resolve({"api-key": "sesame-1"}, {"HF_TOKEN": "hf_sesame-2"})
    dumps = [
        repr(settings),
        str(settings),
        f"{settings.api_key} {settings.api_key!r} {settings.api_key!s:>5}",
        json.dumps(dataclasses.asdict(settings), default=str),
        repr(copy.deepcopy(settings)),
    ]
    assert not any("sesame" in dump for dump in dumps)
    assert settings.api_key is not None and settings.api_key.reveal() == "sesame-1"
    assert settings.hf_token == Secret("hf_sesame-2") and settings.hf_token != Secret("other")


@pytest.mark.parametrize("name", ["api-key", "hf-token"])
def test_bad_and_empty_secrets(name):
    message = error_of({name: "ses ame"}).message
    assert "ame" not in message.replace("--api-key", "") and "printable ASCII" in message
    assert f"--{name} is empty (command line)" in error_of({name: ""}).message


# CPUs.


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_available_cpus_respects_affinity_and_quota(files, limit, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert available_cpus(tmp_path) == (limit or 16)


@pytest.mark.parametrize(("cpus", "workers"), [(1, 2), (2, 2), (5, 4), (9, 8), (64, 8)])
def test_default_tokenization_workers(cpus, workers, monkeypatch):
    monkeypatch.setattr("infinity_bento.settings.available_cpus", lambda: cpus)
    assert resolve().models[0].tokenization_workers == workers
