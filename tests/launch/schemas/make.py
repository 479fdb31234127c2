"""Writes jobset.json: JobSet and ConfigMap as their APIs describe them, as JSON schema.

    python -m pip install kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
    python tests/launch/schemas/make.py

Kubernetes' types are those of the first package, which has them of Kubernetes' OpenAPI description,
and JobSet's those of the second, models made of JobSet's own. Descriptions are left out, and
unknown fields are not allowed. Words that a field may have are in the API's Go source and its
CustomResourceDefinition alone; those that a manifest here uses are in WORDS.
"""

import json
import pathlib
from collections.abc import Iterator
from importlib import metadata, resources
from typing import Any

KUBERNETES = "v1.33.0"
ROOTS = (
    "io.k8s.api.batch.v1.JobTemplateSpec",
    "io.k8s.api.core.v1.ConfigMap",
    "io.k8s.apimachinery.pkg.apis.meta.v1.Condition",
    "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
)
# What the models of JobSet call Kubernetes' types.
THEIRS = {
    "IoK8sApiBatchV1JobTemplateSpec": ROOTS[0],
    "IoK8sApimachineryPkgApisMetaV1Condition": ROOTS[2],
    "IoK8sApimachineryPkgApisMetaV1ObjectMeta": ROOTS[3],
}
DULL = {"description", "default", "title", "format"}

# Type, field: the words it may have.
WORDS = {
    ("JobsetV1alpha2FailurePolicyRule", "action"): (
        *("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
        *("RestartJob", "RestartJobAndIgnoreMaxRestarts"),
    ),
    ("JobsetV1alpha2FailurePolicy", "restartStrategy"): ("Recreate", "BlockingRecreate"),
    ("io.k8s.api.batch.v1.JobSpec", "completionMode"): ("NonIndexed", "Indexed"),
    ("io.k8s.api.batch.v1.PodFailurePolicyRule", "action"): (
        *("FailJob", "FailIndex", "Ignore", "Count"),
    ),
    ("io.k8s.api.batch.v1.PodFailurePolicyOnExitCodesRequirement", "operator"): ("In", "NotIn"),
    ("io.k8s.api.core.v1.PodSpec", "restartPolicy"): ("Always", "OnFailure", "Never"),
}
# Reasons for which a Job fails, of Kubernetes' batch/v1.
REASONS = (
    *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
    *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
)


def bare(schema: Any) -> Any:
    """Without what is for people; optional models without their null."""
    if isinstance(schema, list):
        return [bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "anyOf" in schema and len(schema["anyOf"]) == 2 and schema["anyOf"][1] == {"type": "null"}:
        return bare(schema["anyOf"][0])
    found = {}
    for name, part in schema.items():
        if name == "properties":
            found[name] = {field: bare(of) for field, of in part.items()}
        elif name not in DULL and not name.startswith("x-"):
            found[name] = bare(part)
    return found


def used(schema: Any) -> Iterator[str]:
    """Names of the types that a schema refers to."""
    if isinstance(schema, list):
        for part in schema:
            yield from used(part)
    elif isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for part in schema.values():
            yield from used(part)


def with_our_names(schema: Any) -> Any:
    """A model of JobSet that refers to Kubernetes' types as they call themselves."""
    text = json.dumps(schema)
    for theirs, ours in THEIRS.items():
        text = text.replace(f'"#/$defs/{theirs}"', f'"#/$defs/{ours}"')
    return json.loads(text)


def main() -> None:
    """Writes the file."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    text = (folder / f"{KUBERNETES}-local-strict" / "_definitions.json").read_text()
    theirs = json.loads(text)["$defs"]
    model = JobsetV1alpha2JobSet.model_json_schema(by_alias=True)
    ours = model.pop("$defs") | {"JobsetV1alpha2JobSet": model}
    types: dict[str, Any] = {}
    todo = ["JobsetV1alpha2JobSet", *ROOTS]
    while todo:
        name = todo.pop()
        if name not in types:
            found = with_our_names(bare(theirs.get(name) or ours[name]))
            if "properties" in found:
                found["additionalProperties"] = False
            types[name] = found
            todo += used(found)
    for (name, field), words in WORDS.items():
        types[name]["properties"][field]["enum"] = list(words)
    rule = types["JobsetV1alpha2FailurePolicyRule"]["properties"]
    rule["onJobFailureReasons"]["items"]["enum"] = list(REASONS)
    jobset = types["JobsetV1alpha2JobSet"]
    jobset["required"] = ["apiVersion", "kind", "metadata", "spec"]
    jobset["properties"]["apiVersion"]["enum"] = ["jobset.x-k8s.io/v1alpha2"]
    jobset["properties"]["kind"]["enum"] = ["JobSet"]
    from_packages = ", ".join(
        f"{name} {metadata.version(name)}"
        for name in ("kubernetes-validate", "kubeflow-trainer-api")
    )
    document = {
        "$comment": f"Made by make.py of {from_packages}: Kubernetes {KUBERNETES} and JobSet "
        "v1alpha2, Copyright The Kubernetes Authors, Apache License 2.0. Do not edit.",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "oneOf": [
            {"$ref": "#/$defs/JobsetV1alpha2JobSet"},
            {"$ref": "#/$defs/io.k8s.api.core.v1.ConfigMap"},
        ],
        "$defs": dict(sorted(types.items())),
    }
    lines = json.dumps(document, separators=(",", ":")).replace('"io.k8s', '\n"io.k8s')
    path = pathlib.Path(__file__).with_name("jobset.json")
    path.write_text(lines.replace('"Jobset', '\n"Jobset') + "\n")


if __name__ == "__main__":
    main()
