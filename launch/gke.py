"""`python -m launch gke EXPERIMENT ...`: a run as a JobSet, a pod on each host of a TPU slice.

The cluster has, or makes, the machines. Kubernetes starts the pods, and starts all of them again
when one was preempted or lost, but not when the run itself has failed (`launch.jobset`).
"""

import argparse
import os
import shlex
import time
from collections.abc import Iterator, Sequence

from etils import epath

from bert_jax import errors
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage.workdir import named_errors, write_atomic
from launch import arguments, checks, console, dry_run, jobset, kubectl, shipping, tools
from launch import xpk as xpk_lib
from launch.gke_launched import Launched
from launch.jobset import Pods
from launch.kubectl import Kubectl
from launch.spec import Spec
from launch.target import Record, find, require_no_other
from launch.verdict import FAILURES

# To finish the steps under way and to save; a spot machine gives half a minute, whatever is asked.
_GRACE = 300
MANIFEST = "manifest.yaml"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code of the launch; see its --help."""
    args = _parser().parse_args(argv)
    try:
        return _launch(args)
    except (InputError, Unavailable) as error:
        console.say(str(error))
        return errors.of_error(error)[1]
    except KeyboardInterrupt:
        console.say("interrupted")
        return errors.INTERRUPTED


def target(record: Record) -> Launched:
    """The run that a record tells of."""
    return Launched(record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch gke",
        description="Run an experiment on a TPU slice of a GKE cluster, as a JobSet.",
        epilog="exit code: 0 launched, see `python -m launch status`; 2 bad input, or the cluster "
        "has refused",
    )
    arguments.add(parser)
    parser.add_argument(
        "--image", required=True, metavar="IMAGE:TAG", help="made by the Dockerfile, and pushed"
    )
    parser.add_argument("--cluster", default="", help="[what kubectl is set to]")
    parser.add_argument("--zone", default="", help="of the cluster, or its region")
    parser.add_argument("--project", default="", help="of the cluster")
    parser.add_argument("--namespace", default="default", help="[default]")
    parser.add_argument(
        "--service-account",
        default="",
        metavar="NAME",
        help="of Kubernetes, which may use the bucket [the namespace's default]",
    )
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help="cheaper, and may be taken back")
    tier.add_argument("--reservation", default="", metavar="NAME", help="out of a reservation")
    parser.add_argument(
        "--grace",
        type=int,
        default=_GRACE,
        metavar="S",
        help=f"seconds a pod has to save when it is told to end [{_GRACE}]",
    )
    parser.add_argument(
        "--privileged",
        action="store_true",
        help="run as root with all rights, where a node gives its TPUs to nobody else",
    )
    parser.add_argument(
        "--xpk", action="store_true", help="print the xpk command that does the same, and end"
    )
    return parser


def _launch(args: argparse.Namespace) -> int:
    force = checks.forced(args.force)
    spec = arguments.specified(args)
    pods = _pods(args)
    if args.xpk:
        console.tell(shlex.join(xpk_lib.command(spec, pods, args.cluster, args.zone, args.project)))
        return errors.FINISHED
    manifest = jobset.text(spec, pods)
    if args.dry_run:
        # What kubectl is set to is not asked: a dry run asks nobody.
        named = args.cluster or args.zone or args.project
        context = kubectl.context(args.cluster, args.zone, args.project) if named else ""
        for line in _dry_run(spec, pods, context, manifest):
            console.tell(line)
        return errors.FINISHED
    context = kubectl.context(args.cluster, args.zone, args.project)
    record = _record(spec, context, args.namespace, args.price_per_chip_hour)
    checks.check(spec, force, args.price_per_chip_hour, console.say)
    _make_room(record)
    _create(record, manifest)
    console.say(
        f"{spec.name} is launched: {spec.hosts} pods on {args.topology}; "
        f"`python -m launch status {spec.workdir}` says how it stands, `logs` what it says"
    )
    return errors.FINISHED


def _pods(args: argparse.Namespace) -> Pods:
    if args.grace < 1:
        raise InputError(f"--grace {args.grace}: must be at least 1")
    return Pods(
        image=jobset.checked_image(args.image),
        namespace=args.namespace,
        service_account=args.service_account,
        capacity=jobset.capacity(args.spot, args.reservation),
        grace=args.grace,
        privileged=args.privileged,
    )


def _record(spec: Spec, context: str, namespace: str, price: float | None) -> Record:
    assert spec.topology is not None
    return Record(
        target="gke",
        name=spec.name,
        place={"context": context, "namespace": namespace},
        workdir=spec.workdir,
        topology=spec.topology.name,
        hosts=spec.hosts,
        config_sha256=spec.sha256,
        commit="",  # the image's, which its label tells
        time=time.time(),
        price_per_chip_hour=price,
    )


def _make_room(record: Record) -> None:
    """Deletes a JobSet of this name that has ended.

    Raises:
      InputError: there is one that has not, or that was not launched for this workdir; or this
        workdir's launch before has another name and is there.
    """
    require_no_other(record)
    launched = Launched(record)
    state = launched.state()
    if state.word == "gone":
        return
    before = find(record.workdir)
    if before is None or not before.rents_the_same(record):
        raise InputError(
            f"{record.name}: is there already ({state.detail}), and was not launched for "
            f"{record.workdir}; name another with --name"
        )
    if state.word != "ended":
        raise InputError(
            f"{record.name}: is there already ({state.detail}); `python -m launch stop "
            f"{record.workdir}` ends it"
        )
    console.say(f"{record.name} has ended before ({state.detail}); deleting it")
    launched.delete(kubectl.QUICK)


def _create(record: Record, manifest: str) -> None:
    """Applies the manifest; takes back what was made of it if that fails.

    Raises:
      InputError: the cluster refuses it.
    """
    folder = epath.Path(shipping.staging(record.name))
    path = folder / MANIFEST
    with named_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, manifest)
    record.write()
    record.write(os.fspath(folder))
    try:
        done = tools.run(_kubectl(record).apply(os.fspath(path)), kubectl.QUICK)
        if done.code:
            raise InputError(kubectl.meaning(f"{record.name}: not launched", done))
    except BaseException as error:
        try:
            Launched(record).delete(kubectl.QUICK)
        except InputError as another:
            raise InputError(f"{error}; {another}") from error
        raise


def _kubectl(record: Record) -> Kubectl:
    return Kubectl(
        name=record.name, context=record.place["context"], namespace=record.place["namespace"]
    )


def _dry_run(spec: Spec, pods: Pods, context: str, manifest: str) -> Iterator[str]:
    """The script of a launch that meets no trouble, with remarks on what is done about trouble."""
    assert spec.topology is not None
    words = Kubectl(name=spec.name, context=context, namespace=pods.namespace)
    folder = shipping.staging(spec.name)
    path = folder / MANIFEST
    yield "#!/usr/bin/env bash"
    yield f"# {spec.name}: {spec.topology.name}, {spec.topology.chips} chips on {spec.hosts} hosts;"
    yield f"# image {pods.image}, config sha256 {spec.sha256}."
    yield "# Checked before, unless --force names it: the commit, the workdir, doctor, plan."
    yield "set -eu"
    yield ""
    yield "# One of this name that has not ended is left alone, and nothing is launched; one that"
    yield "# has ended is deleted first."
    yield shlex.join(words.get())
    yield ""
    yield shlex.join(["mkdir", "-p", os.fspath(folder)])
    yield from dry_run.written(path, manifest)
    yield shlex.join(words.apply(os.fspath(path)))
    yield ""
    failures = ", ".join(map(str, FAILURES))
    yield f"# A pod that ends with exit code {failures} is the end. Any other end but 0 (75 is a"
    yield f"# preemption) starts all pods again, {spec.retries} times at most."
    yield "# If the cluster refuses it, and by `python -m launch stop`, after the pods have saved:"
    yield f"#   {shlex.join(words.delete(kubectl.QUICK))}"
