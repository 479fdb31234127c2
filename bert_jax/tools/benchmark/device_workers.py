"""Processes that train runs side by side, each on its own part of this machine's devices.

On a CPU the parts are cores, since XLA starts a thread for each core that a process may use.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

from etils import epath

from bert_jax import system
from bert_jax.config import Finetuning, Model
from bert_jax.config import code as custom_code
from bert_jax.data.workers import Worker, WorkerDied
from bert_jax.storage.workdir import create_folder

# Values of TPU_CHIPS_PER_PROCESS_BOUNDS by the number of chips of a process.
_TPU_BLOCKS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
# Bytes of a process without the run: Python, JAX, compiled programs.
_PROCESS_BYTES = 10**9


def bytes_of_run(model: Model, parameters: int, experiment: Finetuning) -> int:
    """Estimates the memory of this machine that a fine-tuning needs.

    Weights, gradients and two moments count in float32 even if accelerators hold them, since loads
    and saves copy most of them. On a CPU, activations count, too (Korthikanti et al. 2022, equation
    2, with four bytes for each number instead of two).
    """
    needed = _PROCESS_BYTES + 16 * parameters
    if not system.accelerator_count():
        length = experiment.task.max_sequence_length
        tokens = experiment.batch_size * length
        per_token = 34 * model.hidden_size + 5 * model.num_attention_heads * length
        needed += 2 * model.num_hidden_layers * tokens * per_token
    return needed


def environment_of(number: int, count: int) -> dict[str, str]:
    """Returns the variables by which process `number` of `count` sees only its accelerators."""
    devices = system.accelerator_count() // count
    device_ids = ",".join(str(number * devices + i) for i in range(devices))
    visible = {
        "CUDA_VISIBLE_DEVICES": device_ids,
        "TPU_VISIBLE_CHIPS": device_ids,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _TPU_BLOCKS.get(devices, f"1,{devices},1"),
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    return visible if devices else {}


class DeviceWorkers:
    """Executes calls of several threads side by side, each call in a process with its own devices.

    This process must not use devices meanwhile: a TPU serves one process only. What the processes
    print is appended to FOLDER/process-N.log.
    """

    def __init__(self, count: int, folder: epath.Path):
        self.count, self._folder = count, folder
        self._limit = count  # calls that may run at once
        self._idle = list(reversed(range(count)))  # numbers of processes
        self._workers: dict[int, Worker] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def fit_to_memory(self, bytes_each: int) -> int:
        """Limits the calls that run at once to those that the free memory holds."""
        self._limit = max(1, min(self.count, system.free_memory() // bytes_each))
        return self._limit

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Waits for an idle process, and returns the result of a call there.

        If a process dies while several calls may run, memory has probably run out: its call is
        repeated, and from then on one call runs at a time.
        """
        while True:
            number, limit = self._take()
            try:
                worker = self._workers.get(number) or self._start_process(number)
                worker.start(function, *arguments)
                return worker.result()
            except WorkerDied:
                with self._changed:
                    self._workers.pop(number).close()
                    if self._is_closed or limit == 1:
                        raise
                    self._limit = 1
            finally:
                with self._changed:
                    self._idle.append(number)
                    self._changed.notify_all()

    def _take(self) -> tuple[int, int]:
        """Waits until a call may run; returns the number of its process, and the limit now."""

        def may_run() -> bool:
            return self._is_closed or self.count - len(self._idle) < self._limit

        with self._changed:
            self._changed.wait_for(may_run)
            if self._is_closed:
                raise WorkerDied(code=0)  # as for calls that `close` ends
            return self._idle.pop(), self._limit

    def _start_process(self, number: int) -> Worker:
        environment = os.environ | custom_code.environment() | environment_of(number, self.count)
        log = self._folder / f"process-{number}.log"
        with create_folder(self._folder), open(log, "ab") as output:  # a failure removes the folder
            worker = Worker(environment, output)
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))[number :: self.count]
            os.sched_setaffinity(worker.process.pid, cores or os.sched_getaffinity(0))
        with self._changed:
            self._workers[number] = worker
            if self._is_closed:
                worker.close()
        return worker

    def close(self) -> None:
        """Ends all processes at once; their calls raise WorkerDied."""
        with self._changed:
            self._is_closed = True
            for worker in self._workers.values():
                worker.process.kill()
            self._changed.notify_all()
