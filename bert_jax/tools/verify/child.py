"""`python -m bert_jax.tools.verify.child PLAN ARGS`: runs `bert-jax ARGS`, and kills it by a plan.

PLAN is a `tools.verify.faults.Plan` as JSON. The run's hooks write each step to a journal,
and end this process where the plan says.
"""

import hashlib
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from bert_jax import cli, system
from bert_jax.running.context import HOOKS, Hooks
from bert_jax.tools.verify.faults import Fault, Moment, Plan, files_below
from bert_jax.training.objective import Batch

_POLL = 0.005  # seconds between two looks at a save; more frequent looks would slow the save down


def rows_of(batch: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yields (row number, hash of the row's arrays) of the rows on this process's devices."""
    names = sorted(batch)
    for shards in zip(*(batch[name].addressable_shards for name in names), strict=True):
        arrays = dict(zip(names, (np.asarray(shard.data) for shard in shards), strict=True))
        for i, row_number in enumerate(arrays["rows"].tolist()):
            content = b"".join(arrays[name][i].tobytes() for name in names)
            yield row_number, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


class FaultHooks(Hooks):
    """Journals the steps of a run, and kills this process by a plan."""

    def __init__(self, plan: Plan):
        self._fault: Fault | None = plan.fault
        self._plan = plan
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
        self._journal = os.open(plan.journal, flags, 0o644) if plan.journal else None
        self._steps_done = 0
        self._rolled_back_to: int | None = None  # the checkpoint's step; None: no roll-back yet
        self._files_opened = 0  # JSON Lines files
        self._kill_thread: threading.Thread | None = None

    def wait(self) -> None:
        """Returns at once, except if a kill is scheduled: then waits for it."""
        if self._kill_thread is not None:
            self._kill_thread.join()

    def _write_entry(self, kind: str, **values: Any) -> None:
        if self._journal is not None:
            line = json.dumps({"kind": kind, "start": self._plan.start_number, **values}) + "\n"
            os.write(self._journal, line.encode())

    def on_restore(self, step: int, done: int | None) -> None:
        if done is not None:
            self._rolled_back_to = step
            self._write_entry("rolled_back", done=done, to=step)
        self._steps_done = step

    def on_open_file(self, file: str) -> None:
        self.reach("startup", self._files_opened)
        self._files_opened += 1

    def change_batch(self, done: int, batch: Batch) -> Batch:
        self._steps_done = done
        self.reach("startup")  # its end, so that a fault of any progress is due
        self.reach("step")
        if self._rolled_back_to is not None:
            self.reach("roll_back", done - self._rolled_back_to)
        rows, hashes = zip(*rows_of(batch), strict=True)
        self._write_entry("step", step=done, rows=rows, hashes=hashes)
        if done in self._plan.nonfinite_steps:
            weights = "masked_lm_weights"
            batch = batch | {weights: batch[weights] * float("nan")}
        return batch

    def on_evaluation(self, done: int, name: str) -> None:
        self._steps_done = done
        self.reach("evaluation")

    def on_save(self, done: int, path: epath.Path) -> None:
        self._steps_done = done
        if (fault := self._due_fault("save")) is not None:
            args = pathlib.Path(path), fault
            self._start_kill(threading.Thread(target=self._die_in_save, args=args))
        if self._rolled_back_to is not None:
            self.reach("roll_back")  # its end, so that a fault of any progress is due

    def reach(self, moment: Moment, progress: int | None = None) -> None:
        """Dies, now or later, if the fault is due at this moment and progress (None: at any)."""
        fault = self._due_fault(moment)
        if fault is not None and progress in (None, fault.progress):
            if fault.after:
                self._start_kill(threading.Timer(fault.after, self._die, (fault,)))
            else:
                self._die(fault)

    def _due_fault(self, moment: Moment) -> Fault | None:
        fault = self._fault
        if fault is None or self._kill_thread is not None or fault.at != moment:
            return None
        ignores_step = moment in ("startup", "prepare", "roll_back")
        return fault if ignores_step or self._steps_done >= fault.step else None

    def _start_kill(self, thread: threading.Thread) -> None:
        self._kill_thread, thread.daemon = thread, True
        thread.start()

    def _die_in_save(self, path: pathlib.Path, fault: Fault) -> None:
        """Dies once the save of a checkpoint has `fault.progress` files, or is complete."""
        unfinished = path.with_name(f"{path.name}.orbax-checkpoint-tmp")
        while not (path.exists() or unfinished.exists()):
            time.sleep(_POLL)
        while unfinished.exists() and files_below(unfinished) < fault.progress:
            time.sleep(_POLL)
        self._die(fault)

    def _die(self, fault: Fault) -> None:
        self._fault = None  # SIGTERM does not end the process at once
        self._write_entry("killed", done=self._steps_done)
        os.kill(os.getpid(), fault.signal)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code if it is not killed."""
    system.die_with_parent()
    hooks = FaultHooks(Plan.from_json(argv[0]))
    HOOKS.set(hooks)
    if argv[1] == "prepare":
        hooks.reach("prepare")
    code = cli.main(argv[1:])
    hooks.wait()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
