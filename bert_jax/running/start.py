"""Where a run starts. It goes on with the first of these that there is:

1. its own newest checkpoint that is not damaged;
2. the checkpoint of another run that it branches off (see checkpoints.fork);
3. a fresh state with the weights of a base;
4. a fresh state.

A step without a finite loss and gradient changes nothing (see training.step). A few of them are bad
luck; many in a row say that the parameters are broken, by the update before or by the hardware:
then the run starts again from a checkpoint before them, and leaves these steps out.
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from bert_jax import config
from bert_jax.checkpoints.checkpoint import Checkpoints, Restored
from bert_jax.checkpoints.fork import Branch
from bert_jax.config import SKIPPED_STEPS, code
from bert_jax.distributed.peers import Peers
from bert_jax.errors import InputError, Unavailable
from bert_jax.running.environment import changes
from bert_jax.running.job import Context
from bert_jax.storage import retry
from bert_jax.storage.workdir import fork_of, read_json, write_atomic, write_json
from bert_jax.training import feed, step
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training.replay import SilentCorruption


class Failed(Exception):
    """A run cannot go on, for the reason that it says."""

    def __init__(self, why: str, remedy: str = "a lower optimizer.peak_learning_rate"):
        super().__init__(f"{why}; start again with {remedy}")


class Diverged(Exception):
    """Many steps in a row had no finite loss or gradient; what comes after them changes nothing."""

    def __init__(self, bad: range):
        super().__init__(f"steps {bad[0]} to {bad[-1]} have no finite loss or gradient")
        self.bad = bad


def begin(context: Context) -> Restored:
    """Returns where to start, the same on all processes; damaged checkpoints are put aside.

    Raises:
      Unavailable: the storage does not answer, or the processes see different checkpoints.
    """
    _agree_on_steps(context)
    context.peers.on_primary("lost", lambda: _set_aside_if_lost(context))
    return _start(context, None)


def roll_back(
    error: Diverged | SilentCorruption, first: int, begun_at: int, context: Context
) -> Restored:
    """Returns where to start again, a step up to `first`; newer checkpoints are removed.

    Where devices erred it is the oldest if none is as old, as in a run that branched off, and began
    at step `begun_at` and not 0.

    Raises:
      Failed: too much would be done again, see `can_go_back`; nothing was removed.
    """
    peers, saved = context.peers, context.saves
    try:
        saved.wait()
    except Unavailable:
        if peers.count > 1:
            raise  # the others wait for it, inside Orbax; one process goes back past it
    _agree_on_steps(context)
    every = context.job.experiment.run.checkpoint_every
    if not can_go_back(saved.steps, first, every, begun_at):
        if isinstance(error, Diverged):
            raise Failed(
                f"{error}, and no checkpoint from shortly before step {first + 1} is kept to go "
                "back to; those that are there stay",
                "a larger run.keep_checkpoints or a lower optimizer.peak_learning_rate",
            )
        first = saved.steps[-1]
    start = _start(context, first)
    peers.meet("restored")  # until then one may still list what is removed
    peers.on_primary("removed", lambda: saved.forget_after(first, context.mirror.flush))
    saved.look_again()
    return start


def named(erred: SilentCorruption, peers: Peers) -> str:
    """Returns which devices erred, their processes and hosts, in words; all processes ask."""
    names = [f"device {device.id} of {peers.owner(device)}" for device in erred.devices]
    either, link = ("", " and ") if erred.is_sure else ("either ", " or ")
    return f"{either}{link.join(names)} came to another result of the same rows"


def write_experiment(context: Context) -> None:
    """Writes which experiment the run is of, and where it comes from; by one process for all."""
    workdir, experiment, origin = context.job.workdir, context.booked, context.origin
    if not context.peers.is_primary:
        return
    write_atomic(workdir.experiment, config.to_json(experiment))
    for name, source in code.files(experiment).items():
        write_atomic(workdir.root / name, source)
    if origin is not None:
        if (fork := fork_of(workdir)) and context.saves.steps:  # which other settings do not undo
            origin = {"fork": fork} | origin
        write_json(workdir.origin, origin)


def _start(context: Context, at_most: int | None) -> Restored:
    """Decides as above, with a checkpoint up to this step, once all processes see the same."""
    job = context.job
    spec = job.objective, job.optimizer, job.experiment.parallelism, context.mesh
    abstract = step.abstract_state(*spec)

    def agreed(what: str, error: str) -> str:
        # One may have tried to read until it gives up, and then all end with its line.
        return context.peers.first_error(f"checkpoint {what}", error, patience=2 * retry.GIVE_UP)

    restored = None
    with context.saves.cached_lists(), contextlib.suppress(InputError):
        restored = context.saves.newest(abstract, at_most, agreed)
    if restored is None or restored.damaged:  # read again: a cached listing may be stale
        restored = context.saves.newest(abstract, at_most, agreed)
    if restored is not None:  # 1
        job.require_same(restored.metadata)
    elif job.branch is not None:  # 2
        restored = _of_branch(job.branch, context, abstract, agreed)
    else:  # 3, or 4 where the job has no base
        state, sha256 = job.initial_state(step.make_init(*spec)(job.experiment.seed))
        return Restored(0, state, {"init_sha256": sha256, "window": {}}, {})
    _put_aside(context, restored)
    if changed := changes(restored.metadata["environment"]):
        job.say(f"resume: {changed}")
    return restored


def _of_branch(
    branch: Branch, context: Context, abstract: Any, agreed: Callable[[str, str], str]
) -> Restored:
    """Reads the checkpoint that a run branches off; another optimizer than its begins afresh."""
    job = context.job
    others = Checkpoints(branch.workdir.checkpoints)
    theirs, ours = others.experiment(branch.step).optimizer, job.optimizer
    there = step.abstract_state(job.objective, theirs, job.experiment.parallelism, context.mesh)
    restored = others.newest(there, branch.step, agreed)
    if restored is None or restored.step != branch.step:
        raise InputError(f"{branch.command} {branch}: damaged, or not there any more")
    is_other = "; it is not the run that its settings give from step 0" * (branch.command == "fork")
    job.say(f"{branch.command}: from {branch} on{is_other}")
    if theirs.name == ours.name:  # else than in parts without arrays, as of optimizer.layer_decay
        leaves, tree = jax.tree.leaves(restored.state["optimizer"]), abstract["optimizer"]
        restored.state["optimizer"] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    else:
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract["optimizer"])
        init = jax.jit(optimizer_lib.make(ours).init, out_shardings=places)
        restored.state["optimizer"] = init(restored.state["params"])
        job.say(f"optimizer.name: {theirs.name} -> {ours.name}, whose moments begin at 0")
    if branch.command == "decay":
        job.require_same(restored.metadata)
    restored.metadata["begun_at"] = branch.step
    return restored


def _agree_on_steps(context: Context) -> None:
    """Waits until all processes see the same checkpoints; raises Unavailable if they do not."""
    peers, saved = context.peers, context.saves

    def look() -> str:
        with saved.cached_lists():
            saved.look_again()
            return ", ".join(map(str, saved.steps))

    peers.agree("last save", "")  # until then the first process may be saving one
    peers.await_same("checkpoints", look, "run again once all see the same files", Unavailable)


def _put_aside(context: Context, restored: Restored) -> None:
    """Renames damaged checkpoints newer than the restored one, and unreadable older ones."""
    saved = context.saves

    def rename() -> None:
        with saved.cached_lists():
            unreadable = saved.unreadable()
        unreadable = saved.unreadable() if unreadable else {}
        for number, why in (unreadable | restored.damaged).items():
            aside = saved.set_aside(number)
            context.job.say(f"{why}; now {aside}, going on from step {restored.step}")

    context.peers.on_primary("damaged", rename)
    saved.look_again()


def _set_aside_if_lost(context: Context) -> None:
    """Puts the newest that was seen whole aside, and says so, if it is whole no more."""
    job, saved = context.job, context.saves
    path, mend = job.workdir.saved, "remove it to go on"
    step = read_json(path, 1, mend, mend)["step"] if path.exists() else 0
    with saved.cached_lists():
        newest = max(saved.steps, default=0)
    if step > newest:  # list again: the cached listing may be stale
        newest = max(saved.steps, default=0)
    if step <= newest:
        return
    lost = f"{job.workdir.checkpoints / str(step)}: damaged, was saved whole (it is cut or gone)"
    if not newest:
        raise InputError(
            f"{lost}, and no other checkpoint is left to go on from; put the files back, or "
            "choose another --workdir to start again"
        )
    aside = saved.set_aside(step)
    job.say(f"{lost}{f'; now {aside}' * bool(aside)}, going on from step {newest}")


# --- steps that are left out --------------------------------------------------------------------


def with_skipped(state: step.State, steps: tuple[int, ...]) -> step.State:
    """Returns the state with these steps as those that are left out."""
    slots = np.full(SKIPPED_STEPS, -1, np.int32)
    slots[: len(steps)] = steps
    return state | {"skipped_steps": feed.put(slots, state["skipped_steps"].sharding)}


def left_out(skipped: Iterable[int], bad: range) -> tuple[tuple[int, ...], int]:
    """Returns the steps to leave out after these were bad, and from which one all is done again.

    Next to the bad ones that is the last that was done before them: with its update the same would
    come again. With it left out the run takes another way.
    """
    known = set(skipped)
    first = next((step for step in range(bad[0] - 1, -1, -1) if step not in known), bad[0])
    return tuple(sorted(known.union(bad, [first]))), first


def can_go_back(checkpoints: Iterable[int], first: int, every: int, begun_at: int = 0) -> bool:
    """Returns whether the newest state before step `first` is near enough for a roll-back.

    So it is where no checkpoint is newer (a run that is killed goes on from the newest as well), or
    where at most two intervals, of `every` so many steps, are done again. A run that rolls back
    again and again needs older and older checkpoints, while only the newest are kept. What is older
    still may be thousands of steps away: to do them again is not for the run to decide.
    """
    steps = list(checkpoints)
    oldest = -math.inf if begun_at else 0  # only a run that began at step 0 can begin again there
    before = max((step for step in steps if step <= first), default=oldest)
    return max(steps, default=0) <= first or first - before < 2 * every
