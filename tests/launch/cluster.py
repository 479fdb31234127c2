"""What Kubernetes, JobSet and GKE do with a manifest, as far as a run notices.

From their documentation: how a container's variables are made, how a Job's pod failure policy and a
JobSet's failure policy judge exit codes, and what GKE adds to a pod that asks for TPUs.
"""

import json
import pathlib
import re
from typing import Any

import jsonschema
import yaml

SCHEMA = pathlib.Path(__file__).parent / "schemas" / "jobset.json"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SLICE = "metadata.labels['jobset.sigs.k8s.io/job-index']"


def validate(manifest: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError if the API would not take it."""
    schema = json.loads(SCHEMA.read_text())
    kinds = {"JobSet": "JobsetV1alpha2JobSet", "ConfigMap": "io.k8s.api.core.v1.ConfigMap"}
    part = {"$ref": f"#/$defs/{kinds[manifest['kind']]}", "$defs": schema["$defs"]}
    jsonschema.Draft202012Validator(part).validate(manifest)


def read(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the JobSet of a manifest."""
    config, jobset = yaml.safe_load_all(text)
    return config, jobset


def job(jobset: dict[str, Any]) -> dict[str, Any]:
    """The Job that the JobSet makes."""
    (group,) = jobset["spec"]["replicatedJobs"]
    return group["template"]["spec"]


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    """The pod that the Job makes, many times."""
    return job(jobset)["template"]["spec"]


def container(jobset: dict[str, Any]) -> dict[str, Any]:
    """The pod's container."""
    (one,) = pod(jobset)["containers"]
    return one


def expanded(text: str, known: dict[str, str]) -> str:
    """A value or argument as Kubernetes gives it: $(NAME) of a known name, $$ for $."""

    def word(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return known.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", word, text)


def environment(
    jobset: dict[str, Any], index: int, address: str = "10.0.0.7", slice_: int = 0
) -> dict[str, str]:
    """The variables of a pod: first what GKE and the Job's controller add, then its own."""
    hosts = job(jobset)["completions"]
    name, group = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    domain = jobset["spec"]["network"]["subdomain"]
    variables = {
        "JOB_COMPLETION_INDEX": str(index),
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "TPU_WORKER_ID": str(index),
        "TPU_WORKER_HOSTNAMES": ",".join(
            f"{name}-{group}-{slice_}-{i}.{domain}" for i in range(hosts)
        ),
        "TPU_TOPOLOGY": pod(jobset)["nodeSelector"]["cloud.google.com/gke-tpu-topology"],
    }
    fields = {INDEX: str(index), SLICE: str(slice_), "status.podIP": address}
    for one in container(jobset)["env"]:
        if "valueFrom" in one:
            variables[one["name"]] = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            variables[one["name"]] = expanded(one["value"], variables)
    return variables


def words(jobset: dict[str, Any], index: int) -> list[str]:
    """The command of a pod."""
    known = environment(jobset, index)
    one = container(jobset)
    return [expanded(word, known) for word in (*one["command"], *one["args"])]


def after(jobset: dict[str, Any], codes: list[int]) -> str:
    """What becomes of the JobSet when its pods have ended: an action, or "Completed"."""
    if not any(codes):
        return "Completed"
    made = job(jobset)
    assert made["backoffLimit"] == 0 and pod(jobset)["restartPolicy"] == "Never"
    reason = "BackoffLimitExceeded"
    for rule in made["podFailurePolicy"]["rules"]:
        wanted = rule["onExitCodes"]
        assert wanted["containerName"] == container(jobset)["name"]
        if rule["action"] == "FailJob" and any(
            code != 0 and (code in wanted["values"]) == (wanted["operator"] == "In")
            for code in codes
        ):
            reason = "PodFailurePolicy"
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        if reason in rule.get("onJobFailureReasons", [reason]):
            return rule["action"]
    return "RestartJobSet"
