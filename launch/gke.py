"""`python -m launch gke EXPERIMENT ...`: a run on GKE, as the JobSet of `launch.jobset`.

The cluster has the machines or creates them. Kubernetes starts the pods, and restarts all of them
when one was preempted or lost, but not when the run itself has failed (`spec.FINAL`).
"""

import argparse
import os
import shlex
from collections.abc import Iterator

from bert_jax.errors import InputError

from . import jobset
from .spec import FINAL, Spec, heredoc, staging_folder

# Seconds to wait for pods, which save before they end.
_DELETE_SECONDS = 1200


def script(args: argparse.Namespace, spec: Spec) -> Iterator[str]:
    """Yields the lines of the script that applies the JobSet."""
    if args.grace < 1:
        raise InputError(f"--grace {args.grace}: must be at least 1")
    pods = jobset.Pods(
        image=jobset.require_pinned_image(args.image),
        namespace=args.namespace,
        service_account=args.service_account,
        node_labels=jobset.node_labels(args.spot, args.reservation),
        grace=args.grace,
        privileged=args.privileged,
    )
    manifest = jobset.render_manifest(spec, pods)
    path = staging_folder(spec.name) / "manifest.yaml"
    kubectl = ["kubectl", *_context(args), f"--namespace={args.namespace}"]
    get = [*kubectl, "get", "jobset", spec.name, "--ignore-not-found"]
    selector = f"--selector={jobset.OWNER}={spec.name}"
    # Ends all pods within their grace period, and waits for their end.
    delete = shlex.join(
        [
            *(*kubectl, "delete", "jobset,configmap", spec.name, "--ignore-not-found"),
            *("--cascade=foreground", f"--timeout={_DELETE_SECONDS}s"),
        ]
    )
    logs = [*kubectl, "logs", f"{selector},{jobset.INDEX}=0", f"--container={jobset.CONTAINER}"]
    yield "#!/usr/bin/env bash"
    topology = spec.rented_topology
    yield f"# {spec.name}: {topology.name}, {topology.chips} chips on {spec.hosts} hosts;"
    yield f"# image {pods.image}, config sha256 {spec.sha256}."
    yield "# Checked before, unless --force names it: the commit, the workdir, doctor, plan."
    yield f"# Exit codes {', '.join(map(str, FINAL))} of a pod end the run. Others except 0, such"
    yield f"# as 75 after a preemption, restart all pods, {spec.retries} times at most."
    yield "# To list its pods, to follow the log of its first host, and to end it:"
    yield f"#   {shlex.join([*kubectl, 'get', 'pods', selector, '--output=wide'])}"
    yield f"#   {shlex.join([*logs, '--tail=-1', '--follow'])}"
    yield f"#   {delete}"
    yield "set -eu"
    yield f"existing=$({shlex.join([*get, '--output=name'])})"
    yield f"ended=$({shlex.join([*get, '--output=jsonpath={.status.terminalState}'])})"
    yield 'if [ -n "$ended" ]; then'
    yield f'  echo "launch: {spec.name} has ended before (JobSet $ended); deleting it" >&2'
    yield f"  {delete}"
    yield "  existing="
    yield "fi"
    yield ""
    yield shlex.join(["mkdir", "-p", os.fspath(path.parent)])
    yield from heredoc(path, manifest)
    yield "# No change if it is running; another experiment of the same name is refused."
    yield f"if ! {shlex.join([*kubectl, 'apply', f'--filename={path}'])}; then"
    yield f'  [ -n "$existing" ] || {delete}'
    yield "  exit 2"
    yield "fi"
    yield f'echo "launch: {spec.name} is launched; see $0 for commands to follow or end it" >&2'


def _context(args: argparse.Namespace) -> list[str]:
    """Returns kubectl's flag for the context that gcloud made; [] for the current context."""
    cluster = (args.project, args.zone, args.cluster)
    if any(cluster) and not all(cluster):
        raise InputError("name --cluster, --zone and --project together, or none of them")
    return [f"--context=gke_{'_'.join(cluster)}"] if all(cluster) else []
