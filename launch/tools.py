"""Commands of others: started without a terminal, so that none can ask, and ended with us."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence

from bert_jax.errors import InputError

TIMED_OUT = 124  # as timeout(1) ends

# Where to get what is not installed.
_MISSING = {
    "gcloud": "install the Google Cloud CLI and sign in with `gcloud auth login`",
    "kubectl": "install it, and `gcloud container clusters get-credentials` the cluster",
    "git": "install it",
}


@dataclasses.dataclass(frozen=True)
class Done:
    """A command that has ended.

    Attributes:
      code: its exit code; TIMED_OUT if it was ended for taking too long.
      out: what it wrote to standard output.
      err: and to standard error.
    """

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """Its last words, in one line: the one that begins with ERROR, where there is one."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        return (errors or lines or [f"exit code {self.code}"])[-1]


def run(argv: Sequence[str], seconds: float) -> Done:
    """A command and what it says.

    Args:
      argv: its words.
      seconds: that it may take.

    Raises:
      InputError: there is no such command.
    """
    with _started(argv, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            out, err = process.communicate()
            return Done(TIMED_OUT, _text(out), _text(err))
    return Done(process.returncode, _text(out), _text(err))


def stream(argv: Sequence[str], seconds: float, put: Callable[[bytes], None]) -> int:
    """A command whose output is passed on as it comes; what it says to standard error is not.

    Args:
      argv: its words.
      seconds: that it may take.
      put: is given pieces of its standard output.

    Returns:
      Its exit code; TIMED_OUT if it was ended for taking too long.

    Raises:
      InputError: there is no such command.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill(process)

    with _started(argv, stderr=subprocess.DEVNULL) as process:
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                put(piece)
            code = process.wait()
        finally:
            timer.cancel()
    return TIMED_OUT if late.is_set() else code


@contextlib.contextmanager
def _started(argv: Sequence[str], stderr: int) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own, without input; whatever ends us here ends it."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # no terminal to ask at, and no part in our Ctrl-C
        )
    except OSError as error:
        remedy = _MISSING.get(argv[0], "install it")
        raise InputError(f"{argv[0]}: cannot be run ({error.strerror}); {remedy}") from error
    with process:
        try:
            yield process
        except BaseException:
            _kill(process)
            raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace")
