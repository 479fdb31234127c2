"""One host of a rehearsal: `rehearse.py FOLDER ATTEMPT WHO STEP WHAT`, in a local pod.

It starts what GKE would: the container of the manifest in FOLDER, with the variables that
Kubernetes, JobSet and GKE give that pod. Only what this machine does not have is replaced: its TPU,
names of other hosts, and the folders of a container. The run's exit code goes to
FOLDER/code-ATTEMPT-NUMBER; process WHO gets the signal WHAT before step STEP (`pod_member.py`).
"""

import os
import pathlib
import subprocess
import sys

import cluster

from launch import jobset

HERE = pathlib.Path(__file__).resolve().parent
MEMBER = HERE.parent / "distributed" / "pod_member.py"
# What the local pod says of its processes: instead of a TPU, and of names in a cluster's network.
OURS = (
    *("JAX_PLATFORMS", "XLA_FLAGS", "NPROC"),
    *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"),
)


def on_gke(folder: pathlib.Path, number: int, program: list[str]) -> int:
    """Runs the pod's container; returns its exit code."""
    config, manifest = cluster.read((folder / "manifest.yaml").read_text())
    slice_, index = divmod(number, cluster.job(manifest)["completions"])
    given = cluster.environment(manifest, index, "127.0.0.1", slice_)
    assert given["JAX_NUM_PROCESSES"] == os.environ["JAX_NUM_PROCESSES"]
    mounted = folder / f"pod-{number}"
    mounted.mkdir(exist_ok=True)
    for name, text in config["data"].items():
        (mounted / name).write_text(text)
    words = [
        word.replace(jobset.CONFIG_FOLDER, str(mounted)) for word in cluster.words(manifest, number)
    ]
    at = words.index("bert-jax")
    given |= {name: os.environ[name] for name in OURS}
    given["BERT_JAX_CACHE_DIR"] = str(mounted / "cache")
    words[at : at + 1] = program
    return subprocess.run(words, env=os.environ | given, check=False).returncode


def main(folder: pathlib.Path, attempt: str, *deed: str) -> int:
    """Returns the run's exit code."""
    number = int(os.environ["JAX_PROCESS_ID"])
    program = [sys.executable, str(MEMBER), str(folder / f"rows-{attempt}"), *deed]
    code = on_gke(folder, number, program)
    (folder / f"code-{attempt}-{number}").write_text(str(code))
    return code


PODS = jobset.Pods(
    image="bert-jax:1",
    namespace="default",
    service_account="",
    node_labels={},
    grace=300,
    privileged=False,
)


def files(folder: pathlib.Path, spec) -> None:
    """Writes the manifest of a spec."""
    folder.mkdir(parents=True)
    (folder / "manifest.yaml").write_text(jobset.render_manifest(spec, PODS))


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), *sys.argv[2:]))
