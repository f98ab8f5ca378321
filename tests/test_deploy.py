"""The files in ``deploy/`` and ``configs/bentocloud.yaml`` against the schemas of what reads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import kubernetes_validate
import pytest
import yaml
from bentoml._internal.cloud.schemas.schemasv2 import DeploymentConfigSchema
from bentoml._internal.configuration.containers import BentoMLConfiguration
from bentoml._internal.utils.cattr import bentoml_cattr

from infinity_bento.api.table import route_table
from infinity_bento.options import OPTIONS
from infinity_bento.telemetry.dashboard import dashboard, dashboard_json, declared_metrics
from infinity_bento.telemetry.metrics import Metrics
from service import InfinityBento

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.34"


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


INT, TEXT, TEXTS = (
    {"type": "integer"},
    {"type": "string"},
    {"type": "object", "additionalProperties": {"type": "string"}},
)
METADATA = closed(("name",), name=TEXT, labels=TEXTS)
POLICY = closed(("type", "value", "periodSeconds"), type={"enum": ["Pods", "Percent"]}, value=INT, periodSeconds=INT)
RULES = closed(stabilizationWindowSeconds=INT, policies={"type": "array", "items": POLICY}, selectPolicy=TEXT)
TRIGGER = closed(("type", "metadata"), type=TEXT, name=TEXT, metadata=TEXTS, metricType=TEXT)

# The fields of KEDA's and the Prometheus Operator's published definitions that are used here, with their types.
CUSTOM_KINDS = {
    "ScaledObject": closed(
        ("apiVersion", "kind", "spec"),
        apiVersion={"const": "keda.sh/v1alpha1"},
        kind=TEXT,
        metadata=METADATA,
        spec=closed(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=closed(("name",), name=TEXT, kind=TEXT, apiVersion=TEXT),
            minReplicaCount=INT,
            maxReplicaCount=INT,
            idleReplicaCount=INT,
            pollingInterval=INT,
            cooldownPeriod=INT,
            fallback=closed(("failureThreshold", "replicas"), failureThreshold=INT, replicas=INT),
            advanced=closed(
                horizontalPodAutoscalerConfig=closed(behavior=closed(scaleUp=RULES, scaleDown=RULES)),
                restoreToOriginalReplicaCount={"type": "boolean"},
            ),
            triggers={"type": "array", "items": TRIGGER, "minItems": 1},
        ),
    ),
    "PodMonitor": closed(
        ("apiVersion", "kind", "spec"),
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=closed(
            ("selector", "podMetricsEndpoints"),
            selector=closed(matchLabels=TEXTS),
            podMetricsEndpoints={
                "type": "array",
                "items": closed(port=TEXT, path=TEXT, interval={"type": "string", "pattern": r"^\d+s$"}),
            },
        ),
    ),
}


def manifests() -> list[Path]:
    return sorted(file for file in (DEPLOY / "kubernetes" / "cpu").glob("*.yaml") if file.stem != "kustomization")


@pytest.mark.parametrize("file", manifests(), ids=lambda file: file.stem)
def test_each_manifest_fits_its_schema(file: Path) -> None:
    manifest = yaml.safe_load(file.read_text())
    if manifest["kind"] in CUSTOM_KINDS:
        jsonschema.validate(manifest, CUSTOM_KINDS[manifest["kind"]])
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    assert manifest["metadata"]["name"] == "infinity-bento"


def test_a_wrong_manifest_would_be_noticed() -> None:
    deployment = read("deploy/kubernetes/cpu/deployment.yaml")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
    scaled = read("deploy/kubernetes/cpu/scaled-object.yaml")
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 65536
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(scaled, CUSTOM_KINDS["ScaledObject"])


def merged(base: Any, patch: Any) -> Any:
    """What kustomize makes of a strategic patch, as far as it is used here: containers by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {key: merged(base.get(key), patch[key]) if key in patch else base[key] for key in {**base, **patch}}
    if isinstance(base, list) and isinstance(patch, list) and patch and "name" in patch[0]:
        return [merged(item, next((p for p in patch if p["name"] == item["name"]), item)) for item in base]
    return patch


def test_the_gpu_variant_is_the_same_deployment_with_a_gpu() -> None:
    base = read("deploy/kubernetes/cpu/kustomization.yaml")
    assert base["resources"] == [*sorted(base["resources"], key=base["resources"].index)]
    assert {*base["resources"]} == {file.name for file in manifests()}
    gpu = read("deploy/kubernetes/gpu/kustomization.yaml")
    assert gpu["resources"] == ["../cpu"] and gpu["patches"] == [{"path": "deployment.yaml"}]
    deployment = merged(read("deploy/kubernetes/cpu/deployment.yaml"), read("deploy/kubernetes/gpu/deployment.yaml"))
    kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_the_manifests_speak_of_this_server() -> None:
    deployment = read("deploy/kubernetes/cpu/deployment.yaml")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    open_paths = {path for route in route_table() if route.is_open for path in route.paths}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in open_paths, "a probe carries no key"
        assert container[probe]["timeoutSeconds"] > 1, "a loading server answers late"
    known = {option.env for option in OPTIONS}
    assert {variable["name"] for variable in container["env"]} <= known
    assert pod["spec"]["securityContext"]["runAsNonRoot"] and pod["spec"]["securityContext"]["runAsUser"] == 1034
    labels = pod["metadata"]["labels"]
    for path in ("disruption-budget", "pod-monitor"):
        assert read(f"deploy/kubernetes/cpu/{path}.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert read("deploy/kubernetes/cpu/service.yaml")["spec"]["selector"] == labels
    scaled = read("deploy/kubernetes/cpu/scaled-object.yaml")["spec"]
    (trigger,) = scaled["triggers"]
    names = {metric.name for metric in declared_metrics(Metrics())}
    assert set(re.findall(r"infinity_\w+", trigger["metadata"]["query"])) == {"infinity_queue_tokens"} <= names
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_compose_and_what_it_mounts() -> None:
    compose = read("deploy/compose.yaml")
    assert set(compose["services"]) == {"server", "prometheus", "grafana"}
    for service in compose["services"].values():
        assert ":" in service["image"] and not service["image"].endswith(":latest")
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).is_file(), volume
    health = compose["services"]["server"]["healthcheck"]["test"]
    assert health[0] == "CMD" and "/readyz" in health[-1]
    (scrape,) = read("deploy/prometheus.yaml")["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == ["server:3000"]
    (source,) = read("deploy/grafana/datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_the_dashboard_is_current_and_shows_every_metric() -> None:
    file = DEPLOY / "grafana" / "infinity-bento.json"
    assert file.read_text() == dashboard_json(), f"run: python -m infinity_bento.telemetry.dashboard > {file.name}"
    exposed = Metrics()
    exposed.set_queue("m", 1, 2)
    text = exposed.render().decode()
    families = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    shown = {re.sub(r" \(\w+\)$", "", panel["description"]) for panel in dashboard()["panels"]}
    assert shown == families
    places = [tuple(panel["gridPos"].values()) for panel in dashboard()["panels"]]
    assert len(set(places)) == len(places)
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")") and target["legendFormat"]


def test_bentocloud_reads_its_file() -> None:
    config = read("configs/bentocloud.yaml")
    assert set(config) <= {"name", "bento", "cluster", *(field.name for field in attrs.fields(DeploymentConfigSchema))}
    schema = bentoml_cattr.structure(
        {key: value for key, value in config.items() if key not in ("name", "bento", "cluster")}, DeploymentConfigSchema
    )
    (name,) = schema.services
    assert name == InfinityBento.name
    service = schema.services[name]
    written = config["services"][name]
    assert set(written) <= {field.name for field in attrs.fields(type(service))}
    assert service.scaling.min_replicas == 1 and service.scaling.max_replicas == 8
    # BentoML's own check of a service's configuration.
    BentoMLConfiguration(override_defaults={"services": {name: written["config_overrides"]}}, use_version=2)
    paths = {path for route in route_table() if route.is_open for path in route.paths}
    assert set(written["config_overrides"]["endpoints"].values()) <= paths
    assert {entry["name"] for entry in config["envs"]} <= {option.env for option in OPTIONS}
