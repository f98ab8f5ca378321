"""Every Prometheus metric, declared once. The engine and the routes report here; ``/metrics`` renders it.

The ``te_*`` names and buckets are those of Text Embeddings Inference, so that its dashboards keep working. The
``infinity_*`` metrics count in tokens and carry the model's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from infinity_bento.core import Task, Timing
from infinity_bento.telemetry.ledger import Ledger

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

DURATION_BUCKETS = tuple(1e-5 * 1.5**k for k in range(1, 36))  # seconds
BATCH_SIZE_BUCKETS = tuple(2.0**k for k in range(13))  # inputs
BATCH_TOKENS_BUCKETS = tuple(2.0**k for k in range(21))  # tokens

_STAGES = ("", "tokenization_", "queue_", "inference_")
_PREDICT_TASKS = (Task.RERANK, Task.CLASSIFY, Task.CLASSIFY_TOKENS, Task.DECIDE)

# Our stable error codes -> TEI's ``err`` label; the rest are faults of the server.
_TEI_FAILURES = {
    "invalid_input": "validation",
    "empty_input": "validation",
    "malformed_body": "validation",
    "payload_too_large": "validation",
    "unsupported_media_type": "validation",
    "model_not_found": "validation",
    "unauthorized": "validation",
    "input_too_long": "tokenization",
    "batch_too_large": "batch_size",
    "overloaded": "overloaded",
    "not_ready": "overloaded",
    "unsupported_task": "model_type",
    "deadline_exceeded": "dropped",
    "client_gone": "dropped",
}

_TEI_COUNTERS = (
    "te_request_count",
    "te_request_success",
    "te_request_failure",
    "te_embed_count",
    "te_embed_success",
    "te_predict_count",
    "te_predict_success",
)
_TOTAL = re.compile(rf"^((?:# (?:HELP|TYPE) )?(?:{'|'.join(_TEI_COUNTERS)}))_total\b", re.MULTILINE)
_CREATED = re.compile(r"^(?:# (?:HELP|TYPE) )?(?:te|infinity)_\w+_created\b.*\n", re.MULTILINE)


def with_tei_names(text: str) -> str:
    """Exposition text with TEI's counter names: the client library insists on ``_total``, TEI has none."""
    return _TOTAL.sub(r"\1", _CREATED.sub("", text))


def _forget_dead_processes(folder: Path) -> None:
    """Remove what processes that have died said of their present; what they counted stays."""
    for file in folder.glob("gauge_live*_*.db"):
        process = file.stem.rpartition("_")[2]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            file.unlink(missing_ok=True)


class Metrics:
    """All metrics of one process.

    The doors call ``count_error``, each for what it answers. The engine calls the rest: whoever asks is counted once,
    as one request for each call of ``Engine.submit``.

    Args:
        registry: Where they are registered; None makes one for this instance, so that instances never collide.
        max_input_length: Longest input in tokens; sets the buckets of ``te_request_input_length``.

    With ``PROMETHEUS_MULTIPROC_DIR`` set before Python starts, values go to files there, and ``render`` adds up the
    files of all processes. That is the client library's own switch.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, max_input_length: int = 32768) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._ledger = Ledger(self._book_queues)
        self._queued: dict[str, tuple[int, int]] = {}  # inputs and tokens by model
        self._declare_tei(max_input_length)
        self._declare_own()

    def observe_request(
        self, task: Task, model: str, seconds: float, timing: Timing, tokens: Sequence[int], *, failed: int = 0
    ) -> None:
        """Count an answered request.

        Args:
            task: What was asked.
            model: The public name of the model.
            seconds: From the call of the engine to its last result, before the answer is encoded.
            timing: Mean over the inputs.
            tokens: The length of every answered input after truncation.
            failed: Inputs with an error of their own; the request as a whole is no success then.
        """
        kind = "predict" if task in _PREDICT_TASKS else "embed"
        self._ledger.add(self._inference_success[kind], len(tokens))
        if failed == 0:
            self._ledger.add(self._success[len(tokens) == 1], 1)
        self._ledger.add(self._tokens_of(model), sum(tokens))
        stages = (seconds, timing.tokenize_seconds, timing.queue_seconds, timing.inference_seconds)
        observed = [*zip(self._durations["request"], stages, strict=True)]
        observed += zip(self._durations[kind], stages, strict=True)
        observed += [(self._input_length, length) for length in tokens]
        self._ledger.observe(observed)

    def count_request(self, task: Task, inputs: int) -> None:
        """Count a request that was understood and is about to run."""
        self._ledger.add(self._count[inputs == 1], 1)
        self._ledger.add(self._inference_count["predict" if task in _PREDICT_TASKS else "embed"], inputs)

    def count_error(self, code: str) -> None:
        """Count a request that failed with this stable code (``InfinityError.code`` or ``client_gone``)."""
        self._request_failure.labels(_TEI_FAILURES.get(code, "inference")).inc()
        self._errors.labels(code).inc()

    def count_truncated(self, model: str, inputs: int) -> None:
        """Count inputs that were cut to the length limit."""
        self._truncated.labels(model).inc(inputs)

    def count_shared(self, model: str, tokens: int) -> None:
        """Count tokens that were answered without being computed: copies, and prefixes that a batch shares."""
        self._shared.labels(model).inc(tokens)

    def count_dropped(self, model: str, inputs: int = 1) -> None:
        """Count queued inputs that were thrown away because nobody waited for them any more."""
        self._dropped.labels(model).inc(inputs)

    def count_retried(self, model: str, batches: int = 1) -> None:
        """Count batches that failed and were run again in smaller parts."""
        self._retried.labels(model).inc(batches)

    def set_queue(self, model: str, inputs: int, tokens: int) -> None:
        """Say what waits for this model now."""
        self._queued[model] = inputs, tokens
        self._ledger.touch()

    def observe_batch(self, model: str, inputs: int, tokens: int) -> None:
        """Record the size of one forward pass."""
        self._ledger.observe(
            [
                (self._batch_next_size, inputs),
                (self._batch_next_tokens, tokens),
                (self._batch_inputs.labels(model), inputs),
                (self._batch_tokens.labels(model), tokens),
            ]
        )

    def book(self) -> None:
        """Have everything up to now in what other processes render; it is within a quarter of a second anyway."""
        self._ledger.book()

    def _book_queues(self) -> None:
        queued = dict(self._queued)
        self._queue_size.set(sum(inputs for inputs, _ in queued.values()))
        for model, (inputs, tokens) in queued.items():
            self._queue_inputs.labels(model).set(inputs)
            self._queue_tokens.labels(model).set(tokens)

    def _tokens_of(self, model: str) -> Counter:
        counter = self._model_tokens.get(model)
        if counter is None:
            counter = self._model_tokens[model] = self._tokens.labels(model)
        return counter

    def render(self) -> bytes:
        """The Prometheus text of this process, or of all processes in multi-process mode."""
        self.book()
        registry = self.registry
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if folder:
            _forget_dead_processes(Path(folder))
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return with_tei_names(generate_latest(registry).decode()).encode()

    def _declare_tei(self, max_input_length: int) -> None:
        count = self._counter("te_request_count", "Requests that were understood", "method")
        success = self._counter("te_request_success", "Requests answered", "method")
        # Looking up a label costs more than counting, so the two known ones are looked up here; True: a single input.
        self._count = {True: count.labels("single"), False: count.labels("batch")}
        self._success = {True: success.labels("single"), False: success.labels("batch")}
        self._request_failure = self._counter("te_request_failure", "Requests refused or failed, by cause", "err")
        self._inference_count = {
            "embed": self._counter("te_embed_count", "Inputs of embedding requests"),
            "predict": self._counter("te_predict_count", "Inputs of rerank, classify and decide requests"),
        }
        self._inference_success = {
            "embed": self._counter("te_embed_success", "Inputs embedded"),
            "predict": self._counter("te_predict_success", "Inputs scored"),
        }
        self._durations = {
            kind: tuple(
                self._histogram(f"te_{kind}_{stage}duration", f"Seconds per {kind} request", DURATION_BUCKETS)
                for stage in _STAGES
            )
            for kind in ("request", "embed", "predict")
        }
        lengths = tuple(2.0**k for k in range(max(1, max_input_length.bit_length())))
        self._input_length = self._histogram("te_request_input_length", "Tokens of an input", lengths)
        self._queue_size = Gauge(
            "te_queue_size", "Inputs that wait", registry=self.registry, multiprocess_mode="livesum"
        )
        self._batch_next_size = self._histogram("te_batch_next_size", "Inputs of a batch", BATCH_SIZE_BUCKETS)
        self._batch_next_tokens = self._histogram("te_batch_next_tokens", "Tokens of a batch", BATCH_TOKENS_BUCKETS)

    def _declare_own(self) -> None:
        self._tokens = self._counter("infinity_tokens", "Tokens answered, after truncation", "model")
        self._model_tokens: dict[str, Counter] = {}
        self._errors = self._counter("infinity_errors", "Requests refused or failed, by stable code", "code")
        self._truncated = self._counter("infinity_truncated_inputs", "Inputs cut to the length limit", "model")
        self._shared = self._counter(
            "infinity_shared_tokens", "Tokens answered without being computed: copies and shared prefixes", "model"
        )
        self._dropped = self._counter("infinity_dropped_inputs", "Queued inputs nobody waited for", "model")
        self._retried = self._counter("infinity_retried_batches", "Batches run again in smaller parts", "model")
        self._queue_inputs = self._gauge("infinity_queue_inputs", "Inputs that wait")
        self._queue_tokens = self._gauge("infinity_queue_tokens", "Tokens that wait")
        self._batch_inputs = self._histogram(
            "infinity_batch_inputs", "Inputs of a forward pass", BATCH_SIZE_BUCKETS, "model"
        )
        self._batch_tokens = self._histogram(
            "infinity_batch_tokens", "Tokens of a forward pass", BATCH_TOKENS_BUCKETS, "model"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model",), registry=self.registry, multiprocess_mode="livesum")

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)
