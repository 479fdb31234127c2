"""`python -m bert_jax.tools.verify.child PLAN ARGS`: runs `bert-jax ARGS`, and kills it by a plan.

PLAN is a `tools.verify.faults.Plan` as JSON. This process patches its training modules to journal
each step and to die where the plan says. The runner does not know about the patches.
"""

import hashlib
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax import cli, system
from bert_jax.checkpoints.load import Restored
from bert_jax.checkpoints.save import Saver
from bert_jax.data import corpus
from bert_jax.pretraining import evaluators
from bert_jax.running import start
from bert_jax.storage.json_lines import JsonLines
from bert_jax.tools.verify.faults import Fault, Plan, files_below
from bert_jax.training import step

_POLL = 0.005  # seconds between two looks at a save; more frequent looks would slow the save down


def rows_of(batch: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yields (row number, hash of the row's arrays) of the rows on this process's devices."""
    names = sorted(batch)
    for shards in zip(*(batch[name].addressable_shards for name in names), strict=True):
        arrays = dict(zip(names, (np.asarray(shard.data) for shard in shards), strict=True))
        for i, row in enumerate(arrays["rows"].tolist()):
            content = b"".join(arrays[name][i].tobytes() for name in names)
            yield row, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


class _Child:
    """The progress of this process, and the wrappers around the functions that the runner calls."""

    def __init__(self, plan: Plan):
        self._fault: Fault | None = plan.fault
        self._plan = plan
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
        self._journal = os.open(plan.journal, flags, 0o644) if plan.journal else None
        self._steps_done = 0
        self._steps_redone: int | None = None  # steps since the roll-back; None before one
        self._parts_done = 0  # parts of the current evaluation or start
        self._kill_thread: threading.Thread | None = None

    def patch(self) -> None:
        """Replaces each function by a call of a method, which gets the function as an argument."""
        for owner, name, wrapper in (
            (step, "make_train_step", self._make_train_step),
            (step, "make_eval_step", self._make_eval_step),
            (evaluators.PredictionSampler, "sample", self._sample_predictions),
            (Saver, "save", self._save),
            (start, "_start", self._restore),
            (JsonLines, "delete_after", self._truncate_lines),
            (corpus, "prepare", self._prepare),
        ):
            setattr(owner, name, _wrap(wrapper, getattr(owner, name)))

    def wait(self) -> None:
        """Returns at once, except if a kill is scheduled: then waits for it."""
        if self._kill_thread is not None:
            self._kill_thread.join()

    def _write_note(self, kind: str, **values: Any) -> None:
        if self._journal is not None:
            line = json.dumps({"kind": kind, "start": self._plan.start, **values}) + "\n"
            os.write(self._journal, line.encode())

    # --- moments at which a fault may come ------------------------------------------------------

    def _make_train_step(self, make: Callable[..., Callable], *args: Any) -> Callable:
        train_step = make(*args)

        def journaled(state: Any, window: Any, batch: Any, key: Any, fixed: Any) -> Any:
            self._reach("start")  # all JSON Lines files are open
            self._reach("step")
            self._reach("roll_back", self._steps_redone)
            rows, hashes = zip(*rows_of(batch), strict=True)
            self._write_note("step", step=self._steps_done, rows=rows, hashes=hashes)
            if self._steps_done in self._plan.not_finite:
                weights = "masked_lm_weights"
                batch = batch | {weights: batch[weights] * float("nan")}
            result = train_step(state, window, batch, key, fixed)
            self._steps_done, self._parts_done = self._steps_done + 1, 0
            self._steps_redone = None if self._steps_redone is None else self._steps_redone + 1
            return result

        return journaled

    def _make_eval_step(self, make: Callable[..., Callable], *args: Any) -> Callable:
        eval_step = make(*args)

        def counted(*args: Any) -> Any:
            self._reach("evaluation", self._parts_done)
            self._parts_done += 1
            return eval_step(*args)

        return counted

    def _sample_predictions(self, ask: Callable, *args: Any) -> Any:
        self._reach("evaluation")  # after all batches; the line of the evaluation is written
        return ask(*args)

    def _truncate_lines(self, delete_after: Callable, *args: Any) -> Any:
        self._reach("start", self._parts_done)
        self._parts_done += 1
        return delete_after(*args)

    def _save(self, save: Callable, saves: Saver, saved_step: int, *args: Any) -> None:
        if (fault := self._due_fault("save")) is not None:
            arguments = pathlib.Path(saves.checkpoints.folder.path), saved_step, fault
            self._start_kill(threading.Thread(target=self._die_in_save, args=arguments))
        self._reach("roll_back")
        save(saves, saved_step, *args)

    def _restore(self, restore: Callable[..., Restored], *args: Any) -> Restored:
        restored = restore(*args)
        if args[-1] is not None:  # a roll-back
            self._steps_redone = 0
            self._write_note("rolled_back", done=self._steps_done, to=restored.step)
        self._steps_done = restored.step
        return restored

    def _prepare(self, prepare: Callable, *args: Any) -> Any:
        self._reach("prepare")
        start_time = time.monotonic()
        manifest = prepare(*args)
        self._write_note("prepared", seconds=time.monotonic() - start_time)
        return manifest

    # --- the kill -------------------------------------------------------------------------------

    def _due_fault(self, moment: str) -> Fault | None:
        fault = self._fault
        if fault is None or self._kill_thread is not None or fault.at != moment:
            return None
        if moment == "roll_back":
            return None if self._steps_redone is None else fault
        return fault if moment in ("start", "prepare") or self._steps_done >= fault.step else None

    def _reach(self, moment: str, part: int | None = None) -> None:
        """Dies, now or after a delay, if the fault is due at this moment and, if given, part."""
        fault = self._due_fault(moment)
        if fault is not None and part in (None, fault.part):
            if fault.after:
                self._start_kill(threading.Timer(fault.after, self._die, (fault,)))
            else:
                self._die(fault)

    def _start_kill(self, thread: threading.Thread) -> None:
        self._kill_thread, thread.daemon = thread, True
        thread.start()

    def _die_in_save(self, folder: pathlib.Path, saved_step: int, fault: Fault) -> None:
        """Dies once the save has `fault.part` files, or is complete."""
        complete = folder / str(saved_step)
        unfinished = folder / f"{saved_step}.orbax-checkpoint-tmp"
        while not (complete.exists() or unfinished.exists()):
            time.sleep(_POLL)
        while unfinished.exists() and files_below(unfinished) < fault.part:
            time.sleep(_POLL)
        self._die(fault)

    def _die(self, fault: Fault) -> None:
        self._fault = None
        self._write_note("killed", done=self._steps_done)
        os.kill(os.getpid(), fault.signal)


def _wrap(wrapper: Callable, function: Callable) -> Callable:
    """Returns a plain function: one that is an attribute of a class becomes a method."""
    return lambda *args: wrapper(function, *args)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code if it is not killed."""
    system.die_with_parent()
    child = _Child(Plan.from_json(argv[0]))
    child.patch()
    code = cli.main(argv[1:])
    child.wait()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
