"""Commands of others (gcloud, kubectl, git): started so that none can ask, and ended with us."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from bert_jax.errors import InputError, printable

# How people start this package: in a checkout, or as part of what is installed.
PROGRAM = "python -m launch" if __package__ == "launch" else "bert-jax launch"

TIMED_OUT = 124  # as timeout(1) ends

# Where to get what is not installed.
_MISSING = {
    "gcloud": "install the Google Cloud CLI and sign in with `gcloud auth login`",
    "kubectl": "install it, and `gcloud container clusters get-credentials` the cluster",
}


def say(line: str) -> None:
    """Prints a line of ours; a terminal that has gone away ends nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(f"launch: {printable(line)}", file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """Prints a line of a run's log; a reader that has gone away ends nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(printable(line), flush=True)


@dataclasses.dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int  # its exit code; TIMED_OUT if it was ended for taking too long
    out: str  # its standard output
    err: str  # its standard error

    @property
    def complaint(self) -> str:
        """Its last line: the one that begins with ERROR, where there is one."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        named = [line for line in lines if line.startswith("ERROR")]
        return (named or lines or [f"exit code {self.code}"])[-1]


def run(argv: Sequence[str], seconds: float) -> Done:
    """Runs a command, in a session of its own, without input; whatever ends us here ends it.

    Args:
      argv: its words.
      seconds: that it may take.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # no terminal to ask at, and no part in our Ctrl-C
        )
    except OSError as error:
        remedy = _MISSING.get(argv[0], "install it")
        raise InputError(f"{argv[0]}: cannot be run ({error.strerror}); {remedy}") from error
    with process:
        try:
            out, err = process.communicate(timeout=seconds)
            return Done(process.returncode, out, err)
        except subprocess.TimeoutExpired:
            _kill(process)
            return Done(TIMED_OUT, *process.communicate())
        except BaseException:
            _kill(process)
            raise


def show(argv: Sequence[str]) -> int:
    """Runs a command whose output is the user's, and returns its exit code."""
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        remedy = _MISSING.get(argv[0], "install it")
        raise InputError(f"{argv[0]}: cannot be run ({error.strerror}); {remedy}") from error


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
