"""A JSON schema of what a RayJob may contain, as far as kubernetes/rayjob.yaml needs it.

Names and types are those of KubeRay's CRD (ray-operator/config/crd/bases/ray.io_rayjobs.yaml,
version v1, of KubeRay v1.6.2 and v1.7.0), which has Kubernetes' own of a pod in it. Its lines
are not copied; with KUBERAY_HOME, test_kubernetes.py compares them. Unlike the CRD's, the objects
here are closed: a misspelt name is an error.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}
QUANTITIES: Schema = {
    "type": "object",
    "additionalProperties": {
        "type": ["integer", "string"],
        "pattern": r"^\d+(\.\d+)?([KMGT]i?|m)?$",
    },
}


def closed(*required: str, **properties: Schema) -> Schema:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def several(items: Schema) -> Schema:
    """A list with at least one item."""
    return {"type": "array", "items": items, "minItems": 1}


def one_of(*values: str) -> Schema:
    """One of these strings."""
    return {"type": "string", "enum": list(values)}


CONTAINER = closed(
    "name",
    "image",
    name=STRING,
    image=STRING,
    workingDir=STRING,
    env=several(closed("name", "value", name=STRING, value=STRING)),
    securityContext=closed(
        allowPrivilegeEscalation=BOOLEAN, capabilities=closed(drop=several(STRING))
    ),
    resources=closed(requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts=several(
        closed("name", "mountPath", name=STRING, mountPath=STRING, readOnly=BOOLEAN)
    ),
)
VOLUME = closed(
    "name",
    name=STRING,
    emptyDir=closed(medium=STRING, sizeLimit={"type": ["integer", "string"]}),
    persistentVolumeClaim=closed("claimName", claimName=STRING),
    configMap=closed("name", name=STRING),
)
POD = closed(
    "spec",
    metadata=closed(labels=STRINGS),
    spec=closed(
        "containers",
        automountServiceAccountToken=BOOLEAN,
        securityContext=closed(
            runAsNonRoot=BOOLEAN,
            runAsUser=INTEGER,
            runAsGroup=INTEGER,
            fsGroup=INTEGER,
            fsGroupChangePolicy=one_of("OnRootMismatch", "Always"),
            seccompProfile=closed("type", type=one_of("RuntimeDefault", "Localhost")),
        ),
        containers=several(CONTAINER),
        volumes=several(VOLUME),
    ),
)
RAY_JOB = closed(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion=one_of("ray.io/v1"),
    kind=one_of("RayJob"),
    metadata=closed("name", name=STRING),
    spec=closed(
        "rayClusterSpec",
        # The CRD accepts any string for it; these are the operator's.
        submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
        backoffLimit=INTEGER,
        shutdownAfterJobFinishes=BOOLEAN,
        ttlSecondsAfterFinished=INTEGER,
        entrypoint=STRING,
        rayClusterSpec=closed(
            "headGroupSpec",
            rayVersion=STRING,
            authOptions=closed(mode=one_of("disabled", "token")),
            headGroupSpec=closed("template", rayStartParams=STRINGS, template=POD),
            workerGroupSpecs=several(
                closed(
                    "groupName",
                    "minReplicas",
                    "maxReplicas",
                    "template",
                    groupName=STRING,
                    replicas=INTEGER,
                    minReplicas=INTEGER,
                    maxReplicas=INTEGER,
                    rayStartParams=STRINGS,
                    template=POD,
                )
            ),
        ),
    ),
)
