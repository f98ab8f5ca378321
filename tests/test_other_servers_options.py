"""Whoever comes from Text Embeddings Inference or Infinity: each of their options and variables means the same here, or
the start is refused by its name. None is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from infinity_bento.core import Pooling
from infinity_bento.errors import ConfigError
from infinity_bento.options import Secret
from infinity_bento.settings import resolve

# Their README's options, with a value of theirs and what our settings make of it.
UNDERSTOOD: list[tuple[str, str, Any]] = [
    ("model-id", "BAAI/bge-base-en-v1.5", "BAAI/bge-base-en-v1.5"),
    ("revision", "refs/pr/2", "refs/pr/2"),
    ("served-model-name", "embeddings", "embeddings"),
    ("torch-device", "cpu", "cpu"),
    ("dtype", "float16", "float16"),
    ("dtype", "bfloat16", "bfloat16"),
    ("max-batch-tokens", "32768", 32768),
    ("max-batch-requests", "8", 8),
    ("max-concurrent-requests", "2", 2),
    ("max-client-batch-size", "32", 32),
    ("max-sequence-length", "8192", 8192),
    ("auto-truncate", "false", False),
    ("pooling", "cls", Pooling.CLS),
    ("pooling", "mean", Pooling.MEAN),
    ("pooling", "splade", Pooling.SPLADE),
    ("pooling", "last-token", Pooling.LAST_TOKEN),
    ("default-prompt-name", "query", "query"),
    ("default-prompt", "query: ", "query: "),
    ("dense-path", "2_Dense_1024", "2_Dense_1024"),
    ("tokenization-workers", "3", 3),
    *(("decision-protocol", name, name) for name in ("onejev", "rune", "clef", "pplx", "d3")),
    ("hostname", "127.0.0.1", "127.0.0.1"),
    ("port", "8000", 8000),
    ("payload-limit", "2000000", 2_000_000),
    ("cors-allow-origin", "https://example.org", ("https://example.org",)),
    ("json-output", "true", True),
    ("huggingface-hub-cache", "/data", "/data"),
    ("api-key", "s3cret", "s3cret"),
    ("hf-token", "t0ken", "t0ken"),
    ("grpc-port", "4000", 4000),
]
# Those that have no meaning here yet, or by design, and what the refusal must say instead.
REFUSED = {
    "device-id": "--torch-device cuda:N",
    "backend-device-ids": "--torch-device cuda:N",
    "backend": "PyTorch is the only backend",
    "enable-fp8-dynamic": "choose a --dtype",
    "dynamic-quantization": "choose a --dtype",
    "image-allowed-hosts": "text only",
    "image-memory-budget-mib": "text only",
    "prometheus-port": "/metrics of --port",
    "otlp-endpoint": "leave it out",
    "otlp-service-name": "leave it out",
    "disable-spans": "--tracing",
    "uds-path": "no separate backend process",
    "hf-api-token": "--hf-token",
    "batch-size": "--max-batch-tokens",
    "engine": "PyTorch is the only engine",
    "device": "--torch-device",
}
# TEI's variables have no prefix. HOSTNAME is left out: containers hold their own id there, which is no address.
TEI_VARIABLES = [
    "MODEL_ID",
    "REVISION",
    "SERVED_MODEL_NAME",
    "DTYPE",
    "POOLING",
    "MAX_CONCURRENT_REQUESTS",
    "MAX_BATCH_TOKENS",
    "MAX_BATCH_REQUESTS",
    "MAX_CLIENT_BATCH_SIZE",
    "AUTO_TRUNCATE",
    "DEFAULT_PROMPT_NAME",
    "DEFAULT_PROMPT",
    "DENSE_PATH",
    "TOKENIZATION_WORKERS",
    "PAYLOAD_LIMIT",
    "API_KEY",
    "HF_TOKEN",
    "JSON_OUTPUT",
    "CORS_ALLOW_ORIGIN",
    "PORT",
    "HUGGINGFACE_HUB_CACHE",
]
VALUES = {name: (value, meaning) for name, value, meaning in UNDERSTOOD}


def setting(settings: Any, name: str) -> Any:
    field = name.replace("-", "_")
    holder = settings if hasattr(settings, field) else settings.models[0]
    found = getattr(holder, field)
    return found.reveal() if isinstance(found, Secret) else found


@pytest.mark.parametrize(("name", "value", "meaning"), UNDERSTOOD)
def test_an_option_means_the_same_from_every_source(name: str, value: str, meaning: Any) -> None:
    variable = "INFINITY_" + name.replace("-", "_").upper()
    for settings in (resolve({name: value}), resolve(environ={variable: value})):
        assert setting(settings, name) == meaning


@pytest.mark.parametrize("variable", TEI_VARIABLES)
def test_teis_variables_count_after_ours(variable: str) -> None:
    name = variable.lower().replace("_", "-")
    value, meaning = VALUES[name]
    settings = resolve(environ={variable: value})
    assert setting(settings, name) == meaning
    assert str(settings.origins[name]) == f"environment {variable}"
    other = {"port": "9999", "max-batch-tokens": "512"}.get(name)
    if other is not None:
        ours = "INFINITY_" + variable
        assert setting(resolve(environ={variable: value, ours: other}), name) == int(other)


def test_the_name_of_the_machine_is_no_address() -> None:
    assert resolve(environ={"HOSTNAME": "3f2a9c"}).hostname == "0.0.0.0"


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_without_meaning_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({name: "1"})
    assert caught.value.message.startswith(f"--{name} is not") and REFUSED[name] in caught.value.message
    with pytest.raises(ConfigError, match=REFUSED[name]):
        resolve(environ={"INFINITY_" + name.replace("-", "_").upper(): "1"})
