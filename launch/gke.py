"""`python -m launch gke EXPERIMENT ...`: a run on GKE, as the JobSet of `launch.jobset`.

The cluster has, or makes, the machines. Kubernetes starts the pods, and starts all of them again
when one was preempted or lost, but not when the run itself has failed (`spec.FINAL`).
"""

import argparse
import os
import shlex
from collections.abc import Iterator

from bert_jax.errors import InputError

from . import jobset
from .spec import FINAL, Spec, script_that_writes, staging

# To wait for pods that save before they end.
_DELETE_SECONDS = 1200


def script(args: argparse.Namespace, spec: Spec) -> Iterator[str]:
    """Yields the lines of the script that applies the JobSet, unless it is there already."""
    if args.grace < 1:
        raise InputError(f"--grace {args.grace}: must be at least 1")
    pods = jobset.Pods(
        image=jobset.checked_image(args.image),
        namespace=args.namespace,
        service_account=args.service_account,
        capacity=jobset.capacity(args.spot, args.reservation),
        grace=args.grace,
        privileged=args.privileged,
    )
    manifest = jobset.text(spec, pods)
    path = staging(spec.name) / "manifest.yaml"
    kubectl = ["kubectl", *_context(args), f"--namespace={args.namespace}"]
    get = [*kubectl, "get", "jobset", spec.name, "--ignore-not-found"]
    of = f"--selector={jobset.OWNER}={spec.name}"
    # Ends all pods as their grace allows, and waits for their end.
    delete = shlex.join(
        [
            *(*kubectl, "delete", "jobset,configmap", spec.name, "--ignore-not-found"),
            *("--cascade=foreground", f"--timeout={_DELETE_SECONDS}s"),
        ]
    )
    logs = [*kubectl, "logs", f"{of},{jobset.INDEX}=0", f"--container={jobset.CONTAINER}"]
    yield "#!/usr/bin/env bash"
    topology = spec.rented_topology
    yield f"# {spec.name}: {topology.name}, {topology.chips} chips on {spec.hosts} hosts;"
    yield f"# image {pods.image}, config sha256 {spec.sha256}."
    yield "# Checked before, unless --force names it: the commit, the workdir, doctor, plan."
    yield f"# A pod that ends with exit code {', '.join(map(str, FINAL))} is the end. Any other end"
    yield f"# but 0 (75 is a preemption) starts all pods again, {spec.retries} times at most."
    yield "# Its pods, the log of its first host, and its end:"
    yield f"#   {shlex.join([*kubectl, 'get', 'pods', of, '--output=wide'])}"
    yield f"#   {shlex.join([*logs, '--tail=-1', '--follow'])}"
    yield f"#   {delete}"
    yield "set -eu"
    yield f"there=$({shlex.join([*get, '--output=name'])})"
    yield f"ended=$({shlex.join([*get, '--output=jsonpath={.status.terminalState}'])})"
    yield 'if [ -n "$ended" ]; then'
    yield f'  echo "launch: {spec.name} has ended before (JobSet $ended); deleting it" >&2'
    yield f"  {delete}"
    yield "  there="
    yield "fi"
    yield ""
    yield shlex.join(["mkdir", "-p", os.fspath(path.parent)])
    yield from script_that_writes(path, manifest)
    yield "# One that goes on is not changed by this: another experiment of its name is refused."
    yield f"if ! {shlex.join([*kubectl, 'apply', f'--filename={path}'])}; then"
    yield f'  [ -n "$there" ] || {delete}'
    yield "  exit 2"
    yield "fi"
    yield f'echo "launch: {spec.name} is launched; the first lines of $0 show and end it" >&2'


def _context(args: argparse.Namespace) -> list[str]:
    """Returns the flag that names the cluster as gcloud's get-credentials does; none: its own."""
    place = (args.project, args.zone, args.cluster)
    if any(place) and not all(place):
        raise InputError("name --cluster, --zone and --project together, or none of them")
    return [f"--context=gke_{'_'.join(place)}"] if all(place) else []
