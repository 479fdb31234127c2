"""`python -m bert_jax.tools.verify.child PLAN ARGS`: `bert-jax ARGS`, killed where the plan says.

PLAN is a `tools.verify.faults.Plan` as JSON. This process patches its training modules so that they
journal each step and die where the plan says: the runner knows nothing of it.
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
from bert_jax.checkpoints.checkpoint import Restored
from bert_jax.checkpoints.saves import Saves
from bert_jax.data import corpus
from bert_jax.pretraining import evaluators
from bert_jax.running import start
from bert_jax.storage.json_lines import JsonLines
from bert_jax.tools.verify.faults import Fault, Plan, files_below
from bert_jax.training import step

_POLL = 0.005  # seconds between two looks at a save: more often would slow it down


def rows_of(batch: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yields (row, hash of all that it holds) of the rows on this process's devices."""
    names = sorted(batch)
    for shards in zip(*(batch[name].addressable_shards for name in names), strict=True):
        arrays = dict(zip(names, (np.asarray(shard.data) for shard in shards), strict=True))
        for i, row in enumerate(arrays["rows"].tolist()):
            held = b"".join(arrays[name][i].tobytes() for name in names)
            yield row, int.from_bytes(hashlib.blake2b(held, digest_size=8).digest())


class _Child:
    """This process: how far it has come, and what it does between the runner and its callees."""

    def __init__(self, plan: Plan):
        self._fault: Fault | None = plan.fault
        self._plan = plan
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
        self._journal = os.open(plan.journal, flags, 0o644) if plan.journal else None
        self._done = 0  # steps
        self._redone: int | None = None  # steps since the roll-back; None before
        self._parts = 0  # of the evaluation or the start that is under way
        self._dying: threading.Thread | None = None

    def patch(self) -> None:
        """Puts itself between the runner and what it calls: each function is handed to a method."""
        for owner, name, around in (
            (step, "make_train_step", self._make_train_step),
            (step, "make_eval_step", self._make_eval_step),
            (evaluators.PredictionSampler, "ask", self._watch),
            (Saves, "save", self._save),
            (start, "_start", self._restore),
            (JsonLines, "forget_after", self._open),
            (corpus, "prepare", self._prepare),
        ):
            setattr(owner, name, _wrap(around, getattr(owner, name)))

    def wait(self) -> None:
        """Returns unless a kill is under way: the command was faster than it."""
        if self._dying is not None:
            self._dying.join()

    def _note(self, kind: str, **values: Any) -> None:
        if self._journal is not None:
            line = json.dumps({"kind": kind, "start": self._plan.start, **values}) + "\n"
            os.write(self._journal, line.encode())

    # --- the places -----------------------------------------------------------------------------

    def _make_train_step(self, make: Callable[..., Callable], *args: Any) -> Callable:
        train_step = make(*args)

        def journaled(state: Any, window: Any, batch: Any, key: Any, fixed: Any) -> Any:
            self._reach("start")  # all files of lines are open
            self._reach("step")
            self._reach("roll_back", self._redone)
            rows, hashes = zip(*rows_of(batch), strict=True)
            self._note("step", step=self._done, rows=rows, hashes=hashes)
            if self._done in self._plan.not_finite:
                weights = "masked_lm_weights"
                batch = batch | {weights: batch[weights] * float("nan")}
            result = train_step(state, window, batch, key, fixed)
            self._done, self._parts = self._done + 1, 0
            self._redone = None if self._redone is None else self._redone + 1
            return result

        return journaled

    def _make_eval_step(self, make: Callable[..., Callable], *args: Any) -> Callable:
        eval_step = make(*args)

        def counted(*args: Any) -> Any:
            self._reach("evaluation", self._parts)
            self._parts += 1
            return eval_step(*args)

        return counted

    def _watch(self, ask: Callable, *args: Any) -> Any:
        self._reach("evaluation")  # after all batches, with the line of the evaluation written
        return ask(*args)

    def _open(self, forget_after: Callable, *args: Any) -> Any:
        self._reach("start", self._parts)
        self._parts += 1
        return forget_after(*args)

    def _save(self, save: Callable, saves: Saves, at: int, *args: Any) -> None:
        if (fault := self._due("save")) is not None:
            where = pathlib.Path(saves._folder), at, fault
            self._start(threading.Thread(target=self._die_in_save, args=where))
        self._reach("roll_back")
        save(saves, at, *args)

    def _restore(self, function: Callable[..., Restored], *args: Any) -> Restored:
        restored = function(*args)
        if args[-1] is not None:  # a roll-back
            self._redone = 0
            self._note("rolled_back", done=self._done, to=restored.step)
        self._done = restored.step
        return restored

    def _prepare(self, prepare: Callable, *args: Any) -> Any:
        self._reach("prepare")
        begun = time.monotonic()
        made = prepare(*args)
        self._note("prepared", seconds=time.monotonic() - begun)
        return made

    # --- the kill -------------------------------------------------------------------------------

    def _due(self, place: str) -> Fault | None:
        fault = self._fault
        if fault is None or self._dying is not None or fault.at != place:
            return None
        if place == "roll_back":
            return None if self._redone is None else fault
        return fault if place in ("start", "prepare") or self._done >= fault.step else None

    def _reach(self, place: str, part: int | None = None) -> None:
        """Dies, now or soon, if the fault is of this place, and of this part if one is given."""
        fault = self._due(place)
        if fault is not None and part in (None, fault.part):
            if fault.after:
                self._start(threading.Timer(fault.after, self._die, (fault,)))
            else:
                self._die(fault)

    def _start(self, dying: threading.Thread) -> None:
        self._dying, dying.daemon = dying, True
        dying.start()

    def _die_in_save(self, folder: pathlib.Path, at: int, fault: Fault) -> None:
        """Dies once so many files of the save exist, or it is whole."""
        whole, unfinished = folder / str(at), folder / f"{at}.orbax-checkpoint-tmp"
        while not (whole.exists() or unfinished.exists()):
            time.sleep(_POLL)
        while unfinished.exists() and files_below(unfinished) < fault.part:
            time.sleep(_POLL)
        self._die(fault)

    def _die(self, fault: Fault) -> None:
        self._fault = None
        self._note("killed", done=self._done)
        os.kill(os.getpid(), fault.signal)


def _wrap(around: Callable, inner: Callable) -> Callable:
    """Returns a plain function, so that of a class it becomes a method."""
    return lambda *args: around(inner, *args)


def main(argv: Sequence[str]) -> int:
    """Returns the command's exit code, if it comes to that."""
    system.die_with_parent()
    child = _Child(Plan.from_json(argv[0]))
    child.patch()
    code = cli.main(argv[1:])
    child.wait()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
