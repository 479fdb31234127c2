"""`python -m launch NAME ARGS`: runs a launcher, or asks about what was launched for a workdir."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from bert_jax import errors
from bert_jax.errors import InputError, Unavailable

from .commands import PROGRAM, say

# Each is a module; imported when it is named, since checks take the whole library.
LAUNCHERS = ("local", "gke", "tpu_vm")
NAMES = (*LAUNCHERS, "status", "logs", "stop")

# Preemptions of a run of days on machines that may be taken back.
_RETRIES = 10
# To finish the steps under way and to save; a spot machine gives half a minute, whatever is asked.
_GRACE = 300
# Without its TPU a host fails, and does not go on with its processor.
ENVIRONMENT = {"JAX_PLATFORMS": "tpu,cpu"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = None
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    parser = _parser()
    for word in words[:1]:
        near = difflib.get_close_matches(word, NAMES, n=1)
        if word == "xpk":
            parser.error(
                "xpk: is a program of its own, which takes `bert-jax pretrain ...` as --command; "
                "docs/launch.md has the whole line, and `gke` makes a JobSet without it"
            )
        if near and word not in NAMES and not word.startswith("-"):
            parser.error(f"{word}: no such launcher; did you mean {near[0]}?")
    args = parser.parse_args(words)
    if command is not None and args.launcher != "local":
        parser.error(f"{args.launcher}: takes no COMMAND after --")
    try:
        if args.launcher == "local":
            if problem := _local_problem(args, command):
                parser.error(problem)
            return _module("local").run(args, command)
        if args.launcher in LAUNCHERS:
            return _module(args.launcher).launch(args, _specified(args))
        return _asked(args)
    except (InputError, Unavailable) as error:
        say(str(error))
        return errors.of_error(error)[1]
    except KeyboardInterrupt:
        say("interrupted")
        return errors.INTERRUPTED


def _module(launcher: str) -> ModuleType:
    return importlib.import_module(f".{launcher}", __package__)


def _local_problem(args: argparse.Namespace, command: Sequence[str] | None) -> str:
    if (args.experiment is None) == (command is None) or command == []:
        return "name an EXPERIMENT, or a COMMAND after --"
    given = (args.workdir, args.set, args.extend, args.retries, args.dry_run)
    if command is not None and any(given):
        return "--workdir, --set, --extend, --retries and --dry-run go with an EXPERIMENT"
    return ""


def _specified(args: argparse.Namespace) -> object:
    """Returns the spec that the flags of a launch on rented machines describe."""
    from bert_jax.plan import topology

    from . import checks, spec

    checks.forced(args.force)  # before anything takes time
    if not args.workdir.startswith("gs://"):
        raise InputError(
            f"--workdir {args.workdir}: rented machines share no disk; name a bucket, "
            "gs://BUCKET/FOLDER"
        )
    return spec.specify(
        args.experiment,
        args.set,
        workdir=args.workdir,
        topology=topology.parse(args.topology),
        name=args.name,
        extend=args.extend,
        environment=ENVIRONMENT,
        retries=args.retries,
    )


def _asked(args: argparse.Namespace) -> int:
    """Answers `status`, `logs` and `stop`."""
    from . import spec

    record = spec.find_record(args.workdir)
    if record is None:
        raise InputError(f"{args.workdir}: nothing is rented for it (no {spec.RECORD})")
    launcher = _module(record.launcher)
    if args.launcher == "stop":
        return launcher.stop(record)
    if args.launcher == "logs":
        if not 0 <= args.host < record.hosts:
            raise InputError(f"--host {args.host}: {record.name} has hosts 0 to {record.hosts - 1}")
        return launcher.logs(record, args.host, args.follow)
    place = ", ".join(f"{name} {value}" for name, value in record.place.items() if value)
    print(f"{record.name}: {record.topology}, {record.hosts} hosts; {record.launcher}, {place}")
    code = launcher.status(record)
    for line in _progress(record.workdir, record.price_per_chip_hour):
        print(line)
    return code


def _progress(workdir: str, price_per_chip_hour: float | None) -> list[str]:
    """Returns lines on how far a run has come, by its own records."""
    from bert_jax.report import records, times
    from bert_jax.storage import mirror

    if not mirror.opened(workdir).experiment.exists():
        return ["run: has written nothing yet"]
    run = records.Record.read(workdir)
    goodput = times.goodput(run.timings).line(price_per_chip_hour)
    return [f"run: {run.state}, step {run.done:,} of {run.experiment.total_steps:,}", goodput]


# --- Flags --------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Leaves with exit code 2."""
        self.exit(
            errors.BAD_INPUT, f"launch: {errors.printable(message)}; see {self.prog} --help\n"
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM, description="Start a run in several processes, here or elsewhere."
    )
    commands = parser.add_subparsers(dest="launcher", required=True, metavar="NAME")
    _add_local(
        commands.add_parser(
            "local",
            usage=f"{PROGRAM} local [FLAGS] EXPERIMENT\n       {PROGRAM} local [FLAGS] -- COMMAND",
            help="several processes on this machine that are one run",
            epilog="exit code: 0 finished; 75 stopped on request, run again to go on; 74 the "
            "machine or the network failed, run again to go on; else that of the process that "
            "failed first, 128 and the signal's number if it was killed",
        )
    )
    gke = commands.add_parser(
        "gke",
        help="a TPU slice of a GKE cluster, as a JobSet",
        epilog="exit code: 0 launched; 2 bad input, or the cluster has refused",
    )
    _add_rented(gke)
    gke.add_argument(
        "--image",
        required=True,
        metavar="IMAGE:TAG",
        help="container image, made by the Dockerfile and pushed",
    )
    gke.add_argument(
        "--cluster", default="", help="name of the cluster [the one that kubectl is set to]"
    )
    gke.add_argument("--zone", default="", help="the cluster's zone or region")
    gke.add_argument("--project", default="", help="the cluster's project")
    gke.add_argument("--namespace", default="default", help="[default]")
    gke.add_argument(
        "--service-account",
        default="",
        metavar="NAME",
        help="Kubernetes service account that may use the bucket [the namespace's default]",
    )
    tier = gke.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help="cheaper machines, may be taken back")
    tier.add_argument("--reservation", default="", metavar="NAME", help="your reservation to use")
    gke.add_argument(
        "--grace",
        type=int,
        default=_GRACE,
        metavar="S",
        help=f"seconds a pod has to save when it is asked to end [{_GRACE}]",
    )
    gke.add_argument(
        "--privileged",
        action="store_true",
        help="run pods as root with all rights, for nodes that give their TPUs only to such",
    )
    tpu_vm = commands.add_parser(
        "tpu_vm",
        help="the hosts of a TPU slice that is rented for the run",
        epilog="exit code: 0 finished; 74, 75, 134 launch again to go on; 1 the run failed; 2 bad "
        "input, or no machines",
    )
    _add_rented(tpu_vm)
    tpu_vm.add_argument("--zone", required=True, help="where to rent, e.g. us-west4-a")
    tpu_vm.add_argument(
        "--project", default="", help="Google Cloud project that is billed [gcloud's own setting]"
    )
    tier = tpu_vm.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help="cheaper machines, may be taken back")
    tier.add_argument("--reserved", action="store_true", help="machines of your reservation")
    tpu_vm.add_argument(
        "--valid-until",
        default="24h",
        metavar="T",
        help="how long to wait for machines: 90m, 2d [24h]",
    )
    tpu_vm.add_argument(
        "--runtime-version", metavar="V", help="software version of the machines [by type of TPU]"
    )
    tpu_vm.add_argument(
        "--keep",
        action="store_true",
        help="keep the machines at the end, and pay for them; Ctrl-C leaves the run going, too",
    )
    for name, description in (
        ("status", "show the machines of a launched run, and how far it has come"),
        ("logs", "show the output of a host of a launched run"),
        ("stop", "have a launched run save and end, and give its machines back"),
    ):
        asked = commands.add_parser(name, help=description)
        asked.add_argument("workdir", metavar="W", help="workdir of the run")
        if name == "logs":
            asked.add_argument(
                "--host", type=int, default=0, metavar="N", help="host whose output is shown [0]"
            )
            asked.add_argument(
                "--follow", action="store_true", help="keep showing until the run ends"
            )
    return parser


def _add_experiment(parser: argparse.ArgumentParser, retries: int) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="change a field; repeatable"
    )
    parser.add_argument("--extend", action="store_true", help="go on beyond the end of a run")
    parser.add_argument(
        "--retries",
        type=_at_least_0,
        default=retries,
        metavar="N",
        help=f"most restarts after a preemption or the loss of a host [{retries}]",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every command and file as a script of bash; nothing is checked or started",
    )


def _add_rented(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that all launchers of rented machines have."""
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a file, .py or resolved .json")
    parser.add_argument("--workdir", required=True, metavar="gs://...", help="folder of the run")
    parser.add_argument(
        "--topology", required=True, metavar="SLICE", help="TPUs: v5e:8x8, v3:4x4, ..."
    )
    _add_experiment(parser, _RETRIES)
    parser.add_argument(
        "--name", help="name of what is rented [the experiment's name and the hash of its config]"
    )
    parser.add_argument(
        "--price-per-chip-hour", type=float, metavar="P", help="to show costs, in any currency"
    )
    parser.add_argument(
        "--force",
        default="",
        metavar="CHECKS",
        help="leave out checks, comma-separated: commit, workdir, doctor, plan",
    )


def _add_local(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiment", nargs="?", metavar="EXPERIMENT", help="a file, .py or resolved .json"
    )
    parser.add_argument(
        "--processes", type=_count, default=2, metavar="N", help="processes to start [2]"
    )
    parser.add_argument(
        "--devices-per-process",
        type=_count,
        default=1,
        metavar="D",
        help="virtual CPU devices of each [1]",
    )
    parser.add_argument(
        "--arrive-within",
        type=_seconds,
        default=120.0,
        metavar="S",
        help="seconds that processes have to connect to each other [120]",
    )
    parser.add_argument(
        "--hang-after",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="print all stacks and end after so many seconds without a step; set it longer than "
        "compilation, an evaluation and a save take [600]",
    )
    parser.add_argument("--workdir", metavar="W", help="folder of the EXPERIMENT's run [runs/NAME]")
    _add_experiment(parser, 0)


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1024:
        raise argparse.ArgumentTypeError("must be between 1 and 1024")
    return value


def _at_least_0(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
