"""`python -m launch local_pod -- COMMAND`: a run in several processes, all on this machine.

Each has virtual devices on the CPU. It is how a pod is tried before there is one: the processes
find each other, share the batches, save and stop together as on many hosts.
"""

import argparse
import io
import shutil
import sys
from collections.abc import Sequence

from bert_jax import endings, pod
from bert_jax.section import InputError


def main(argv: Sequence[str]) -> int:
    """Returns the exit code of the pod."""
    parser = argparse.ArgumentParser(
        prog="python -m launch local_pod",
        description="Run a command in several processes on this machine that are one run.",
        epilog="exit code: 0 finished; 75 stopped on request, run again to go on; else that of "
        "the process that failed first, 128 and the signal's number if it was killed",
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
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="e.g. -- bert-jax pretrain experiments/tiny.py",
    )
    args = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # not every terminal speaks UTF-8
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("name a COMMAND after --")
    if command[0] == "bert-jax":
        # Of this interpreter, whatever else of that name is on the path.
        command = [sys.executable, "-m", "bert_jax.cli", *command[1:]]
    elif shutil.which(command[0]) is None:
        print(f"launch: {command[0]}: no such command", file=sys.stderr)
        return endings.BAD_INPUT
    shape = pod.Shape(args.processes, args.devices_per_process, args.arrive_within, args.hang_after)
    try:
        return pod.run(command, shape)
    except InputError as error:
        print(f"launch: {error}", file=sys.stderr)
        return endings.BAD_INPUT


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1024:
        raise argparse.ArgumentTypeError("must be between 1 and 1024")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return value
