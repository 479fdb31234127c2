"""A launch spec as Kubernetes objects: a JobSet with a job per slice and a pod per host.

Names and meanings: JobSet's API v1alpha2 (jobset.sigs.k8s.io: failure policy, restart strategy,
exclusive placement, index of a job), Kubernetes' Jobs (pod failure policy, completion index),
"Deploy TPU workloads in GKE" (cloud.google.com/kubernetes-engine/docs/how-to/tpus: node labels,
google.com/tpu, spot and reservations) and "Deploy TPU Multislices in GKE" (how-to/tpu-multislice);
MEGASCALE_* variables as in GKE's manifests of Pathways and in jax's `cloud_tpu_cluster`.
"""

import dataclasses
import posixpath
from typing import Any

import yaml

from bert_jax.errors import InputError

from .spec import EXPERIMENT_FILE, FINAL, Spec, slice_names

CONTAINER = "run"
# Name of the only group of pods; host 3 of slice 0 of NAME is the pod NAME-hosts-0-3-XXXXX.
GROUP = "hosts"
# Labels of the pods: their JobSet, the number of the slice, and of the pod within the slice.
OWNER = "jobset.sigs.k8s.io/jobset-name"
SLICE = "jobset.sigs.k8s.io/job-index"
INDEX = "batch.kubernetes.io/job-completion-index"
SHA256 = "bert-jax/config-sha256"  # an annotation of the JobSet

# Folders of the experiment's file, and of copies of corpora and compiled steps.
CONFIG_FOLDER, CACHE_FOLDER = "/etc/bert_jax", "/cache"
# Ports of JAX's coordinator (on every generation of TPU) and of the TPU runtime between hosts.
COORDINATOR_PORT, TPU_PORT = 8482, 8471

# For the pods to connect: machines of a slice start minutes apart, and each pulls the image.
_ARRIVE_SECONDS = "900"
_USER = 1000  # user of the image
_LARGEST_CONFIG = 1_000_000  # bytes, slightly less than a ConfigMap may hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pods:
    """The settings of the pods in a cluster, beyond those of the run itself."""

    image: str  # with a tag or digest
    namespace: str
    service_account: str  # of Kubernetes, which may use the bucket; "": the namespace's default
    node_labels: dict[str, str]  # that choose spot machines or a reservation
    grace: int  # seconds between SIGTERM and SIGKILL, to finish dispatched steps and save
    # Whether pods run as root with all rights, which some nodes require for their TPUs.
    privileged: bool


def node_labels(spot: bool, reservation: str) -> dict[str, str]:
    """Returns the node labels of spot machines, of a reservation, or none."""
    if spot:
        return {"cloud.google.com/gke-spot": "true"}
    return {"cloud.google.com/reservation-name": reservation} if reservation else {}


def require_pinned_image(image: str) -> str:
    """Returns the image; raises InputError unless its name fixes one version."""
    name = image.rpartition("/")[2]
    if "@sha256:" not in name and (":" not in name or name.endswith((":", ":latest"))):
        raise InputError(f"--image {image}: name one version of it, IMAGE:TAG or IMAGE@sha256:...")
    return image


def render_manifest(spec: Spec, pods: Pods) -> str:
    """Returns the manifest as YAML: a ConfigMap with the experiment, and the JobSet."""
    if len("".join([spec.config, *spec.code.values()]).encode()) > _LARGEST_CONFIG:
        raise InputError(f"{spec.experiment.name}: its JSON is larger than a ConfigMap may be")
    metadata = {
        "name": spec.name,
        "namespace": pods.namespace,
        "labels": {"app.kubernetes.io/name": "bert-jax"},
        "annotations": {SHA256: spec.sha256},
    }
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": {EXPERIMENT_FILE: spec.config, **spec.code},
    }
    objects = [config, _jobset(spec, pods, metadata)]
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100, explicit_start=True)


def _jobset(spec: Spec, pods: Pods, metadata: dict[str, Any]) -> dict[str, Any]:
    annotations = dict(metadata["annotations"])
    if spec.hosts > 1:
        # All pods of a job in one slice: a node pool of several machines is a slice.
        key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        annotations[key] = "cloud.google.com/gke-nodepool"
    reasons = ["PodFailurePolicy"]
    failure = {"name": "failure", "action": "FailJobSet", "onJobFailureReasons": reasons}
    template, slices = {"spec": _job(spec, pods)}, spec.rented_topology.slices
    hosts = {"name": GROUP, "replicas": slices, "template": template}
    # Blocking: a pod that is still saving holds the workdir, so all must end before any restarts.
    # Several slices restart independently: no slice waits for a missing one or ends with another.
    strategy, action = "BlockingRecreate", "RestartJobSet"
    if slices > 1:
        strategy, action = "Recreate", "RestartJob"
    # The rule "preemption" has no condition: it applies to all other failures.
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata | {"annotations": annotations},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": spec.name},
            "failurePolicy": {
                "maxRestarts": spec.retries * slices,
                "restartStrategy": strategy,
                "rules": [failure, {"name": "preemption", "action": action}],
            },
            "replicatedJobs": [hosts],
        },
    }


def _job(spec: Spec, pods: Pods) -> dict[str, Any]:
    codes = {"containerName": CONTAINER, "operator": "In", "values": list(FINAL)}
    return {
        "parallelism": spec.hosts // spec.rented_topology.slices,
        "completions": spec.hosts // spec.rented_topology.slices,
        "completionMode": "Indexed",
        # A slice cannot continue if one of its pods is missing.
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/name": "bert-jax"}},
            "spec": _pod(spec, pods),
        },
    }


def _pod(spec: Spec, pods: Pods) -> dict[str, Any]:
    names = slice_names(spec.rented_topology)
    if not names.gke_accelerator:
        raise InputError(
            f"--topology {spec.rented_topology.name}: not on GKE; choose another generation, or "
            "`launch tpu_vm`"
        )
    account = {"serviceAccountName": pods.service_account} if pods.service_account else {}
    user = {"runAsUser": 0} if pods.privileged else {"runAsNonRoot": True, "runAsUser": _USER}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.grace,
        # Process 1 of a container ignores SIGTERM until it has a handler for it.
        "shareProcessNamespace": True,
        **account,
        "automountServiceAccountToken": False,  # pods do not use the cluster's API
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": names.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": names.gke_topology,
            **pods.node_labels,
        },
        "securityContext": user,
        "containers": [_container(spec, pods)],
        "volumes": [
            {"name": "experiment", "configMap": {"name": spec.name}},
            {"name": "cache", "emptyDir": {}},
        ],
    }


def _container(spec: Spec, pods: Pods) -> dict[str, Any]:
    topology = spec.rented_topology
    chips = {"google.com/tpu": slice_names(topology).chips_per_host}
    command, *args = spec.command(posixpath.join(CONFIG_FOLDER, EXPERIMENT_FILE))
    prefix = _renumber_process(spec.hosts // topology.slices) if topology.slices > 1 else []
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {
        "name": CONTAINER,
        "image": pods.image,
        "command": [*map(_escape, prefix), command],
        "args": [_escape(arg) for arg in args],
        "env": _environment(spec),
        "ports": [{"containerPort": port} for port in (TPU_PORT, COORDINATOR_PORT)],
        "resources": {"requests": chips, "limits": dict(chips)},
        "securityContext": {"privileged": True} if pods.privileged else rights,
        "volumeMounts": [
            {"name": "experiment", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "cache", "mountPath": CACHE_FOLDER},
        ],
    }


def _renumber_process(hosts: int) -> list[str]:
    """Returns a command prefix that numbers the process among those of all slices."""
    number = f"$((MEGASCALE_SLICE_ID * {hosts} + JAX_PROCESS_ID))"
    return ["/bin/sh", "-c", f'export JAX_PROCESS_ID={number}; exec "$0" "$@"']


def _environment(spec: Spec) -> list[dict[str, Any]]:
    """Returns a pod's variables; they replace GKE's, by which JAX could not name a missing host."""
    given = {"BERT_JAX_ARRIVE_WITHIN": _ARRIVE_SECONDS, "BERT_JAX_CACHE_DIR": CACHE_FOLDER}
    given |= {"JAX_NUM_PROCESSES": str(spec.hosts), **spec.environment}
    variables: list[dict[str, Any]] = [
        {"name": name, "value": _escape(value)} for name, value in sorted(given.items())
    ]
    slices = spec.rented_topology.slices
    first_hosts = [f"{spec.name}-{GROUP}-{number}-0.{spec.name}" for number in range(slices)]
    if spec.hosts > 1:
        addresses = ",".join(f"{first}:{COORDINATOR_PORT}" for first in first_hosts)
        index = f"metadata.annotations['{INDEX}']"
        variables += [
            # The first process of each slice, by a name that all pods can resolve. With several
            # slices, `bert_jax.distributed.rendezvous` splits the list.
            {"name": "JAX_COORDINATOR_ADDRESS", "value": addresses},
            {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            # Listens only on the address inside the cluster.
            {"name": "JAX_COORDINATOR_BIND_ADDRESS", "value": f"$(POD_IP):{COORDINATOR_PORT}"},
        ]
    if slices > 1:
        label = f"metadata.labels['{SLICE}']"
        variables += [
            {"name": "MEGASCALE_NUM_SLICES", "value": str(slices)},
            {"name": "MEGASCALE_SLICE_ID", "valueFrom": {"fieldRef": {"fieldPath": label}}},
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": first_hosts[0]},
        ]
    return variables


def _escape(value: str) -> str:
    """Returns the value so that Kubernetes does not expand $(NAME) in it."""
    return value.replace("$", "$$")


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeated objects in full."""

    def ignore_aliases(self, data: Any) -> bool:
        """Writes an object that occurs twice in full, without an alias."""
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)
