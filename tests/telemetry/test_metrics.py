from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infinity_bento.core import Task, Timing
from infinity_bento.telemetry.metrics import Metrics

TEI_COUNTERS = [
    *(f"te_request_{what}" for what in ("count", "success", "failure")),
    *(f"te_{kind}_{what}" for kind in ("embed", "predict") for what in ("count", "success")),
]
TEI_HISTOGRAMS = [
    *(
        f"te_{kind}_{stage}duration"
        for kind in ("request", "embed", "predict")
        for stage in ("", "tokenization_", "queue_", "inference_")
    ),
    *("te_request_input_length", "te_batch_next_size", "te_batch_next_tokens"),
]


def samples(metrics: Metrics) -> dict[str, float]:
    """Exposition line without its value -> value."""
    lines = metrics.render().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def buckets(metrics: Metrics, name: str) -> list[float]:
    family = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}[name]
    return [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]


def test_teis_names_and_types() -> None:
    text = Metrics().render().decode()
    kinds = {"te_queue_size": "gauge"} | dict.fromkeys(TEI_COUNTERS, "counter")
    for name, kind in (kinds | dict.fromkeys(TEI_HISTOGRAMS, "histogram")).items():
        assert f"# TYPE {name} {kind}\n" in text
    assert "_created" not in text
    assert len(list(text_string_to_metric_families(text))) == text.count("# TYPE ")


def test_teis_buckets() -> None:
    metrics = Metrics(max_input_length=512)
    durations = buckets(metrics, "te_request_duration")
    assert (
        len(durations) == 36 and durations[0] == pytest.approx(1.5e-5) and durations[34] == pytest.approx(14.56, 1e-3)
    )
    assert buckets(metrics, "te_request_input_length") == [*(2.0**k for k in range(10)), float("inf")]
    assert buckets(metrics, "te_batch_next_size") == [*(2.0**k for k in range(13)), float("inf")]
    assert buckets(metrics, "te_batch_next_tokens") == [*(2.0**k for k in range(21)), float("inf")]


def test_a_request_is_counted_once_in_each_place() -> None:
    metrics = Metrics()
    metrics.count_request(Task.EMBED, 2)
    metrics.observe_request(Task.EMBED, "m", 0.5, Timing(0.1, 0.2, 0.3), [3, 5])
    metrics.count_request(Task.RERANK, 1)
    metrics.observe_request(Task.RERANK, "r", 1.0, Timing(), [7])
    found = samples(metrics)
    assert found['te_request_count{method="batch"}'] == 1 and found['te_request_count{method="single"}'] == 1
    assert found['te_request_success{method="batch"}'] == 1
    assert found["te_embed_count"] == 2 and found["te_embed_success"] == 2
    assert found["te_predict_count"] == 1 and found["te_predict_success"] == 1
    assert found["te_request_duration_sum"] == pytest.approx(1.5) and found["te_embed_duration_sum"] == 0.5
    assert found["te_embed_tokenization_duration_sum"] == 0.1 and found["te_embed_queue_duration_sum"] == 0.2
    assert found["te_embed_inference_duration_sum"] == 0.3
    assert found["te_request_input_length_sum"] == 15 and found["te_request_input_length_count"] == 3
    assert found['infinity_tokens_total{model="m"}'] == 8 and found['infinity_tokens_total{model="r"}'] == 7


def test_a_request_with_a_failed_input_is_no_success_but_its_tokens_count() -> None:
    metrics = Metrics()
    metrics.count_request(Task.DECIDE, 3)
    metrics.observe_request(Task.DECIDE, "m", 0.5, Timing(), [3, 5], failed=1)
    found = samples(metrics)
    assert 'te_request_success{method="batch"}' in found and found['te_request_success{method="batch"}'] == 0
    assert found['te_request_count{method="batch"}'] == 1
    assert found["te_predict_count"] == 3 and found["te_predict_success"] == 2
    assert found['infinity_tokens_total{model="m"}'] == 8


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("invalid_input", "validation"),
        ("batch_too_large", "batch_size"),
        ("input_too_long", "tokenization"),
        ("overloaded", "overloaded"),
        ("unsupported_task", "model_type"),
        ("client_gone", "dropped"),
        ("internal", "inference"),
    ],
)
def test_errors_are_counted_by_teis_cause_and_by_code(code: str, label: str) -> None:
    metrics = Metrics()
    metrics.count_error(code)
    found = samples(metrics)
    assert found[f'te_request_failure{{err="{label}"}}'] == 1
    assert found[f'infinity_errors_total{{code="{code}"}}'] == 1


def test_what_the_engine_reports() -> None:
    metrics = Metrics()
    metrics.set_queue("m", 3, 100)
    metrics.set_queue("n", 4, 50)
    metrics.set_queue("m", 1, 10)
    metrics.observe_batch("m", 8, 512)
    metrics.count_truncated("m", 2)
    metrics.count_dropped("m")
    metrics.count_retried("m")
    found = samples(metrics)
    assert found["te_queue_size"] == 5
    assert found['infinity_queue_inputs{model="m"}'] == 1 and found['infinity_queue_tokens{model="m"}'] == 10
    assert found["te_batch_next_size_sum"] == 8 and found["te_batch_next_tokens_sum"] == 512
    assert found['infinity_batch_inputs_sum{model="m"}'] == 8 and found['infinity_batch_tokens_sum{model="m"}'] == 512
    assert found['infinity_truncated_inputs_total{model="m"}'] == 2
    assert found['infinity_dropped_inputs_total{model="m"}'] == 1
    assert found['infinity_retried_batches_total{model="m"}'] == 1


def test_instances_do_not_share_values() -> None:
    first, second = Metrics(), Metrics()
    first.count_error("internal")
    assert 'te_request_failure{err="inference"}' in samples(first)
    assert 'te_request_failure{err="inference"}' not in samples(second)


WORKER = """
from infinity_bento.telemetry.metrics import Metrics
metrics = Metrics()
metrics.count_error("overloaded")
metrics.set_queue("m", 2, 20)
print(metrics.render().decode())
"""


def test_processes_are_added_up(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    texts = [
        subprocess.run(
            [sys.executable, "-c", WORKER], env=environment, cwd=root, check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    ]
    for count, text in enumerate(texts, start=1):
        assert f'te_request_failure{{err="overloaded"}} {count}.0' in text
        assert "te_queue_size 2.0" in text, "what waited in a process that has ended waits no more"
