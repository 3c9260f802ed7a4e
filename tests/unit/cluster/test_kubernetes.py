"""Pods of an Indexed Job, and the manifest of the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from unisono.cluster import Launch
from unisono.cluster_resolver import KubernetesClusterResolver
from unisono.errors import ClusterError

ROOT = Path(__file__).parents[3]
# The schemas of Kubernetes 1.37 for jobs and services, without their texts, and without those of
# parts that the manifest does not use, and that of JobSet v1alpha2. No field is allowed that they
# do not name.
SCHEMAS: dict[str, Any] = json.loads((ROOT / "tests" / "kubernetes_schema.json").read_text())
ENVIRON = {
    "JOB_COMPLETION_INDEX": "1",
    "UNISONO_NUM_WORKERS": "3",
    "UNISONO_COORDINATOR": "train-0.train:29500",
}
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "number": (int, float),
    "null": type(None),
}


def manifests(source: str = "docs/launchers.md") -> list[dict[str, Any]]:
    """A service and its job, or a job set."""
    yaml = pytest.importorskip("yaml", reason="PyYAML has no wheel for Python 3.13t")
    text = (ROOT / source).read_text()
    texts = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if source.endswith(".md") else [text]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text)]


JOB_SET = "examples/jobs/jobset.yaml"
# The page, and the file to copy.
SOURCES = ["docs/launchers.md", "examples/jobs/kubernetes.yaml"]


def faults(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    """What `schema` does not allow in `value`."""
    if "$ref" in schema:
        return faults(value, SCHEMAS[schema["$ref"]], where)
    for choice in ("oneOf", "anyOf"):
        if choice in schema and all(faults(value, one, where) for one in schema[choice]):
            return [f"{where}: {value!r} is none of {schema[choice]}"]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    is_bool = isinstance(value, bool) and "boolean" not in kinds
    if kinds and (is_bool or not isinstance(value, tuple(TYPES[kind] for kind in kinds))):
        return [f"{where}: {value!r} is not {kinds}"]
    if value not in schema.get("enum", [value]):
        return [f"{where}: {value!r} is not one of {schema['enum']}"]
    found = [
        f"{where}.{name} is missing" for name in schema.get("required", []) if name not in value
    ]
    if isinstance(value, list):
        for number, item in enumerate(value):
            found += faults(item, schema.get("items", {}), f"{where}[{number}]")
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for name, item in value.items():
            if name not in known and others is False:
                found.append(f"{where}.{name} is not known")
            else:
                found += faults(item, known.get(name, others), f"{where}.{name}")
    return found


@pytest.mark.parametrize("source", [*SOURCES, JOB_SET])
def test_the_manifest_of_the_documentation_keeps_to_the_schema(source: str) -> None:
    for manifest in manifests(source):
        assert faults(manifest, SCHEMAS[manifest["kind"]], manifest["kind"]) == []


def test_the_schema_finds_faults() -> None:
    _, job = manifests()
    (job_set,) = manifests(JOB_SET)
    job["spec"]["completion"] = 2
    job["spec"]["completions"] = "2"
    del job["spec"]["template"]["spec"]["containers"][0]["name"]
    assert len(faults(job, SCHEMAS["Job"], "job")) == 3
    del job_set["spec"]["replicatedJobs"][0]["template"]
    job_set["spec"]["failurePolicy"]["maxRestart"] = 3
    assert len(faults(job_set, SCHEMAS["JobSet"], "job set")) == 2


@pytest.mark.parametrize("source", SOURCES)
def test_the_manifest_of_the_documentation_describes_a_cluster(source: str) -> None:
    service, job = manifests(source)
    pod = job["spec"]["template"]["spec"]

    # Pods of an Indexed Job are called JOB-INDEX.SUBDOMAIN; the service makes the names known.
    host = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert coordinator_of(job["spec"]) == f"{host}:29500"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_the_job_set_of_the_examples_describes_a_cluster() -> None:
    (job_set,) = manifests(JOB_SET)
    name = job_set["metadata"]["name"]
    (replicated,) = job_set["spec"]["replicatedJobs"]

    # A job set makes a service of its own name, and jobs called SET-REPLICATED-INDEX.
    assert replicated["replicas"] == 1
    assert coordinator_of(replicated["template"]["spec"]) == (
        f"{name}-{replicated['name']}-0-0.{name}:29500"
    )


def coordinator_of(spec: dict[str, Any]) -> str:
    """Where the pods of an Indexed Job find pod 0, as the resolver sees it in pod 1."""
    container = spec["template"]["spec"]["containers"][0]
    variables = {one["name"]: one.get("value", "") for one in container["env"]}

    found = KubernetesClusterResolver(environ={**variables, "JOB_COMPLETION_INDEX": "1"})

    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == found.cluster_spec().num_tasks("worker")
    assert "UNISONO_JOB_TOKEN" in variables
    return found.master(task_id=0)


def test_the_pod_is_found() -> None:
    found = KubernetesClusterResolver(environ=ENVIRON)

    names = [f"train-{number}.train:29500" for number in range(3)]
    assert found.cluster_spec().job_tasks("worker") == names
    assert (found.task_type, found.task_id, found.environment) == ("worker", 1, "kubernetes")
    assert found.launch() == Launch(job="kubernetes-train-0.train:29500")


def test_other_pods_are_not_known_if_the_first_has_another_name() -> None:
    found = KubernetesClusterResolver(environ={**ENVIRON, "UNISONO_COORDINATOR": "10.0.0.7:29500"})

    assert found.cluster_spec().job_tasks("worker") == ["10.0.0.7:29500", None, None]


@pytest.mark.parametrize("name", ["JOB_COMPLETION_INDEX", "UNISONO_NUM_WORKERS"])
def test_a_variable_that_is_not_set_is_named(name: str) -> None:
    environ = {key: value for key, value in ENVIRON.items() if key != name}

    with pytest.raises(ClusterError, match=f"an Indexed Job of Kubernetes sets {name}"):
        KubernetesClusterResolver(environ=environ)


def test_a_manifest_without_an_address_is_told_what_to_write() -> None:
    with pytest.raises(ClusterError, match=r"Set UNISONO_COORDINATOR.*JOB-0.SERVICE:29500"):
        KubernetesClusterResolver(
            environ={name: ENVIRON[name] for name in ENVIRON if name != "UNISONO_COORDINATOR"}
        )
