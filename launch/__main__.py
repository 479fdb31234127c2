"""`bert-jax launch LAUNCHER ARGS`: starts a run in several processes, here or on rented machines.

For rented machines, the launcher's module makes one bash script. `--dry-run` prints the script;
otherwise it is executed after the checks of `launch.checks`.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from bert_jax import errors
from bert_jax.errors import InputError, Unavailable
from bert_jax.process import prepare_process
from bert_jax.system import restart_in_utf8_mode

# The command that starts this package: in a checkout, or as part of the installed package.
PROGRAM = "python -m launch" if __package__ == "launch" else "bert-jax launch"
LAUNCHERS = ("local", "gke", "tpu_vm")

# Restarts after preemptions, enough for a run of some days on spot machines.
_RETRIES = 10
# Seconds to finish dispatched steps and to save; spot machines give only half a minute.
_GRACE = 300
_SPOT_HELP = "cheaper machines that may be preempted"
# JAX raises if a listed platform is missing: a host without its TPU does not train on its CPU.
ENVIRONMENT = {"JAX_PLATFORMS": "tpu,cpu"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit code."""
    if argv is None:
        restart_in_utf8_mode()
        prepare_process()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = None
    if "--" in arguments:
        separator = arguments.index("--")
        arguments, command = arguments[:separator], arguments[separator + 1 :]
    parser = _make_parser()
    close = difflib.get_close_matches(arguments[0], LAUNCHERS, n=1) if arguments else []
    if close and arguments[0] not in LAUNCHERS:
        parser.error(f"{arguments[0]}: no such launcher; did you mean {close[0]}?")
    args = parser.parse_args(arguments)
    if command is not None and args.launcher != "local":
        parser.error(f"{args.launcher}: takes no COMMAND after --")
    try:
        if args.code:
            from bert_jax.config import code

            code.allow_code_file(args.code)
        if args.launcher != "local":
            return _launch_rented(args)
        if problem := _find_local_problem(args, command):
            parser.error(problem)
        from . import local  # slow to import, and --help does not need it

        return local.run(args, command)
    except (InputError, Unavailable) as error:
        print(f"launch: {errors.printable(str(error))}", file=sys.stderr)
        return errors.message_and_code(error)[1]
    except KeyboardInterrupt:
        print("launch: interrupted", file=sys.stderr)
        return errors.INTERRUPTED


def _find_local_problem(args: argparse.Namespace, command: Sequence[str] | None) -> str:
    if (args.experiment is None) == (command is None) or command == []:
        return "name an EXPERIMENT, or a COMMAND after --"
    flags = (args.workdir, args.set, args.code, args.extend, args.retries, args.dry_run)
    if command is not None and any(flags):
        return "--workdir, --set, --code, --extend, --retries and --dry-run need an EXPERIMENT"
    return ""


def _launch_rented(args: argparse.Namespace) -> int:
    """Launches on rented machines: prints the script, or runs the checks and executes it."""
    from etils import epath

    from bert_jax.storage.workdir import translate_os_errors, write_atomic
    from bert_jax.tools.plan import topology

    from . import checks, gke, spec, tpu_vm

    skipped = checks.parse_force(args.force)  # before anything takes time
    if not args.workdir.startswith("gs://"):
        raise InputError(
            f"--workdir {args.workdir}: rented machines share no disk; name a bucket, "
            "gs://BUCKET/FOLDER"
        )
    run_spec = spec.make_spec(
        args.experiment,
        args.set,
        workdir=args.workdir,
        topology=topology.parse(args.topology),
        name=args.name,
        extend=args.extend,
        environment=ENVIRONMENT,
        retries=args.retries,
    )
    launcher = gke if args.launcher == "gke" else tpu_vm
    script = "\n".join(launcher.script(args, run_spec)) + "\n"
    if args.dry_run:
        print(script, end="")
        return errors.FINISHED
    checks.run_checks(run_spec, skipped, args.price_per_chip_hour)
    path = spec.staging_folder(run_spec.name) / "launch.sh"
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(epath.Path(path), script)
    spec.report(f"running {path}")
    sys.stdout.flush()  # the findings of doctor, which exec would discard
    # Replaces this process, so that signals reach the script.
    return os.execvp("bash", ["bash", os.fspath(path)])


# --- Flags --------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        self.exit(
            errors.BAD_INPUT, f"launch: {errors.printable(message)}; see {self.prog} --help\n"
        )


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM, description="Start a run in several processes, here or elsewhere."
    )
    commands = parser.add_subparsers(dest="launcher", required=True, metavar="NAME")
    local = commands.add_parser(
        "local",
        usage=f"{PROGRAM} local [FLAGS] EXPERIMENT\n       {PROGRAM} local [FLAGS] -- COMMAND",
        help="several processes on this machine that are one run",
        epilog="exit code: 0 finished; 75 stopped on request, run again to resume; 74 the machine "
        "or the network failed, run again to resume; else that of the process that failed first, "
        "128 plus the signal's number if it was killed",
    )
    add = local.add_argument
    add("experiment", nargs="?", metavar="EXPERIMENT", help="a file, .py or resolved .json")
    count, seconds = _number_between(int, 1, 1024), _number_between(float, 1e-3, 1e6)
    add("--processes", type=count, default=2, metavar="N", help="processes to start [2]")
    devices = "virtual CPU devices of each [1]"
    add("--devices-per-process", type=count, default=1, metavar="D", help=devices)
    add("--slices", type=count, default=1, metavar="S", help="slices that the processes form [1]")
    arrive = "seconds for the processes to connect to each other [120]"
    add("--arrive-within", type=seconds, default=120.0, metavar="S", help=arrive)
    hang = (
        "print all stacks and end after this many seconds without a step; must be longer than "
        "compilation, an evaluation and a save take [600]"
    )
    add("--hang-after", type=seconds, default=600.0, metavar="S", help=hang)
    add("--workdir", metavar="W", help="folder of the EXPERIMENT's run [runs/NAME]")
    _add_common_flags(local, 0)

    gke = commands.add_parser(
        "gke",
        help="a TPU slice of a GKE cluster, as a JobSet",
        epilog="exit code: 0 launched; 1 kubectl failed; 2 bad input, or the cluster refused it",
    )
    _add_rented_flags(gke)
    add = gke.add_argument
    image = "container image, built from the Dockerfile and pushed"
    add("--image", required=True, metavar="IMAGE:TAG", help=image)
    add("--cluster", default="", help="name of the cluster [kubectl's current context]")
    add("--zone", default="", help="the cluster's zone or region")
    add("--project", default="", help="the cluster's project")
    add("--namespace", default="default", help="Kubernetes namespace [default]")
    account = "Kubernetes service account that may use the bucket [the namespace's default]"
    add("--service-account", default="", metavar="NAME", help=account)
    grace = f"seconds for a pod to save when it is asked to end [{_GRACE}]"
    add("--grace", type=int, default=_GRACE, metavar="S", help=grace)
    privileged = "run pods as root with all rights, if the nodes require it for their TPUs"
    add("--privileged", action="store_true", help=privileged)
    tier = gke.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help=_SPOT_HELP)
    tier.add_argument("--reservation", default="", metavar="NAME", help="your reservation to use")

    tpu_vm = commands.add_parser(
        "tpu_vm",
        help="the hosts of a TPU slice that is rented for the run",
        epilog="exit code: 0 finished; 74, 75, 134 launch again to resume; 1 the run failed; 2 bad "
        "input, or no machines",
    )
    _add_rented_flags(tpu_vm)
    add = tpu_vm.add_argument
    add("--zone", required=True, help="where to rent, e.g. us-west4-a")
    add("--project", default="", help="project that is billed [gcloud's own setting]")
    wait = "how long to wait for machines: 90m, 2d [24h]"
    add("--valid-until", default="24h", metavar="T", help=wait)
    version = "software version of the machines [by type of TPU]"
    add("--runtime-version", metavar="V", help=version)
    keep = "keep the machines at the end, which costs money; Ctrl-C then leaves the run running"
    add("--keep", action="store_true", help=keep)
    tier = tpu_vm.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help=_SPOT_HELP)
    tier.add_argument("--reserved", action="store_true", help="machines of your reservation")
    return parser


def _add_common_flags(parser: argparse.ArgumentParser, retries: int) -> None:
    """Adds the flags that all launchers have."""
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="a.b=c", help="change a field; repeatable")
    about = "the .py file of a custom objective or encoder that a resolved .json names"
    add("--code", metavar="FILE", help=about)
    add("--extend", action="store_true", help="train a finished run for more steps")
    about = f"maximum number of restarts after a preemption or the loss of a host [{retries}]"
    add("--retries", type=_number_between(int, 0, 10**6), default=retries, metavar="N", help=about)
    about = "print all commands and files as a bash script, without checking or starting anything"
    add("--dry-run", action="store_true", help=about)


def _add_rented_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that all launchers of rented machines have."""
    add = parser.add_argument
    add("experiment", metavar="EXPERIMENT", help="a file, .py or resolved .json")
    add("--workdir", required=True, metavar="gs://...", help="folder of the run")
    add("--topology", required=True, metavar="SLICE", help="TPUs: v5e:8x8, v3:4x4, ...")
    _add_common_flags(parser, _RETRIES)
    add("--name", help="name of the resources [the experiment's name and the hash of its config]")
    price = _number_between(float, 0, 1e9)
    add("--price-per-chip-hour", type=price, metavar="P", help="to show costs, in any currency")
    about = "checks to skip, comma-separated: commit, workdir, doctor, plan"
    add("--force", default="", metavar="CHECKS", help=about)


def _number_between(kind: type, least: float, most: float) -> Callable[[str], float]:
    """Returns a parser of numbers between these bounds."""

    def parse(text: str) -> float:
        if not least <= (value := kind(text)) <= most:
            raise argparse.ArgumentTypeError(f"must be between {least} and {most}")
        return value

    return parse


if __name__ == "__main__":
    sys.exit(main())
