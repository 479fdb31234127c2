"""`python -m launch local_pod`: a run in several processes, all on this machine.

Each has virtual devices on the CPU. It is how a pod is tried before there is one: the processes
find each other, share the batches, save and stop together as on many hosts. An EXPERIMENT is
launched as it is elsewhere, by the same specification; after `--` any command may stand.
"""

import argparse
import dataclasses
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Sequence

from bert_jax import errors, pod
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage.workdir import named_errors, write_atomic
from launch import console, dry_run, shipping
from launch.spec import EXPERIMENT, Spec, specify
from launch.verdict import FAILURES, ending_word


def main(argv: Sequence[str]) -> int:
    """Returns the exit code of the pod."""
    flags, command = _parted(argv)
    parser = _parser()
    args = parser.parse_args(flags)
    if (args.experiment is None) == (command is None):
        parser.error("name an EXPERIMENT, or a COMMAND after --")
    if command == []:
        parser.error("name a COMMAND after --")
    given = (args.workdir, args.set, args.extend, args.retries, args.dry_run)
    if command is not None and any(given):
        parser.error("--workdir, --set, --extend, --retries and --dry-run go with an EXPERIMENT")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # not every terminal speaks UTF-8
    shape = pod.Shape(args.processes, args.devices_per_process, args.arrive_within, args.hang_after)
    try:
        if command is not None:
            return pod.run(_of_this_interpreter(command), shape).code
        spec = specify(
            args.experiment,
            args.set,
            workdir=args.workdir or "",
            topology=None,
            hosts=args.processes,
            extend=args.extend,
            retries=args.retries,
        )
        spec = dataclasses.replace(spec, workdir=spec.workdir or f"runs/{spec.claim.name}")
        return _dry_run(spec) if args.dry_run else _launch(spec, shape)
    except (InputError, Unavailable) as error:
        print(f"launch: {error}", file=sys.stderr)
        return errors.of_error(error)[1]


def _launch(spec: Spec, shape: pod.Shape) -> int:
    """Starts it, and again after a preemption, a loss or a fault that may pass.

    Until its end or its last retry.
    """
    file = _file(spec)
    with named_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, spec.config)
    command = _of_this_interpreter(spec.command(os.fspath(file)))
    left = spec.retries
    while True:
        ended = pod.run(command, shape)
        over = ended.code in (errors.FINISHED, *FAILURES) or ended.asked
        if over or not left:
            return ended.code
        left -= 1
        console.say(
            f"{spec.name} {ending_word(ended.code)}; starting it again, {left} retries left"
        )


def _dry_run(spec: Spec) -> int:
    file = _file(spec)
    console.tell("#!/usr/bin/env bash")
    console.tell(f"# {spec.name}: {spec.hosts} processes on this machine,")
    console.tell(f"# config sha256 {spec.sha256}; {spec.retries} retries.")
    console.tell("set -eu")
    console.tell(shlex.join(["mkdir", "-p", os.fspath(file.parent)]))
    for line in dry_run.written(file, spec.config):
        console.tell(line)
    start = [sys.executable, "-m", "launch", "local_pod", "--processes", str(spec.hosts), "--"]
    console.tell(shlex.join([*start, *spec.command(os.fspath(file))]))
    return errors.FINISHED


def _file(spec: Spec) -> pathlib.Path:
    return shipping.staging(spec.name) / EXPERIMENT


def _of_this_interpreter(command: Sequence[str]) -> list[str]:
    """The command, `bert-jax` being that of this interpreter, whatever else is on the path.

    Raises:
      InputError: there is no such command.
    """
    if command[0] == "bert-jax":
        return [sys.executable, "-m", "bert_jax.cli", *command[1:]]
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]}: no such command")
    return list(command)


def _parted(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Flags, and what follows the first `--`; None if there is none."""
    if "--" not in argv:
        return list(argv), None
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch local_pod",
        usage="%(prog)s [FLAGS] EXPERIMENT --workdir W\n       %(prog)s [FLAGS] -- COMMAND",
        description="Run an experiment, or a command, in several processes on this machine that "
        "are one run.",
        epilog="exit code: 0 finished; 75 stopped on request, run again to go on; 74 the machine "
        "or the network failed, run again to go on; else that of "
        "the process that failed first, 128 and the signal's number if it was killed",
    )
    parser.add_argument(
        "experiment", nargs="?", metavar="EXPERIMENT", help="a file, .py or resolved .json"
    )
    parser.add_argument("--processes", type=_count, default=2, metavar="N", help="[2]")
    parser.add_argument(
        "--devices-per-process", type=_count, default=1, metavar="D", help="virtual devices [1]"
    )
    parser.add_argument(
        "--arrive-within",
        type=_seconds,
        default=120.0,
        metavar="S",
        help="seconds in which all must have found each other [120]",
    )
    parser.add_argument(
        "--hang-after",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="end with everyone's stacks after so many seconds without a step; longer than "
        "compilation, an evaluation and a save [600]",
    )
    of_experiment = parser.add_argument_group("of an EXPERIMENT, as of other launchers")
    of_experiment.add_argument("--workdir", metavar="W", help="of the run [runs/NAME]")
    of_experiment.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="change a field; repeatable"
    )
    of_experiment.add_argument(
        "--extend", action="store_true", help="go on beyond the end of a run"
    )
    of_experiment.add_argument(
        "--retries",
        type=_retries,
        default=0,
        metavar="N",
        help="starts after a process was preempted or lost, or its machine or network failed [0]",
    )
    of_experiment.add_argument(
        "--dry-run", action="store_true", help="print the file and the command as a script of bash"
    )
    return parser


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1024:
        raise argparse.ArgumentTypeError("must be between 1 and 1024")
    return value


def _retries(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return value
