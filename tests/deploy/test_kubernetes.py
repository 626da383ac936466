"""The Kubernetes manifests: valid against the schemas of the API, and consistent with the gateway."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import Config

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
ADAPTER = FOLDER / "autoscaling" / "adapter-values.yaml"
FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml" and path != ADAPTER)
VERSIONS = ("1.29.0", kubernetes_validate.latest_version())
DRAIN_END_S = 30
"""What a gateway may take after its drain timeout, as the documentation says."""


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def found(kind: str, name: str = "inferry") -> dict[str, Any]:
    (one,) = [
        document
        for path in FILES
        for document in documents(path)
        if (document["kind"], document["metadata"]["name"]) == (kind, name)
    ]
    return one


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = found("Deployment")["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (one,) = pod()["containers"]
    assert isinstance(one, dict)
    return one


def environment() -> dict[str, str]:
    """The variables of a gateway, with values of the example secret and of a pod."""
    secrets = found("Secret")["stringData"]
    fields = {"status.podIP": "10.1.2.3", "metadata.name": "inferry-7d9c5-x2x4z"}
    values: dict[str, str] = {}
    for one in container()["env"]:
        source = one.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["name"] == "inferry"
            values[one["name"]] = secrets[source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            values[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
        else:
            values[one["name"]] = one["value"]
            for name, value in list(values.items()):
                values[one["name"]] = values[one["name"]].replace(f"$({name})", value)
    return values


def config() -> Config:
    return parse(yaml.safe_load(found("ConfigMap")["data"]["inferry.yaml"]), environment())


def of_the_api() -> Iterator[Any]:
    for path in FILES:
        for document in documents(path):
            # KEDA is not part of the API; its fields are checked below.
            if not document["apiVersion"].startswith("keda.sh/"):
                for version in VERSIONS:
                    yield pytest.param(document, version, id=f"{path.name}-{document['kind']}-{version}")


@pytest.mark.parametrize(("document", "version"), list(of_the_api()))
def test_a_manifest_is_valid_against_the_schema_of_the_api(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_mistake_in_a_manifest_is_found() -> None:
    document = found("Deployment")
    document["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_the_kustomization_has_everything_but_examples() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [path.name for path in FILES if path.parent == FOLDER and "example" not in path.name]


def test_the_configuration_of_a_pod_is_accepted() -> None:
    one = config()
    assert one.cluster.advertise == "10.1.2.3:8100"
    assert one.cluster.name == "inferry-7d9c5-x2x4z"
    assert one.cluster.redis is not None
    assert one.ledger.startswith("postgresql://")
    assert one.auth.mode == "on"
    assert one.cluster.secret_env in environment()


def test_variables_that_kubernetes_adds_for_services_do_not_reach_the_gateway() -> None:
    assert pod()["enableServiceLinks"] is False


def test_a_pod_is_killed_only_after_the_drain() -> None:
    sleep_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert sleep_s >= 2 * container()["readinessProbe"]["periodSeconds"]
    assert pod()["terminationGracePeriodSeconds"] == sleep_s + config().server.drain_timeout_s + DRAIN_END_S


def test_probes_ask_what_they_mean() -> None:
    probes = {name: container()[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}


def test_a_pod_has_no_privileges() -> None:
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert found("ServiceAccount")["automountServiceAccountToken"] is False


def test_only_gateways_reach_the_port_between_gateways() -> None:
    calls, jobs = found("NetworkPolicy")["spec"]["ingress"]
    assert (calls["ports"], jobs["ports"]) == ([{"port": 8000}], [{"port": 8100}])
    assert jobs["from"] == [{"podSelector": {"matchLabels": found("Deployment")["spec"]["selector"]["matchLabels"]}}]


def test_the_gateways_know_every_engine_that_may_be_started() -> None:
    names = [worker.name for worker in config().workers]
    assert names == [
        f"vllm-{number}" for number in range(found("HorizontalPodAutoscaler", "vllm")["spec"]["maxReplicas"])
    ]
    assert len(names) == found("ScaledObject", "vllm")["spec"]["maxReplicaCount"]
    assert found("StatefulSet", "vllm")["spec"]["serviceName"] == found("Service", "vllm")["metadata"]["name"]


def test_both_autoscalers_follow_the_advice_of_the_gateway() -> None:
    hpa, keda = found("HorizontalPodAutoscaler", "vllm")["spec"], found("ScaledObject", "vllm")["spec"]
    assert hpa["metrics"][0]["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    (trigger,) = keda["triggers"]
    assert (trigger["type"], trigger["metricType"], trigger["metadata"]["threshold"]) == (
        "prometheus",
        "AverageValue",
        "1",
    )
    assert "inferry_desired_workers" in trigger["metadata"]["query"]
    assert hpa["scaleTargetRef"] == keda["scaleTargetRef"]


def test_no_autoscaler_adds_up_the_advice_of_several_gateways() -> None:
    hpa, keda = found("HorizontalPodAutoscaler", "vllm")["spec"], found("ScaledObject", "vllm")["spec"]
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["external"]
    assert rule["seriesQuery"].startswith("inferry_desired_workers{")
    assert rule["name"]["as"] == hpa["metrics"][0]["external"]["metric"]["name"]
    assert rule["metricsQuery"].startswith("max(")
    assert keda["triggers"][0]["metadata"]["query"].startswith("max(")
