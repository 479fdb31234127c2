"""Processes that take turns: one measures while the others wait for a line on their stdin.

The two frameworks of `torch_step` live in different environments; a line of JSON asks, a line of
JSON answers.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from typing import Any

from benchmarks import measure


class Worker:
    """A process that answers requests, kept to some cores.

    Args:
      python: the interpreter of its environment.
      module: is run with `-m`, and calls `serve`.
      threads: it may use.
      memory, device: as of `measure.environment`.
    """

    def __init__(
        self,
        python: str,
        module: str,
        threads: int,
        memory: measure.Memory = "kept",
        device: measure.Device = "cpu",
    ):
        self._name = module
        self._process = subprocess.Popen(
            [python, "-m", module],
            cwd=measure.ROOT,
            env=measure.environment(threads, memory, device),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: measure.pin(threads),
        )

    def ask(self, method: str, **arguments: Any) -> Any:
        """Calls a method of what the other side serves; RuntimeError if it raised or died."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name}: ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self._name}: {answer['error']}")
        return answer["value"]

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate("")


def serve(target: object) -> None:
    """Answers requests with the methods of `target` until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = {"value": getattr(target, method)(**arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
