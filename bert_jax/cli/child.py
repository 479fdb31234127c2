"""`python -m bert_jax.cli.child PLAN ARGS...`: `bert-jax ARGS`, killed where the plan says.

PLAN is a `verify.faults.Plan` as JSON. What dies at a place and journals each step is patched into
the training modules of this process: the runner knows nothing of it.
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

import jax
import numpy as np

from bert_jax import cli, system
from bert_jax.data import corpus
from bert_jax.training import evaluators, start, step
from bert_jax.training import lines as lines_lib
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.verify import pod
from bert_jax.verify.faults import Fault, Plan, files_below

# Of several processes: how long all may take to arrive, and a step, in seconds.
_ARRIVE, _HANG = 120.0, 600.0
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
        number = int(os.environ.get("JAX_PROCESS_ID", "0"))
        mine = plan.fault is not None and plan.fault.process == number
        self._fault: Fault | None = plan.fault if mine else None
        self._not_finite = frozenset(plan.not_finite)
        self._nudged = plan.nudged
        self._who = {"start": plan.start, "process": number}
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
        self._journal = os.open(plan.journal, flags, 0o644) if plan.journal else None
        self._done = 0  # steps
        self._redone: int | None = None  # steps since the roll-back; None before
        self._parts = 0  # of the evaluation or the start that is under way
        self._dying: threading.Thread | None = None

    def patch(self) -> None:
        """Puts itself between the runner and what it calls."""
        step.make_train_step = self._around_train_step(step.make_train_step)
        step.make_eval_step = self._around_eval_step(step.make_eval_step)
        evaluators.Watched.predict = self._before(evaluators.Watched.predict, self._evaluated)
        Checkpoints.save = self._around_save(Checkpoints.save)
        start._start = self._around_restore(start._start)
        lines_lib.Lines.forget_after = self._before(lines_lib.Lines.forget_after, self._opened)
        corpus.prepare = self._around_prepare(corpus.prepare)

    def wait(self) -> None:
        """Returns unless a kill is under way: the command was faster than it."""
        if self._dying is not None:
            self._dying.join()

    def _note(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._journal is not None:
            line = json.dumps({"kind": kind, **self._who, **values}) + "\n"
            os.write(self._journal, line.encode())

    # --- the places -----------------------------------------------------------------------------

    def _around_train_step(self, make: Callable[..., Callable]) -> Callable[..., Callable]:
        def make_journaled(*args: Any) -> Callable:
            train_step = make(*args)

            def journaled(state: Any, window: Any, batch: Any, key: Any, fixed: Any) -> Any:
                if self._due("step") or self._due("start"):  # all files of lines are open
                    self._die()
                if self._due("roll_back") and self._redone == self._fault.part:
                    self._die()
                rows, hashes = zip(*rows_of(batch), strict=True)
                self._note("step", {"step": self._done, "rows": rows, "hashes": hashes})
                if self._nudged and not self._done:
                    nudge = 1 + np.finfo(np.float32).eps
                    state = state | {"params": jax.tree.map(lambda x: x * nudge, state["params"])}
                if self._done in self._not_finite:
                    weights = "masked_lm_weights"
                    batch = batch | {weights: batch[weights] * float("nan")}
                result = train_step(state, window, batch, key, fixed)
                self._done, self._parts = self._done + 1, 0
                self._redone = None if self._redone is None else self._redone + 1
                return result

            return journaled

        return make_journaled

    def _around_eval_step(self, make: Callable[..., Callable]) -> Callable[..., Callable]:
        def make_counted(*args: Any) -> Callable:
            eval_step = make(*args)

            def counted(params: Any, sums: Any, batch: Any) -> Any:
                if self._due("evaluation") and self._parts == self._fault.part:
                    self._die()
                self._parts += 1
                return eval_step(params, sums, batch)

            return counted

        return make_counted

    def _evaluated(self) -> None:
        """Dies after all batches, with the line of the evaluation written."""
        if self._due("evaluation"):
            self._die()

    def _opened(self) -> None:
        if self._due("start") and self._parts == self._fault.part:
            self._die()
        self._parts += 1

    def _around_save(self, save: Callable) -> Callable:
        def saving(checkpoints: Checkpoints, at: int, *args: Any) -> None:
            if self._due("save"):
                folder = pathlib.Path(checkpoints._folder)
                self._in_a_thread(lambda: self._die_in_save(folder, at))
            if self._due("roll_back"):
                self._die()
            save(checkpoints, at, *args)

        return saving

    def _die_in_save(self, folder: pathlib.Path, at: int) -> None:
        """Dies once so many files of the save exist, or it is whole."""
        whole, unfinished = folder / str(at), folder / f"{at}.orbax-checkpoint-tmp"
        while not (whole.exists() or unfinished.exists()):
            time.sleep(_POLL)
        while unfinished.exists() and files_below(unfinished) < self._fault.part:
            time.sleep(_POLL)
        self._kill()

    def _around_restore(self, function: Callable[..., start.Start]) -> Callable[..., start.Start]:
        def restoring(*args: Any) -> start.Start:
            restored = function(*args)
            if args[-1] is not None:  # a roll-back
                self._redone = 0
                self._note("rolled_back", {"done": self._done, "to": restored.done})
            self._done = restored.done
            return restored

        return restoring

    def _around_prepare(self, prepare: Callable) -> Callable:
        def preparing(*args: Any) -> Any:
            if self._due("prepare"):
                self._die()
            begun = time.monotonic()
            made = prepare(*args)
            self._note("prepared", {"seconds": time.monotonic() - begun})
            return made

        return preparing

    def _before(self, function: Callable, look: Callable[[], None]) -> Callable:
        def looking(*args: Any) -> Any:
            look()
            return function(*args)

        return looking

    # --- the kill -------------------------------------------------------------------------------

    def _due(self, place: str) -> bool:
        fault = self._fault
        if fault is None or self._dying is not None or fault.at != place:
            return False
        if place == "roll_back":
            return self._redone is not None
        return place in ("start", "prepare") or self._done >= fault.step

    def _die(self) -> None:
        if not self._fault.after:
            self._kill()
            return

        def later() -> None:
            time.sleep(self._fault.after)
            self._kill()

        self._in_a_thread(later)

    def _in_a_thread(self, work: Callable[[], None]) -> None:
        self._dying = threading.Thread(target=work, daemon=True)
        self._dying.start()

    def _kill(self) -> None:
        fault, self._fault = self._fault, None
        self._note("killed", {"done": self._done})
        os.kill(os.getpid(), fault.signal)


def main(argv: Sequence[str]) -> int:
    """Returns the command's exit code, if it comes to that."""
    system.die_with_parent()
    plan = Plan.from_json(argv[0])
    if plan.processes > 1 and "JAX_PROCESS_ID" not in os.environ:
        command = [sys.executable, "-m", "bert_jax.cli.child", *argv]
        ended = pod.run(
            command,
            processes=plan.processes,
            devices=1,
            arrive_within=_ARRIVE,
            hang_after=_HANG,
        )
        return ended.code
    child = _Child(plan)
    child.patch()
    code = cli.main(argv[1:])
    child.wait()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
