"""Manifests: what the APIs take, and what a pod makes of them."""

import dataclasses
import os
import subprocess

import cluster
import pytest
from jax._src.clusters import cloud_tpu_cluster
from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster

from bert_jax import hardware
from bert_jax.distributed import peers, rendezvous
from bert_jax.errors import InputError
from bert_jax.tools.plan import topology
from launch import jobset, spec

IMAGE = "registry.example/bert/bert-jax:1"
PODS = jobset.Pods(
    image=IMAGE, namespace="default", service_account="", node_labels={}, grace=60, privileged=False
)


def specified(slice_name: str = "v5e:4x4", **more) -> spec.Spec:
    given = {"workdir": "gs://bucket/run", "retries": 10} | more
    return spec.make_spec(
        "experiments/tiny.py",
        given.pop("settings", ()),
        topology=topology.parse(slice_name),
        **given,
    )


def made(what: spec.Spec, **pods) -> tuple[dict, dict]:
    """The ConfigMap and the JobSet as a cluster reads them, once the APIs have taken them."""
    manifest = cluster.read(jobset.render_manifest(what, dataclasses.replace(PODS, **pods)))
    for one in manifest:
        cluster.validate(one)
    return manifest


# --- The APIs ---


# The largest slice of each generation that GKE offers, and those of TPU7x of one and many machines.
LARGEST = [f"{word}:{tpu.slices[-1]}" for word, tpu in hardware.TPUS.items() if word != "v2"]


@pytest.mark.parametrize("slice_name", [*LARGEST, "tpu7x:2x2x1", "tpu7x:4x4x4"])
def test_a_slice_s_manifest_is_valid_and_asks_for_all_its_chips(slice_name):
    what = specified(slice_name=slice_name)
    _, manifest = made(what)
    chips = cluster.container(manifest)["resources"]
    assert chips["requests"] == chips["limits"]
    assert (
        cluster.job(manifest)["parallelism"] == cluster.job(manifest)["completions"] == what.hosts
    )
    assert cluster.job(manifest)["completionMode"] == "Indexed"
    assert what.hosts * chips["limits"]["google.com/tpu"] == what.topology.chips
    labels = cluster.pod(manifest)["nodeSelector"]
    assert labels["cloud.google.com/gke-tpu-topology"] == slice_name.partition(":")[2]


def test_an_experiment_that_no_configmap_holds_is_named():
    what = dataclasses.replace(specified(), config="x" * 1_000_001)
    with pytest.raises(InputError, match="tiny: its JSON is larger than a ConfigMap may be"):
        jobset.render_manifest(what, PODS)


@pytest.mark.parametrize("image", ["bert-jax", "r/bert-jax:latest", "host:5000/bert-jax", "a/b:"])
def test_an_image_that_may_change_under_the_run_is_refused(image):
    with pytest.raises(InputError, match=f"--image {image}: name one version of it"):
        jobset.require_pinned_image(image)
    assert jobset.require_pinned_image("host:5000/b:1") == "host:5000/b:1"
    assert jobset.require_pinned_image(digest := "b@sha256:" + 64 * "0") == digest


# --- How it ends ---


@pytest.mark.parametrize(
    ("codes", "action"),
    [
        ([0, 0, 0, 0], "Completed"),
        ([75, 75, 75, 75], "RestartJobSet"),
        ([75, 143, 0, 0], "RestartJobSet"),
        ([137, 134, 134, 134], "RestartJobSet"),
        ([134, 0, 0, 0], "RestartJobSet"),
        ([1, 1, 1, 1], "FailJobSet"),
        ([134, 1, 134, 134], "FailJobSet"),
        ([2, 2, 2, 2], "FailJobSet"),
        ([130, 130, 130, 130], "FailJobSet"),
    ],
)
def test_a_preemption_starts_all_again_and_a_failure_ends_them(codes, action):
    _, manifest = made(specified())
    assert cluster.after(manifest, codes) == action


def test_spot_machines_are_chosen_by_label():
    _, manifest = made(specified(), node_labels=jobset.node_labels(True, ""))
    assert cluster.pod(manifest)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"


def test_restarts_are_counted_and_wait_for_pods_that_still_save():
    _, manifest = made(specified(retries=3), grace=450)
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3 and policy["restartStrategy"] == "BlockingRecreate"
    assert {rule["action"] for rule in policy["rules"]} == {"FailJobSet", "RestartJobSet"}
    assert cluster.pod(manifest)["terminationGracePeriodSeconds"] == 450
    assert cluster.pod(manifest)["shareProcessNamespace"], "else SIGTERM is not heard at the start"


# --- What a pod is given ---


def test_pods_find_each_other_where_jax_would_look_for_them(monkeypatch):
    """By our variables, which peers reads, as by GKE's, which jax reads."""
    _, manifest = made(specified())
    monkeypatch.setattr(GkeTpuCluster, "wait_for_coordinator", lambda *args: None)
    # Of several slices that are one run: here the machines say that there are none.
    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value_from_metadata", lambda key: None)
    places = []
    for index in range(4):
        with monkeypatch.context() as patch:
            for name, value in cluster.environment(manifest, index).items():
                patch.setenv(name, value)
            place = rendezvous.read_process_info()
            assert place.number == GkeTpuCluster.get_process_id() == index
            assert place.process_count == GkeTpuCluster.get_process_count() == 4
            assert place.address == GkeTpuCluster.get_coordinator_address(1, None)
            assert os.environ["JAX_COORDINATOR_BIND_ADDRESS"] == "10.0.0.7:8482"
            places.append(place)
    assert len({place.address for place in places}) == 1
    assert all(place.number < place.process_count for place in places)


def test_several_slices_are_a_job_each_and_number_their_pods_through(monkeypatch):
    """As jax numbers them by the variables of the accelerator's runtime."""
    _, manifest = made(specified(slice_name="2*v5e:4x4"))
    (group,) = manifest["spec"]["replicatedJobs"]
    assert (group["replicas"], cluster.job(manifest)["completions"]) == (2, 4)
    assert cluster.pod(manifest)["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    *shell, command, _ = cluster.words(manifest, 0)[:5]
    assert command == "bert-jax"
    for number in range(8):
        variables = cluster.environment(manifest, number % 4, slice_=number // 4)
        words = [*shell, "printenv", "JAX_PROCESS_ID"]
        said = subprocess.run(words, env=os.environ | variables, check=True, capture_output=True)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert int(said.stdout) == GkeTpuCluster.get_process_id() == number
        assert GkeTpuCluster.get_process_count() == int(variables["JAX_NUM_PROCESSES"]) == 8
        firsts = [each.split(":")[0] for each in variables["JAX_COORDINATOR_ADDRESS"].split(",")]
        assert variables["MEGASCALE_COORDINATOR_ADDRESS"] == firsts[0]
        if number % 4 == 0:  # the first of its slice, as the cluster names it
            assert variables["TPU_WORKER_HOSTNAMES"].split(",")[0] == firsts[number // 4]


def test_of_several_slices_one_that_is_away_holds_up_none():
    """None is created after another, deleted with another, or waits for another's pods to go."""
    _, manifest = made(specified(slice_name="2*v5e:4x4", retries=3))
    assert "startupPolicy" not in manifest["spec"]
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 6 and policy["restartStrategy"] == "Recreate"
    assert cluster.after(manifest, [75] * 4 + [0] * 4) == "RestartJob"
    assert cluster.after(manifest, [1] * 8) == "FailJobSet"


@pytest.mark.parametrize("slice_name", ["v5e:2x2", "tpu7x:2x2x1"])
def test_one_host_is_one_process(slice_name, monkeypatch):
    _, manifest = made(specified(slice_name=slice_name))
    for name, value in cluster.environment(manifest, 0).items():
        monkeypatch.setenv(name, value)
    assert rendezvous.read_process_info() is None and not peers._is_tpu_host()
    assert not any("exclusive" in name for name in manifest["metadata"]["annotations"])


def test_every_value_reaches_the_pod_as_it_is():
    odd = "gs://bucket/$(HOME) 'a' \"b\" $$ `c`"
    what = specified(
        workdir=odd,
        environment={"ODD": "$(JAX_PROCESS_ID) $$"},
        settings=("name=$(x)'\"",),
        name="odd",
    )
    config, manifest = made(what)
    mounts = {m["name"]: m["mountPath"] for m in cluster.container(manifest)["volumeMounts"]}
    assert mounts["experiment"] == "/etc/bert_jax"
    assert cluster.environment(manifest, 1)["BERT_JAX_CACHE_DIR"] == mounts["cache"]
    assert config["data"] == {"experiment.json": what.config} and "$(x)'\\\"" in what.config
    assert cluster.words(manifest, 1) == [
        *("bert-jax", "pretrain", "/etc/bert_jax/experiment.json", "--workdir", odd)
    ]
    assert cluster.environment(manifest, 1)["ODD"] == "$(JAX_PROCESS_ID) $$"


def test_pods_have_no_rights_unless_asked_for():
    _, manifest = made(specified())
    assert cluster.pod(manifest)["securityContext"]["runAsNonRoot"]
    assert cluster.container(manifest)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    _, manifest = made(specified(), privileged=True)
    assert cluster.container(manifest)["securityContext"] == {"privileged": True}
