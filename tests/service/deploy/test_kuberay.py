"""kuberay/: valid to KubeRay's own schema, with images, commands and settings that exist."""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import typer
import yaml  # type: ignore[import-untyped]

from undertow.engine.base.config import Settings
from undertow.engine.cluster.settings import ClusterSettings
from undertow.serving.cli import app
from undertow.serving.http.routes.health import router
from undertow.serving.http.service_settings import ServiceSettings

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "kuberay"
# RayCluster v1 of KubeRay, commit feeaf72 (helm-chart/kuberay-operator/crds, Apache-2.0), cut to what
# may be used here.
SCHEMA = json.loads(Path(__file__).with_name("raycluster_spec.json").read_text())


def read(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


KUSTOMIZATION = read("kustomization.yaml")[0]
CLUSTER = read("cluster.yaml")[0]
DEPLOYMENT, CLAIM, SERVICE = read("service.yaml")
VARIABLES = dict(line.split("=", 1) for line in KUSTOMIZATION["configMapGenerator"][0]["literals"])


def pods() -> list[Any]:
    groups = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"], DEPLOYMENT["spec"]]
    return [group["template"]["spec"] for group in groups]


def test_the_cluster_is_what_the_operator_accepts() -> None:
    jsonschema.validate(CLUSTER["spec"], SCHEMA)
    misspelt = copy.deepcopy(CLUSTER["spec"])
    misspelt["workerGroupSpecs"][0]["maxReplica"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        jsonschema.validate(misspelt, SCHEMA)


def test_the_parts_fit_together() -> None:
    assert {*KUSTOMIZATION["resources"]} == {"cluster.yaml", "service.yaml"}
    images = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in KUSTOMIZATION["images"]}
    assert {container["image"] for pod in pods() for container in pod["containers"]} == images.keys()
    built = (ROOT / "Dockerfile").read_text() + (ROOT / "Dockerfile.vllm").read_text()
    assert all(f"-t {image} " in built for image in images.values())
    assert f"\nray=={CLUSTER['spec']['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    template = DEPLOYMENT["spec"]["template"]
    assert SERVICE["spec"]["selector"] == template["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    (container,) = template["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    paths = {getattr(route, "path", "") for route in router.routes}
    assert {container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")} <= paths


def test_no_container_runs_as_root_or_writes_to_its_root() -> None:
    for pod in pods():
        told = pod["securityContext"]
        assert told["runAsNonRoot"] and told["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {told[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {10001}
        writable = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
        # the autoscaler is KubeRay's own container beside the head
        for container in (*pod["containers"], CLUSTER["spec"]["autoscalerOptions"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert {mounts["/tmp"], mounts["/home/undertow"]} <= writable
    assert all("USER 10001:10001" in (ROOT / name).read_text() for name in ("Dockerfile", "Dockerfile.vllm"))


def test_the_service_is_started_by_a_command_that_exists() -> None:
    (container,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
    joined, served = container["args"][0].split(" && ")
    assert f"{CLUSTER['metadata']['name']}-head-svc:6379" in joined
    words = [re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], word) for word in shlex.split(served)]
    assert words[:3] == ["exec", "undertow", "serve"]
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    given = serve.make_context("serve", words[3:]).params
    assert (str(given["store"]), given["ray"], given["shards"]) == ("s3://BUCKET/memories", "auto", 1)


def test_shards_find_room_on_their_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    asked = ClusterSettings()
    Settings()
    engine, vllm = CLUSTER["spec"]["workerGroupSpecs"]
    limits = engine["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert asked.num_cpus <= int(limits["cpu"]) and asked.num_gpus == int(limits["nvidia.com/gpu"])
    assert asked.num_cpus > int(vllm["rayStartParams"]["num-cpus"])
    assert json.loads(json.loads(vllm["rayStartParams"]["resources"])) == {"undertow_vllm": 1}


@pytest.mark.parametrize(
    "variable",
    ["UNDERTOW_SERVICE_HOST", "UNDERTOW_SERVICE_PORT_HTTP", "UNDERTOW_PORT", "UNDERTOW_PORT_80_TCP_ADDR"],
)
def test_variables_that_kubernetes_sets_for_a_service_are_no_settings(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(pod["enableServiceLinks"] is False for pod in pods())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv(variable, "x")
    Settings()
    ServiceSettings()
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(ValueError, match=variable):
        (ServiceSettings if "SERVICE" in variable else Settings)()
