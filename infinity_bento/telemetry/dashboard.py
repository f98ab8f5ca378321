"""The Grafana dashboard, generated from the declared metrics: ``python -m infinity_bento.telemetry.dashboard``.

``deploy/grafana/infinity-bento.json`` is its output; a test keeps the two together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from infinity_bento.telemetry.metrics import Metrics, with_tei_names

COLUMNS = 2
WIDTH, HEIGHT = 24 // COLUMNS, 8
QUANTILES = (0.5, 0.95, 0.99)
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTOR = 'job=~"$job"'


@dataclass(frozen=True, slots=True)
class Declared:
    """One declared metric, as Prometheus sees it."""

    name: str
    kind: str  # counter, gauge, histogram
    help: str
    labels: tuple[str, ...]


def declared_metrics(metrics: Metrics) -> list[Declared]:
    """All metrics by name: this package's own first, then those with the names of Text Embeddings Inference."""
    found = []
    for collector in metrics.registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            name, kind = collector._name, str(collector._type)
            if kind == "counter":
                name = with_tei_names(f"{name}_total")
            found.append(Declared(name, kind, collector._documentation, tuple(collector._labelnames)))
    return sorted(found, key=lambda metric: (not metric.name.startswith("infinity_"), metric.name))


def queries(metric: Declared) -> Iterator[tuple[str, str]]:
    """Expressions and legends that show a metric over time."""
    by = f" by ({', '.join(metric.labels)})" if metric.labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    if metric.kind == "counter":
        yield f"sum{by} (rate({metric.name}{{{SELECTOR}}}[$__rate_interval]))", legend or "per second"
    elif metric.kind == "gauge":
        yield f"sum{by} ({metric.name}{{{SELECTOR}}})", legend or "now"
    else:
        buckets = (
            f"sum by ({', '.join(('le', *metric.labels))}) (rate({metric.name}_bucket{{{SELECTOR}}}[$__rate_interval]))"
        )
        for quantile in QUANTILES:
            yield f"histogram_quantile({quantile}, {buckets})", f"p{quantile * 100:g} {legend}".strip()


def unit(metric: Declared) -> str:
    """Grafana's name of the unit."""
    if metric.name.endswith("_duration"):
        return "s"
    return "cps" if metric.kind == "counter" else "short"


def panel(metric: Declared, number: int) -> dict[str, Any]:
    """One panel in its place."""
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": metric.help,
        "description": f"{metric.name} ({metric.kind})",
        "datasource": DATASOURCE,
        "gridPos": {
            "x": number % COLUMNS * WIDTH,
            "y": number // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit(metric), "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(queries(metric))
        ],
    }


def variable(name: str, label: str, **fields: Any) -> dict[str, Any]:
    """One choice at the top of the dashboard."""
    return {"name": name, "label": label, "hide": 0, "options": [], **fields}


def dashboard() -> dict[str, Any]:
    """Grafana's model of the dashboard."""
    metrics = declared_metrics(Metrics())
    jobs = variable(
        "job",
        "Job",
        type="query",
        datasource=DATASOURCE,
        query={"query": "label_values(te_request_count, job)", "refId": "jobs"},
        refresh=2,
        includeAll=True,
        multi=True,
        current={"text": "All", "value": "$__all"},
    )
    return {
        "uid": "infinity-bento",
        "title": "infinity-bento",
        "description": "Generated from the server's declared metrics.",
        "tags": ["infinity-bento"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [variable("datasource", "Data source", type="datasource", query="prometheus", current={}), jobs]
        },
        "panels": [panel(metric, number) for number, metric in enumerate(metrics)],
    }


def dashboard_json() -> str:
    """The dashboard as the file holds it."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    print(dashboard_json(), end="")
