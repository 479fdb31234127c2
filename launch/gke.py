"""`python -m launch gke EXPERIMENT ...`: a run on GKE, as the JobSet of `launch.jobset`.

The cluster has, or makes, the machines. Kubernetes starts the pods, and starts all of them again
when one was preempted or lost, but not when the run itself has failed (`spec.FINAL`).
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import time
from collections.abc import Iterator, Mapping
from typing import Any

from bert_jax import errors
from bert_jax.errors import InputError
from bert_jax.storage.workdir import named_errors, write_atomic

from . import checks, jobset
from .commands import PROGRAM, Done, run, say, show
from .spec import FINAL, Record, Spec, find_record, script_that_writes, staging

_MANIFEST = "manifest.yaml"
# For a command of kubectl's with an answer of its own, and one that waits for pods to save.
_QUICK, _DELETE = 120.0, 1200.0

# A part of what kubectl prints (in lower case): what it means, and what to do.
_MEANINGS = (
    ("no matches for kind", "the cluster has no JobSet; install it, see docs/launch.md"),
    ("doesn't have a resource type", "the cluster has no JobSet; install it, see docs/launch.md"),
    ("exceeded quota", "the namespace's quota is used up; raise it, or name another --namespace"),
    ("forbidden", "you may not do this; ask for the role Kubernetes Engine Developer"),
    ("unauthorized", "sign in with `gcloud auth login`"),
    ("current-context is not set", "name the --cluster, its --zone and --project"),
    ("does not exist", "`gcloud container clusters get-credentials` the cluster"),
    ("connection to the server", "is the cluster running, and can it be reached from here?"),
    ("unable to connect", "is the cluster running, and can it be reached from here?"),
    ("i/o timeout", "is the cluster running, and can it be reached from here?"),
)


def context(cluster: str, zone: str, project: str) -> str:
    """Returns the name that `gcloud container clusters get-credentials` gives a cluster.

    Args:
      cluster: "": the one that kubectl is set to.
      zone: of the cluster, or its region.
      project: of the cluster.
    """
    if cluster and zone and project:
        return f"gke_{project}_{zone}_{cluster}"
    if cluster or zone or project:
        raise InputError("name --cluster, --zone and --project together, or none of them")
    return _asked("kubectl", ["kubectl", "config", "current-context"]).out.strip()


def _asked(what: str, argv: list[str], seconds: float = _QUICK) -> Done:
    """Returns what kubectl answers."""
    done = run(argv, seconds)
    if done.code:
        lower = done.err.lower()
        remedy = next((f"; {remedy}" for part, remedy in _MEANINGS if part in lower), "")
        raise InputError(f"{what}: {done.complaint}{remedy}")
    return done


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kubectl:
    """The words of every kubectl command about one JobSet."""

    name: str  # of the JobSet and its ConfigMap
    context: str  # the cluster, as kubectl knows it; "": the one it is set to
    namespace: str  # where they live

    def get(self, output: str) -> list[str]:
        """Returns the command that prints the JobSet; nothing if there is none."""
        return self._words("get", "jobset", self.name, "--ignore-not-found", f"--output={output}")

    def pods(self) -> list[str]:
        """Returns the command that prints its pods, where they run and why they wait."""
        return self._words("get", "pods", f"--selector={jobset.OWNER}={self.name}", "--output=wide")

    def apply(self, path: pathlib.Path) -> list[str]:
        """Returns the command that makes what the file describes."""
        return self._words("apply", f"--filename={path}")

    def delete(self) -> list[str]:
        """Returns the command that ends all pods as their grace allows, and waits for their end."""
        return self._words(
            *("delete", "jobset,configmap", self.name, "--ignore-not-found"),
            *("--cascade=foreground", f"--timeout={round(_DELETE)}s"),
        )

    def logs(self, host: int, follow: bool) -> list[str]:
        """Returns the command that prints the output of a pod."""
        return self._words(
            *("logs", f"--selector={jobset.OWNER}={self.name},{jobset.INDEX}={host}"),
            *(f"--container={jobset.CONTAINER}", "--tail=-1"),
            *(["--follow"] if follow else []),
        )

    def _words(self, *words: str) -> list[str]:
        cluster = [f"--context={self.context}"] if self.context else []
        return ["kubectl", *cluster, f"--namespace={self.namespace}", *words]


# --- The commands -------------------------------------------------------------------------------


def launch(args: argparse.Namespace, spec: Spec) -> int:
    """Applies the JobSet; the same command again finds it and leaves it alone.

    Args:
      args: flags of `launch gke`.
      spec: what is launched.

    Returns:
      FINISHED: Kubernetes does the rest.
    """
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
    path = staging(spec.name) / _MANIFEST
    # What kubectl is set to is not asked by a dry run: it asks nobody.
    known = args.cluster or args.zone or args.project or not args.dry_run
    cluster = context(args.cluster, args.zone, args.project) if known else ""
    kubectl = Kubectl(name=spec.name, context=cluster, namespace=args.namespace)
    if args.dry_run:
        print("\n".join(_script(spec, pods, kubectl, path, manifest)))
        return errors.FINISHED
    checks.check(spec, checks.forced(args.force), args.price_per_chip_hour)
    if _is_under_way(spec, kubectl):
        say(f"{spec.name} is there already, and goes on")
        return errors.FINISHED
    assert spec.topology is not None
    record = Record(
        launcher="gke",
        place={"context": cluster, "namespace": args.namespace},
        name=spec.name,
        workdir=spec.workdir,
        topology=spec.topology.name,
        hosts=spec.hosts,
        config_sha256=spec.sha256,
        time=time.time(),
        price_per_chip_hour=args.price_per_chip_hour,
    )
    record.write()
    with named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, manifest)
    try:
        _asked(f"{spec.name}: not launched", kubectl.apply(path))
    except (InputError, KeyboardInterrupt) as error:  # a part of it may have been made
        try:
            _delete(record)
        except InputError as another:
            raise InputError(f"{str(error) or 'interrupted'}; {another}") from error
        raise
    say(
        f"{spec.name} is launched: {spec.hosts} pods on {spec.topology.name}; `{PROGRAM} "
        f"status {spec.workdir}` shows them, `logs` their output"
    )
    return errors.FINISHED


def _is_under_way(spec: Spec, kubectl: Kubectl) -> bool:
    """Returns whether this run's JobSet is there; one that has ended is deleted."""
    out = _asked(spec.name, kubectl.get("json")).out
    try:
        there: Mapping[str, Any] = json.loads(out or "{}")
    except ValueError as error:
        raise InputError(f"{spec.name}: kubectl does not answer with JSON") from error
    if not there:
        return False
    if ended := there.get("status", {}).get("terminalState"):
        say(f"{spec.name} has ended before (JobSet {ended}); deleting it")
        _asked(spec.name, kubectl.delete(), _DELETE + _QUICK)
        return False
    if there["metadata"].get("annotations", {}).get(jobset.SHA256) != spec.sha256:
        raise InputError(
            f"{spec.name}: is there already, with another experiment; `{PROGRAM} stop` ends "
            "it, or name another with --name"
        )
    before = find_record(spec.workdir)
    if before is None or (before.launcher, before.name) != ("gke", spec.name):
        raise InputError(
            f"{spec.name}: is there already, and was not launched for {spec.workdir}; name another "
            "with --name"
        )
    return True


def status(record: Record) -> int:
    """Shows the JobSet and its pods; returns kubectl's exit code."""
    kubectl = _of(record)
    return show(kubectl.get("wide")) or show(kubectl.pods())


def logs(record: Record, host: int, follow: bool) -> int:
    """Shows the output of a host; that of before a restart is in Cloud Logging alone."""
    return show(_of(record).logs(host, follow))


def stop(record: Record) -> int:
    """Stops the pods once they have saved, and deletes all that was made."""
    say(f"deleting {record.name}; its pods save first")
    _delete(record)
    say(f"{record.name} is deleted; `bert-jax checkpoints {record.workdir}` lists what is saved")
    return errors.FINISHED


def _delete(record: Record) -> None:
    """Deletes all that was made, once the pods have ended, and the record."""
    argv = _of(record).delete()
    try:
        _asked("kubectl", argv, _DELETE + _QUICK)
    except (InputError, KeyboardInterrupt) as error:
        raise InputError(
            f"{record.name}: may still be there and cost money ({error or 'interrupted'}); delete "
            f"it with: {shlex.join(argv)}"
        ) from error
    record.remove()


def _of(record: Record) -> Kubectl:
    return Kubectl(name=record.name, **record.place)


def _script(
    spec: Spec, pods: jobset.Pods, kubectl: Kubectl, path: pathlib.Path, manifest: str
) -> Iterator[str]:
    assert spec.topology is not None
    yield "#!/usr/bin/env bash"
    yield f"# {spec.name}: {spec.topology.name}, {spec.topology.chips} chips on {spec.hosts} hosts;"
    yield f"# image {pods.image}, config sha256 {spec.sha256}."
    yield "# Checked before, unless --force names it: the commit, the workdir, doctor, plan."
    yield "set -eu"
    yield ""
    yield "# One of this name that has not ended is left alone; one that has is deleted first."
    yield shlex.join(kubectl.get("json"))
    yield ""
    yield shlex.join(["mkdir", "-p", os.fspath(path.parent)])
    yield from script_that_writes(path, manifest)
    yield shlex.join(kubectl.apply(path))
    yield ""
    final = ", ".join(map(str, FINAL))
    yield f"# A pod that ends with exit code {final} is the end. Any other end but 0 (75 is a"
    yield f"# preemption) starts all pods again, {spec.retries} times at most."
    yield f"# `{PROGRAM} status`, `logs` and `stop` of the workdir do:"
    for words in (kubectl.pods(), kubectl.logs(0, True), kubectl.delete()):
        yield f"#   {shlex.join(words)}"
