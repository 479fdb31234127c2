"""`python -m bert_jax.verify.victim ORDER ARGS...`: `bert-jax ARGS`, which dies as it was told.

ORDER is an `orders.Order` as JSON. What is needed to die at a place, and to note each step, is
patched into the training modules of this process: the runner knows nothing of it.
"""

import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bert_jax import cli, pod, system
from bert_jax.data import corpus
from bert_jax.training import evaluators, step
from bert_jax.training import lines as lines_lib
from bert_jax.training.beginning import Beginning, Beginnings
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.verify.notes import Notebook, rows_of
from bert_jax.verify.orders import Death, Order, files_below

# Of several processes: how long all may take to come, and a step.
_ARRIVE, _HANG = 120.0, 600.0
_LOOK = 0.005  # seconds between two looks at a save: more often would slow it down


class Victim:
    """The process, and how far it has come."""

    def __init__(self, order: Order):
        number = int(os.environ.get("JAX_PROCESS_ID", "0"))
        mine = order.death is not None and order.death.process == number
        self._death: Death | None = order.death if mine else None
        self._notes = Notebook(order.notes, order.start, number)
        self._not_finite = frozenset(order.not_finite)
        self._done = 0  # steps
        self._again: int | None = None  # steps since the roll-back; None before
        self._parts = 0  # of the evaluation or the start that is on
        self._begun = False  # the death
        self._dying: threading.Thread | None = None

    def patch(self) -> None:
        """Puts itself between the runner and what it calls."""
        step.make_train_step = self._noting(step.make_train_step)
        step.make_eval_step = self._evaluating(step.make_eval_step)
        evaluators.Watched.predict = self._before(evaluators.Watched.predict, self._predictions)
        Checkpoints.save = self._saving(Checkpoints.save)
        Beginnings._restore = self._finding(Beginnings._restore)
        lines_lib.Lines.forget_after = self._before(lines_lib.Lines.forget_after, self._opened)
        corpus.prepare = self._preparing(corpus.prepare)

    def wait(self) -> None:
        """Returns unless a death is under way: the command was faster than it."""
        if self._dying is not None:
            self._dying.join()

    # --- the places -----------------------------------------------------------------------------

    def _noting(self, make: Callable[..., Callable]) -> Callable[..., Callable]:
        def make_noting(*args: Any) -> Callable:
            train_step = make(*args)

            def noting(state: Any, window: Any, batch: Any, key: Any, fixed: Any) -> Any:
                if self._due("step") or self._due("start"):  # all files of lines are open
                    self._die()
                if self._due("roll_back") and self._again == self._death.part:
                    self._die()
                rows, hashes = zip(*rows_of(batch), strict=True)
                note = {"step": self._done, "rows": rows, "hashes": hashes}
                self._notes.write("step", note)
                if self._done in self._not_finite:
                    weights = "masked_lm_weights"
                    batch = batch | {weights: batch[weights] * float("nan")}
                done = train_step(state, window, batch, key, fixed)
                self._done, self._parts = self._done + 1, 0
                self._again = None if self._again is None else self._again + 1
                return done

            return noting

        return make_noting

    def _evaluating(self, make: Callable[..., Callable]) -> Callable[..., Callable]:
        def make_evaluating(*args: Any) -> Callable:
            eval_step = make(*args)

            def evaluating(params: Any, sums: Any, batch: Any) -> Any:
                if self._due("evaluation") and self._parts == self._death.part:
                    self._die()
                self._parts += 1
                return eval_step(params, sums, batch)

            return evaluating

        return make_evaluating

    def _predictions(self) -> None:
        """All batches are done, and the line of the evaluation is written."""
        if self._due("evaluation"):
            self._die()

    def _opened(self) -> None:
        if self._due("start") and self._parts == self._death.part:
            self._die()
        self._parts += 1

    def _saving(self, save: Callable) -> Callable:
        def saving(checkpoints: Checkpoints, at: int, *args: Any) -> None:
            if self._due("save"):
                folder = pathlib.Path(checkpoints._folder)
                self._in_a_thread(lambda: self._watch(folder, at))
            if self._due("roll_back"):
                self._die()
            save(checkpoints, at, *args)

        return saving

    def _finding(self, find: Callable[..., Beginning]) -> Callable[..., Beginning]:
        def finding(beginnings: Beginnings, saved: Checkpoints, at_most: int | None) -> Beginning:
            found = find(beginnings, saved, at_most)
            if at_most is not None:
                self._again = 0
                self._notes.write("rolled_back", {"done": self._done, "to": found.done})
            self._done = found.done
            return found

        return finding

    def _watch(self, folder: pathlib.Path, at: int) -> None:
        """Dies once so many files of the save stand there, or it is whole."""
        whole, unfinished = folder / str(at), folder / f"{at}.orbax-checkpoint-tmp"
        while not (whole.exists() or unfinished.exists()):
            time.sleep(_LOOK)
        while unfinished.exists() and files_below(unfinished) < self._death.part:
            time.sleep(_LOOK)
        self._kill()

    def _preparing(self, prepare: Callable) -> Callable:
        def preparing(*args: Any) -> Any:
            if self._due("prepare"):
                self._die()
            begun = time.monotonic()
            made = prepare(*args)
            self._notes.write("prepared", {"seconds": time.monotonic() - begun})
            return made

        return preparing

    def _before(self, function: Callable, look: Callable[[], None]) -> Callable:
        def looking(*args: Any) -> Any:
            look()
            return function(*args)

        return looking

    # --- the death ------------------------------------------------------------------------------

    def _due(self, place: str) -> bool:
        death = self._death
        if death is None or self._begun or death.at != place:
            return False
        if place == "roll_back":
            return self._again is not None
        return place in ("start", "prepare") or self._done >= death.step

    def _die(self) -> None:
        if not self._death.after:
            self._kill()
            return

        def later() -> None:
            time.sleep(self._death.after)
            self._kill()

        self._in_a_thread(later)

    def _in_a_thread(self, work: Callable[[], None]) -> None:
        self._begun = True
        self._dying = threading.Thread(target=work, daemon=True)
        self._dying.start()

    def _kill(self) -> None:
        self._begun = True
        self._notes.write("killed", {"done": self._done})
        os.kill(os.getpid(), self._death.signal)


def main(argv: Sequence[str]) -> int:
    """Returns the command's exit code, if it comes to that."""
    system.die_with_parent()
    order = Order.from_json(argv[0])
    if order.processes > 1 and "JAX_PROCESS_ID" not in os.environ:
        command = [sys.executable, "-m", "bert_jax.verify.victim", *argv]
        return pod.run(command, pod.Shape(order.processes, 1, _ARRIVE, _HANG)).code
    victim = Victim(order)
    victim.patch()
    code = cli.main(argv[1:])
    victim.wait()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
