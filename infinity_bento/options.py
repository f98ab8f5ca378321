"""The table of options: every name, type, default and help text once.

``settings.py`` resolves it; the command line, the start-up block and ``docs/configuration.md`` are made from it.
"""

from __future__ import annotations

import difflib
import hmac
import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infinity_bento.core import Pooling

ENVIRONMENT_PREFIX = "INFINITY_"
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


class Secret:
    """A text that never prints: ``repr``, ``str`` and ``format`` give ``***``. Only ``reveal()`` gives the text."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself; for the one place that compares or sends it."""
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True, slots=True)
class Kind:
    """How the text of a value is read.

    ``parse`` raises ``ValueError`` for everything that ``allowed`` (the end of "it must be ...") does not describe.
    ``refused`` maps values that are understood but cannot be honoured to the reason.
    """

    parse: Callable[[str], Any]
    allowed: str
    metavar: str
    refused: Mapping[str, str] = field(default_factory=dict)


def integer(minimum: int, maximum: int | None = None) -> Kind:
    """Whole numbers from ``minimum`` to ``maximum``, both included; underscores may group the digits."""

    def parse(text: str) -> int:
        value = int(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(text)
        return value

    above = "of at least {}" if maximum is None else "from {} to {}"
    return Kind(parse, "an integer " + above.format(minimum, maximum), "INT")


def choice(*values: str) -> Kind:
    """One of ``values``, in any case."""

    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in values:
            raise ValueError(text)
        return value

    return Kind(parse, "one of " + ", ".join(values), "|".join(values))


def matching(pattern: str, allowed: str, metavar: str) -> Kind:
    """A text that matches the whole pattern, without surrounding whitespace."""

    def parse(text: str) -> str:
        value = text.strip()
        if re.fullmatch(pattern, value) is None:
            raise ValueError(text)
        return value

    return Kind(parse, allowed, metavar)


def _parse_boolean(text: str) -> bool:
    value = text.strip().lower()
    if value in {"true", "1", "yes", "on", "t", "y"}:
        return True
    if value in {"false", "0", "no", "off", "f", "n"}:
        return False
    raise ValueError(text)


def _parse_seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(text)
    return value


def _parse_pooling(text: str) -> Pooling:
    value = text.strip().lower().replace("-", "_")
    aliases = {
        "last_token": Pooling.LAST_TOKEN,
        "weighted_mean": Pooling.WEIGHTED_MEAN,
        "mean_sqrt": Pooling.MEAN_SQRT,
    }
    return aliases[value] if value in aliases else Pooling(value)


def _parse_secret(text: str) -> Secret:
    value = text.strip()  # files and secret stores like to append a line break
    if re.fullmatch(r"[\x21-\x7e]+", value) is None:
        raise ValueError("not printable ASCII")
    return Secret(value)


ALIAS = matching(r"[^=\x00-\x1f\x7f]+=[^\x00-\x1f\x7f]+", "ALIAS=NAME, where NAME is a served model", "ALIAS=NAME")
BOOLEAN = Kind(_parse_boolean, "true or false (also 1/0, yes/no, on/off)", "BOOL")
SECONDS = Kind(_parse_seconds, "a number of seconds above 0", "SECONDS")
PORT = integer(1, 65535)
LINE = matching(r"[^\x00-\x1f\x7f]+", "one line of text", "TEXT")
PROMPT = Kind(str, "a text", "TEXT")  # verbatim: the space in "query: " matters
SECRET = Kind(_parse_secret, "printable ASCII without spaces", "SECRET")
# BentoML binds to addresses only.
ADDRESS = Kind(
    lambda text: str(ipaddress.ip_address(text.strip())),
    "an IP address (0.0.0.0 for all interfaces, 127.0.0.1 for this machine only)",
    "IP",
)
ORIGIN = matching(r"\*|https?://[^\s/]+", "* or scheme://host[:port] without a path", "ORIGIN")
DEVICE = matching(
    r"auto|cpu|mps|cuda(:[0-9]+)?", "one of auto, cpu, cuda, cuda:N (N: a device number), mps", "auto|cpu|cuda[:N]|mps"
)
POOLING = Kind(
    _parse_pooling,
    "one of cls, max, mean, mean-sqrt, weighted-mean, last-token, splade",
    "cls|max|mean|mean-sqrt|weighted-mean|last-token|splade",
)


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``name`` has dashes; ``default`` is the parsed value.

    ``per_model`` options take one value for all models or one for each; ``many`` options take any number of values.
    ``default_text`` describes a default that is worked out at start.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    per_model: bool = False
    many: bool = False
    secret: bool = False
    env_aliases: tuple[str, ...] = ()
    default_text: str = ""

    @property
    def field(self) -> str:
        """Name of the attribute of ``Settings`` or ``ModelSettings``."""
        return self.name.replace("-", "_")

    @property
    def flag(self) -> str:
        """As written on the command line."""
        return f"--{self.name}"

    @property
    def env(self) -> str:
        """The environment variable that wins over ``env_aliases``."""
        return ENVIRONMENT_PREFIX + self.field.upper()

    def describe_default(self) -> str:
        """The default in words, for help texts."""
        if self.default_text:
            return self.default_text
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return "none" if self.default in (None, ()) else str(self.default)


MODEL_OPTIONS = (
    Option(
        "model-id",
        LINE,
        DEFAULT_MODEL,
        "Checkpoint: a Hugging Face id, a local folder or a Bento model tag.",
        per_model=True,
        env_aliases=("MODEL_ID",),
    ),
    Option(
        "revision",
        LINE,
        None,
        "Branch, tag or commit of the checkpoint.",
        per_model=True,
        env_aliases=("REVISION",),
    ),
    Option(
        "served-model-name",
        LINE,
        None,
        "Public name of the model in requests; must be unique.",
        per_model=True,
        default_text="the model id",
        env_aliases=("SERVED_MODEL_NAME",),
    ),
    Option("torch-device", DEVICE, "auto", "Device to run on; auto picks a GPU where there is one.", per_model=True),
    Option(
        "dtype",
        choice("auto", "float32", "float16", "bfloat16", "mixed"),
        "auto",
        "Precision of the forward pass; auto is float32 on the CPU, else bfloat16. mixed, for CPUs with "
        "bfloat16 units, has products in bfloat16 and all else in float32.",
        per_model=True,
        env_aliases=("DTYPE",),
    ),
    Option(
        "cpu-linear",
        choice("auto", "onednn", "torch", "both"),
        "auto",
        "What multiplies on the CPU: oneDNN with weights laid out once, torch itself, or oneDNN for few rows and torch "
        "for many (weights held twice); auto depends on the processor.",
        per_model=True,
    ),
    Option(
        "native-encoders",
        BOOLEAN,
        True,
        "On the CPU, run the BERT line and ModernBERT by encoders of our own; off takes transformers' modules.",
        per_model=True,
    ),
    Option(
        "pooling",
        POOLING,
        None,
        "Override of the checkpoint's pooling.",
        per_model=True,
        default_text="as the checkpoint says",
        env_aliases=("POOLING",),
    ),
    Option(
        "decision-protocol",
        choice("laya", "clef", "pplx-joint", "pplx", "d3", "jev", "onejev", "block", "rune", "chat"),
        None,
        "How a decision model is asked, for checkpoints without a file that says so (onejev, block, rune, chat).",
        per_model=True,
        default_text="as the checkpoint says",
    ),
    Option(
        "decision-calibration",
        LINE,
        None,
        "File of temperatures for a decision model, as `infinity-bento calibrate` writes it.",
        per_model=True,
        default_text="infinity_calibration.json of the checkpoint, if there is one",
    ),
    Option(
        "max-batch-tokens",
        integer(1),
        16384,
        "Most tokens of one forward pass.",
        per_model=True,
        env_aliases=("MAX_BATCH_TOKENS",),
    ),
    Option(
        "max-batch-requests",
        integer(1),
        None,
        "Most inputs of one forward pass.",
        per_model=True,
        env_aliases=("MAX_BATCH_REQUESTS",),
    ),
    Option(
        "max-concurrent-requests",
        integer(1),
        512,
        "Most inputs in flight; above it a request gets a 429 at once. A larger request runs when nothing else does.",
        per_model=True,
        env_aliases=("MAX_CONCURRENT_REQUESTS",),
    ),
    # 2048 is the documented array limit of OpenAI's embeddings API: clients written for it split their lists there
    # (LangChain sends 1000), so TEI's 32 would turn their defaults into errors. Memory is bounded elsewhere, by
    # payload-limit and max-batch-tokens.
    Option(
        "max-client-batch-size",
        integer(1),
        2048,
        "Most inputs of one request.",
        per_model=True,
        env_aliases=("MAX_CLIENT_BATCH_SIZE",),
    ),
    Option(
        "max-sequence-length",
        integer(1),
        None,
        "Most tokens of one input, prompt and special tokens included.",
        per_model=True,
        default_text="the model's own limit",
    ),
    Option(
        "auto-truncate",
        BOOLEAN,
        True,
        "Cut inputs that are too long (and say so); false: refuse them.",
        per_model=True,
        env_aliases=("AUTO_TRUNCATE",),
    ),
    Option(
        "default-prompt",
        PROMPT,
        None,
        "Text put before every input; excludes --default-prompt-name.",
        per_model=True,
        env_aliases=("DEFAULT_PROMPT",),
    ),
    Option(
        "default-prompt-name",
        LINE,
        None,
        "Name of a prompt saved in the checkpoint; excludes --default-prompt.",
        per_model=True,
        env_aliases=("DEFAULT_PROMPT_NAME",),
    ),
    Option(
        "tokenization-workers",
        integer(1, 64),
        None,
        "Tokenizer threads.",
        per_model=True,
        default_text="available CPUs - 1, from 2 to 8",
        env_aliases=("TOKENIZATION_WORKERS",),
    ),
    Option(
        "dense-path",
        LINE,
        None,
        "Folder of the Dense module inside the checkpoint, such as 2_Dense_1024.",
        per_model=True,
        default_text="as the checkpoint says",
        env_aliases=("DENSE_PATH",),
    ),
)

SERVER_OPTIONS = (
    Option("hostname", ADDRESS, "0.0.0.0", "Address to listen on."),
    Option(
        "port",
        PORT,
        3000,
        "Port to listen on.",
        env_aliases=("PORT",),
    ),
    Option(
        "grpc-port", PORT, None, "Port of TEI's gRPC service (tei.v1); needs the extra grpc.", default_text="no gRPC"
    ),
    Option(
        "grpc-max-parallel-stream-requests",
        integer(1),
        1024,
        "Most messages of one gRPC stream that are worked on at a time.",
        env_aliases=("GRPC_MAX_PARALLEL_STREAM_REQUESTS",),
    ),
    Option(
        "workers", integer(1, 64), 1, "Server processes, each with all models; they share the CPUs, or take a GPU each."
    ),
    # TEI's 2 MB would refuse a full request of 2048 chunks of text (a kilobyte or two each).
    Option(
        "payload-limit",
        integer(1),
        16_000_000,
        "Most bytes of a request body.",
        env_aliases=("PAYLOAD_LIMIT",),
    ),
    Option("request-timeout-seconds", SECONDS, 60.0, "Time after which an unanswered request gets a 504."),
    Option(
        "api-key",
        SECRET,
        None,
        "Key that requests must carry as Authorization: Bearer KEY.",
        secret=True,
        env_aliases=("API_KEY",),
    ),
    Option(
        "cors-allow-origin",
        ORIGIN,
        (),
        "Origin whose pages may call the API from a browser; * means any.",
        many=True,
        env_aliases=("CORS_ALLOW_ORIGIN",),
    ),
    Option(
        "decision-alias", ALIAS, (), "Another name of a decision model in requests, such as jev-latest=NAME.", many=True
    ),
    Option("decision-max-questions", integer(1, 400), 64, "Most questions of one decision request."),
    Option("decision-max-options", integer(2, 255), 255, "Most labels of a choice."),
    Option("decision-max-levels", integer(2, 32), 10, "Most levels of a score."),
    Option("decision-max-total-options", integer(2), 512, "Most options of all questions of a request."),
    Option("decision-max-images", integer(1), 4, "Most images of a decision request."),
    Option(
        "decision-neutral-ids",
        BOOLEAN,
        False,
        "Show q1, q2 ... to models that read the ids of the questions (Clef, some templates); names then do not count.",
    ),
    Option(
        "huggingface-hub-cache",
        LINE,
        None,
        "Folder of downloaded checkpoints.",
        env_aliases=("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"),
        default_text="the hub client's own",
    ),
    Option(
        "hf-token",
        SECRET,
        None,
        "Token for private and gated checkpoints.",
        secret=True,
        env_aliases=("HF_TOKEN", "HF_API_TOKEN"),
        default_text="the hub client's own",
    ),
    Option(
        "offline",
        BOOLEAN,
        False,
        "Never ask the hub; use local files and caches only.",
        env_aliases=("HF_HUB_OFFLINE",),
    ),
    Option("warmup", BOOLEAN, True, "Run a few batches before the server reports ready."),
    Option("access-log", BOOLEAN, False, "Write one log line for each request."),
    Option("tracing", BOOLEAN, False, "Record OpenTelemetry spans."),
    Option(
        "json-output",
        BOOLEAN,
        False,
        "Write log lines as JSON.",
        env_aliases=("JSON_OUTPUT",),
    ),
    Option(
        "log-level", choice("debug", "info", "warning", "error", "critical"), "info", "Least severity that is logged."
    ),
    Option("preset", LINE, None, "YAML file with option values: a path, or a name in configs/."),
)

OPTIONS = MODEL_OPTIONS + SERVER_OPTIONS

# Names of other servers' options, or of ours to come: known, so that nobody believes they had an effect.
# Each text continues "--NAME ...".
UNSUPPORTED: Mapping[str, str] = {
    "device-id": "is not supported yet; name the device with --torch-device cuda:N",
    "backend-device-ids": "is not supported yet; name one device with --torch-device cuda:N",
    "backend": "is not supported yet; PyTorch is the only backend",
    "enable-fp8-dynamic": "is not supported yet; choose a --dtype",
    "dynamic-quantization": "is not supported yet; choose a --dtype",
    "dynamic-quantization-scope": "is not supported yet; choose a --dtype",
    "image-allowed-hosts": "is not supported yet; inputs are text only",
    "image-memory-budget-mib": "is not supported yet; inputs are text only",
    "priority-queue-bonus-ms": "is not supported yet; the queue is first in, first out",
    "prometheus-port": "is not supported yet; metrics are at /metrics of --port",
    "otlp-endpoint": "is not supported yet; leave it out",
    "otlp-service-name": "is not supported yet; leave it out",
    "disable-spans": "is not supported yet; spans are off unless --tracing is given",
    "hf-api-token": "is not an option here; use --hf-token",
    "uds-path": "is not supported yet; there is no separate backend process to reach by a socket",
    "trust-remote-code": "is not supported; code from checkpoints is never run",
    "batch-size": "is not an option here; use --max-batch-tokens or --max-batch-requests",
    "device": "is not an option here; use --torch-device",
    "engine": "is not an option here; PyTorch is the only engine",
    "host": "is not an option here; use --hostname",
    "model-warmup": "is not an option here; use --warmup",
    "pooling-method": "is not an option here; use --pooling",
}


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word``, or None if none is like it."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None
