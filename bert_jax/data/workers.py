"""Worker processes: for parts of a corpus, plans of epochs, and compilations of the command `plan`.

Workers are not started by `multiprocessing`, which would run the user's script again in each, and
would leave them alive when their parent is killed. A pool of `concurrent.futures` would also make
the end of the parent wait for the calls.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import connection as connection_lib
from typing import IO, Any

from bert_jax.errors import FAILED, Unavailable
from bert_jax.process import prepare_process


class WorkerDied(Unavailable):
    """A worker ended without an answer; `code` is its exit code, negative for a signal."""

    def __init__(self, code: int):
        super().__init__(f"a worker process died with code {code}")
        self.code = code


class Worker:
    """A process that runs one call after another.

    It ends with `close` or when its parent dies, even in the middle of a call. Ctrl-C does not
    reach it. What it prints goes to `output`, by default to standard error.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, output: IO[bytes] | int | None = None
    ):
        self._connection, worker_end = connection_lib.Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from bert_jax.data import workers; "
            f"workers.serve({worker_end.fileno()})"
        )
        with worker_end:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=2 if output is None else output,
                stderr=output,
                pass_fds=(worker_end.fileno(),),
                start_new_session=True,
            )

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Starts a call; function and arguments are pickled."""
        with contextlib.suppress(BrokenPipeError):  # `result` tells that the process is dead
            self._connection.send((function, arguments))

    def result(self) -> Any:
        """Waits for the result of the call; raises the error of the call.

        Raises:
          WorkerDied: the process died, perhaps since the machine has too little memory.
        """
        try:
            value, error = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerDied(self.process.wait()) from None
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Ends the process at once."""
        self.process.kill()
        self.process.wait()
        self._connection.close()


def wait(workers: Iterable[Worker], seconds: float | None = None) -> list[Worker]:
    """Waits up to `seconds` until a call ends; returns the workers whose `result` is available."""
    by_connection: dict[Any, Worker] = {worker._connection: worker for worker in workers}
    return [by_connection[c] for c in connection_lib.wait([*by_connection], seconds)]


def serve(file: int) -> None:
    """Runs the calls that arrive at a file descriptor: the main function of a worker."""
    connection, requests = connection_lib.Connection(file), queue.SimpleQueue[bytes]()

    def receive() -> None:
        # The connection is closed when the parent dies.
        with contextlib.suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv_bytes())
        os._exit(FAILED)

    threading.Thread(target=receive, daemon=True).start()
    prepare_process()
    with contextlib.suppress(OSError):
        while True:
            connection.send_bytes(_answer(requests.get()))


def _answer(request: bytes) -> bytes:
    """Runs a pickled call; returns its result and its error, pickled."""
    try:
        function, arguments = pickle.loads(request)
        return pickle.dumps((function(*arguments), None))
    except BaseException as error:  # a Rust panic is a BaseException, not an Exception
        with contextlib.suppress(Exception):  # some libraries' errors cannot be pickled
            answer = pickle.dumps((None, error))
            pickle.loads(answer)
            return answer
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
