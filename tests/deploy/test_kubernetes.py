"""kubernetes/rayjob.yaml: its form is KubeRay's, and docs/guide/containers.md has what it says.

No operator runs here. With KUBERAY_HOME, a checkout of KubeRay, its own schema is asked, too.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.support.deploy.rayjob import RAY_JOB

MANIFEST = REPOSITORY / "kubernetes/rayjob.yaml"
CRD = "ray-operator/config/crd/bases/ray.io_rayjobs.yaml"


@pytest.fixture(scope="module")
def job():
    return next(yaml.safe_load_all(MANIFEST.read_text()))


@pytest.fixture(scope="module")
def network():
    return list(yaml.safe_load_all(MANIFEST.read_text()))[1]


def pods_of(job):
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def test_it_is_a_ray_job(job):
    jsonschema.validate(job, RAY_JOB)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "submissionMode"), "SideCarMode"),
        (("spec", "backofLimit"), 5),
        (("spec", "rayClusterSpec", "authOptions", "mode"), True),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-gpus"), 0),
        (("spec", "rayClusterSpec", "headGroupSpec", "template"), None),
    ],
)
def test_what_is_no_ray_job_is_found(job, place, value):
    wrong = part = copy.deepcopy(job)
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, RAY_JOB)


def test_kuberays_own_schema_takes_it(job):
    home = os.environ.get("KUBERAY_HOME")
    if not home:
        pytest.skip("no KubeRay here; to run this test: KUBERAY_HOME=CHECKOUT")
    definition = yaml.load(Path(home, CRD).read_text(), yaml.CSafeLoader)
    (version,) = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    jsonschema.validate(job, schema)
    assert not unknown(job, schema), "KubeRay would drop these"
    assert not differences(RAY_JOB, schema)


def unknown(value, schema, path=""):
    """The names in a manifest that a schema does not have: Kubernetes drops them in silence."""
    if isinstance(value, list):
        return [x for each in value for x in unknown(each, schema.get("items", {}), path)]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    properties = schema["properties"]
    return [f"{path}.{name}" for name in value if name not in properties] + [
        x
        for name, each in value.items()
        if name in properties
        for x in unknown(each, properties[name], f"{path}.{name}")
    ]


def differences(ours, theirs, path=""):
    """Where the schema of the tests has another name, type or requirement than KubeRay's."""
    if path in (".apiVersion", ".kind", ".metadata"):
        return []
    if "properties" in ours:
        properties = theirs.get("properties", {})
        missing = set(theirs.get("required", [])) - set(ours["required"])
        return [f"{path} needs {name}" for name in missing] + [
            x
            for name, each in ours["properties"].items()
            for x in (
                differences(each, properties[name], f"{path}.{name}")
                if name in properties
                else [f"{path}.{name} is unknown"]
            )
        ]
    if "items" in ours:
        return differences(ours["items"], theirs["items"], path)
    known = "string" if theirs.get("x-kubernetes-int-or-string") else theirs.get("type")
    return [] if known in ours["type"] else [f"{path} is of type {known}"]


def test_no_pod_has_more_rights_than_it_needs(job):
    for pod in pods_of(job):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        user = re.search(
            r"^USER (\d+):(\d+)$", (REPOSITORY / "docker/Dockerfile").read_text(), re.M
        )
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert (context["runAsUser"], context["fsGroup"]) == (int(user[1]), int(user[2]))
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["requests"] == container["resources"]["limits"]


def test_ports_want_a_token_or_are_out_of_reach(job, network):
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0)  # KubeRay's condition
    own = network["spec"]["podSelector"]["matchLabels"]
    assert all(own.items() <= pod["metadata"]["labels"].items() for pod in pods_of(job))
    from_own, from_operator = network["spec"]["ingress"]
    assert from_own == {"from": [{"podSelector": {"matchLabels": own}}]}
    assert [port["port"] for port in from_operator["ports"]] == [8265]


def test_what_outlives_a_pod_is_on_the_volume(job):
    spec = job["spec"]
    # A dead pod is a failure of the job, which KubeRay then starts anew.
    assert (spec["submissionMode"], spec["shutdownAfterJobFinishes"]) == ("SidecarMode", True)
    assert spec["backoffLimit"] > 0 and "activeDeadlineSeconds" not in spec
    words = shlex.split(spec["entrypoint"])
    assert words[:4] == ["python", "-m", "nemo_specrl", "run"]
    given = dict(word.lstrip("+").split("=") for word in words if "=" in word)
    for pod in pods_of(job):
        (container,) = pod["spec"]["containers"]
        folders = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert set(folders.values()) == set(volumes)

        def on(path, folders=folders, volumes=volumes):
            return volumes[folders["/" + path.split("/")[1]]]

        assert "persistentVolumeClaim" in on(given["checkpointing.checkpoint_dir"])
        assert "persistentVolumeClaim" in on(given["logger.log_dir"])
        assert "emptyDir" in on(given["policy.generation.spec_rl.cache.dir"])
        assert "configMap" in on(words[words.index("--config") + 1])


def test_there_are_as_many_gpus_as_the_recipe_is_told(job):
    given = dict(w.lstrip("+").split("=") for w in job["spec"]["entrypoint"].split() if "=" in w)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert int(given["cluster.num_nodes"]) == group["replicas"] == group["minReplicas"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert given["cluster.gpus_per_node"] == limits["nvidia.com/gpu"]
    assert group["rayStartParams"]["num-gpus"] == limits["nvidia.com/gpu"]
    first = MANIFEST.read_text().split("apiVersion")[0]
    recipe = re.search(r"recipe\.yaml=(\S+)", first)[1]
    assert "4 nodes of 8 GPUs" in (REPOSITORY / recipe).read_text()
