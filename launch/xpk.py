"""The xpk command that starts the same run as our JobSet (github.com/AI-Hypercomputer/xpk, 1.16).

xpk writes a JobSet of its own: it has no place for a file, so that the experiment travels in the
command, and the pods find each other by the variables that GKE sets, as jax reads them.
"""

import base64
import shlex

from bert_jax import errors
from bert_jax.errors import InputError
from launch import names as names_lib
from launch.jobset import Pods
from launch.spec import EXPERIMENT, Spec

# The generations xpk knows, and their smallest slice in chips.
_SMALLEST = {"v4": 4, "v5e": 8, "v5p": 4, "v6e": 1}
# Of its own accord it starts again after 42 and 127 to 255.
_RESTART = f"{errors.UNAVAILABLE},{errors.STOPPED}"


def command(spec: Spec, pods: Pods, cluster: str, zone: str, project: str) -> list[str]:
    """The words of the command.

    Args:
      spec: what is launched.
      pods: image and grace; spot machines and reservations are the cluster's matter in xpk.
      cluster: where, made by `xpk cluster create` or adapted by `xpk cluster adapt`.
      zone: of the cluster.
      project: of the cluster; "": gcloud's own setting.

    Raises:
      InputError: xpk has no such slice, or a flag that it needs is missing.
    """
    assert spec.topology is not None
    generation, _, shape = spec.topology.name.partition(":")
    if spec.topology.chips < _SMALLEST.get(generation, spec.topology.chips + 1):
        raise InputError(f"--topology {spec.topology.name}: xpk has no such slice; leave out --xpk")
    if not cluster or not zone:
        raise InputError("--xpk: name the --cluster and its --zone")
    prefix = names_lib.names(spec.topology).accelerator_type.partition("-")[0]
    return [
        *("xpk", "workload", "create"),
        f"--workload={spec.name}",
        f"--cluster={cluster}",
        f"--zone={zone}",
        *([f"--project={project}"] if project else []),
        *([f"--namespace={pods.namespace}"] if pods.namespace != "default" else []),
        f"--tpu-type={prefix}-{shape}",
        "--num-slices=1",
        f"--docker-image={pods.image}",
        f"--max-restarts={spec.retries}",
        f"--restart-on-exit-codes={_RESTART}",
        f"--termination-grace-period-seconds={pods.grace}",
        *(f"--env={name}={value}" for name, value in sorted(spec.environment.items())),
        f"--command={_shipped(spec)}",
    ]


def _shipped(spec: Spec) -> str:
    """One line for a shell: the experiment's file, and then the run in the shell's place.

    xpk's script hands SIGTERM to this shell, which would not hand it on.
    """
    file = f"/tmp/{EXPERIMENT}"
    encoded = base64.b64encode(spec.config.encode()).decode()
    return f"echo {encoded} | base64 -d > {file} && exec {shlex.join(spec.command(file))}"
